"""tau and kappa against known answers: closed forms, and an oracle with a known error."""

import math

import pytest
import torch
from torch import Tensor

from marigold_uq.calibration import apply_kappa, choose_gaussian_kappa, choose_kappa, choose_tau
from marigold_uq.distributions.base import inverse_positive
from marigold_uq.metrics import crps, energy_score
from marigold_uq.sampling import reverse_diffusion
from marigold_uq.schedulers import DistributionalDDIMScheduler


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

    def draw(tau: float) -> Tensor:
        scheduler.calibrate(tau)
        generator = torch.Generator().manual_seed(5)
        x_T = torch.randn(members, 1, 400, generator=generator, dtype=torch.float64)
        return reverse_diffusion(denoiser, scheduler, x_T, generator=generator)[:, 0]

    return draw


@pytest.mark.parametrize("inflation", [9.0, 0.5])
def test_tau_undoes_a_known_misjudged_variance(inflation):
    scheduler = gaussian_scheduler()
    scheduler.set_timesteps(1)
    target = torch.randn(400, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    draw = inflated_oracle(scheduler, inflation, members=200)
    choice = choose_tau(draw, target)
    # 400 targets know their standard deviation to 1/sqrt(800) = 3.5 %, tau to 7 %; 4 such errors plus the tolerance.
    assert abs(math.log(choice.tau * inflation)) < 4 * 0.07 + 0.05
    assert len(choice.curve) <= 12


def test_tau_agrees_with_a_dense_grid_and_is_never_worse_than_doing_nothing():
    scheduler = gaussian_scheduler()
    scheduler.set_timesteps(3)
    target = torch.randn(400, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    draw = inflated_oracle(scheduler, 4.0, members=50)
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


@pytest.mark.parametrize("unit", [1e-4, 1.0, 1e5])
def test_the_kappa_of_a_gaussian_is_the_factor_its_deviation_lacks_in_any_unit(unit):
    """The CRPS is proper: its best factor is the true one. 20,000 draws tell it to about 1 %."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(20_000, generator=generator).double()
    std = 0.1 + torch.rand(20_000, generator=generator).double()
    target = mean + 2.5 * std * torch.randn(20_000, generator=generator).double()
    choice = choose_gaussian_kappa(unit * mean, std, unit * target)
    exact = choose_gaussian_kappa(unit * mean, unit * std, unit * target)
    assert exact.kappa == pytest.approx(2.5, rel=0.02)
    assert choice.kappa == pytest.approx(unit * exact.kappa, rel=1e-3)
    assert exact.score < exact.score_before


def test_the_kappa_of_a_gaussian_has_the_lowest_crps_of_a_grid():
    generator = torch.Generator().manual_seed(1)
    mean, std = torch.zeros(500).double(), torch.rand(500, generator=generator).double()
    target = torch.randn(500, generator=generator).double()
    choice = choose_gaussian_kappa(mean, std, target)

    def score(kappa: float) -> float:
        """The closed form of Gneiting and Raftery (2007), equation 21."""
        z = target / (kappa * std)
        normal = torch.distributions.Normal(0.0, 1.0)
        density = torch.exp(normal.log_prob(z))
        return float((kappa * std * (z * (2 * normal.cdf(z) - 1) + 2 * density - 1 / math.sqrt(math.pi))).mean())

    assert choice.score == pytest.approx(score(choice.kappa), rel=1e-6)
    assert choice.score <= min(score(choice.kappa * factor) for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0)) + 1e-9


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
        (lambda: choose_kappa(torch.zeros(2, 4), torch.zeros(4)), ValueError, "M >= 3"),
        (lambda: choose_kappa(torch.ones(5, 4), torch.zeros(4)), ValueError, "no spread"),
        (lambda: choose_kappa(torch.ones(5, 4), torch.zeros(4), weights=-torch.ones(4)), ValueError, "not negative"),
        (lambda: choose_kappa(torch.ones(5, 4), torch.zeros(4), weights=torch.zeros(4)), ValueError, "no coordinate"),
        (lambda: choose_kappa(torch.full((5, 4), math.nan), torch.zeros(4)), ValueError, "NaN or infinity"),
        (lambda: apply_kappa(three_draws(), 0.0), ValueError, "positive"),
        (lambda: choose_gaussian_kappa(torch.ones(3), torch.ones(2), torch.ones(3)), ValueError, "one shape"),
        (lambda: choose_gaussian_kappa(torch.ones(3), torch.zeros(3), torch.ones(3)), ValueError, "0 everywhere"),
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
