"""The layout of the raw channels is a file format, and so are the activations."""

import pytest
import torch
from support.laws import generator
from torch import Tensor

from marigold_uq.distributions import (
    FAMILIES,
    MIN_SCALE,
    MIN_VARIANCE,
    CholeskyDistribution,
    GaussianDistribution,
    HeadOptions,
    LowRankDistribution,
    LowRankMixtureDistribution,
    MixtureDistribution,
    PointDistribution,
    SampleDistribution,
)
from marigold_uq.distributions.base import inverse_positive, positive

C, H, W, K, R = 2, 3, 4, 3, 2
HEAD = HeadOptions(num_components=K, rank=R)


def raw_blocks(count: int) -> tuple[Tensor, list[Tensor]]:
    """Raw output of `count` blocks of C channels, and the blocks themselves, (B, C, H, W) each."""
    raw = torch.randn(5, count * C, H, W, generator=generator(), dtype=torch.float64)
    return raw, [raw[:, C * k : C * (k + 1)] for k in range(count)]


def softplus(rho: Tensor, floor: float = 1e-6) -> Tensor:
    return torch.log1p(rho.exp()) + floor


def test_the_smallest_scale_is_one_millionth() -> None:
    assert MIN_SCALE == 1e-6
    assert float(positive(torch.tensor(-200.0))) == pytest.approx(1e-6)


@pytest.mark.parametrize("family", [LowRankDistribution, LowRankMixtureDistribution])
def test_the_smallest_variance_is_the_square_of_the_smallest_scale(
    family: type[LowRankDistribution | LowRankMixtureDistribution],
) -> None:
    """As a variance 1e-6 would be a standard deviation of .157 in units of x_0 at the end of the default betas."""
    assert MIN_VARIANCE == 1e-12
    law = family.from_raw(torch.full((1, family.num_blocks()), -200.0))
    assert float(law.stddev) == pytest.approx(1e-6)


@pytest.mark.parametrize("value", [1e-4, 0.03, 0.5, 1.0, 40.0])
def test_inverse_positive_finds_the_raw_number_of_a_scale(value: float) -> None:
    assert float(positive(torch.tensor(inverse_positive(value), dtype=torch.float64))) == pytest.approx(value)


def test_inverse_positive_refuses_a_scale_below_the_smallest() -> None:
    with pytest.raises(ValueError, match="must exceed 1e-06; got 1e-07"):
        inverse_positive(1e-7)


def test_point_and_sample_read_the_raw_output_as_it_is() -> None:
    raw, _ = raw_blocks(1)
    assert torch.equal(PointDistribution.from_raw(raw).loc, raw)
    assert torch.equal(SampleDistribution.from_raw(raw).draws, raw[None])


def test_gaussian_reads_loc_and_then_the_standard_deviation() -> None:
    raw, (loc, rho) = raw_blocks(2)
    law = GaussianDistribution.from_raw(raw)
    assert torch.equal(law.loc, loc)
    torch.testing.assert_close(law.scale, softplus(rho))


def test_mixture_reads_all_locs_then_all_scales_then_all_logits() -> None:
    raw, blocks = raw_blocks(3 * K)
    law = MixtureDistribution.from_raw(raw, HEAD)
    for k in range(K):
        assert torch.equal(law.loc[:, k], blocks[k])
        torch.testing.assert_close(law.scale[:, k], softplus(blocks[K + k]))
        assert torch.equal(law.logits[:, k], blocks[2 * K + k])
    torch.testing.assert_close(law.weights.sum(1), torch.ones(5, C, H, W, dtype=torch.float64))


def test_pooled_weights_come_from_the_logits_averaged_over_space_per_channel() -> None:
    raw, blocks = raw_blocks(3 * K)
    law = MixtureDistribution.from_raw(raw, HeadOptions(K, pooled_weights=True))
    pooled = torch.stack([block.mean((2, 3)) for block in blocks[2 * K :]], 1).softmax(1)  # (B, K, C)
    torch.testing.assert_close(law.weights, pooled[..., None, None].expand(5, K, C, H, W))


