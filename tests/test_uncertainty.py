"""Uncertainty along a trajectory, against laws whose answer is known exactly.

The oracle of docs/method.md: for x_0 ~ sum_k w_k N(m_k, c_k) the law of eps (or v, or x_0) given x_t is a mixture in
closed form. It stands in for the network, so the only error left is the Monte-Carlo error of finitely many members.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from marigold_uq.distributions import GaussianDistribution, MixtureDistribution
from marigold_uq.distributions.base import MIN_SCALE
from marigold_uq.sampling import ReverseStep, reverse_diffusion
from marigold_uq.schedulers import DistributionalDDIMScheduler
from marigold_uq.uncertainty import (
    OriginalMoments,
    TrajectoryUncertainty,
    VarianceDecomposition,
    decompose_member_samples,
    decompose_members,
    reverse_mean_variance,
    split_members,
    total_std,
    total_variance_by_step,
)

STANDARD_ERRORS = 5


@dataclass(frozen=True)
class ScalarMixture:
    """x_0 ~ sum_k w_k N(m_k, c_k), and its exact posterior as raw channels of the `mixture` family."""

    weights: Tensor
    means: Tensor
    variances: Tensor

    @property
    def mean(self) -> float:
        return float((self.weights * self.means).sum())

    @property
    def variance(self) -> float:
        return float((self.weights * (self.variances + (self.means - self.mean) ** 2)).sum())

    def denoiser(self, scheduler: DistributionalDDIMScheduler):
        def raw(x_t: Tensor, timestep: int) -> Tensor:
            abar = scheduler.alpha_bar(int(timestep))
            m, c = self.means, self.variances
            spread = abar * c + 1 - abar  # V_k
            gap = x_t - math.sqrt(abar) * m  # (B, K)
            logits = self.weights.log() - 0.5 * (gap.square() / spread + spread.log())
            if scheduler.config.prediction_type == "epsilon":
                loc, variance = math.sqrt(1 - abar) * gap / spread, abar * c / spread
            elif scheduler.config.prediction_type == "v_prediction":
                loc = math.sqrt(abar * (1 - abar)) * (1 - c) * gap / spread - math.sqrt(1 - abar) * m
                variance = c / spread
            else:
                loc, variance = m + math.sqrt(abar) * c * gap / spread, (1 - abar) * c / spread
            rho = torch.log(torch.expm1((variance.sqrt() - MIN_SCALE).clamp(min=1e-12)))
            return torch.cat([loc, rho.expand_as(loc), logits], 1)

        return raw


BIMODAL = ScalarMixture(
    torch.tensor([0.3, 0.7], dtype=torch.float64),
    torch.tensor([-0.8, 0.5], dtype=torch.float64),
    torch.tensor([0.04, 0.09], dtype=torch.float64),
)
"""Two modes of unequal weight and width, so that mean, variance and shape of the posterior all depend on x_t."""


def make_scheduler(
    prediction_type: str = "v_prediction", zero_snr: bool = True, **options
) -> DistributionalDDIMScheduler:
    return DistributionalDDIMScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        timestep_spacing="trailing",
        prediction_type=prediction_type,
        rescale_betas_zero_snr=zero_snr,
        noise_family="mixture",
        num_components=2,
        **options,
    )


def exact_start(law: ScalarMixture, scheduler: DistributionalDDIMScheduler, num: int, generator) -> Tensor:
    """Draws of the exact marginal of x_t at the first used timestep, (num, 1)."""
    abar = scheduler.alpha_bar(int(scheduler.timesteps[0]))
    pick = torch.multinomial(law.weights, num, replacement=True, generator=generator)
    z = torch.randn(num, generator=generator, dtype=torch.float64)
    x_0 = law.means[pick] + law.variances[pick].sqrt() * z
    noise = torch.randn(num, generator=generator, dtype=torch.float64)
    return (math.sqrt(abar) * x_0 + math.sqrt(1 - abar) * noise).unsqueeze(1)


def watch(scheduler, num_steps: int, num: int = 20_000, seed: int = 0):
    scheduler.set_timesteps(num_steps)
    generator = torch.Generator().manual_seed(seed)
    observer = TrajectoryUncertainty(keep_steps=True)
    start = exact_start(BIMODAL, scheduler, num, generator)
    samples = reverse_diffusion(
        BIMODAL.denoiser(scheduler), scheduler, start, generator=generator, observers=[observer]
    )
    return observer, samples


@pytest.mark.parametrize(
    ("prediction_type", "zero_snr"), [("epsilon", False), ("v_prediction", True), ("sample", True)]
)
@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_mean_variance_plus_variance_of_means_is_the_total_at_every_step(prediction_type, zero_snr, eta):
    observer, samples = watch(make_scheduler(prediction_type, zero_snr, eta=eta), num_steps=6)
    by_step = total_variance_by_step(observer.steps, num_members=len(samples))  # (6, 1, 1)
    # Each row is a mean of U + (xhat - mean)^2; its own scatter gives the standard error.
    for row, step in zip(by_step, observer.steps, strict=True):
        terms = step.variance + (step.mean - step.mean.mean()).square()
        error = terms.std() / math.sqrt(len(terms))
        assert abs(row.item() - BIMODAL.variance) < STANDARD_ERRORS * error.item()
    fourth = (samples - samples.mean()).pow(4).mean()
    error = ((fourth - samples.var() ** 2) / len(samples)).sqrt()
    assert abs(total_std(samples).item() ** 2 - BIMODAL.variance) < STANDARD_ERRORS * error.item()


def test_at_zero_snr_the_first_call_alone_gives_the_total():
    observer, _ = watch(make_scheduler(), num_steps=4, num=50)
    # x_T is independent of x_0 here, so the posterior is the prior, the same for every member; 1e-5 is the float32
    # rounding of the scheduler's alphas.
    expected = torch.full((50, 1), math.sqrt(BIMODAL.variance), dtype=torch.float64)
    torch.testing.assert_close(observer.initial_std, expected, rtol=1e-5, atol=0)
    assert observer.steps[0].mean.std() < 1e-5


def test_epistemic_is_the_root_of_the_mean_posterior_variance_of_a_gaussian():
    """x_0 ~ N(m, c): U_t = (1 - abar) c / (abar c + 1 - abar) for every x_t, by conjugacy."""
    c = 0.09
    one = torch.ones(2, dtype=torch.float64)  # two equal components are one Gaussian
    law = ScalarMixture(one / 2, 0.7 * one, c * one)
    scheduler = make_scheduler("epsilon", zero_snr=False)
    scheduler.set_timesteps(5)
    observer = TrajectoryUncertainty()
    start = torch.randn(3, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    reverse_diffusion(law.denoiser(scheduler), scheduler, start, generator=generator, observers=[observer])
    abars = [scheduler.alpha_bar(t) for t in scheduler.timesteps.tolist()]
    expected = math.sqrt(sum((1 - a) * c / (a * c + 1 - a) for a in abars) / len(abars))
    torch.testing.assert_close(observer.epistemic, torch.full_like(start, expected), rtol=1e-6, atol=0)


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
def test_reverse_variance_is_the_papers_formula_for_every_prediction_type(prediction_type):
    """V[mu] = (1 - alpha)^2 / (alpha (1 - abar)) Sigma_eps, and its v and x_0 forms, written out from the DDPM mean."""
    scheduler = make_scheduler(prediction_type, zero_snr=False)
    scheduler.set_timesteps(7)
    t = int(scheduler.timesteps[2])
    abar, abar_prev = scheduler.alpha_bar(t), scheduler.alpha_bar(scheduler.previous_timestep(t))
    alpha = abar / abar_prev
    factor = {
        "epsilon": (1 - alpha) ** 2 / (alpha * (1 - abar)),
        "v_prediction": (1 - alpha) ** 2 * abar_prev / (1 - abar),
        "sample": (1 - alpha) ** 2 * abar_prev / (1 - abar) ** 2,
    }[prediction_type]
    x_t = torch.zeros(1, 2, dtype=torch.float64)
    law = GaussianDistribution(x_t, torch.tensor([[0.5, 2.0]], dtype=torch.float64))
    variance = reverse_mean_variance(scheduler, ReverseStep(2, t, x_t, law))
    torch.testing.assert_close(variance, factor * law.variance, rtol=1e-10, atol=0)


def test_reverse_variance_is_finite_at_zero_snr_and_averaged_over_the_steps():
    scheduler = make_scheduler()
    observer, _ = watch(scheduler, num_steps=3, num=4)
    factors = [scheduler.step_coefficients(t, eta=1.0).output ** 2 for t in scheduler.timesteps.tolist()]
    # On a v head Sigma_v = U_t / (1 - abar).
    sigmas = [s.variance / (1 - scheduler.alpha_bar(s.timestep)) for s in observer.steps]
    expected = sum(f * sigma for f, sigma in zip(factors, sigmas, strict=True)) / 3
    assert torch.isfinite(observer.reverse_variance).all()
    torch.testing.assert_close(observer.reverse_variance, expected)


def diagonal_posterior(scheduler: DistributionalDDIMScheduler, covariance: Tensor):
    """Exact marginal means and variances of v for x_0 ~ N(0, C): the best that a diagonal head can say."""
    eigenvalues, basis = torch.linalg.eigh(covariance)

    def raw(x_t: Tensor, timestep: int) -> Tensor:
        abar = scheduler.alpha_bar(int(timestep))
        spread = abar * eigenvalues + 1 - abar
        loc = (x_t[:, 0] @ basis * (math.sqrt(abar * (1 - abar)) * (1 - eigenvalues) / spread)) @ basis.T
        scale = (basis.square() * (eigenvalues / spread)).sum(1).sqrt()
        return torch.stack([loc, torch.log(torch.expm1(scale - MIN_SCALE)).expand_as(loc)], 1)

    return raw


def test_a_diagonal_head_on_a_smooth_field_is_exact_in_one_step_and_too_narrow_in_four():
    """A limit of the family, not of training: noise drawn per coordinate averages out in the next step's mean."""
    position = torch.arange(32, dtype=torch.float64)
    covariance = torch.exp(-0.5 * ((position[:, None] - position) / 4) ** 2)
    spread, correlation = {}, {}
    for num_steps in (1, 4, 50):
        scheduler = make_scheduler(eta=1.0)
        scheduler = DistributionalDDIMScheduler.from_config(scheduler.config, noise_family="gaussian")
        scheduler.set_timesteps(num_steps)
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(2000, 1, 32, generator=generator, dtype=torch.float64)
        network = diagonal_posterior(scheduler, covariance)
        samples = reverse_diffusion(network, scheduler, start, generator=generator)[:, 0]
        spread[num_steps] = total_std(samples).mean().item()
        correlation[num_steps] = torch.corrcoef(samples.T)[10, 11].item()
    # Truth: standard deviation 1, correlation of neighbours exp(-1/32) = .97. Seen with 4000 members: 1.00, .77, .97
    # and .01, .81, .96. Over 32 coordinates a spread of 2000 members has an error below 1/sqrt(4000) = .016.
    assert spread[1] == pytest.approx(1, abs=5 * 0.016)
    assert abs(correlation[1]) < 5 / math.sqrt(2000)
    assert spread[4] < 0.85
    assert spread[4] < spread[50] < 1.03
    assert correlation[50] > 0.9


