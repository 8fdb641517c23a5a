"""Forced two-dimensional turbulence: the Navier-Stokes equations of a periodic square, in vorticity form.

w_t + u . grad w = nu lap w - drag w + f, u = (psi_y, -psi_x), lap psi = -w, f = -forcing k cos(k y): the curl of
Kolmogorov's force forcing sin(k y) e_x. Pseudo-spectral, with the 2/3 rule. In Fourier space the linear part is
integrated exactly and the rest by the classical Runge-Kutta scheme of order four (integrating factor).

States are kept flat, (B, side * side) in C order with y first, so that generation and files are those of all equations;
`as_plane` gives read trajectories their two axes back.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from marigold_uq.field.data.equation import PeriodicEquation
from marigold_uq.field.data.trajectories import Trajectories
from marigold_uq.models.field_grid import FieldDataError, Floats

__all__ = ["PLANE", "NavierStokes", "PlaneTrajectories", "as_plane"]


PLANE = "plane"
"""Entry of a file's metadata: start, length and points of a side."""
INITIAL_WAVES = 8
"""Largest wave number of an initial state, the same at every resolution."""


@dataclass(frozen=True)
class NavierStokes(PeriodicEquation):
    """Kolmogorov flow with drag, from random smooth vorticity.

    Args:
        start: First coordinate of both axes.
        length: Side of the square.
        num_points: Of the whole square, a square number: 4096 is 64 x 64.
        num_states: States kept.
        save_interval: Time between them.
        first_time: Of the first; before, the flow forgets its random start.
        time_step: Longest step; the step used divides the time between saved states evenly.
        nu: Viscosity.
        drag: Linear friction, which ends the cascade to large scales.
        forcing: Amplitude of the force.
        forcing_wave: Its wave number, in waves per side.
        initial_wave: Wave number where initial states have their most power.
    """

    name: ClassVar[str] = "navier_stokes"
    start: float = 0.0
    length: float = 2 * math.pi
    num_points: int = 64 * 64
    num_states: int = 30
    save_interval: float = 0.5
    first_time: float = 10.0
    time_step: float = 0.02
    nu: float = 0.01
    drag: float = 0.1
    forcing: float = 1.0
    forcing_wave: int = 4
    initial_wave: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.side**2 != self.num_points or self.side <= 2 * INITIAL_WAVES:
            least = (2 * INITIAL_WAVES + 1) ** 2
            raise ValueError(f"num_points must be a square number of at least {least}; got {self.num_points}")
        if min(self.nu, self.drag, self.forcing) < 0 or min(self.time_step, self.initial_wave) <= 0:
            raise ValueError(
                "nu, drag and forcing must be at least 0, time_step and initial_wave positive; got "
                f"{self.nu}, {self.drag}, {self.forcing}, {self.time_step}, {self.initial_wave}"
            )
        if not 1 <= self.forcing_wave < self.side / 3:
            raise ValueError(
                f"forcing_wave must be resolved, 1 to below {self.side} / 3; got {self.forcing_wave} waves per side"
            )

    @property
    def side(self) -> int:
        """Points of a side."""
        return math.isqrt(self.num_points)

    @property
    def axis(self) -> Floats:
        """Coordinates of a side; the end point is the first one again and is left out."""
        return self.start + self.length * np.arange(self.side, dtype=np.float64) / self.side

    @property
    def grid(self) -> Floats:
        """Numbers of the points in the flat states."""
        return np.arange(self.num_points, dtype=np.float64)

    def parameters(self) -> dict[str, Any]:
        """Also how flat states are unfolded."""
        plane = {"start": self.start, "length": self.length, "side": self.side}
        return {**super().parameters(), PLANE: plane}

    def draw_initial_state(self, generator: np.random.Generator) -> Floats:
        """Gaussian vorticity of variance 1, power k^2 exp(-2 (k / initial_wave)^2); the same waves on every grid."""
        reach = np.arange(-INITIAL_WAVES, INITIAL_WAVES + 1)
        k = np.hypot(reach[:, None], reach)
        amplitude = k * np.exp(-((k / self.initial_wave) ** 2))
        real, imaginary = generator.standard_normal((2, len(reach), len(reach)))
        spectrum: NDArray[np.complex128] = np.zeros((self.side, self.side), np.complex128)
        spectrum[np.ix_(reach, reach)] = amplitude * (real + 1j * imaginary)
        state = np.fft.ifft2(spectrum, norm="forward").real / np.sqrt((amplitude**2).sum())
        return state.ravel()

    def advance(self, u: Tensor, duration: float) -> Tensor:
        """`duration` in equal steps no longer than `time_step`; waves from 2/3 of the resolution on are cut."""
        num_steps = math.ceil(duration / self.time_step - 1e-9)
        flow = _Flow.of(self, u.device)
        h = duration / num_steps
        full, half = (h * flow.linear).exp(), (0.5 * h * flow.linear).exp()
        w = torch.fft.rfft2(u.unflatten(1, (self.side, self.side))) * flow.resolved
        for _ in range(num_steps):
            w = _step(flow, w, h, full, half)
        return torch.fft.irfft2(w, s=(self.side, self.side)).flatten(1)


