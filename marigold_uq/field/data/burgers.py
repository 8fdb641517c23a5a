"""Burgers' equation, u_t + (u^2 / 2)_x = (nu / pi) u_xx, periodic, by PDEBench's finite-volume scheme, many at once.

Limited slopes (van Leer's monotonised central ones, alpha = 2), an upwind flux from the two states at each face, a
central viscous flux and the midpoint rule: of order two in space and time where the solution is smooth.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from marigold_uq.field.data.equation import PeriodicEquation
from marigold_uq.models.field_grid import Floats

__all__ = ["Burgers"]


WAVE_NUMBERS = np.arange(1, 5)
NUM_PICKS = 2
WINDOW_WIDTH = 0.01
SPECIAL_PROBABILITY = 0.1  # of |u|, and of the window


@dataclass(frozen=True)
class Burgers(PeriodicEquation):
    """Burgers' equation from PDEBench's random initial conditions.

    The defaults are those of 1D_Burgers_Sols_Nu0.01.hdf5: 1024 cells on (0, 1), 201 states 0.01 apart. Unlike there,
    steps are shortened to end exactly on the saved times.

    Args:
        nu: PDEBench's viscosity; the diffusion coefficient is nu / pi.
        cfl: fraction of the stability limit that a step takes.
    """

    name: ClassVar[str] = "burgers"
    start: float = 0.0
    length: float = 1.0
    num_points: int = 1024
    num_states: int = 201
    save_interval: float = 0.01
    first_time: float = 0.0
    nu: float = 0.01
    cfl: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nu < 0 or not 0 < self.cfl <= 1:
            raise ValueError(f"nu is not negative and cfl is in (0, 1]; got nu={self.nu}, cfl={self.cfl}")

    @property
    def spacing(self) -> float:
        """Width of a cell."""
        return self.length / self.num_points

    @property
    def diffusion(self) -> float:
        """Coefficient of u_xx."""
        return self.nu / math.pi

    @property
    def grid(self) -> Floats:
        """Cell centres."""
        return self.start + self.spacing * (np.arange(self.num_points, dtype=np.float64) + 0.5)

    def draw_initial_state(self, generator: np.random.Generator) -> Floats:
        """sum_k A_k sin(w_k x + phi_k), k = 1..4; sometimes |u|; a random sign; sometimes cut to a window.

        A_k ~ U(0, 1), phi_k ~ U(0, 2 pi), w_k = 2 pi k n_k / (x_last - x_first), n_k the number of times k was picked
        in two draws with replacement: an unpicked k gives a constant.
        """
        x = self.grid
        picks = np.bincount(generator.integers(len(WAVE_NUMBERS), size=NUM_PICKS), minlength=len(WAVE_NUMBERS))
        waves = 2 * np.pi * WAVE_NUMBERS * picks / (x[-1] - x[0])
        amplitudes = generator.uniform(0, 1, len(WAVE_NUMBERS))
        phases = generator.uniform(0, 2 * np.pi, len(WAVE_NUMBERS))
        u = np.sum(amplitudes[:, None] * np.sin(waves[:, None] * x + phases[:, None]), axis=0)
        take_absolute, take_window = generator.uniform(size=2) < SPECIAL_PROBABILITY
        sign = generator.choice([-1.0, 1.0])
        edges = generator.uniform([0.1, 0.55], [0.45, 0.9])
        u = sign * (np.abs(u) if take_absolute else u)
        return u * _window((x - self.start) / self.length, *edges) if take_window else u

    def advance(self, u: Tensor, duration: float) -> Tensor:
        """`duration` in midpoint steps; each trajectory has its own step length, so none depends on the others."""
        remaining = torch.full_like(u[:, :1], duration)  # (B, 1)
        while bool((remaining > 0).any()):
            # dt = cfl min(dx / max|u|, dx^2 / (2 nu / pi)); 0 for trajectories that have arrived: their step is exact.
            dt = torch.minimum(self.cfl * self._stable_step(u), remaining)
            half = u - 0.5 * dt / self.spacing * self._flux_difference(u)
            u = u - dt / self.spacing * self._flux_difference(half)
            remaining = remaining - dt
        return u

    def _stable_step(self, u: Tensor) -> Tensor:
        advective = self.spacing / u.abs().amax(1, keepdim=True).clamp_min(1e-12)
        return advective if self.nu == 0 else advective.clamp_max(0.5 * self.spacing**2 / self.diffusion)

    def _flux_difference(self, u: Tensor) -> Tensor:
        """Flux out of each cell on the right minus flux into it on the left, (B, X)."""
        padded = torch.cat([u[:, -2:], u, u[:, :2]], 1)  # (B, X + 4)
        difference = padded[:, 1:] - padded[:, :-1]  # (B, X + 3)
        half_slope = 0.5 * _limited_slope(difference[:, :-1], difference[:, 1:])  # (B, X + 2)
        left = padded[:, 1:-2] + half_slope[:, :-1]  # left and right of each face, (B, X + 1)
        right = padded[:, 2:-1] - half_slope[:, 1:]
        advective = 0.25 * (left.square() + right.square() - (left + right).abs() * (right - left))
        flux = advective - (self.diffusion / self.spacing) * difference[:, 1:-1]
        return flux[:, 1:] - flux[:, :-1]


def _limited_slope(backward: Tensor, forward: Tensor) -> Tensor:
    """min(2 |backward|, 2 |forward|, |central|) with their sign where both agree in it, else 0 (an extremum)."""
    central = 0.5 * (backward + forward)
    rising = torch.minimum(2 * torch.minimum(backward, forward), central).clamp_min_(0)
    falling = torch.maximum(2 * torch.maximum(backward, forward), central).clamp_max_(0)
    return rising + falling


def _window(x: Floats, left: float, right: float) -> Floats:
    """1 between the edges, 0 outside, smooth over WINDOW_WIDTH of the domain."""
    return 0.5 * (np.tanh((x - left) / WINDOW_WIDTH) - np.tanh((x - right) / WINDOW_WIDTH))
