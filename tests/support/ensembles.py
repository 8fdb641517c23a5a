"""Ensembles made by hand, and diffusers' alignment beside them."""

import itertools
import time
from collections.abc import Callable

import numpy as np
import pytest
import scipy.optimize
import torch
import torch.nn.functional as F
from threadpoolctl import threadpool_limits
from torch import Tensor

from marigold_uq.alignment import (
    ensemble_members,
)


def make_scene(height: int, width: int, generator: torch.Generator) -> Tensor:
    """A floor receding upwards, a wavy wall and four boxes, spanning [0, 1]."""
    y, x = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    depth = 1 - y + 0.2 * torch.sin(5 * x + 6 * torch.rand(1, generator=generator))
    for column, row, half_width, half_height, near in torch.rand(4, 5, generator=generator).tolist():
        box = ((x - column).abs() < 0.05 + 0.15 * half_width) & ((y - row).abs() < 0.05 + 0.2 * half_height)
        depth = torch.where(box, 0.5 - 0.4 * near + 0.1 * x, depth)
    return (depth - depth.min()) / (depth.max() - depth.min())


def correlated_noise(height: int, width: int, generator: torch.Generator) -> Tensor:
    """Smooth noise of two length scales and about unit variance."""
    layers = [
        weight * F.interpolate(torch.randn(1, 1, cells, cells, generator=generator), (height, width), mode="bicubic")
        for cells, weight in ((4, 1.0), (16, 0.5))
    ]
    return torch.stack(layers).sum(dim=0)[0, 0]


def make_ensemble(
    num_members: int, height: int = 48, width: int = 64, *, noise: float = 0.03, outliers: int = 0, seed: int = 0
) -> Tensor:
    """Members = random affine map of (scene + correlated noise); outliers show another scene."""
    generator = torch.Generator().manual_seed(seed)
    scene = make_scene(height, width, generator)
    members = []
    for i in range(num_members):
        shown = make_scene(height, width, generator) if i < outliers else scene
        scale, shift = torch.rand(2, generator=generator).tolist()
        members.append((0.5 + scale) * (shown + noise * correlated_noise(height, width, generator)) + 0.5 * shift)
    return torch.stack(members)


def proper_median(maps: Tensor) -> Tensor:
    return torch.quantile(maps.double(), 0.5, dim=0)


def mean_pairwise_rmse(maps: Tensor) -> float:
    """By brute force over the pixels, in units of the range of the median map."""
    values, median = maps.double(), proper_median(maps)
    pairs = [(a - b).square().mean().sqrt() for a, b in itertools.combinations(values, 2)]
    return float(torch.stack(pairs).mean() / (median.max() - median.min()))


def diffusers_aligned(maps: Tensor, monkeypatch: pytest.MonkeyPatch, *, shift_invariant: bool = True) -> Tensor:
    """Members as `MarigoldDepthPipeline.ensemble_depth` aligns them; it returns only their median, so we listen in."""
    pipeline = pytest.importorskip("diffusers").MarigoldDepthPipeline
    found: list[np.ndarray] = []
    stock = scipy.optimize.minimize

    def listening(*args: object, **kwargs: object) -> object:
        result = stock(*args, **kwargs)
        found.append(result.x)
        return result

    monkeypatch.setattr(scipy.optimize, "minimize", listening)
    pipeline.ensemble_depth(maps[:, None], shift_invariant=shift_invariant)
    scale, shift = np.split(found[0], 2) if shift_invariant else (found[0], 0 * found[0])
    return maps.double() * torch.from_numpy(scale)[:, None, None] + torch.from_numpy(shift)[:, None, None]


def cpu_seconds(function: Callable[[], object], repeats: int = 1) -> float:
    """Median processor time, which a busy machine disturbs less than wall-clock time."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        seconds.append(time.process_time() - start)
    return float(np.median(seconds))


def speed_ratio(maps: Tensor) -> float:
    pipeline = pytest.importorskip("diffusers").MarigoldDepthPipeline
    with threadpool_limits(1):  # waiting threads would count as work
        ensemble_members(maps)  # warm-up
        ours = cpu_seconds(lambda: ensemble_members(maps), repeats=7)
        stock = cpu_seconds(lambda: pipeline.ensemble_depth(maps[:, None], output_uncertainty=True))
    print(f"\n{tuple(maps.shape)}: ours {1e3 * ours:.1f} ms, diffusers {stock:.2f} s, ratio {stock / ours:.0f}")
    return stock / ours
