"""Depth to [-1, 1] and back, against numpy; latent masks against brute force."""

import numpy as np
import pytest
import torch

from marigold_uq.depth.data import denormalize_depth, latent_mask, normalize_depth


def depth_and_mask(seed: int, shape: tuple[int, ...] = (1, 33, 47)) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    depth = 0.5 + 20 * torch.rand(shape, generator=generator) ** 2
    return depth, torch.rand(shape, generator=generator) > 0.3


@pytest.mark.parametrize(("low", "high"), [(0.02, 0.98), (0.0, 1.0), (0.25, 0.5)])
@pytest.mark.parametrize("seed", range(3))
def test_the_range_is_numpys_quantiles_of_the_valid_pixels(seed: int, low: float, high: float) -> None:
    depth, valid = depth_and_mask(seed)
    normalized, (d_low, d_high) = normalize_depth(depth, valid, low, high)

    values = depth[valid].numpy().astype(np.float64)
    expected_low, expected_high = np.quantile(values, [low, high])
    assert (d_low, d_high) == pytest.approx((expected_low, expected_high), rel=1e-12)  # both in float64
    expected = np.clip((depth.numpy() - expected_low) / (expected_high - expected_low) * 2 - 1, -1, 1)
    expected[~valid.numpy()] = 1
    np.testing.assert_allclose(normalized.numpy(), expected, rtol=0, atol=1e-6)  # float32 rounding of numbers <= 1
    assert normalized.dtype == depth.dtype


def test_denormalising_inverts_between_the_quantiles_and_clips_outside() -> None:
    depth, valid = depth_and_mask(0)
    normalized, (d_low, d_high) = normalize_depth(depth, valid)
    back = denormalize_depth(normalized, (d_low, d_high))
    expected = torch.where(valid, depth.clamp(d_low, d_high), torch.full_like(depth, d_high))
    torch.testing.assert_close(back, expected, rtol=1e-6, atol=1e-6)


def test_invalid_pixels_change_nothing_but_themselves() -> None:
    depth, valid = depth_and_mask(1)
    poisoned = torch.where(valid, depth, torch.full_like(depth, torch.nan))
    normalized, depth_range = normalize_depth(poisoned, valid)
    reference, reference_range = normalize_depth(depth, valid)
    assert depth_range == reference_range
    assert torch.equal(normalized, reference)
    assert bool((normalized[~valid] == 1).all())


@pytest.mark.parametrize("pixels", [1, 200])
def test_a_constant_map_is_finite_and_comes_back(pixels: int) -> None:
    depth = torch.full((1, 20, 20), 3.7)
    valid = torch.arange(400).reshape(1, 20, 20) < pixels
    normalized, depth_range = normalize_depth(depth, valid)
    assert normalized[valid].unique().tolist() == [0.0]
    assert normalized[~valid].unique().tolist() == [1.0]
    assert bool((denormalize_depth(normalized, depth_range) == depth).all())


def test_more_pixels_than_torch_quantile_takes_are_fine() -> None:
    depth = torch.arange(2**24 + 5, dtype=torch.float32).reshape(1, 1, -1)
    _, (d_low, d_high) = normalize_depth(depth, torch.ones_like(depth, dtype=torch.bool), 0.25, 0.75)
    # Whole numbers below 2**24 are exact in float32, and both quantiles are such.
    assert (d_low, d_high) == (0.25 * (2**24 + 4), 0.75 * (2**24 + 4))


def test_wrong_inputs_say_what_is_wrong() -> None:
    depth, valid = depth_and_mask(0)
    with pytest.raises(ValueError, match="no valid pixel"):
        normalize_depth(depth, torch.zeros_like(valid))
    with pytest.raises(ValueError, match=r"must be bool with depth's shape \(1, 33, 47\), got torch.float32"):
        normalize_depth(depth, valid.float())
    with pytest.raises(ValueError, match=r"low=0\.9, high=0\.1"):
        normalize_depth(depth, valid, 0.9, 0.1)


@pytest.mark.parametrize(("shape", "factor"), [((1, 16, 24), 8), ((2, 3, 12, 20), 4), ((8, 8), 8)])
def test_a_latent_cell_is_valid_iff_all_its_pixels_are(shape: tuple[int, ...], factor: int) -> None:
    generator = torch.Generator().manual_seed(0)
    valid = torch.rand(shape, generator=generator) > 0.01
    flat = valid.reshape(-1, *shape[-2:])
    rows, columns = shape[-2] // factor, shape[-1] // factor
    expected = torch.zeros(flat.shape[0], rows, columns, dtype=torch.bool)
    for b in range(flat.shape[0]):
        for i in range(rows):
            for j in range(columns):
                cell = flat[b, i * factor : (i + 1) * factor, j * factor : (j + 1) * factor]
                expected[b, i, j] = all(cell.flatten().tolist())
    assert torch.equal(latent_mask(valid, factor), expected.reshape(*shape[:-2], rows, columns))


def test_a_size_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="375 x 1242 pixels do not divide into cells of 8 x 8"):
        latent_mask(torch.ones(1, 375, 1242, dtype=torch.bool))
