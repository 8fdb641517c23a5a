"""Augmentation keeps image and depth registered and follows from (seed, epoch, index)."""

import math
from dataclasses import fields

import pytest
import torch

from marigold_uq.depth.data import (
    AugmentedDataset,
    DepthDataError,
    DepthSample,
    DepthTransform,
    PhotometricTransform,
    flip_sample,
    resize_sample,
    sample_generator,
)
from marigold_uq.depth.data.photometric import gaussian_blur

STRENGTHS = {field.name: 0.5 for field in fields(PhotometricTransform)}


def coordinates(height: int, width: int) -> DepthSample:
    """Each pixel knows where it came from: depth numbers the pixels, red and green are row and column."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    image = torch.stack([rows / height, columns / width, torch.zeros(height, width)])
    depth = (rows * width + columns + 1.0)[None]
    return DepthSample(image=image, depth=depth, valid=depth % 3 != 0, name="coordinates")


def generator(index: int = 0) -> torch.Generator:
    return sample_generator(7, 0, index)


def test_without_flip_the_default_changes_nothing_and_draws_no_noise() -> None:
    sample = coordinates(8, 12)
    same = DepthTransform(flip=0.0)(sample, generator())
    for key in ("image", "depth", "valid"):
        assert torch.equal(same[key], sample[key])
    assert PhotometricTransform()(sample["image"], generator()) is sample["image"]


def test_a_flip_mirrors_all_three_and_happens_as_often_as_asked() -> None:
    sample = coordinates(8, 12)
    flipped = DepthTransform(flip=1.0)(sample, generator())
    for key in ("image", "depth", "valid"):
        assert torch.equal(flipped[key], sample[key][..., torch.arange(11, -1, -1)])
        assert torch.equal(flip_sample(flip_sample(sample))[key], sample[key])
    count = sum(bool(DepthTransform()(sample, generator(i))["depth"][0, 0, 0] != 1) for i in range(400))
    assert abs(count - 200) < 4 * 10  # four standard deviations of Binomial(400, 1/2)


def test_a_crop_at_its_own_size_takes_the_same_window_of_image_depth_and_mask() -> None:
    sample = coordinates(40, 64)
    tops = set()
    for i in range(30):
        out = DepthTransform(size=(16, 16), crop_scale=(0.4, 0.4), flip=0.0)(sample, generator(i))  # 0.4 * 40 = 16
        top, left = divmod(int(out["depth"][0, 0, 0]) - 1, 64)
        tops.add((top, left))
        window = slice(top, top + 16), slice(left, left + 16)
        for key in ("image", "depth", "valid"):
            assert torch.equal(out[key], sample[key][:, window[0], window[1]])
    assert len(tops) > 20


@pytest.mark.parametrize("size", [(16, 24), (48, 40), (97, 33)])
def test_resizing_invents_no_depth_and_keeps_it_under_its_pixel(size: tuple[int, int]) -> None:
    sample = coordinates(64, 96)
    out = DepthTransform(size=size, crop_scale=(0.5, 1.0), flip=0.0)(sample, generator(3))
    assert out["image"].shape == (3, *size)
    number = out["depth"][0].long() - 1
    assert torch.equal(number + 1.0, out["depth"][0])  # a whole number: an existing pixel, no average
    assert torch.equal(out["valid"][0], (number + 1) % 3 != 0)
    rows, columns = number // 96, number % 96
    # Red is the row: the antialiased image and the nearest depth differ by at most one input or output pixel.
    pixel = max(1.0, 64 / size[0], 96 / size[1])
    inside = slice(3, -3), slice(3, -3)  # antialiasing is one-sided at the border
    assert float((out["image"][0] * 64 - rows).abs()[inside].max()) <= pixel
    assert float((out["image"][1] * 96 - columns).abs()[inside].max()) <= pixel


def test_resizing_to_the_same_size_is_the_identity() -> None:
    sample = coordinates(8, 12)
    assert resize_sample(sample, (8, 12)) is sample


def test_the_same_seed_epoch_and_index_give_the_same_augmentation_and_others_do_not() -> None:
    transform = DepthTransform((16, 16), (0.3, 1.0), 0.5, PhotometricTransform(**STRENGTHS))
    samples = [coordinates(32, 32)] * 4
    dataset = AugmentedDataset(samples, transform, seed=1)  # type: ignore[arg-type]
    first = [dataset[i] for i in range(4)]
    again = [dataset[i] for i in (3, 2, 1, 0)][::-1]
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a["image"], b["image"])
        assert torch.equal(a["depth"], b["depth"])
    assert not torch.equal(first[0]["image"], first[1]["image"])
    dataset.set_epoch(1)
    assert not torch.equal(dataset[0]["image"], first[0]["image"])
    other_seed = AugmentedDataset(samples, transform, seed=2)  # type: ignore[arg-type]
    assert not torch.equal(other_seed[0]["image"], first[0]["image"])


def test_augmentation_leaves_the_global_random_state_alone() -> None:
    state = torch.get_rng_state()
    DepthTransform((8, 8), (0.3, 1.0), 0.5, PhotometricTransform(**STRENGTHS))(coordinates(32, 32), generator())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", list(STRENGTHS))
def test_each_photometric_change_acts_stays_in_range_and_leaves_depth_alone(name: str) -> None:
    sample = DepthSample(**{**coordinates(16, 16), "image": torch.rand(3, 16, 16, generator=generator())})  # type: ignore[typeddict-item]
    strength = {"grayscale": 1.0, "blur": 3.0}.get(name, 0.5)
    transform = DepthTransform(flip=0.0, photometric=PhotometricTransform(**{name: strength}))
    outputs = [transform(sample, generator(i)) for i in range(20)]
    changed = [not torch.allclose(out["image"], sample["image"], atol=1e-3) for out in outputs]
    assert sum(changed) >= 10  # a strength may be drawn near 0, but not mostly
    for out in outputs:
        assert 0 <= float(out["image"].min()) <= float(out["image"].max()) <= 1
        assert torch.equal(out["depth"], sample["depth"])
        assert torch.equal(out["valid"], sample["valid"])


def test_photometric_changes_are_what_they_say() -> None:
    image = 0.3 + 0.3 * torch.rand(3, 16, 16, generator=generator())
    grey = PhotometricTransform(grayscale=1.0)(image, generator())
    torch.testing.assert_close(grey[0], 0.299 * image[0] + 0.587 * image[1] + 0.114 * image[2])
    assert torch.equal(grey[0], grey[1])
    for name in ("brightness", "white_balance"):  # factors: the same in every pixel
        ratio = PhotometricTransform(**{name: 0.1})(image, generator()) / image
        torch.testing.assert_close(ratio, ratio[:, :1, :1].expand_as(ratio))
        assert float(ratio.log().abs().max()) <= (0.1 if name == "brightness" else 0.2) + 1e-6
    exponent = PhotometricTransform(gamma=0.3)(image, generator()).log() / image.log()
    torch.testing.assert_close(exponent, exponent[:1, :1, :1].expand_as(exponent), rtol=1e-4, atol=1e-4)
    turned = PhotometricTransform(hue=0.5)(image, generator())  # a rotation about the grey axis keeps sum and length
    torch.testing.assert_close(turned.sum(0), image.sum(0))
    torch.testing.assert_close(turned.square().sum(0), image.square().sum(0))
    flat = torch.full((3, 9, 9), 0.4)
    torch.testing.assert_close(PhotometricTransform(hue=1.0, saturation=1.0, contrast=1.0)(flat, generator()), flat)


def test_the_blur_is_a_gaussian() -> None:
    impulse = torch.zeros(1, 41, 41, dtype=torch.float64)
    impulse[0, 20, 20] = 1
    blurred = gaussian_blur(impulse, 2.0)[0]
    offsets = torch.arange(41) - 20.0
    assert math.isclose(float(blurred.sum()), 1, rel_tol=1e-12)
    variance = float((blurred.sum(0) * offsets**2).sum())
    assert math.isclose(variance, 4, rel_tol=0.03)  # cutting a Gaussian at 3 sigma loses 2.7 % of its variance
    assert math.isclose(float(blurred[20, 22] / blurred[20, 20]), math.exp(-0.5), rel_tol=1e-12)


def test_sparse_ground_truth_is_sought_by_further_crops_and_then_named() -> None:
    sample = coordinates(64, 64)
    sample["valid"] = torch.zeros(1, 64, 64, dtype=torch.bool)
    sample["valid"][:, :, 32:] = True
    transform = DepthTransform(size=(8, 8), crop_scale=(0.2, 0.2))
    assert all(bool(transform(sample, generator(i))["valid"].any()) for i in range(50))
    empty = DepthSample(**{**sample, "valid": torch.zeros(1, 64, 64, dtype=torch.bool)})  # type: ignore[typeddict-item]
    with pytest.raises(DepthDataError, match="coordinates: no valid depth pixel in 10 random crops"):
        transform(empty, generator())
    skipping = AugmentedDataset([empty, sample], transform, seed=0, on_error="skip")  # type: ignore[arg-type,list-item]
    assert bool(skipping[0]["valid"].any())
    assert len(skipping.problems) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flip": 1.5}, "flip is a probability, got 1.5"),
        ({"crop_scale": (0.5, 1.5)}, "crop_scale needs"),
        ({"size": (0, 5)}, "size must be positive"),
    ],
)
def test_wrong_settings_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DepthTransform(**options)
    with pytest.raises(ValueError, match="noise must be a non-negative number, got -1"):
        PhotometricTransform(noise=-1)
