"""Test rows that a model may remember: those with the features of a training row."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from marigold_uq.metrics import crps
from marigold_uq.tabular.uci import UCISplit

__all__ = ["duplicate_rows", "score_apart"]


def duplicate_rows(split: UCISplit) -> NDArray[np.bool_]:
    """Which test rows have exactly the features of a training row, (rows,)."""
    seen = {row.tobytes() for row in split.train_features + 0.0}  # -0.0 becomes 0.0
    return np.array([row.tobytes() in seen for row in split.test_features + 0.0], dtype=bool)


def score_apart(samples: NDArray[np.float64], split: UCISplit) -> dict[str, Any]:
    """The fair CRPS of draws (M, rows) on new rows and on duplicates apart, and the share of duplicates.

    `crps_new` and `crps_duplicates` are left out where there are no such rows.
    """
    is_old = duplicate_rows(split)
    scores = crps(torch.from_numpy(np.array(samples)), torch.from_numpy(np.array(split.test_targets))).numpy()
    parts = {"crps_new": scores[~is_old], "crps_duplicates": scores[is_old]}
    means = {name: float(part.mean()) for name, part in parts.items() if len(part)}
    return {"duplicates": float(is_old.mean()), **means}
