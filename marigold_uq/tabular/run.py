"""From a table and a config to a folder with a trained `TabularRegressionPipeline`."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from marigold_uq.results import versions
from marigold_uq.tabular import DiffusionRegressor
from marigold_uq.tabular.data import LoadedTable, TableSource, read_table

FORMAT = "marigold_uq tabular run 1"
CONFORMAL_FILE = "conformal.npz"


def train_tabular(source: TableSource, model: DiffusionRegressor, output: Path, config_text: str = "") -> Path:
    """Fit a model and write OUTPUT/model (the pipeline), config.yaml, run.json and, if calibrated, conformal.npz.

    The folder appears when everything is in it. One that exists is refused.
    """
    output = Path(output)
    if output.exists():
        raise FileExistsError(f"{output} exists; choose another output, nothing is overwritten")
    table = read_table(source)
    wall, cpu = time.perf_counter(), time.process_time()
    model.fit(table.features, table.targets, table.weights)
    seconds = {"fit_seconds": time.perf_counter() - wall, "fit_cpu_seconds": time.process_time() - cpu}
    output.parent.mkdir(parents=True, exist_ok=True)
    with _new_folder(output) as temporary:
        model.pipeline_.save_pretrained(temporary / "model")
        (temporary / "config.yaml").write_text(config_text, encoding="utf-8")
        content = json.dumps({**describe_run(source, table, model), **seconds}, indent=1)
        (temporary / "run.json").write_text(content + "\n", encoding="utf-8")
        if model.conformal_scores_ is not None:
            np.savez(temporary / CONFORMAL_FILE, scores=model.conformal_scores_)
    return output


@contextmanager
def _new_folder(final: Path) -> Iterator[Path]:
    """A hidden folder to write to, which becomes `final`; if that is there by now, the result stays where it is."""
    temporary = final.with_name(f".{final.name}-{uuid4().hex}")
    temporary.mkdir()
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if final.exists():
        raise FileExistsError(f"{final} was made by another process meanwhile; this result is kept in {temporary}")
    os.rename(temporary, final)  # fails, unlike a move, if a folder with files comes in between


def describe_run(source: TableSource, table: LoadedTable, model: DiffusionRegressor) -> dict[str, Any]:
    """What was trained on what."""
    return {
        "format": FORMAT,
        "data": str(source.path),
        "num_rows": len(table.targets),
        "feature_names": table.feature_names,
        "target_names": table.target_names,
        "target_scale": np.atleast_1d(table.targets.std(0)).tolist(),
        "recipe": asdict(model.recipe_),
        "epochs": [int(epoch) for epoch in model.n_epochs_],
        "seed": model.seed_,
        "n_samples": model.n_samples,
        "versions": versions(),
    }