def test_the_observer_makes_no_network_call_and_changes_no_sample():
    scheduler, calls = make_scheduler(eta=1.0), []
    scheduler.set_timesteps(5)
    exact = BIMODAL.denoiser(scheduler)

    def counted(x_t, timestep):
        calls.append(timestep)
        return exact(x_t, timestep)

    start = torch.zeros(3, 1, dtype=torch.float64)
    plain = reverse_diffusion(counted, scheduler, start, generator=torch.Generator().manual_seed(3))
    watched = reverse_diffusion(
        counted, scheduler, start, generator=torch.Generator().manual_seed(3), observers=[TrajectoryUncertainty()]
    )
    assert torch.equal(plain, watched)
    assert len(calls) == 2 * 5


def test_one_observer_over_two_batches_equals_one_batch():
    def run(batches) -> TrajectoryUncertainty:
        scheduler = make_scheduler(eta=1.0)
        scheduler.set_timesteps(4)
        observer = TrajectoryUncertainty(keep_steps=True)
        start = torch.linspace(-1, 1, 6, dtype=torch.float64).unsqueeze(1)
        for part in batches:
            generators = [torch.Generator().manual_seed(i) for i in part]
            reverse_diffusion(
                BIMODAL.denoiser(scheduler), scheduler, start[part], generator=generators, observers=[observer]
            )
        return observer

    whole, split = run([list(range(6))]), run([[0, 1, 2, 3], [4, 5]])
    torch.testing.assert_close(split.epistemic, whole.epistemic)
    torch.testing.assert_close(split.steps[-1].mean, whole.steps[-1].mean)
    assert [s.timestep for s in split.steps] == [s.timestep for s in whole.steps]


