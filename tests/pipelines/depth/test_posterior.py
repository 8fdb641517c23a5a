"""Both ways to uncertainty on a model whose posterior is known (`known_posterior`)."""

import math

import numpy as np
import pytest
import torch
from support.known_posterior import SCALE, draw_truth, known_image, known_law, known_pipeline, through_decoder
from support.tiny_depth import generator

from marigold_uq import DistributionalDDIMScheduler
from marigold_uq.metrics import expected_coverage
from marigold_uq.pipelines.depth.latents import recentred

MODES = ("ensemble", "trajectory")


def cells(maps: np.ndarray) -> np.ndarray:
    """One pixel per cell of 2 x 2: independent numbers."""
    return maps[..., ::2, ::2]


@pytest.mark.parametrize("eta", [0.0, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_mean_and_spread_are_those_of_the_posterior(mode, steps, eta):
    pipeline, num_members = known_pipeline(), 200
    pipeline.scheduler.register_to_config(eta=eta)
    output = pipeline(
        known_image(),
        steps,
        num_members,
        batch_size=50,
        uncertainty=mode,
        generator=generator(1),
        ensembling_kwargs={"reduction": "mean"},
    )
    mean, std = known_law(known_image())
    z = cells(output.prediction[0, ..., 0] - mean) / (std / math.sqrt(num_members))  # 64 cells
    if mode == "trajectory" and steps == 1:  # the mean comes through a linear decoder without any sampling error
        assert np.abs(z).max() < 1e-3
    elif mode == "trajectory":  # that of one chain, which keeps some of the noise that it started from
        plain = pipeline(known_image(), steps, generator=generator(1)).prediction
        np.testing.assert_array_equal(output.prediction, plain)
        assert np.abs(z).max() < math.sqrt(num_members)  # within a standard deviation
    else:
        assert np.abs(z).max() < 4.5
    ratio = cells(output.uncertainty[0, ..., 0]).mean() / std
    assert ratio == pytest.approx(1, abs=4 / math.sqrt(2 * num_members * 64))  # 4 standard errors


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_members", [2, 5, 10])
def test_few_members_estimate_the_variance_without_bias(mode, num_members):
    """2304 cells: pairs x, 2 mu - x, with the divisor E - 1, would be too wide by E/(E - 1)."""
    image = known_image(96, 96)
    output = known_pipeline()(image, 2, num_members, uncertainty=mode, generator=generator(2), batch_size=5)
    ratio = (cells(output.uncertainty[0, ..., 0]) / known_law(image)[1]) ** 2
    standard_error = math.sqrt(2 / (num_members - 1) / ratio.size)
    assert ratio.mean() == pytest.approx(1, abs=4 * standard_error)


@pytest.mark.parametrize("mode", MODES)
def test_affine_invariant_maps_keep_their_shape_and_agree_on_their_spread(mode):
    """Alignment takes scale and shift out of 64 independent cells: little of the spread, all in units of the range."""
    pipeline = known_pipeline(scale_invariant=True, shift_invariant=True)
    output = pipeline(known_image(), 2, 100, batch_size=50, uncertainty=mode, generator=generator(1))
    mean, std = known_law(known_image())
    prediction, spread = output.prediction[0, ..., 0], output.uncertainty[0, ..., 0]
    if mode == "ensemble":  # a reduction of many; that of one chain stays as the decoder gives it
        assert (prediction.min(), prediction.max()) == (pytest.approx(0, abs=1e-6), pytest.approx(1, abs=1e-6))
    assert np.corrcoef(prediction.ravel(), mean.ravel())[0, 1] > 0.97
    slope = np.polyfit(mean.ravel(), prediction.ravel(), 1)[0]
    assert cells(spread).mean() / (slope * std) == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("num_members", "coverage"), [(10, 0.9), (39, 0.95), (20, 0.5)])
def test_intervals_hold_their_share_of_the_truth(mode, num_members, coverage):
    """With 10 members Student's t takes over: their extremes hold 9/11 only."""
    image = known_image(64, 64)
    output = known_pipeline()(image, 1, num_members, uncertainty=mode, coverage=coverage, generator=generator(3))
    truth = draw_truth(image, generator(4))
    lower, upper = output.interval[0, ..., 0], output.interval[0, ..., 1]
    held = cells((lower <= truth) & (truth <= upper))
    tolerance = 4 * math.sqrt(coverage * (1 - coverage) / held.size)  # 4 standard errors of 1024 cells
    method = "student_t" if num_members == 10 else "weibull"
    expected = expected_coverage(num_members, coverage, method)
    assert expected == pytest.approx(coverage, abs=0.01)
    # A trajectory's mean has no sampling error, for which these intervals leave room: up to 1 + 1/E wider in variance.
    room = 0.02 if mode == "trajectory" else 0.0
    assert expected - tolerance < held.mean() < expected + room + tolerance


def test_quantiles_are_ordered_and_near_those_of_the_law():
    levels = [0.1, 0.5, 0.9]
    output = known_pipeline()(known_image(), 1, 200, quantiles=levels, uncertainty="trajectory", generator=generator())
    mean, std = known_law(known_image())
    assert output.quantiles.shape == (1, 16, 16, 3)
    assert (np.diff(output.quantiles[0], axis=-1) >= 0).all()
    normal = torch.special.ndtri(torch.tensor(levels)).numpy()
    error = (output.quantiles[0] - mean[..., None]) / std - normal
    assert np.abs(error[::2, ::2].mean((0, 1))).max() < 4 * 1.71 / math.sqrt(200 * 64)  # sqrt(q(1-q))/phi at q = .1


def test_epistemic_is_the_mean_of_the_heads_variances_through_the_decoder():
    pipeline, image = known_pipeline(), known_image(96, 96)
    output = pipeline(image, 4, 3, uncertainty="ensemble", output_epistemic=True, generator=generator())
    abar = pipeline.scheduler.alphas_cumprod[pipeline.scheduler.for_chain(4).timesteps].reshape(-1, 1)
    variance = SCALE**2
    per_step = (1 - abar) * variance / (abar * variance + 1 - abar)  # U_t = Var[x_0 | x_t], (steps, C)
    ratio = (cells(output.epistemic[0, ..., 0]) / through_decoder(per_step.mean(0))) ** 2
    assert ratio.mean() == pytest.approx(1, abs=4 * math.sqrt(2 / 7 / ratio.size))  # 8 draws; 4 standard errors


def test_epistemic_follows_the_alignment_into_the_units_of_the_prediction():
    metric = known_pipeline()(known_image(), 2, 8, output_epistemic=True, uncertainty="ensemble", generator=generator())
    pipeline = known_pipeline(scale_invariant=True, shift_invariant=True)
    options = {"output_epistemic": True, "uncertainty": "ensemble", "output_samples": True, "generator": generator()}
    relative = pipeline(known_image(), 2, 8, **options)
    first = known_pipeline()(known_image(), 2, 8, **{**options, "generator": generator()}).samples[0, ..., 0]
    scale = np.polyfit(first.ravel(), relative.samples[0, ..., 0].ravel(), 1)[0]
    assert np.allclose(relative.epistemic, scale * metric.epistemic, rtol=1e-3)


@pytest.mark.parametrize(("mode", "steps", "calls"), [("ensemble", 2, 12), ("trajectory", 2, 2), ("trajectory", 9, 9)])
def test_a_trajectory_costs_as_many_network_calls_as_one_chain_has_steps(mode, steps, calls):
    pipeline = known_pipeline()
    pipeline(known_image(), steps, 6, uncertainty=mode)
    assert pipeline.unet.batch_sizes == [1] * calls


def test_draws_are_moved_together_to_the_mean_of_their_laws_also_where_the_law_is_skew():
    scheduler = DistributionalDDIMScheduler(noise_family="mixture", num_components=2)
    raw = torch.randn(3, 6, 8, 8, generator=generator())
    law = scheduler.noise_distribution(raw, (1, 8, 8))
    draws = law.rsample((4,), generator(1))  # (E, B, C, h, w)
    moved = recentred(draws, law.mean)
    assert torch.allclose(moved.mean(0), law.mean, atol=1e-6)
    shift = moved - draws
    assert torch.allclose(shift, shift[:1].expand_as(shift), atol=1e-6)  # one move for all: the spread is untouched


def test_tau_shrinks_the_spread_of_a_trajectory_by_its_root():
    options = {"uncertainty": "trajectory", "generator": generator()}
    before = known_pipeline()(known_image(), 2, 8, **options).uncertainty
    pipeline = known_pipeline()
    pipeline.scheduler.calibrate(0.25)
    after = pipeline(known_image(), 2, 8, **{**options, "generator": generator()}).uncertainty
    assert np.allclose(after, 0.5 * before, atol=1e-6)
