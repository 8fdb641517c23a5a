"""Products and norms over a last axis of length three, several times faster than numpy's reductions over it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]  # the renderer computes in float32 throughout


def dot(a: Array, b: Array) -> Array:
    """Scalar products; (..., 3), (..., 3) -> (...)."""
    return a[..., 0] * b[..., 0] + a[..., 1] * b[..., 1] + a[..., 2] * b[..., 2]


def norm(a: Array) -> Array:
    """Euclidean lengths; (..., 3) -> (...)."""
    return np.sqrt(dot(a, a))


def mean_channel(a: Array) -> Array:
    """Mean over three channels; (..., 3) -> (...)."""
    return (a[..., 0] + a[..., 1] + a[..., 2]) * np.float32(1 / 3)


def dominant_axis(a: Array) -> NDArray[np.intp]:
    """Index of the largest absolute component; (N, 3) -> (N,)."""
    x, y, z = np.abs(a[:, 0]), np.abs(a[:, 1]), np.abs(a[:, 2])
    return np.where(z >= np.maximum(x, y), 2, np.where(y > x, 1, 0))


def cross(a: Array, b: Array) -> Array:
    """Vector product of two single vectors; (3,), (3,) -> (3,)."""
    return np.array([a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]], dtype=np.float32)
