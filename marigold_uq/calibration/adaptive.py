"""Adaptive conformal intervals for sequences, where what comes is not exchangeable with what was."""

import math

import torch
from torch import Tensor

from marigold_uq.calibration.intervals import check_coverage
from marigold_uq.precision import at_least_float32

__all__ = ["AdaptiveConformal"]


class AdaptiveConformal:
    """Intervals ybar -+ q_t s whose level follows their misses (adaptive conformal inference, Gibbs and Candes 2021).

    Use it in turns: `interval` before the truth is known, `update` with its score |y - ybar| / s (`residual_ratio`)
    after. q_t is the conformal quantile of the last scores at miscoverage a_t, and a_{t+1} = a_t + step (a - miss_t),
    a = 1 - coverage. At a_t <= 0 the interval is infinite, at a_t >= 1 empty, so a_t stays within [-step, 1 + step].
    Then for *any* sequence, chosen by an adversary too, after T updates

        |share of misses - a| <= (max(a, 1 - a) + step) / (step T).

    Scores may have any shape (lead times, places); each coordinate is a sequence of its own.

    Args:
        coverage: Long-run share of the truth inside.
        step: Larger follows faster and makes widths restless.
        window: Scores that the quantile is taken of.
        scores: Held-out scores (n, ...) to start with, oldest first.
    """

    def __init__(self, coverage: float, *, step: float = 0.01, window: int = 500, scores: Tensor | None = None) -> None:
        self.coverage = check_coverage(coverage)
        if not 0 < step < math.inf or window < 1:
            raise ValueError(f"step must be positive and window at least 1; got {step} and {window}")
        self.step, self.window = float(step), int(window)
        self._scores: Tensor | None = None
        self._miscoverage: Tensor | None = None
        if scores is not None:
            self._scores = self._checked(scores)[-self.window :]
            self._miscoverage = torch.full_like(self._scores[0], 1 - self.coverage, dtype=torch.float64)

    @property
    def miscoverage(self) -> Tensor | float:
        """a_t, (...)."""
        return 1 - self.coverage if self._miscoverage is None else self._miscoverage

    def scale(self) -> Tensor:
        """q_t, (...): infinite where a_t <= 0 or too few scores are known, minus infinity (empty) where a_t >= 1."""
        if self._scores is None or self._miscoverage is None:
            return torch.tensor(math.inf)
        count, ordered = len(self._scores), self._scores.sort(0).values
        rank = torch.ceil((count + 1) * (1 - self._miscoverage) - 1e-9).long()
        found = ordered.gather(0, (rank - 1).clamp(0, count - 1).unsqueeze(0))[0]
        found = torch.where(rank > count, math.inf, found)
        return torch.where(self._miscoverage >= 1, -math.inf, torch.where(self._miscoverage <= 0, math.inf, found))

    def interval(self, prediction: Tensor, uncertainty: Tensor) -> Tensor:
        """Ends (2, ...) around a prediction with its standard deviation."""
        scale = self.scale().to(prediction)
        half = torch.where(scale.isinf(), scale, scale * uncertainty)  # infinite without a spread too
        return torch.stack([prediction - half, prediction + half])

    def update(self, score: Tensor, issued: Tensor | None = None) -> Tensor:
        """Take the score (...) of the truth, and return where the interval missed it.

        `issued` is the `scale` of an interval that was issued before other truths came in; by default it is today's.
        """
        score = self._checked(at_least_float32(torch.as_tensor(score)).unsqueeze(0))
        missed = score[0] > (self.scale() if issued is None else issued)
        before = (
            self.miscoverage if self._miscoverage is not None else torch.full_like(score[0], 1 - self.coverage).double()
        )
        self._miscoverage = torch.as_tensor(before) + self.step * (1 - self.coverage - missed.double())
        self._scores = score if self._scores is None else torch.cat([self._scores, score])[-self.window :]
        return missed

    def _checked(self, scores: Tensor) -> Tensor:
        scores = at_least_float32(scores)
        if scores.ndim == 0 or not len(scores) or bool((scores.isnan() | (scores < 0)).any()):
            raise ValueError("scores must be (n, ...), not negative and without NaN")
        if self._scores is not None and scores.shape[1:] != self._scores.shape[1:]:
            raise ValueError(f"expected a score {tuple(self._scores.shape[1:])}; got {tuple(scores.shape[1:])}")
        return scores