def test_members_are_grouped_by_input_in_both_layouts():
    inputs, members = torch.tensor([10.0, 20.0]), torch.tensor([1.0, 2.0, 3.0])
    expected = members[:, None] + inputs  # (M, inputs)
    by_input = expected.T.flatten()  # 11 12 13 21 22 23
    assert torch.equal(split_members(by_input, 3), expected)
    assert torch.equal(split_members(expected.flatten(), 3, "member_major"), expected)


def test_total_by_step_of_two_inputs_is_worked_out_per_input():
    mean = torch.tensor([[0.0], [2.0], [5.0], [5.0]])  # input 1: members 0, 2; input 2: members 5, 5
    step = OriginalMoments(10, mean, torch.tensor([[1.0], [3.0], [0.5], [0.5]]))
    # by hand: mean U = 2 and 0.5; unbiased variance of {0, 2} = 2, of {5, 5} = 0
    assert total_variance_by_step([step], num_members=2).flatten().tolist() == [4.0, 0.5]


def test_decomposition_of_members_is_the_variance_of_their_mixture():
    means = torch.tensor([[0.0, 1.0], [3.0, 1.0], [-1.5, 1.0]], dtype=torch.float64)
    variances = torch.tensor([[1.0, 0.5], [0.25, 2.0], [0.01, 1.0]], dtype=torch.float64)
    result = decompose_members(means, variances)
    mixture = MixtureDistribution(means[None], variances.sqrt()[None], torch.zeros_like(means)[None])  # (1, K, 2)
    torch.testing.assert_close(result.total_variance, mixture.variance[0])
    torch.testing.assert_close(result.total, result.total_variance.sqrt())
    assert result.epistemic[1] == 0  # members that agree on the mean have nothing between them
    torch.testing.assert_close(result.aleatoric.square() + result.epistemic.square(), result.total_variance)


