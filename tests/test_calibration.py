"""Calibration against known answers: closed forms, an oracle with a known error, and simulated coverage."""

import json
import math
from itertools import pairwise

import pytest
import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from torch import Tensor

from marigold_uq.calibration import (
    Calibration,
    apply_kappa,
    choose_kappa,
    choose_steps_and_tau,
    choose_tau,
    conformal_images,
    conformal_rows,
    cqr_score,
    draw_with_tau,
    read_calibration,
    residual_ratio,
    store_calibration,
)
from marigold_uq.distributions.base import inverse_positive
from marigold_uq.metrics import crps, energy_score
from marigold_uq.sampling import reverse_diffusion
from marigold_uq.schedulers import DistributionalDDIMScheduler


class CalibratedPipeline(DiffusionPipeline):
    """The smallest pipeline that can keep a calibration."""

    def __init__(self, scheduler: DistributionalDDIMScheduler, calibration: dict | None = None) -> None:
        super().__init__()
        self.register_modules(scheduler=scheduler)
        self.register_to_config(calibration=calibration)


class ForgetfulPipeline(DiffusionPipeline):
    """A pipeline without the argument that would bring a calibration back."""

    def __init__(self, scheduler: DistributionalDDIMScheduler) -> None:
        super().__init__()
        self.register_modules(scheduler=scheduler)


class ModalPipeline(CalibratedPipeline):
    """A pipeline that keeps one calibration per mode by itself."""

    def calibrate(self, mode: str, calibration: Calibration) -> None:
        self.register_to_config(calibration={mode: calibration.to_dict()})


def gaussian_scheduler(**options) -> DistributionalDDIMScheduler:
    return DistributionalDDIMScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        timestep_spacing="trailing",
        rescale_betas_zero_snr=True,
        prediction_type="v_prediction",
        noise_family="gaussian",
        **options,
    )


def inflated_oracle(scheduler: DistributionalDDIMScheduler, inflation: float, members: int):
    """x_0 ~ N(0, 1), for which v is N(0, 1) whatever x_t: an exact head whose variance is `inflation` times too large.

    With C = 1 the posterior mean of v is 0 and its variance 1 at every t, so in one step from zero SNR
    x_0 = A x_T + B v with A = 0, B = -1: samples have variance tau * inflation, and the best tau is 1 / inflation.
    """
    rho = inverse_positive(math.sqrt(inflation))

    def denoiser(x_t: Tensor, timestep: int) -> Tensor:
        return torch.cat([torch.zeros_like(x_t), torch.full_like(x_t, rho)], 1)

    def sample() -> Tensor:
        generator = torch.Generator().manual_seed(5)
        x_T = torch.randn(members, 1, 400, generator=generator, dtype=torch.float64)
        return reverse_diffusion(denoiser, scheduler, x_T, generator=generator)[:, 0]

    return sample


