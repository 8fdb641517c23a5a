"""Depth cells: there and back, convexity, and quantiles that decode to quantiles."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from marigold_uq.models.depth_cells import DepthCells


def cells(**options: object) -> DepthCells:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        decoder = DepthCells(**{"guide_channels": 8, **options}).eval()  # type: ignore[arg-type]
        torch.nn.init.normal_(decoder.weights[-1].weight)
        return decoder


def guide() -> Tensor:
    return torch.randn(1, 8, 6, 8, generator=torch.Generator().manual_seed(1))


def everywhere(depth: Tensor) -> Tensor:
    return torch.ones_like(depth, dtype=torch.bool)


def test_the_scale_of_the_latents_goes_from_minus_two_to_two_and_back() -> None:
    decoder, depth = cells(), torch.linspace(-1, 1, 101)
    latent = decoder.to_latent(depth)
    assert latent[[0, -1]].tolist() == pytest.approx([-2, 2], abs=1e-5)
    assert (latent.diff() > 0).all()
    torch.testing.assert_close(decoder.to_depth(latent), depth, rtol=0, atol=1e-5)


def test_a_constant_map_comes_back_whatever_the_guide_says() -> None:
    decoder, depth = cells(), torch.full((2, 1, 24, 32), 0.3)
    latents, known = decoder.encode(depth, everywhere(depth))
    assert latents.shape == known.shape == (2, 4, 3, 4)
    assert known.all()
    (decoded,) = decoder.decode(latents, return_dict=False, guide=guide())
    torch.testing.assert_close(decoded, torch.full((2, 1, 48, 64), 0.3), rtol=0, atol=1e-5)


def test_parts_hold_the_mean_of_the_valid_pixels_and_count_from_half_of_them_on() -> None:
    decoder = cells()
    depth, valid = torch.zeros(1, 1, 8, 8), torch.ones(1, 1, 8, 8, dtype=torch.bool)
    depth[..., :4, :4] = 0.5
    depth[..., 0, 0], valid[..., 0, 0] = 100.0, False
    valid[..., :4, 5:] = False
    latents, known = decoder.encode(depth, valid)
    assert latents[0, :, 0, 0].tolist() == pytest.approx(
        [float(decoder.to_latent(torch.tensor(value))) for value in (0.5, 0.0, 0.0, 0.0)], abs=1e-5
    )
    assert known[0, :, 0, 0].tolist() == [True, False, True, True]


def test_a_decoded_value_lies_between_the_parts_around_it() -> None:
    decoder = cells()
    latents = torch.randn(1, 4, 3, 4, generator=torch.Generator().manual_seed(2))
    values = decoder.upsample(latents, guide())
    parts = torch.nn.functional.pixel_shuffle(latents, 2)
    padded = torch.nn.functional.pad(parts, (1, 1, 1, 1), mode="replicate")
    highest = torch.nn.functional.max_pool2d(padded, 3, stride=1).repeat_interleave(4, 2).repeat_interleave(4, 3)
    lowest = -torch.nn.functional.max_pool2d(-padded, 3, stride=1).repeat_interleave(4, 2).repeat_interleave(4, 3)
    assert (values <= highest + 1e-5).all()
    assert (values >= lowest - 1e-5).all()


def test_quantiles_of_parts_that_go_wrong_together_decode_to_quantiles_of_pixels() -> None:
    """One number moves all parts: part k is loc_k + scale_k z, so the pixel's quantile is its decoder at that z."""
    decoder, generator = cells(), torch.Generator().manual_seed(3)
    loc, scale = torch.randn(4, 3, 4, generator=generator), torch.rand(4, 3, 4, generator=generator)
    z = torch.linspace(-2, 2, 41)
    (maps,) = decoder.decode(loc + scale * z[:, None, None, None], return_dict=False, guide=guide())
    assert (maps.diff(dim=0) >= 0).all()
    (upper,) = decoder.decode((loc + scale * z[30])[None], return_dict=False, guide=guide())
    torch.testing.assert_close(maps.sort(0).values[30], upper[0])


def test_it_survives_its_file(tmp_path: Path) -> None:
    decoder = cells(latent_channels=9, cell=24)
    decoder.save_pretrained(tmp_path)
    again = DepthCells.from_pretrained(tmp_path)
    latents, nine = torch.randn(1, 9, 2, 2), torch.randn(1, 8, 6, 6)
    assert again.decode(latents, False, guide=nine)[0].equal(decoder.decode(latents, False, guide=nine)[0])


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="square"):
        DepthCells(latent_channels=5)
    with pytest.raises(ValueError, match="offset"):
        DepthCells(offset=0.0)
    with pytest.raises(ValueError, match="return_dict"):
        cells().decode(torch.zeros(1, 4, 3, 4), guide=guide())


def test_a_new_decoder_interpolates_linearly() -> None:
    """Up to the share of the parts that it could learn to use, a few thousandths each."""
    latents = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    guide = torch.randn(2, 64, 12, 16, generator=torch.Generator().manual_seed(1))
    decoded = DepthCells().upsample(latents, guide).detach()
    linear = torch.nn.functional.interpolate(
        torch.nn.functional.pixel_shuffle(latents, 2), scale_factor=4.0, mode="bilinear"
    )
    assert float((decoded - linear).std() / linear.std()) < 0.02


def test_a_decoder_that_is_sure_of_a_part_can_still_learn_another() -> None:
    cells = DepthCells()
    with torch.no_grad():
        cells.weights[-1].bias.fill_(-8.0)
        cells.weights[-1].bias[:16] = 8.0
    weights = cells.convex_weights(torch.randn(1, 64, 4, 4))
    assert float(weights[:, 0].detach().min()) > 0.99
    (gradient,) = torch.autograd.grad(weights[:, 1].sum(), cells.weights[-1].bias)
    assert float(gradient[16:32].abs().min()) > 1e-6
