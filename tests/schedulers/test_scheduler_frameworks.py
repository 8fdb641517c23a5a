"""EDM and rectified flow: exact with a perfect network, equal to stock for a point, trained as the framework trains."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import EDMDPMSolverMultistepScheduler, EDMEulerScheduler, EulerDiscreteScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from support.oracles import (
    CHAINS,
    ETAS,
    EXACT_FAMILIES,
    SIZES,
    TARGETS,
    Framework,
    assert_law,
    edm_framework,
    flow_framework,
    gaussian_target,
    in_dtype,
    noisy,
    perfect_network_of,
)
from torch import Tensor

from marigold_uq.distributions import FAMILIES
from marigold_uq.sampling import one_step_distribution, reverse_diffusion
from marigold_uq.schedulers import (
    DistributionalDDIMScheduler,
    DistributionalEDMScheduler,
    DistributionalFlowMatchScheduler,
    DistributionalLCMScheduler,
    DistributionalScheduler,
    NoiseLevel,
    OutputForm,
    reverse_step,
)

SCHEDULERS: dict[str, tuple[type[DistributionalScheduler], dict[str, Any], Callable[[float], Framework]]] = {
    "edm": (DistributionalEDMScheduler, {}, edm_framework),
    "edm v": (DistributionalEDMScheduler, {"prediction_type": "v_prediction"}, lambda t: edm_framework(t, sign=-1.0)),
    "edm exponential": (
        DistributionalEDMScheduler,
        {"sigma_schedule": "exponential", "sigma_max": 20.0, "sigma_data": 1.0},
        lambda t: edm_framework(t, 1.0),
    ),
    "flow": (DistributionalFlowMatchScheduler, {}, flow_framework),
    "flow shifted": (DistributionalFlowMatchScheduler, {"shift": 3.0}, flow_framework),
}
every_framework = pytest.mark.parametrize("framework", SCHEDULERS)


def build(framework: str, family: str, **options: Any) -> Any:
    kind, own, _ = SCHEDULERS[framework]
    return kind(noise_family=family, **{**SIZES[family], **own, **options})


def framework_cases() -> list[tuple[str, str, int, float]]:
    """Every family with every framework and 1, 4 or 50 steps; eta in turn, so that every pair of values occurs."""
    cases = []
    for f, family in enumerate(EXACT_FAMILIES):
        for s, framework in enumerate(SCHEDULERS):
            for k, steps in enumerate((1, 4, 50)):
                if not (steps == 1 and framework == "edm exponential"):  # stock's starts such a chain at sigma_min
                    cases.append((family, framework, steps, ETAS[(f + s + k) % 3]))
    return cases


@pytest.mark.parametrize(("family", "framework", "steps", "eta"), framework_cases())
def test_a_perfect_network_gives_the_exact_law(family: str, framework: str, steps: int, eta: float) -> None:
    scheduler, at = build(framework, family, eta=eta), SCHEDULERS[framework][2]
    scheduler.set_timesteps(steps)
    target, generator = in_dtype(TARGETS[family], torch.float32), torch.Generator().manual_seed(steps)
    first = at(scheduler.timesteps[0].item())
    x_t = first.size * noisy(target, first.alpha_bar, CHAINS[steps], generator)
    network = perfect_network_of(family, target, at)
    x_0 = reverse_diffusion(network, scheduler, x_t / scheduler.init_noise_sigma, generator=generator)
    assert_law(x_0.flatten(1).double(), TARGETS[family])


@pytest.mark.parametrize(
    ("kind", "stock", "options", "start"),
    [
        (DistributionalEDMScheduler, EDMEulerScheduler, {}, 80.0),
        (DistributionalEDMScheduler, EDMEulerScheduler, {"prediction_type": "v_prediction", "sigma_data": 1.0}, 80.0),
        (DistributionalEDMScheduler, EDMEulerScheduler, {"sigma_schedule": "exponential"}, 80.0),
        (DistributionalEDMScheduler, EDMEulerScheduler, {"final_sigmas_type": "sigma_min"}, 80.0),
        (DistributionalFlowMatchScheduler, FlowMatchEulerDiscreteScheduler, {}, 1.0),
        (DistributionalFlowMatchScheduler, FlowMatchEulerDiscreteScheduler, {"shift": 3.0}, 1.0),
        (DistributionalFlowMatchScheduler, FlowMatchEulerDiscreteScheduler, {"use_karras_sigmas": True}, 1.0),
    ],
)
@pytest.mark.parametrize("steps", [2, 10, 50])
def test_a_point_steps_as_stock_does(
    kind: type, stock: type, options: dict[str, Any], start: float, steps: int
) -> None:
    """Float32: 1e-6 of the largest number that is added up, at every step and input along a chain."""
    ours, theirs = kind(**options), stock(**options)
    for scheduler in (ours, theirs):
        scheduler.set_timesteps(steps)
    assert torch.equal(ours.timesteps, theirs.timesteps)
    x = start * torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0))
    for t in theirs.timesteps:
        tolerance = 1e-6 * float(x.abs().max())
        seen = theirs.scale_model_input(x, t) if stock is EDMEulerScheduler else x
        torch.testing.assert_close(ours.scale_model_input(x, t), seen, rtol=1e-6, atol=1e-6)
        stepped = ours.step(torch.tanh(seen), t, x, return_dict=False)[0]
        x = theirs.step(torch.tanh(seen), t, x, return_dict=False)[0]
        torch.testing.assert_close(stepped, x, rtol=0, atol=tolerance)


@every_framework
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_saved_scheduler_loads_alike(framework: str, family: str, tmp_path: Path) -> None:
    scheduler = build(framework, family, eta=0.25)
    scheduler.calibrate(0.5)
    scheduler.save_pretrained(tmp_path)
    loaded = type(scheduler).from_pretrained(tmp_path)
    own = {name: value for name, value in scheduler.config.items() if not name.startswith("_")}
    assert own == {name: value for name, value in loaded.config.items() if not name.startswith("_")}
    assert loaded.config.tau == 0.5
    assert isinstance(loaded, SchedulerMixin)


@pytest.mark.parametrize(
    ("kind", "stock"),
    [
        (DistributionalEDMScheduler, EDMEulerScheduler(sigma_max=60.0)),
        (DistributionalEDMScheduler, EDMDPMSolverMultistepScheduler(sigma_max=60.0)),
        (DistributionalFlowMatchScheduler, FlowMatchEulerDiscreteScheduler(shift=3.0)),
    ],
)
def test_a_stock_config_becomes_any_family(kind: Any, stock: Any) -> None:
    scheduler = kind.from_config(stock.config, noise_family="mixture", num_components=3)
    assert (scheduler.config.noise_family, scheduler.config.num_components) == ("mixture", 3)
    for name in ("sigma_max", "shift"):
        assert scheduler.config.get(name) == stock.config.get(name)


def test_a_continuous_euler_config_is_edm_with_unit_data() -> None:
    """Stable Video Diffusion's: v_prediction, timesteps ln(sigma) / 4. One point step is Euler's own."""
    options = {"timestep_type": "continuous", "prediction_type": "v_prediction", "use_karras_sigmas": True}
    euler = EulerDiscreteScheduler(**options, sigma_min=0.002, sigma_max=700.0)
    ours = DistributionalEDMScheduler.from_config(euler.config)
    assert ours.config.sigma_data == 1.0
    for scheduler in (ours, euler):
        scheduler.set_timesteps(10)
    torch.testing.assert_close(ours.timesteps, euler.timesteps, rtol=1e-5, atol=1e-5)
    x = 700 * torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0))
    expected = euler.step(torch.tanh(euler.scale_model_input(x, euler.timesteps[0])), euler.timesteps[0], x)
    found = ours.step(torch.tanh(ours.scale_model_input(x, ours.timesteps[0])), ours.timesteps[0], x)
    torch.testing.assert_close(found.prev_sample, expected.prev_sample, rtol=1e-5, atol=1e-3)  # of 700


@pytest.mark.parametrize("options", [{}, {"timestep_type": "continuous"}, {"prediction_type": "v_prediction"}])
def test_an_euler_config_of_another_framework_says_where_it_belongs(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"belongs to DistributionalDDIMScheduler\.from_config"):
        DistributionalEDMScheduler.from_config(EulerDiscreteScheduler(**options).config)


@every_framework
def test_targets_and_noisy_samples_are_what_the_framework_says(framework: str) -> None:
    scheduler, at = build(framework, "gaussian"), SCHEDULERS[framework][2]
    generator = torch.Generator().manual_seed(0)
    x_0, noise = (torch.randn(6, 2, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    timesteps = scheduler.sample_timesteps(6, generator)
    x_t = scheduler.add_noise(x_0, noise, timesteps)
    target = scheduler.training_target(x_0, noise, timesteps)
    for b, t in enumerate(timesteps.tolist()):
        here = at(t)
        torch.testing.assert_close(x_t[b], here.signal * x_0[b] + here.noise * noise[b], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(target[b], here.a * x_t[b] + here.b * x_0[b], rtol=1e-4, atol=1e-4)


@every_framework
def test_training_levels_have_the_distribution_of_the_framework(framework: str) -> None:
    """ln sigma ~ N(-1.2, 1.2^2) for EDM, logit s ~ N(0, 1) before the shift for flow; per sample generators too."""
    scheduler, count = build(framework, "gaussian"), 4000
    t = scheduler.sample_timesteps(count, torch.Generator().manual_seed(0)).double()
    if "edm" in framework:
        values, mean, std = 4 * t, -1.2, 1.2
    else:
        s = t / 1000
        s = s / (scheduler.config.shift - (scheduler.config.shift - 1) * s)
        values, mean, std = torch.logit(s), 0.0, 1.0
    assert abs(float(values.mean()) - mean) < 5 * std / math.sqrt(count)
    assert abs(float(values.std()) - std) < 5 * std / math.sqrt(2 * count)
    alone = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    together = scheduler.sample_timesteps(2, alone)
    assert float(together[1]) == float(scheduler.sample_timesteps(1, [torch.Generator().manual_seed(2)]))


@every_framework
def test_training_visits_all_rows_of_a_table_alike(framework: str) -> None:
    """Each of 20 rows with 200 of 4000 timesteps, 5 standard errors of 14; in rising order of noise."""
    scheduler = build(framework, "gaussian")
    drawn = scheduler.sample_timesteps(4000, torch.Generator().manual_seed(0))
    counts = torch.bincount(scheduler.noise_index(drawn, 20), minlength=20)
    assert len(counts) == 20
    assert float((counts - 200).abs().max()) < 5 * math.sqrt(200)
    rising = drawn.sort().values
    position = scheduler.table_position(rising)
    assert bool((position.diff() >= 0).all())
    assert 0 <= float(position.min()) < float(position.max()) <= scheduler.config.num_train_timesteps


@every_framework
def test_the_timesteps_of_a_table_lie_in_its_rows_and_end_where_sampling_starts(framework: str) -> None:
    scheduler = build(framework, "gaussian")
    timesteps = scheduler.table_timesteps(50)
    assert scheduler.noise_index(timesteps, 50).tolist() == list(range(50))
    assert float(timesteps[-1]) == pytest.approx(scheduler.noisiest_timestep)
    assert bool(scheduler.timesteps_at(torch.tensor([0.0, 1.0])).isfinite().all())


def test_the_rows_of_a_table_over_ddims_timesteps_are_these_timesteps() -> None:
    scheduler = DistributionalDDIMScheduler(num_train_timesteps=50)
    every = torch.arange(50)
    assert torch.equal(scheduler.table_position(every), every)
    assert torch.equal(scheduler.noise_index(every), every)
    assert torch.equal(scheduler.table_timesteps(50), every)
    assert scheduler.noise_index(every, 10).tolist() == [t // 5 for t in range(50)]


def test_the_scheduler_of_distilled_models_has_the_table_of_ddim() -> None:
    scheduler, every = DistributionalLCMScheduler(), torch.arange(1000)
    assert torch.equal(scheduler.noise_index(every), every)
    assert scheduler.table_timesteps(10).tolist() == [50, 150, 250, 350, 450, 550, 650, 750, 850, 999]


def test_ddim_trains_at_every_timestep_alike() -> None:
    t = DistributionalDDIMScheduler(num_train_timesteps=10).sample_timesteps(5000, torch.Generator().manual_seed(0))
    assert t.dtype == torch.int64
    assert set(t.tolist()) == set(range(10))
    assert int(torch.bincount(t).min()) > 400  # 500 +- 5 standard errors of 21


@pytest.mark.parametrize("framework", ["edm", "flow", "ddim"])
def test_the_original_distribution_takes_a_timestep_per_sample(framework: str) -> None:
    scheduler = (
        DistributionalDDIMScheduler(noise_family="gaussian") if framework == "ddim" else build(framework, "gaussian")
    )
    generator = torch.Generator().manual_seed(0)
    timesteps = scheduler.sample_timesteps(3, generator)
    raw, x_t = torch.randn(3, 4, 5, generator=generator), torch.randn(3, 2, 5, generator=generator)
    together = scheduler.original_distribution(raw, timesteps, x_t)
    for b, t in enumerate(timesteps):
        rows = slice(b, b + 1)
        alone = scheduler.original_distribution(raw[rows], t, x_t[rows])
        torch.testing.assert_close(together.mean[rows], alone.mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(together.variance[rows], alone.variance, rtol=1e-4, atol=1e-7)


def test_one_step_of_the_exponential_schedule_is_refused_because_stocks_starts_at_sigma_min() -> None:
    scheduler = build("edm exponential", "gaussian")
    scheduler.set_timesteps(1)
    with pytest.raises(ValueError, match="x_t must be mostly noise at its first timestep"):
        one_step_distribution(lambda x_t, t: x_t.repeat(1, 2, 1), scheduler, torch.zeros(1, 1, 2))


@pytest.mark.parametrize("framework", [name for name in SCHEDULERS if name != "edm exponential"])
def test_one_step_is_what_the_chain_of_one_step_draws_from(framework: str) -> None:
    scheduler, at = build(framework, "gaussian", tau=0.5), SCHEDULERS[framework][2]
    scheduler.set_timesteps(1)
    target = in_dtype(gaussian_target((1, 2), [0.7, -1.0], [0.09, 0.5]), torch.float32)
    network = perfect_network_of("gaussian", target, at)
    x_T = torch.randn(1, 1, 2, generator=torch.Generator().manual_seed(0))
    law = one_step_distribution(network, scheduler, x_T)
    x_0 = reverse_diffusion(network, scheduler, x_T.expand(4000, -1, -1), generator=torch.Generator().manual_seed(1))
    error = law.stddev[0] / math.sqrt(4000)
    assert bool(((x_0.mean(0) - law.mean[0]).abs() < 5 * error).all())
    torch.testing.assert_close(x_0.std(0), law.stddev[0], rtol=5 / math.sqrt(8000), atol=0)


@pytest.mark.parametrize(
    ("kind", "bad", "message"),
    [
        (DistributionalEDMScheduler, {"sigma_min": 2.0, "sigma_max": 1.0}, "expected 0 < sigma_min < sigma_max"),
        (DistributionalEDMScheduler, {"prediction_type": "sample"}, "prediction_type must be epsilon or v_prediction"),
        (DistributionalEDMScheduler, {"noise_family": "low_rank"}, "a rank of at least 1"),
        (DistributionalFlowMatchScheduler, {"invert_sigmas": True}, "leave both off"),
        (DistributionalFlowMatchScheduler, {"stochastic_sampling": True}, "leave both off"),
        (DistributionalFlowMatchScheduler, {"eta": math.nan}, "eta must be finite"),
    ],
)
def test_bad_arguments_are_refused(kind: Any, bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**bad)


@every_framework
def test_steps_are_checked(framework: str) -> None:
    scheduler = build(framework, "gaussian")
    raw, x_t = torch.zeros(1, 4, 3), torch.zeros(1, 2, 3)
    with pytest.raises(ValueError, match="run 'set_timesteps'"):
        scheduler.step(raw, 0.5, x_t)
    with pytest.raises(ValueError, match="must be at least 1; got 0"):
        scheduler.set_timesteps(0)
    scheduler.set_timesteps(4)
    with pytest.raises(ValueError, match="starts at one of the scheduler's timesteps"):
        scheduler.step(raw, 0.123, x_t)
    with pytest.raises(ValueError, match="does not fit x_t"):
        scheduler.step(scheduler.noise_distribution(raw), scheduler.timesteps[0], torch.zeros(2, 2, 3))


def test_a_point_scheduler_does_not_drop_the_spread_of_a_distribution() -> None:
    scheduler = build("flow", "point")
    scheduler.set_timesteps(2)
    wide = build("flow", "gaussian").noise_distribution(torch.zeros(1, 4, 3))
    with pytest.raises(TypeError, match="would drop the spread of a GaussianDistribution"):
        scheduler.step(wide, scheduler.timesteps[0], torch.zeros(1, 2, 3))


FORMS: dict[str, Callable[[float, float], OutputForm[float]]] = {
    "epsilon": lambda a, s: OutputForm(0.0, 1.0),
    "sample": lambda a, s: OutputForm(1.0, 0.0),
    "v": lambda a, s: OutputForm(-s, a),
    "flow": lambda a, s: OutputForm(-1.0, 1.0),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("eta", [0.0, 0.3, 1.0])
def test_the_reverse_step_keeps_signal_and_noise_whatever_the_network_puts_out(form: str, eta: float) -> None:
    """For o = p x_0 + q eps exactly, x_prev = a' x_0 + lambda eps + sigma z with lambda^2 + sigma^2 = s'^2."""
    for a, s, a_prev, s_prev in [
        (0.2, 0.9, 0.7, 0.6),
        (0.01, 1.0, 0.5, 0.5),
        (1.0, 80.0, 1.0, 3.0),
        (0.9, 0.1, 1.0, 0.0),
    ]:
        output = FORMS[form](a, s)
        c = reverse_step(NoiseLevel(a, s), NoiseLevel(a_prev, s_prev), output, eta)
        of_x_0, of_eps = c.sample * a + c.output * output.original, c.sample * s + c.output * output.noise
        assert of_x_0 == pytest.approx(a_prev, abs=1e-12)
        assert of_eps**2 + c.std_dev**2 == pytest.approx(s_prev**2, abs=1e-12)
        ratio = 1 - (a * s_prev / (a_prev * s)) ** 2
        assert c.std_dev**2 == pytest.approx(eta**2 * s_prev**2 * ratio, abs=1e-12)


def test_a_level_without_noise_steps_to_its_signal_and_not_back() -> None:
    clean, form = NoiseLevel(0.5, 0.0), OutputForm(1.0, 0.0)
    c = reverse_step(clean, NoiseLevel(1.0, 0.0), form, 1.0)
    assert (c.sample, c.output, c.std_dev) == (2.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="takes noise away"):
        reverse_step(clean, NoiseLevel(0.5, 0.1), form, 1.0)


def test_betas_so_small_that_alpha_bar_rounds_to_one_divide_nothing_by_zero() -> None:
    for kind in ("epsilon", "v_prediction", "sample"):
        scheduler = DistributionalDDIMScheduler(
            trained_betas=[1e-9, 0.5], num_train_timesteps=2, prediction_type=kind, noise_family="gaussian"
        )
        scheduler.set_timesteps(2)
        x_t = torch.ones(1, 1, 3)
        stepped = scheduler.step(torch.zeros(1, 2, 3), 0, x_t, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(stepped.prev_sample, x_t)


@pytest.mark.parametrize("framework", ["edm", "flow"])
def test_gradients_flow_through_a_chain_on_request(framework: str) -> None:
    scheduler = build(framework, "gaussian", eta=0.5)
    scheduler.set_timesteps(3)
    weight = torch.tensor(0.3, requires_grad=True)

    def denoiser(x: Tensor, t: Tensor | int) -> Tensor:
        return torch.cat([weight * x, torch.zeros_like(x)], 1)

    x_T = torch.randn(4, 1, 3, generator=torch.Generator().manual_seed(0))
    x_0 = reverse_diffusion(denoiser, scheduler, x_T, generator=torch.Generator().manual_seed(1), grad=True)
    x_0.sum().backward()
    assert weight.grad is not None
    assert float(weight.grad) != 0
    assert not reverse_diffusion(denoiser, scheduler, x_T, generator=torch.Generator().manual_seed(1)).requires_grad


def test_tau_of_a_step_overrides_that_of_the_config() -> None:
    for scheduler in (build("flow", "gaussian", eta=1.0), DistributionalDDIMScheduler(noise_family="point", eta=1.0)):
        scheduler.set_timesteps(4)
        raw = torch.zeros(2000, scheduler.num_raw_channels(1), 1)
        t, x_t = scheduler.timesteps[1], torch.zeros(2000, 1, 1)
        wide, narrow = (
            scheduler.step(raw, t, x_t, generator=torch.Generator().manual_seed(0), tau=tau).prev_sample
            for tau in (1.0, 0.25)
        )
        torch.testing.assert_close(narrow - narrow.mean(), 0.5 * (wide - wide.mean()))