@pytest.mark.parametrize("inflation", [9.0, 0.5])
def test_tau_undoes_a_known_misjudged_variance(inflation):
    scheduler = gaussian_scheduler()
    scheduler.set_timesteps(1)
    target = torch.randn(400, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    draw = draw_with_tau(scheduler, inflated_oracle(scheduler, inflation, members=200))
    choice = choose_tau(draw, target)
    # 400 targets know their standard deviation to 1/sqrt(800) = 3.5 %, tau to 7 %; 4 such errors plus the tolerance.
    assert abs(math.log(choice.tau * inflation)) < 4 * 0.07 + 0.05
    assert choice.num_evaluations <= 12
    assert scheduler.config.tau == 1.0  # put back


def test_tau_agrees_with_a_dense_grid_and_is_never_worse_than_doing_nothing():
    scheduler = gaussian_scheduler()
    scheduler.set_timesteps(3)
    target = torch.randn(400, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    draw = draw_with_tau(scheduler, inflated_oracle(scheduler, 4.0, members=50))
    choice = choose_tau(draw, target)
    grid = [float(crps(draw(tau), target).mean()) for tau in torch.logspace(-2, 1, 60).tolist()]
    # The grid is 12 % wide in tau; the score is quadratic around its minimum, so 1e-4 relative is generous.
    assert choice.score <= min(grid) * (1 + 1e-4)
    assert choice.score <= dict(choice.curve)[1.0]
    assert list(choice.curve) == sorted(choice.curve)


def test_tau_at_a_bound_warns():
    with pytest.warns(UserWarning, match="widen the bounds"):
        choose_tau(lambda tau: tau * torch.tensor([[-1.0], [0.0], [1.0]]), torch.full((1,), 9.0), bounds=(0.1, 2.0))


def test_a_mask_hides_broken_targets_from_the_search():
    generator = torch.Generator().manual_seed(0)
    z, target = torch.randn(50, 300, generator=generator), torch.randn(300, generator=generator)
    mask = torch.arange(300) % 3 > 0
    broken = torch.where(mask, target, torch.nan)
    hidden = choose_tau(lambda tau: math.sqrt(tau) * z, broken, mask=mask)
    left_out = choose_tau(lambda tau: math.sqrt(tau) * z[:, mask], target[mask])
    assert hidden.tau == pytest.approx(left_out.tau)
    with pytest.raises(ValueError, match="not finite"):
        choose_tau(lambda tau: math.sqrt(tau) * z, broken)


def test_steps_are_chosen_together_with_tau():
    generator = torch.Generator().manual_seed(0)
    z, target = torch.randn(100, 500, generator=generator), torch.randn(500, generator=generator)
    bias = {1: 1.0, 5: 0.0, 20: 0.5}  # 5 steps have the right mean

    choice = choose_steps_and_tau(lambda steps, tau: bias[steps] + 3 * math.sqrt(tau) * z, target, [20, 1, 5])
    assert choice.num_steps == 5
    assert choice.tau == pytest.approx(1 / 9, rel=0.3)  # 500 targets: 4 standard errors of a variance are 25 %
    assert set(choice.by_steps) == {1, 5, 20}
    assert choice.score == choice.by_steps[5].score


@pytest.mark.parametrize(("members", "spread"), [(10, 1.0), (10, 3.0), (100, 0.4)])
def test_kappa_meets_the_closed_form_for_gaussian_ensembles(members, spread):
    """y ~ N(0, 1), x ~ N(0, a^2): minimise sqrt(2/pi) sqrt(1 + a^2/M + k^2 a^2 (1 - 1/M)) - k a/sqrt(pi) by hand.

    kappa^2 = (1 + a^2/M) / (a^2 (1 - 1/M)(1 - 2/M)).
    """
    generator = torch.Generator().manual_seed(0)
    num = 20_000
    samples = spread * torch.randn(members, num, generator=generator, dtype=torch.float64)
    target = torch.randn(num, generator=generator, dtype=torch.float64)
    expected = math.sqrt((1 + spread**2 / members) / (spread**2 * (1 - 1 / members) * (1 - 2 / members)))
    # A standard deviation from num rows is known to 1/sqrt(2 num) = .5 %; the CRPS is about half as efficient.
    assert choose_kappa(samples, target).kappa == pytest.approx(expected, rel=5 * 0.005 * 1.5)


def test_kappa_is_the_minimum_of_the_convex_score():
    generator = torch.Generator().manual_seed(3)
    samples = torch.randn(7, 30, generator=generator, dtype=torch.float64) ** 3
    target = torch.randn(30, generator=generator, dtype=torch.float64)
    choice = choose_kappa(samples, target)

    def score(kappa: float) -> float:
        return float(crps(apply_kappa(samples, kappa), target).mean())

    fine = [score(choice.kappa * factor) for factor in (0.5, 0.9, 0.99, 0.999, 1.001, 1.01, 1.1, 2.0)]
    assert min(fine) >= choice.score - 1e-12
    assert choice.score_before == pytest.approx(score(1.0))
    by_search = choose_kappa(samples, target, score=crps)  # the route of any other score
    assert by_search.score == pytest.approx(choice.score, rel=1e-4)


def test_kappa_with_another_proper_score_and_a_mask():
    generator = torch.Generator().manual_seed(4)
    samples = 2 * torch.randn(50, 400, 2, generator=generator, dtype=torch.float64)
    target = torch.randn(400, 2, generator=generator, dtype=torch.float64)
    choice = choose_kappa(samples, target, score=lambda x, y: energy_score(x, y, event_dims=1))
    # mean of 50: kappa^2 = 1.08/(4 * .98 * .96); the energy score of a 2-D isotropic Gaussian has the same optimum
    # to order 1/M, and 800 numbers give the scale to 2.5 %.
    assert choice.kappa == pytest.approx(math.sqrt(1.08 / (4 * 0.98 * 0.96)), rel=0.1)
    mask = torch.zeros(400, 2, dtype=torch.bool)
    mask[:, 0] = True
    broken = torch.where(mask, target, torch.nan)
    one = choose_kappa(samples[..., 0], target[..., 0])
    assert choose_kappa(samples, broken, mask=mask).kappa == pytest.approx(one.kappa, rel=1e-6)


@pytest.mark.parametrize("score", [None, crps])
def test_a_weight_of_kappa_is_a_number_of_copies(score):
    generator = torch.Generator().manual_seed(5)
    samples = torch.randn(7, 40, generator=generator, dtype=torch.float64)
    target = torch.linspace(0.1, 3.0, 40, dtype=torch.float64) * torch.randn(40, generator=generator).double()
    copies = torch.arange(40).remainder(4)  # some rows none at all
    weighted = choose_kappa(samples, target, score=score, weights=copies)
    repeated = choose_kappa(samples.repeat_interleave(copies, 1), target.repeat_interleave(copies), score=score)
    assert weighted.kappa == pytest.approx(repeated.kappa, rel=1e-6)
    assert weighted.score == pytest.approx(repeated.score, rel=1e-9)
    assert weighted.score_before == pytest.approx(repeated.score_before, rel=1e-9)
    assert weighted.kappa != pytest.approx(choose_kappa(samples, target, score=score).kappa, rel=1e-3)


def test_kappa_leaves_the_mean_alone():
    samples = torch.randn(9, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    stretched = apply_kappa(samples, 0.3)
    torch.testing.assert_close(stretched.mean(0), samples.mean(0))
    torch.testing.assert_close(stretched.std(0), 0.3 * samples.std(0))


@pytest.mark.parametrize(
    ("num_rows", "alpha", "rank"),
    [(19, 0.05, 19), (20, 0.05, 20), (39, 0.05, 38), (9, 0.1, 9), (99, 0.1, 90), (29, 0.1, 27), (1, 0.5, 1)],
)
def test_the_conformal_rank_is_exact_also_where_floats_round_up(num_rows, alpha, rank):
    """ceil((n + 1)(1 - alpha)) in decimal arithmetic; 30 * 0.9 or 100 * 0.9 may exceed 27 and 90 in floats."""
    scores = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0)).double() + 1
    assert conformal_rows(scores, alpha) == rank


def test_rows_are_covered_as_promised_on_average_over_calibration_sets():
    """The exact mean coverage of split conformal is k/(n + 1) for continuous scores, whatever their law."""
    generator = torch.Generator().manual_seed(0)
    trials, num_rows, alpha = 20_000, 30, 0.1
    heavy = torch.randn(num_rows + 1, trials, generator=generator, dtype=torch.float64).exp()  # log-normal ratios
    calibration, new = heavy[:-1], heavy[-1]
    covered = (new <= conformal_rows(calibration, alpha)).double()
    expected = math.ceil(31 * 0.9) / 31
    assert abs(covered.mean().item() - expected) < 4 * math.sqrt(expected * (1 - expected) / trials)
    assert expected >= 1 - alpha


def test_cqr_margins_cover_as_promised():
    generator = torch.Generator().manual_seed(0)
    trials, num_rows, alpha = 10_000, 39, 0.05
    target = torch.randn(num_rows + 1, trials, generator=generator, dtype=torch.float64)
    lower, upper = torch.full_like(target, -0.5), torch.full_like(target, 1.0)  # far too narrow, off centre
    scores = cqr_score(lower, upper, target)
    margin = conformal_rows(scores[:-1], alpha)
    inside = (target[-1] >= lower[-1] - margin) & (target[-1] <= upper[-1] + margin)
    assert abs(inside.double().mean().item() - 38 / 40) < 4 * math.sqrt(0.05 * 0.95 / trials)


def test_outputs_get_their_own_scale():
    scores = torch.stack([torch.arange(19.0), 10 * torch.arange(19.0)], 1)
    assert conformal_rows(scores, 0.05).tolist() == [18.0, 180.0]


def simulate_images(num: int, pixels: int, generator: torch.Generator) -> Tensor:
    """Ratios whose pixels share an image-wide offset and scale: strongly dependent within an image."""
    offset = 1.5 * torch.randn(num, 1, generator=generator)
    scale = (0.5 * torch.randn(num, 1, generator=generator)).exp()
    return (offset + scale * torch.randn(num, pixels, generator=generator)).abs()


def test_images_keep_the_promised_share_of_pixels_on_average():
    generator = torch.Generator().manual_seed(0)
    trials, num_images, pixels, alpha = 1500, 25, 30, 0.1
    losses = torch.empty(trials)
    for trial in range(trials):
        images = simulate_images(num_images + 1, pixels, generator)
        scale = conformal_images(list(images[:-1]), alpha)
        losses[trial] = (images[-1] > scale).float().mean()
    error = losses.std() / math.sqrt(trials)
    assert losses.mean() < alpha + 3 * error
    # Conformal risk control is also tight: at least alpha - 2/(n + 1).
    assert losses.mean() > alpha - 2 / (num_images + 1) - 3 * error


@pytest.mark.parametrize("tied", [False, True])
def test_the_image_scale_is_the_smallest_that_satisfies_the_inequality(tied):
    """Brute force: try every ratio, every midpoint and zero."""
    generator = torch.Generator().manual_seed(1)
    images = [torch.rand(size, generator=generator, dtype=torch.float64) for size in (3, 7, 1, 5, 4, 6, 2, 9, 3, 8, 5)]
    images = [(4 * image).round() if tied else image for image in images]
    groups, alpha = list("aabcdeefghi"), 0.2

    def average_loss(lam: float) -> float:
        per_scene: dict[str, list[float]] = {}
        for group, image in zip(groups, images, strict=True):
            per_scene.setdefault(group, []).append(float((image > lam).double().mean()))
        means = [sum(values) / len(values) for values in per_scene.values()]
        return (sum(means) + 1) / (len(means) + 1)

    candidates = sorted({0.0, *torch.cat(images).tolist()})
    candidates += [(a + b) / 2 for a, b in pairwise(candidates)]
    smallest = min(lam for lam in candidates if average_loss(lam) <= alpha)
    assert conformal_images(images, alpha, groups=groups) == smallest


def test_with_19_images_five_percent_needs_every_pixel_inside():
    images = [torch.rand(10, generator=torch.Generator().manual_seed(i)) for i in range(19)]
    assert conformal_images(images, 0.05) == max(float(image.max()) for image in images)
    with pytest.raises(ValueError, match="at least 19"):
        conformal_images(images[:18], 0.05)
    assert conformal_images(images[:18], 0.05, too_few="inf") == math.inf
    with pytest.raises(ValueError, match="2 calibration scenes"):
        conformal_images(images, 0.05, groups=[0] * 10 + [1] * 9)


def test_residual_ratio_knows_exact_and_hopeless_pixels():
    mean, std = torch.tensor([0.0, 1.0, 1.0, 5.0]), torch.tensor([1.0, 0.0, 0.0, 2.0])
    target, mask = torch.tensor([2.0, 1.0, 3.0, float("nan")]), torch.tensor([True, True, True, False])
    assert residual_ratio(mean, std, target, mask).tolist() == [2.0, 0.0, math.inf]


def full_calibration() -> Calibration:
    return Calibration(
        tau=0.25,
        kappa=0.8,
        conformal_scale=torch.tensor([2.1, 1.9], dtype=torch.float64),
        coverage=0.95,
        num_calibration=120,
        num_steps=10,
        num_members=50,
        note="validation rows 2020",
    )


def test_a_calibration_survives_json():
    calibration = full_calibration()
    assert Calibration.from_dict(json.loads(json.dumps(calibration.to_dict()))) == calibration
    low, high = calibration.interval(torch.zeros(3, 2), torch.ones(3, 2))
    torch.testing.assert_close(high[0], torch.tensor([2.1, 1.9]))
    torch.testing.assert_close(low, -high)


def test_a_pipeline_keeps_its_calibration_through_save_and_load(tmp_path):
    pipeline = CalibratedPipeline(gaussian_scheduler())
    assert read_calibration(pipeline) == Calibration()
    store_calibration(pipeline, full_calibration())
    assert pipeline.scheduler.config.tau == 0.25
    pipeline.save_pretrained(tmp_path)
    loaded = CalibratedPipeline.from_pretrained(tmp_path)
    assert read_calibration(loaded) == full_calibration()
    assert loaded.scheduler.config.tau == 0.25


def test_a_scheduler_keeps_its_tau_through_save_and_load(tmp_path):
    scheduler = gaussian_scheduler()
    store_calibration(scheduler, Calibration(tau=0.125))
    scheduler.save_pretrained(tmp_path)
    assert read_calibration(DistributionalDDIMScheduler.from_pretrained(tmp_path)).tau == 0.125


def test_a_changed_tau_is_noticed():
    pipeline = CalibratedPipeline(gaussian_scheduler())
    store_calibration(pipeline, full_calibration())
    pipeline.scheduler.calibrate(0.5)
    with pytest.raises(ValueError, match=r"made with tau = 0.25, but the scheduler has tau = 0.5"):
        read_calibration(pipeline)


def three_draws() -> Tensor:
    return torch.tensor([[0.0], [1.0], [2.0]])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: choose_tau(lambda tau: torch.zeros(3, 4), torch.zeros(5)), ValueError, r"samples \(M, \*target"),
        (lambda: choose_tau(lambda tau: three_draws(), torch.zeros(1), bounds=(0.0, 1.0)), ValueError, "0 < low"),
        (lambda: choose_tau(lambda tau: three_draws(), torch.zeros(1), max_evaluations=2), ValueError, "at least 4"),
        (
            lambda: choose_tau(lambda tau: three_draws(), torch.zeros(1), mask=torch.tensor([False])),
            ValueError,
            "False everywhere",
        ),
        (lambda: choose_tau(lambda tau: three_draws(), torch.zeros(1), mask=torch.ones(1)), TypeError, "boolean"),
        (lambda: choose_steps_and_tau(lambda s, tau: three_draws(), torch.zeros(1), []), ValueError, "at least 1"),
        (lambda: choose_kappa(torch.zeros(2, 4), torch.zeros(4)), ValueError, "M >= 3"),
        (lambda: choose_kappa(torch.ones(5, 4), torch.zeros(4)), ValueError, "no spread"),
        (lambda: choose_kappa(torch.ones(5, 4), torch.zeros(4), weights=-torch.ones(4)), ValueError, "not negative"),
        (lambda: choose_kappa(torch.ones(5, 4), torch.zeros(4), weights=torch.zeros(4)), ValueError, "no coordinate"),
        (lambda: choose_kappa(torch.full((5, 4), math.nan), torch.zeros(4)), ValueError, "NaN or infinity"),
        (lambda: apply_kappa(three_draws(), 0.0), ValueError, "positive"),
        (lambda: conformal_rows(torch.zeros(18), 0.05), ValueError, "at least 19"),
        (lambda: conformal_rows(torch.zeros(50), 5), ValueError, "within"),
        (lambda: conformal_rows(torch.full((50,), math.nan), 0.05), ValueError, "NaN"),
        (lambda: conformal_rows(torch.tensor(1.0), 0.05), ValueError, "single number"),
        (lambda: conformal_images([torch.ones(3), torch.ones(0)], 0.5), ValueError, "image 1 has no valid pixel"),
        (lambda: conformal_images([torch.ones(3)] * 3, 0.5, groups=[1]), ValueError, "one scene per image"),
        (lambda: conformal_images([], 0.05), ValueError, "0 calibration images"),
        (lambda: residual_ratio(torch.zeros(2), torch.zeros(3), torch.zeros(2)), ValueError, "one shape"),
        (lambda: residual_ratio(torch.zeros(2), -torch.ones(2), torch.zeros(2)), ValueError, "negative"),
        (lambda: cqr_score(torch.zeros(2), torch.zeros(3), torch.zeros(2)), ValueError, "differ in shape"),
        (lambda: Calibration(tau=0.0), ValueError, "tau must be positive"),
        (lambda: Calibration(conformal_scale=math.inf, coverage=0.9), ValueError, "finite"),
        (lambda: Calibration(conformal_scale=-1.0, coverage=0.9), ValueError, "half width"),
        (lambda: Calibration(conformal_scale=2.0), ValueError, "belong together"),
        (lambda: Calibration(conformal_scale=2.0, coverage=95), ValueError, "within"),
        (lambda: Calibration().interval(torch.zeros(1), torch.ones(1)), ValueError, "no conformal_scale"),
        (lambda: Calibration.from_dict({"temperature": 1.0}), ValueError, "unknown calibration keys"),
        (lambda: store_calibration(gaussian_scheduler(), full_calibration()), ValueError, "only tau"),
        (lambda: store_calibration(ForgetfulPipeline(gaussian_scheduler()), Calibration()), TypeError, "would lose"),
        (lambda: store_calibration(ModalPipeline(gaussian_scheduler()), Calibration()), TypeError, "its own"),
        (lambda: read_calibration(ModalPipeline(gaussian_scheduler())), TypeError, "its own"),
        (lambda: read_calibration(CalibratedPipeline(None)), TypeError, "DistributionalDDIMScheduler"),
    ],
)
def test_bad_input_is_an_error_that_says_what_to_do(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_tau_that_changes_nothing_stays_one_and_says_so():
    samples = torch.randn(10, 50, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="tau changes nothing"):
        assert choose_tau(lambda tau: samples, torch.zeros(50)).tau == 1.0


def test_bounds_the_wrong_way_round_are_refused_for_kappa_too():
    samples = torch.randn(10, 50, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="0 < low < high"):
        choose_kappa(samples, torch.zeros(50), bounds=(5.0, 2.0))