@dataclass(frozen=True)
class _Flow:
    """The equation in Fourier space; members (side, side // 2 + 1), y first."""

    side: int
    resolved: Tensor  # 1 where both wave numbers are below side / 3: products do not alias onto them
    linear: Tensor  # -nu k^2 - drag
    force: Tensor
    i_kx: Tensor
    i_ky: Tensor
    inverse: Tensor  # 1 / k^2, 0 for the mean

    @classmethod
    def of(cls, equation: NavierStokes, device: torch.device) -> "_Flow":
        side, unit = equation.side, 2 * math.pi / equation.length
        index_y = np.fft.fftfreq(side, 1 / side)[:, None]
        index_x = np.arange(side // 2 + 1)
        ky, kx = (np.broadcast_to(unit * index, (side, side // 2 + 1)) for index in (index_y, index_x))
        squares = kx**2 + ky**2
        resolved = (3 * np.abs(index_y) < side) & (3 * index_x < side)
        wave = unit * equation.forcing_wave
        force = -equation.forcing * wave * np.cos(wave * (equation.axis - equation.start))[:, None]
        tensors = [
            resolved.astype(np.float64),
            -equation.nu * squares - equation.drag,
            np.fft.rfft2(np.broadcast_to(force, (side, side))),
            1j * kx,
            1j * ky,
            np.divide(1.0, squares, out=np.zeros_like(squares), where=squares > 0),
        ]
        return cls(side, *(torch.from_numpy(np.ascontiguousarray(one)).to(device) for one in tensors))

    def rate(self, w: Tensor) -> Tensor:
        """-u . grad w + f of spectra w (B, side, side // 2 + 1)."""
        psi = w * self.inverse
        factors = (self.i_ky * psi, -self.i_kx * psi, self.i_kx * w, self.i_ky * w)
        u, v, w_x, w_y = (torch.fft.irfft2(one, s=(self.side, self.side)) for one in factors)
        return self.resolved * (self.force - torch.fft.rfft2(u * w_x + v * w_y))


def _step(flow: _Flow, w: Tensor, h: float, full: Tensor, half: Tensor) -> Tensor:
    """One Runge-Kutta step of exp(-L t) w, whose rate is exp(-L t) N(w); `full` is exp(h L), `half` exp(h L / 2)."""
    n_1 = flow.rate(w)
    n_2 = flow.rate(half * (w + 0.5 * h * n_1))
    n_3 = flow.rate(half * w + 0.5 * h * n_2)
    n_4 = flow.rate(full * w + h * half * n_3)
    return full * w + h / 6 * (full * n_1 + 2 * half * (n_2 + n_3) + n_4)


@dataclass(frozen=True)
class PlaneTrajectories(Trajectories):
    """Trajectories whose points fill a square: states stay flat here, and `read` unfolds them."""

    @property
    def coordinates(self) -> Mapping[str, Floats]:
        """The two axes, y first."""
        plane = self.metadata[PLANE]
        axis = plane["start"] + plane["length"] * np.arange(plane["side"], dtype=np.float64) / plane["side"]
        return {"y": axis, "x": axis}

    def read(self, sequence: int, start: int, stop: int) -> Tensor:
        """States (n, 1, Y, X)."""
        side = self.metadata[PLANE]["side"]
        return super().read(sequence, start, stop).unflatten(-1, (side, side))

    def select(self, indices: Sequence[int]) -> "PlaneTrajectories":
        """The trajectories `indices`, in this order."""
        return _as_planes(super().select(indices))


def as_plane(trajectories: Trajectories) -> Trajectories:
    """With two axes, where the file says that its points fill a square; unchanged otherwise."""
    plane = trajectories.metadata.get(PLANE)
    if plane is None:
        return trajectories
    if len(trajectories.x) != plane["side"] ** 2:
        raise FieldDataError(
            f"{trajectories.source}: a square of {plane['side']} x {plane['side']} points cannot be thinned by a "
            f"point_stride; got {len(trajectories.x)} of them. Generate it with fewer num_points"
        )
    return _as_planes(trajectories)


def _as_planes(trajectories: Trajectories) -> PlaneTrajectories:
    return PlaneTrajectories(**{one.name: getattr(trajectories, one.name) for one in fields(Trajectories)})
