"""Small sets in the layout of the UCI folders, and models that train in a moment."""

from pathlib import Path
from typing import Any

import numpy as np

from marigold_uq.tabular import DiffusionRegressor, TrainingOptions


def write_set(root: Path, name: str, *, rows: int = 60, num_splits: int = 2) -> Path:
    """A set with 3 features and y = x_0 - x_1^2 + noise; a tenth of the rows is each split's test set."""
    folder = root / name
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 3))
    y = 3 + x[:, 0] - x[:, 1] ** 2 + 0.3 * rng.normal(size=rows)
    np.savetxt(folder / "data.txt", np.c_[x, y])
    (folder / "index_features.txt").write_text("0\n1\n2\n")
    (folder / "index_target.txt").write_text("3\n")
    (folder / "n_splits.txt").write_text(f"{num_splits}\n")
    for split in range(num_splits):
        order = rng.permutation(rows)
        np.savetxt(folder / f"index_test_{split}.txt", order[: rows // 10], fmt="%d")
        np.savetxt(folder / f"index_train_{split}.txt", order[rows // 10 :], fmt="%d")
    return root


def quick_model(preset: str = "default", **changes: Any) -> DiffusionRegressor:
    """Two models, few epochs, trees and steps; names of `TrainingOptions` may be among the changes."""
    given = {"num_models": 2, "max_epochs": 8, "baseline_epochs": 10, "num_inference_steps": 4, "ensemble_size": 20}
    given |= {"random_state": 0, **changes}
    details = {name: given.pop(name) for name in list(given) if name in TrainingOptions.__dataclass_fields__}
    return DiffusionRegressor(preset, **given, training_options=TrainingOptions(**details))
