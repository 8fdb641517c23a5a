"""What every registered family promises, for events of every shape. A new family is tested by registering it."""

from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest
import torch
from support.laws import (
    BATCH,
    DENSITY_NAMES,
    EVENT_SHAPES,
    FAMILY_NAMES,
    HEAD,
    generator,
    is_flat,
    law_from,
    random_law,
    random_raw,
    random_value,
)
from support.references import STANDARD_ERRORS, assert_within_standard_errors, total_covariance
from torch import Tensor

from marigold_uq.distributions import FAMILIES, MixtureDistribution, NoiseDistribution, family_class
from marigold_uq.scores import crps

NUM_SAMPLES = 4000

every_family = pytest.mark.parametrize("name", FAMILY_NAMES)
every_shape = pytest.mark.parametrize("event_shape", EVENT_SHAPES.values(), ids=EVENT_SHAPES.keys())


@every_shape
@every_family
def test_moments_have_the_event_shape_and_agree_with_draws(name: str, event_shape: tuple[int, ...]) -> None:
    law = random_law(name, event_shape)
    draws = law.rsample((NUM_SAMPLES,), generator(2))
    assert law.mean.shape == law.variance.shape == law.stddev.shape == (BATCH, *event_shape)
    assert law.event_shape == event_shape
    assert draws.shape == (NUM_SAMPLES, BATCH, *event_shape)
    assert_within_standard_errors(draws, law.mean)
    assert_within_standard_errors((draws - law.mean).square(), law.variance)
    torch.testing.assert_close(law.stddev.square(), law.variance)


@every_shape
@every_family
def test_draws_have_the_joint_covariance_of_the_dense_law(name: str, event_shape: tuple[int, ...]) -> None:
    law = random_law(name, event_shape)
    draws = (law.rsample((NUM_SAMPLES,), generator(3)) - law.mean).flatten(2)
    for b in range(BATCH):
        products = draws[:, b, :, None] * draws[:, b, None, :]  # (N, D, D)
        assert_within_standard_errors(products, total_covariance(law, b))


@every_family
def test_sample_shape_leads_the_shape_of_the_draws(name: str) -> None:
    law = random_law(name, (2, 5))
    for sample_shape in [(), (3,), (3, 2), (1, 2, 1)]:
        assert law.rsample(sample_shape, generator()).shape == (*sample_shape, BATCH, 2, 5)


@every_family
def test_a_seed_fixes_the_draws(name: str) -> None:
    law = random_law(name, (2, 5), dtype=torch.float32)
    first, again = law.rsample((4,), generator(5)), law.rsample((4,), generator(5))
    assert torch.equal(first, again)
    if law.variance.max() > 0:
        assert not torch.equal(first, law.rsample((4,), generator(6)))


@every_family
def test_drawing_leaves_the_global_random_state_alone(name: str) -> None:
    before = torch.get_rng_state()
    random_law(name, (2, 5)).rsample((4,), generator(5))
    assert torch.equal(before, torch.get_rng_state())


@every_shape
@every_family
def test_an_element_with_its_own_generator_draws_the_same_bits_in_any_company(
    name: str, event_shape: tuple[int, ...]
) -> None:
    raw = random_raw(name, event_shape, batch=4, dtype=torch.float32)
    batch_axis = 1 if FAMILIES[name].noise_channels else 0

    def draw(members: list[int]) -> dict[int, Tensor]:
        law = law_from(name, raw.index_select(batch_axis, torch.tensor(members)), event_shape)
        drawn = law.rsample((3,), [generator(100 + m) for m in members])
        return {m: drawn[:, position] for position, m in enumerate(members)}

    together = draw([0, 1, 2, 3])
    for company in [[0], [1], [2], [3], [3, 2, 1, 0], [2, 0]]:
        for member, drawn in draw(company).items():
            assert torch.equal(drawn, together[member]), f"member {member} changed in the batch {company}"


@pytest.mark.parametrize("name", [n for n in FAMILY_NAMES if n != "point"])  # a Dirac law draws no random numbers
def test_a_list_of_generators_must_match_the_batch(name: str) -> None:
    law = random_law(name, (3,))
    with pytest.raises(ValueError, match=r"got 3 generators for a batch of 2"):
        law.rsample(generator=[generator(s) for s in range(3)])


@every_family
def test_laws_are_frozen(name: str) -> None:
    law = random_law(name, (3,))
    for field in fields(law):
        with pytest.raises(FrozenInstanceError):
            setattr(law, field.name, torch.zeros(1))


@every_family
def test_operations_leave_the_law_itself_alone(name: str) -> None:
    law = random_law(name, (2, 5))
    before = {field.name: getattr(law, field.name).clone() for field in fields(law)}
    law.affine(-2.0, 1.0), law.scaled(0.3), law.convolved(0.5), law.marginal(), law.quantile(0.3)
    law.rsample((2,), generator())
    for name_, value in before.items():
        assert torch.equal(getattr(law, name_), value)


@every_family
def test_a_wrong_channel_count_says_what_was_expected_and_what_came(name: str) -> None:
    event_shape = (2, 5)
    raw = random_raw(name, event_shape)
    raw = raw[0] if FAMILIES[name].noise_channels else raw
    wrong = torch.cat([raw, raw[:, :1]], 1)
    with pytest.raises(ValueError, match=rf"(?s){name}.*{raw.shape[1]}.*got.*{wrong.shape[1]}"):
        FAMILIES[name].from_raw(wrong, HEAD, event_shape=event_shape)


