"""Real RGB-D frames: constant and ramp predictors have the published errors when read through our reader.

The expected numbers come with the frames: per-group AbsRel of a constant and of a vertical ramp after least-squares
alignment, computed by somebody else's script.
"""

import os
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from support.published_depth import ABS_REL

from marigold_uq.depth.data import ImageDepthFolder

DATA = os.environ.get("MARIGOLD_UQ_DATA")
FRAMES = Path(DATA or "") / "depth_real"
pytestmark = pytest.mark.skipif(
    DATA is None or not FRAMES.is_dir(), reason="set MARIGOLD_UQ_DATA to the folder that holds depth_real/"
)

MEAN_ABS_REL, MEAN_DELTA1 = (0.432, 0.267), (0.470, 0.622)


def errors(truth: np.ndarray, prediction: np.ndarray) -> tuple[float, float]:
    """AbsRel and delta1 over valid pixels (N,) after least squares; clipped to [min / 2, 2 max] of the truth."""
    design = np.stack([prediction, np.ones_like(prediction)], axis=1)
    aligned = design @ np.linalg.lstsq(design, truth, rcond=None)[0]
    aligned = np.clip(aligned, 0.5 * truth.min(), 2 * truth.max())
    ratio = np.maximum(aligned / truth, truth / aligned)
    return float(np.mean(np.abs(aligned - truth) / truth)), float(np.mean(ratio < 1.25))


@pytest.mark.parametrize(("column", "predictor"), [(0, "constant"), (1, "ramp")])
def test_constant_and_ramp_have_the_published_errors(column: int, predictor: str) -> None:
    dataset = ImageDepthFolder(FRAMES)
    per_group: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for sample in dataset:
        valid = sample["valid"][0].numpy()
        truth = sample["depth"][0].numpy()[valid].astype(np.float64)
        rows = np.indices(valid.shape)[0][valid].astype(np.float64)
        prediction = np.zeros_like(rows) if predictor == "constant" else -rows
        per_group[dataset.groups[sample["name"]]].append(errors(truth, prediction))
    means = {group: np.mean(pairs, axis=0) for group, pairs in per_group.items()}

    assert {group: mean[0] for group, mean in means.items()} == pytest.approx(
        {group: pair[column] for group, pair in ABS_REL.items()},
        abs=0.00051,  # three printed decimals
    )
    over_groups = np.mean(list(means.values()), axis=0)
    assert over_groups == pytest.approx((MEAN_ABS_REL[column], MEAN_DELTA1[column]), abs=0.00051)


def test_every_frame_reads_and_has_the_share_of_valid_pixels_its_index_states() -> None:
    import json

    dataset = ImageDepthFolder(FRAMES, on_error="raise")
    stated = {row["name"]: row["valid"] for row in json.loads((FRAMES / "index.json").read_text())}
    shares = {sample["name"]: float(sample["valid"].float().mean()) for sample in dataset}
    assert shares == pytest.approx(stated, abs=0.00051)  # three printed decimals
    assert dataset.problems == []
