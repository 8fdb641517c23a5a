"""The objective of fields with missing values: NaN in a target marks what does not count."""

from __future__ import annotations

import torch
from torch import Tensor

from marigold_uq.denoising import Denoiser
from marigold_uq.scores import sample_scores
from marigold_uq.training.objective import Objective

__all__ = ["MaskedObjective"]


class MaskedObjective(Objective):
    """An `Objective` that leaves out coordinates whose target is NaN; without any it is the objective itself."""

    def losses(
        self, denoiser: Denoiser, x_0: Tensor, generators: list[torch.Generator], mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As of `Objective`; x_0 may hold NaN."""
        filled, valid = _without_nan(x_0)
        if valid is not None:
            mask = valid if mask is None else valid & mask
        return super().losses(denoiser, filled, generators, mask)

    def held_out(self, denoiser: Denoiser, x_0: Tensor, generators: list[torch.Generator]) -> Tensor:
        """As of `Objective`; where values are missing, the marginal CRPS of the others."""
        filled, valid = _without_nan(x_0)
        if valid is None:
            return super().held_out(denoiser, x_0, generators)
        prediction = self.predict(denoiser, filled, generators)
        return sample_scores(prediction.law, prediction.target, "crps", mask=valid)


def _without_nan(x_0: Tensor) -> tuple[Tensor, Tensor | None]:
    """The target with 0 for NaN, and where it counts; None where everything does."""
    missing = x_0.isnan()
    return (x_0.nan_to_num(nan=0.0), ~missing) if bool(missing.any()) else (x_0, None)