@pytest.mark.parametrize("name", [n for n in FAMILY_NAMES if not is_flat(n) and FAMILIES[n].num_blocks(HEAD) > 1])
def test_without_an_event_shape_an_indivisible_channel_count_is_an_error(name: str) -> None:
    blocks = FAMILIES[name].num_blocks(HEAD)
    with pytest.raises(ValueError, match=rf"(?s)multiple of {blocks}.*got {blocks + 1}"):
        FAMILIES[name].from_raw(torch.zeros(1, blocks + 1, 4), HEAD)


@every_family
def test_half_precision_raw_output_becomes_a_float32_law(name: str) -> None:
    raw = random_raw(name, (2, 5), dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        law, same = law_from(name, raw.to(dtype), (2, 5)), law_from(name, raw.to(dtype).float(), (2, 5))
        assert law.mean.dtype == law.variance.dtype == law.rsample(generator=generator()).dtype == torch.float32
        assert torch.equal(law.mean, same.mean)
        assert torch.equal(law.variance, same.variance)


@every_family
def test_float64_stays_float64(name: str) -> None:
    law = random_law(name, (2, 5), dtype=torch.float64)
    tensors = [law.mean, law.variance, law.rsample((2,), generator()), law.quantile([0.1, 0.9])]
    tensors += [law.affine(2.0, 1.0).variance, law.scaled(0.5).variance, law.convolved(0.5).variance]
    assert {tensor.dtype for tensor in tensors} == {torch.float64}


@pytest.mark.parametrize("name", DENSITY_NAMES)
def test_a_share_q_of_the_draws_lies_below_the_quantile_q(name: str) -> None:
    law = random_law(name, (2, 5))
    levels = torch.tensor([0.025, 0.3, 0.5, 0.9])
    quantiles, draws = law.quantile(levels), law.rsample((NUM_SAMPLES,), generator(4))
    for level, quantile in zip(levels.tolist(), quantiles, strict=True):
        share = (draws <= quantile).double().mean(0)
        error = (level * (1 - level) / NUM_SAMPLES) ** 0.5
        assert float((share - level).abs().max()) < STANDARD_ERRORS * error


@every_family
def test_quantiles_of_several_levels_are_stacked_and_do_not_cross(name: str) -> None:
    law = random_law(name, (2, 5))
    several = law.quantile([0.1, 0.5, 0.9])
    assert several.shape == (3, BATCH, 2, 5)
    assert torch.equal(several[0], law.quantile(0.1))
    assert torch.equal(several, law.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)))
    assert bool((several.diff(dim=0) >= 0).all())


@every_family
@pytest.mark.parametrize("level", [0.0, 1.0, -0.1, float("nan"), [0.5, 1.5]])
def test_quantile_levels_outside_the_open_unit_interval_are_errors(name: str, level: float | list[float]) -> None:
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        random_law(name, (3,)).quantile(level)


@every_family
def test_the_marginal_law_has_the_same_moments_quantiles_and_crps(name: str) -> None:
    law = random_law(name, (2, 5))
    alone, value = law.marginal(), random_value(law)
    torch.testing.assert_close(alone.mean, law.mean)
    torch.testing.assert_close(alone.variance, law.variance)
    torch.testing.assert_close(alone.quantile([0.2, 0.7]), law.quantile([0.2, 0.7]))
    torch.testing.assert_close(crps(alone, value), crps(law, value))


def test_an_unknown_family_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'gauss'.*cholesky, gaussian, low_rank, low_rank_mixture, mixture"):
        family_class("gauss")


def test_the_registry_holds_the_families_of_the_method_under_their_config_names() -> None:
    paper = {"point", "gaussian", "mixture", "low_rank", "cholesky", "sample", "low_rank_mixture"}
    assert paper <= set(FAMILIES)
    assert all(cls.name == name and issubclass(cls, NoiseDistribution) for name, cls in FAMILIES.items())


def test_the_distribution_function_of_a_mixture_inverts_its_quantiles() -> None:
    law = random_law("mixture", (2, 5))
    assert isinstance(law, MixtureDistribution)
    levels = torch.tensor([1e-4, 0.1, 0.5, 0.99], dtype=torch.float64)
    back = law.cdf(law.quantile(levels))
    torch.testing.assert_close(back, levels.reshape(-1, 1, 1, 1).expand_as(back), rtol=1e-9, atol=1e-12)


def test_quantiles_of_a_gaussian_invert_the_distribution_function_of_torch() -> None:
    law = random_law("gaussian", (2, 5))
    levels = torch.tensor([1e-4, 0.1, 0.5, 0.99], dtype=torch.float64)
    back = torch.distributions.Normal(law.mean, law.stddev).cdf(law.quantile(levels))
    torch.testing.assert_close(back, levels.reshape(-1, 1, 1, 1).expand_as(back), rtol=1e-9, atol=1e-12)


def test_quantiles_of_draws_are_those_of_numpy_with_weibull_plotting_positions() -> None:
    law = random_law("sample", (2, 5))
    levels = [0.01, 0.2, 0.37, 0.5, 0.83, 0.99]
    expected = np.quantile(law.draws.numpy(), levels, axis=0, method="weibull")
    torch.testing.assert_close(law.quantile(levels), torch.from_numpy(expected))
