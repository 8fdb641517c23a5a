"""Intervals along a rollout that follow their misses, for forecasts that are made again and again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from marigold_uq.calibration import AdaptiveConformal, residual_ratio

__all__ = ["RolloutIntervals"]


@dataclass
class _Issued:
    """A forecast whose truth is still coming: moments (L, ...), the scales it was issued with, and what has come."""

    mean: Tensor
    std: Tensor
    scales: list[Tensor]
    known: int = 0


class RolloutIntervals:
    """Adaptive conformal intervals for every lead time of forecasts that start one time step after the other.

    Use it in turns: `issue` a forecast of the next L states, then `observe` the next state. The truth of lead time l
    comes l steps after the forecast and is held against the width that the forecast was issued with. Each lead time,
    variable and place is a sequence of its own, an `AdaptiveConformal`. A delay of l lets a_t leave [0, 1] by l steps,
    so for *any* sequence, after T truths of lead time l,

        |share of misses - a| <= (max(a, 1 - a) + l step) / (step T),  a = 1 - coverage.

    Args:
        coverage: Long-run share of the truth inside, of every lead time.
        num_leads: Lead times of each forecast.
        step: Larger follows faster and makes widths restless.
        window: Scores of each lead time that widths are taken from.
        scores: Held-out scores |y - ybar| / s (n, L, ...) to start with, oldest first.
    """

    def __init__(
        self, coverage: float, num_leads: int, *, step: float = 0.01, window: int = 500, scores: Tensor | None = None
    ) -> None:
        if num_leads < 1 or (scores is not None and scores.shape[1:2] != (num_leads,)):
            shape = None if scores is None else tuple(scores.shape)
            raise ValueError(f"num_leads must be at least 1, scores (n, num_leads, ...); got {num_leads} and {shape}")
        self.leads = [
            AdaptiveConformal(coverage, step=step, window=window, scores=None if scores is None else scores[:, lead])
            for lead in range(num_leads)
        ]
        self._pending: deque[_Issued] = deque()

    def issue(self, mean: Tensor, std: Tensor) -> Tensor:
        """Ends (2, L, ...) around a forecast (L, ...) from the newest state, with its standard deviations (L, ...)."""
        if len(mean) != len(self.leads) or mean.shape != std.shape:
            raise ValueError(
                f"mean and std must be ({len(self.leads)}, ...) alike; got {tuple(mean.shape)} and {tuple(std.shape)}"
            )
        scales = [lead.scale() for lead in self.leads]
        self._pending.append(_Issued(mean, std, scales))
        ends = [lead.interval(mean[number], std[number]) for number, lead in enumerate(self.leads)]
        return torch.stack(ends, 1)

    def observe(self, truth: Tensor) -> dict[int, Tensor]:
        """Take the next state (...); lead time, counted from 1 -> where that forecast's interval missed it."""
        missed = {}
        for forecast in self._pending:
            number = forecast.known
            score = residual_ratio(forecast.mean[number], forecast.std[number], truth)
            missed[number + 1] = self.leads[number].update(score, forecast.scales[number])
            forecast.known += 1
        if self._pending and self._pending[0].known == len(self.leads):
            self._pending.popleft()
        return missed
