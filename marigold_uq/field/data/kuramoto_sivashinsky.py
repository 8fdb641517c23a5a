"""Kuramoto-Sivashinsky trajectories, u_t + u u_x + u_xx + u_xxxx = 0 on a periodic interval, many at once.

In Fourier space v_t = L v + N(v) with L = k^2 - k^4 and N(v) = -(i k / 2) F[(F^-1 v)^2]. Time stepping is ETDRK4
(Cox and Matthews 2002) with the coefficients of Kassam and Trefethen (2005): the linear part is exact, the nonlinear
one of order four.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from marigold_uq.field.data.equation import PeriodicEquation
from marigold_uq.models.field_grid import Floats

__all__ = ["KuramotoSivashinsky"]


CONTOUR_POINTS = 32


@dataclass(frozen=True)
class KuramotoSivashinsky(PeriodicEquation):
    """The chaotic KS equation from uniform noise on the grid.

    The defaults are the paper's: [0, 100], 256 points, initial values U(-1, 1), ds = 2. Published trajectories start at
    time 6, when the noise has become a smooth field; `first_time=0` keeps the noise as the first state.

    Args:
        time_step: longest ETDRK4 step; the step used divides the time between saved states evenly.
        amplitude: initial values are U(-amplitude, amplitude).
    """

    name: ClassVar[str] = "kuramoto_sivashinsky"
    start: float = 0.0
    length: float = 100.0
    num_points: int = 256
    num_states: int = 50
    save_interval: float = 2.0
    first_time: float = 6.0
    time_step: float = 0.1
    amplitude: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.time_step <= 0 or self.amplitude <= 0:
            raise ValueError(f"time_step and amplitude are positive; got {self.time_step}, {self.amplitude}")

    @property
    def grid(self) -> Floats:
        """start + length j / num_points; the end point is the first one again and is left out."""
        return self.start + self.length * np.arange(self.num_points, dtype=np.float64) / self.num_points

    def draw_initial_state(self, generator: np.random.Generator) -> Floats:
        """Independent U(-amplitude, amplitude) at every point."""
        return generator.uniform(-self.amplitude, self.amplitude, self.num_points)

    def advance(self, u: Tensor, duration: float) -> Tensor:
        """`duration` in equal ETDRK4 steps no longer than `time_step`; scales above 2/3 of the resolution are cut."""
        num_steps = math.ceil(duration / self.time_step - 1e-9)
        stepper = _stepper(self.num_points, self.length, duration / num_steps, u.device)
        v = torch.fft.rfft(u) * stepper.resolved
        for _ in range(num_steps):
            v = stepper.step(v)
        return torch.fft.irfft(v, n=self.num_points)


@dataclass(frozen=True)
class ETDRK4:
    """One step of length h in Fourier space; all members (K,), K = num_points // 2 + 1."""

    num_points: int
    resolved: Tensor  # 1 where |index| < num_points / 3: products of such modes do not alias onto them (2/3 rule)
    nonlinear: Tensor  # -i k / 2, 0 where not resolved
    full: Tensor  # exp(h L)
    half: Tensor  # exp(h L / 2)
    half_weight: Tensor  # Q of Kassam and Trefethen
    weights: tuple[Tensor, Tensor, Tensor]  # f1, 2 f2, f3

    def step(self, v: Tensor) -> Tensor:
        """v (B, K) one step later."""
        n_v = self._nonlinear_part(v)
        decayed = self.half * v
        a = torch.addcmul(decayed, self.half_weight, n_v)
        n_a = self._nonlinear_part(a)
        n_b = self._nonlinear_part(torch.addcmul(decayed, self.half_weight, n_a))
        n_c = self._nonlinear_part(self.half * a + self.half_weight * (2 * n_b - n_v))
        f1, f2, f3 = self.weights
        return (self.full * v).addcmul_(f1, n_v).addcmul_(f2, n_a + n_b).addcmul_(f3, n_c)

    def _nonlinear_part(self, v: Tensor) -> Tensor:
        return self.nonlinear * torch.fft.rfft(torch.fft.irfft(v, n=self.num_points).square_())


@lru_cache(maxsize=16)
def _stepper(num_points: int, length: float, h: float, device: torch.device) -> ETDRK4:
    index = np.arange(num_points // 2 + 1)
    k = 2 * np.pi * index / length
    resolved = (3 * index < num_points).astype(np.float64)
    hl = h * (k**2 - k**4)
    # The phi functions lose all digits near hL = 0: they are averaged over a circle around it, where they are benign.
    r = hl[:, None] + np.exp(1j * np.pi * (np.arange(CONTOUR_POINTS) + 0.5) / CONTOUR_POINTS)  # (K, contour)
    e = np.exp(r)

    def mean(values: np.ndarray) -> Tensor:
        return torch.from_numpy(h * values.mean(1).real).to(device, torch.complex128)

    f1 = mean((-4 - r + e * (4 - 3 * r + r**2)) / r**3)
    f2 = mean((2 + r + e * (r - 2)) / r**3)
    f3 = mean((-4 - 3 * r - r**2 + e * (4 - r)) / r**3)
    return ETDRK4(
        num_points,
        torch.from_numpy(resolved).to(device),
        torch.from_numpy(-0.5j * k * resolved).to(device),
        torch.from_numpy(np.exp(hl)).to(device, torch.complex128),
        torch.from_numpy(np.exp(hl / 2)).to(device, torch.complex128),
        mean((np.exp(r / 2) - 1) / r),
        (f1, 2 * f2, f3),
    )