def test_decomposition_from_draws_does_not_take_sampling_noise_for_disagreement():
    generator = torch.Generator().manual_seed(0)
    # 5 identical models, 8 draws each, 20000 coordinates: between must vanish on average, not be 1/8 of within.
    draws = torch.randn(5, 8, 20_000, generator=generator, dtype=torch.float64)
    same = decompose_member_samples(draws)
    naive = decompose_members(draws.mean(1), draws.var(1))
    assert naive.between_variance.mean() == pytest.approx(0.8 / 8, rel=0.05)  # (S - 1)/S / M
    # clipping at zero keeps the positive half only: far below the naive number, not exactly zero
    assert same.between_variance.mean() < 0.4 * naive.between_variance.mean()
    # models 1 apart: population variance of {0, 1, 2, 3, 4} is 2; its mean over 20000 coordinates has an error of
    # sqrt(4 * 2 / (5 * 8) / 20000) = .0032, and forgetting (S - 1)/S would move it by .025
    apart = decompose_member_samples(draws + torch.arange(5, dtype=torch.float64)[:, None, None])
    assert apart.between_variance.mean() == pytest.approx(2, abs=STANDARD_ERRORS * 0.0032)
    assert apart.within_variance.mean() == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TrajectoryUncertainty().epistemic, "no trajectory was watched"),
        (lambda: TrajectoryUncertainty().steps, "keep_steps=True"),
        (lambda: split_members(torch.zeros(5, 2), 2), "whole groups"),
        (lambda: split_members(torch.zeros(4), 2, "rows"), "unknown layout"),
        (lambda: total_std(torch.zeros(1, 3)), "M >= 2"),
        (lambda: total_variance_by_step([], 1), "num_members >= 2"),
        (lambda: decompose_members(torch.zeros(2, 3), torch.zeros(2)), "one shape"),
        (lambda: decompose_members(torch.zeros(2, 3), torch.tensor([[1.0, 1, 1], [1, -1, 1]])), "negative"),
        (lambda: decompose_member_samples(torch.zeros(2, 1, 3)), "S, M >= 2"),
    ],
)
def test_bad_input_is_an_error_that_says_what_to_do(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_family_without_variance_is_refused_instead_of_called_certain():
    scheduler = DistributionalDDIMScheduler(clip_sample=False)
    scheduler.set_timesteps(2)
    with pytest.raises(ValueError, match="no variance"):
        reverse_diffusion(lambda x, t: x, scheduler, torch.zeros(2, 1), observers=[TrajectoryUncertainty()])


def test_a_head_that_is_certain_of_some_coordinates_is_collected():
    scheduler, observer = make_scheduler(), TrajectoryUncertainty()
    scheduler.set_timesteps(2)
    scale = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    observer(scheduler, ReverseStep(0, int(scheduler.timesteps[0]), scale, GaussianDistribution(scale, scale)))
    assert (observer.epistemic > 0).tolist() == [[False, True]]


def test_different_schedules_are_not_joined():
    observer, scheduler = TrajectoryUncertainty(keep_steps=True), make_scheduler()
    for num_steps in (2, 3):
        scheduler.set_timesteps(num_steps)
        start = torch.zeros(1, 1, dtype=torch.float64)
        generator = torch.Generator().manual_seed(0)
        reverse_diffusion(BIMODAL.denoiser(scheduler), scheduler, start, generator=generator, observers=[observer])
    with pytest.raises(ValueError, match="different timesteps"):
        _ = observer.steps


def test_decomposition_holds_standard_deviations_where_it_says_so():
    result = VarianceDecomposition(torch.tensor(9.0), torch.tensor(16.0))
    assert (result.aleatoric, result.epistemic, result.total) == (3.0, 4.0, 5.0)


def test_tau_shrinks_the_initial_spread_as_it_shrinks_the_samples_and_leaves_the_epistemic_estimate():
    spread = {}
    for tau in (1.0, 0.1):
        scheduler = make_scheduler(eta=1.0)
        scheduler = DistributionalDDIMScheduler.from_config(scheduler.config, noise_family="gaussian", tau=tau)
        scheduler.set_timesteps(1)
        observer = TrajectoryUncertainty()
        network = diagonal_posterior(scheduler, torch.eye(2, dtype=torch.float64))
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(4000, 1, 2, generator=generator, dtype=torch.float64)
        samples = reverse_diffusion(network, scheduler, start, generator=generator, observers=[observer])
        # 4000 draws know their standard deviation to 1/sqrt(8000) = 1.1 %
        torch.testing.assert_close(observer.initial_std[0], total_std(samples), rtol=5 * 0.011, atol=0)
        spread[tau] = observer.epistemic[0]
    torch.testing.assert_close(spread[0.1], spread[1.0])


def test_a_head_that_is_certain_somewhere_but_not_everywhere_is_watched():
    scheduler = DistributionalDDIMScheduler(noise_family="gaussian", prediction_type="sample")
    scheduler.set_timesteps(4)
    law = GaussianDistribution(torch.zeros(1, 2), torch.tensor([[0.0, 0.3]]))
    observer = TrajectoryUncertainty()
    observer(scheduler, ReverseStep(0, 750, torch.zeros(1, 2), law))
    torch.testing.assert_close(observer.initial_std, torch.tensor([[0.0, 0.3]]))