def test_low_rank_reads_loc_then_a_variance_then_the_factors() -> None:
    raw, (loc, rho, *factors) = raw_blocks(2 + R)
    law = LowRankDistribution.from_raw(raw, HEAD)
    assert torch.equal(law.loc, loc)
    torch.testing.assert_close(law.cov_diag, softplus(rho, MIN_VARIANCE))
    assert torch.equal(law.cov_factor, torch.stack(factors, 1))
    torch.testing.assert_close(law.variance, softplus(rho, MIN_VARIANCE) + sum(f.square() for f in factors))


def test_low_rank_mixture_reads_its_factors_component_by_component_and_averages_the_logits() -> None:
    raw, blocks = raw_blocks(K * (3 + R))
    law = LowRankMixtureDistribution.from_raw(raw, HEAD)
    for k in range(K):
        assert torch.equal(law.loc[:, k], blocks[k])
        torch.testing.assert_close(law.cov_diag[:, k], softplus(blocks[K + k], MIN_VARIANCE))
        torch.testing.assert_close(law.logits[:, k], blocks[2 * K + k].mean((1, 2, 3)))
        for r in range(R):
            assert torch.equal(law.cov_factor[:, k, r], blocks[3 * K + k * R + r])


def test_cholesky_reads_the_triangle_row_by_row_with_unit_rows_times_a_standard_deviation() -> None:
    raw = torch.tensor([[1.0, 2.0, 3.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]], dtype=torch.float64)
    law = CholeskyDistribution.from_raw(raw)
    scale = softplus(torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64))
    rows = torch.tensor([[1, 0, 0], [0.2, 1, 0], [0.4, 0.5, 1]], dtype=torch.float64)
    expected = scale[:, None] * rows / rows.square().sum(1, keepdim=True).sqrt()
    assert torch.equal(law.loc, raw[:, :3])
    torch.testing.assert_close(law.scale_tril[0], expected)
    torch.testing.assert_close(law.variance[0], scale.square())


def test_cholesky_without_an_event_shape_finds_the_dimension_or_says_which_widths_exist() -> None:
    assert CholeskyDistribution.from_raw(torch.zeros(1, 14)).loc.shape == (1, 4)
    with pytest.raises(ValueError, match=r"13 raw numbers fit no cholesky head: .* 2, 5, 9, 14"):
        CholeskyDistribution.from_raw(torch.zeros(1, 13))


def test_cholesky_refuses_raw_output_with_space() -> None:
    with pytest.raises(ValueError, match=r"flat raw output .* got shape \(1, 14, 2\)"):
        CholeskyDistribution.from_raw(torch.zeros(1, 14, 2), event_shape=(4,))


@pytest.mark.parametrize(
    ("name", "channels"),  # 1, 2, 3K, 2 + r, K (3 + r) and 1 per target channel, here 4 of them, K = 3 and r = 2
    [("point", 4), ("gaussian", 8), ("mixture", 36), ("low_rank", 16), ("low_rank_mixture", 60), ("sample", 4)],
)
def test_the_number_of_raw_channels_is_that_of_the_family(name: str, channels: int) -> None:
    assert FAMILIES[name].num_raw_channels(4, HeadOptions(3, 2)) == channels


def test_cholesky_counts_coordinates_and_not_channels() -> None:
    assert CholeskyDistribution.num_raw_channels(4) == 14
    with pytest.raises(ValueError, match=r"D \+ D\(D\+1\)/2"):
        CholeskyDistribution.num_blocks()


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "cholesky"])
def test_initial_blocks_start_at_the_pretrained_mean_with_about_the_asked_for_spread(name: str) -> None:
    """A head whose raw blocks are exactly these starts: factors at zero, the pretrained output at 0.7."""
    family, pretrained, scale = FAMILIES[name], 0.7, 0.2
    blocks = family.initial_blocks(HEAD, scale)
    assert len(blocks) == family.num_blocks(HEAD)
    raw = torch.tensor([[pretrained * b.copies_mean + b.bias for b in blocks]], dtype=torch.float64)
    law = family.from_raw(raw, HEAD)
    torch.testing.assert_close(law.mean, torch.full((1, 1), pretrained, dtype=torch.float64))
    if family.has_spread:
        assert scale * (1 - 1e-12) <= float(law.stddev) <= 2 * scale
