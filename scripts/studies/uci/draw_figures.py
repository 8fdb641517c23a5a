"""Figures of calibration on a UCI set: coverage and PIT before and after calibration, and intervals.

    python -m scripts.studies.uci.draw_figures --data data --set concrete --model calibration_fraction=0.1 --output fig
    python -m scripts.studies.uci.draw_figures --cells runs/uci --set concrete --output runs/figures

The first fits a model to the first splits: intervals.png shows the test rows of split 0; calibration.png pools the test
rows, "before" are the draws as the networks make them, "after" those that kappa stretched, chosen on rows set aside
from training or on validation rows (only "draws" without a kappa). The second draws comparison.png of the columns that
scripts/studies/uci/reproduce.py has made. The files must not exist.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from tqdm.auto import tqdm

from marigold_uq.files import make_folder
from marigold_uq.plotting import save_figure
from marigold_uq.tabular import DiffusionRegressor
from marigold_uq.tabular.estimators import model_options
from marigold_uq.tabular.figures import calibration_figure, interval_figure
from marigold_uq.tabular.scores import pooled_curves, score_rows
from marigold_uq.tabular.uci import UCIDataset, UCISplit
from scripts.studies.uci.cells import CellStore
from scripts.studies.uci.tables import column_title, epochs_text

TARGETS = {
    "concrete": "compressive strength (MPa)",
    "energy": "heating load (kWh / m²)",
    "power": "electrical output (MW)",
    "wine": "quality",
    "yacht": "resistance",
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, help="folder with one folder per UCI set: fit a model")
    source.add_argument("--cells", type=Path, help="folder of reproduce_uci.py: compare its columns")
    parser.add_argument("--output", type=Path, required=True, help="folder of the pictures")
    parser.add_argument("--set", default="concrete", dest="name")
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--preset", default="default")
    parser.add_argument("--model", nargs="*", default=[], metavar="NAME=VALUE", help="of DiffusionRegressor")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(arguments)


def score_both(model: DiffusionRegressor, split: UCISplit) -> dict[str, dict[str, Any]]:
    """Scores of the draws as the networks make them, and of the calibrated ones; of "draws" if they are the same."""
    draws = {"after": model.sample(split.test_features)}
    if model.pipeline_.config.kappa is None:
        draws = {"draws": draws["after"]}
    else:
        members = model.pipeline_(split.test_features, model.n_samples, seed=model.seed_).member_samples
        raw = members.swapaxes(0, 1).reshape(-1, *members.shape[2:])[: model.n_samples, :, 0]
        draws = {"before": raw, **draws}
    scale = float(split.train_targets.std())
    return {name: score_rows(values, split.test_targets, target_scale=scale) for name, values in draws.items()}


def draw_intervals(model: DiffusionRegressor, split: UCISplit, name: str) -> Figure:
    """Test rows of one split."""
    interval, mean = model.predict_interval(split.test_features), model.sample(split.test_features).mean(0)
    text, unit = f"{name}: rows that the model has never seen", TARGETS.get(name, "target")
    return interval_figure(split.test_targets, mean, interval, title=text, unit=unit)


def draw_fitted(options: argparse.Namespace) -> None:
    """Fit, score, draw."""
    dataset = UCIDataset.load(options.data, options.name)
    scores: dict[str, list[dict[str, Any]]] = {}
    num_splits = min(options.splits, dataset.num_splits)
    for number in tqdm(range(num_splits), options.name):
        split = dataset.split(number)
        changes = model_options(options.model)
        model = DiffusionRegressor(options.preset, **{"random_state": options.seed + number, **changes})
        model.fit(split.train_features, split.train_targets)
        for name, one in score_both(model, split).items():
            scores.setdefault(name, []).append(one)
        if number == 0:
            save_figure(draw_intervals(model, split, options.name), options.output / "intervals.png")
    curves = {name: pooled_curves(entries) for name, entries in scores.items()}
    text = f"{options.name}, {options.preset}, test rows of {num_splits} split(s)"
    figure = calibration_figure(curves, title=text, num_samples=model.n_samples)
    save_figure(figure, options.output / "calibration.png")


def draw_cells(options: argparse.Namespace) -> None:
    """The columns of a reproduction."""
    found = [cell for cell in CellStore(options.cells).furthest().values() if cell.key.dataset == options.name]
    if not found:
        raise ValueError(f"{options.cells} has no finished cell of {options.name}")
    labels = [f"{column_title(cell.key.preset, cell.key.family)}\n{epochs_text(cell)} epochs" for cell in found]
    curves = {label: pooled_curves(cell.splits) for label, cell in zip(labels, found, strict=True)}
    figure = calibration_figure(curves, title=options.name, num_samples=found[0].facts["num_samples"])
    save_figure(figure, options.output / "comparison.png")


def main(arguments: list[str] | None = None) -> int:
    """Draw what was asked for."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    make_folder(options.output)
    if options.cells is not None:
        draw_cells(options)
    else:
        draw_fitted(options)
    print(f"written to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
