"""Scores of forecasts as maps: power by wave number in both directions, and how well events are foreseen."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["exceedance_brier", "isotropic_spectrum"]


def isotropic_spectrum(states: Tensor) -> Tensor:
    """Power per shell of wave numbers round(|k|), (..., Y, X) -> (..., shells), of a square that is periodic both ways.

    The mean is shell 0. The sum over all shells is the mean square of the state, because no wave is left out: the last
    shells reach into the corners.
    """
    side_y, side_x = states.shape[-2:]
    if side_y != side_x:
        raise ValueError(f"an isotropic spectrum needs as many points along both axes; got {side_y} x {side_x}")
    waves = torch.fft.fftfreq(side_y, 1 / side_y, device=states.device)
    shell = (waves[:, None] ** 2 + waves**2).sqrt().round().long().flatten()
    power = torch.fft.fft2(states, norm="forward").abs().square().flatten(-2)
    found = power.new_zeros(*power.shape[:-1], int(shell.max()) + 1)
    return found.index_add(-1, shell, power)


def exceedance_brier(samples: Tensor, target: Tensor, threshold: float) -> Tensor:
    """Fair Brier score (...) of the event |value| > threshold, from samples (M, ...): the CRPS of its indicator.

    (p - o)^2 - p (1 - p) / (M - 1), p the share of samples: its mean does not depend on how many there are.
    """
    if len(samples) < 2:
        raise ValueError(f"a fair Brier score needs at least 2 samples; got {len(samples)}")
    happened = (target.abs() > threshold).to(samples.dtype)
    share = (samples.abs() > threshold).to(samples.dtype).mean(0)
    return (share - happened).square() - share * (1 - share) / (len(samples) - 1)
