"""Theorem 1 for every framework: x_t = a x_0 + s eps, and a network whose output is o = p x_0 + q eps.

A framework is a way to choose (a, s) at each timestep and (p, q) for its output; the reverse step is one formula.
"""

import math
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

Scalar = TypeVar("Scalar", float, Tensor)


@dataclass(frozen=True)
class NoiseLevel(Generic[Scalar]):
    """x_t = signal x_0 + noise eps; numbers, or tensors (B, 1, ..) for a level per sample."""

    signal: Scalar  # a
    noise: Scalar  # s

    @property
    def signal_share(self) -> Scalar:
        """The share of the signal in the variance of x_t, for data of variance 1."""
        return self.signal**2 / (self.signal**2 + self.noise**2)


CLEAN = NoiseLevel(1.0, 0.0)
"""x_0 itself, where a chain ends."""


@dataclass(frozen=True)
class OutputForm(Generic[Scalar]):
    """What a network puts out, o = original x_0 + noise eps: eps (0, 1), x_0 (1, 0), v (-s, a), flow (-1, 1), ..."""

    original: Scalar  # p
    noise: Scalar  # q


@dataclass(frozen=True)
class StepCoefficients:
    """x_prev = sample * x_t + output * o + std_dev * z, for the head's own output o (Theorem 1)."""

    sample: float  # A
    output: float  # B
    std_dev: float  # sigma


def reverse_step(
    level: NoiseLevel[float], prev: NoiseLevel[float], form: OutputForm[float], eta: float
) -> StepCoefficients:
    """A, B and sigma of the step from (a, s) to (a', s').

    sigma^2 = eta^2 s'^2 (1 - (a s' / a' s)^2), lambda^2 = s'^2 - sigma^2 and x_prev = a' x_0 + lambda eps + sigma z, in
    which x_0 and eps are solved from x_t = a x_0 + s eps and o = p x_0 + q eps, of determinant a q - p s.
    """
    if level.noise == 0 < prev.noise:
        raise ValueError(f"a reverse step takes noise away: from {level} to {prev} it would add some")
    if level.noise == 0:
        return StepCoefficients(prev.signal / level.signal, 0.0, 0.0)
    std_dev = eta * prev.noise * math.sqrt(max(0.0, 1 - _kept_noise(level, prev) ** 2))
    if not eta >= 0 or std_dev > prev.noise * (1 + 1e-6):
        raise ValueError(
            f"eta = {eta} is out of range: 0 is DDIM, 1 is DDPM; its sigma = {std_dev:.3g} exceeds the noise that "
            f"x_prev holds, {prev.noise:.3g}"
        )
    determinant = _determinant(level, form)
    direction = math.sqrt(max(0.0, prev.noise**2 - std_dev**2))  # lambda; rounding may leave -1e-17
    return StepCoefficients(
        sample=(prev.signal * form.noise - direction * form.original) / determinant,
        output=(direction * level.signal - prev.signal * level.noise) / determinant,
        std_dev=std_dev,
    )


def _kept_noise(level: NoiseLevel[float], prev: NoiseLevel[float]) -> float:
    """a s' / (a' s), the ratio of the two noise-to-signal ratios; 0 where x_t is pure noise."""
    return level.signal * prev.noise / (prev.signal * level.noise) if level.signal else 0.0


def original_coefficients(level: NoiseLevel[Scalar], form: OutputForm[Scalar]) -> tuple[Scalar, Scalar]:
    """A and B of x_0 = A x_t + B o, the step that goes to (1, 0) at once."""
    if not isinstance(level.noise, Tensor) and level.noise == 0:  # x_t is a x_0 already
        return 1 / level.signal, 0 * level.noise
    determinant = _determinant(level, form)
    return form.noise / determinant, -level.noise / determinant


def _determinant(level: NoiseLevel[Scalar], form: OutputForm[Scalar]) -> Scalar:
    """a q - p s, of x_t and o as functions of x_0 and eps."""
    determinant = level.signal * form.noise - form.original * level.noise
    if not isinstance(determinant, Tensor) and determinant == 0:
        raise ValueError(
            "at zero terminal SNR x_t is pure noise and an epsilon head says nothing about x_0; use "
            "prediction_type='v_prediction' or 'sample', or rescale_betas_zero_snr=False"
        )
    return determinant
