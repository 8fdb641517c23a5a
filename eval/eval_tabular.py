"""Score predictions for tables: RMSE, fair CRPS, Gaussian NLL, coverage and width of intervals, PIT.

python eval/eval_tabular.py --config configs/tabular/default.yaml --uci.root data/uci --uci.name yacht --output runs/y
python eval/eval_tabular.py --run runs/price --data.path new_rows.csv --data.target '[price]' --output runs/price_scores

The first fits a model to every split of a UCI set, the second scores a folder of train/train_tabular.py. Both write
metrics.json, metrics.md and calibration.png.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ActionConfigFile, ArgumentParser, Namespace

from marigold_uq.tabular import DiffusionRegressor
from marigold_uq.tabular.data import TableSource
from marigold_uq.tabular.evaluate import UCISource, evaluate_run, evaluate_uci, write_evaluation


def make_parser() -> ArgumentParser:
    """The command line; `model` has the keys of train_tabular.py, so that its configs serve here too."""
    parser = ArgumentParser(description="Score predictions for tables.", allow_abbrev=False)
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file; any field can be overridden by a flag")
    parser.add_argument("--run", type=Path | None, default=None, help="folder of train_tabular.py")
    parser.add_argument("--data", type=TableSource | None, default=None, help="rows to score the run on")
    parser.add_argument("--uci", type=UCISource | None, default=None, help="or: a set to fit and score, split by split")
    parser.add_class_arguments(DiffusionRegressor, "model", skip={"random_state", "n_samples"})
    parser.add_argument("--num_samples", type=int, default=100, help="draws per row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    return parser


def describe(model: Path | dict[str, Any], data: Path | str) -> dict[str, Any]:
    """What was scored on what, as model cards read it."""
    name = Path(data).name
    return {
        "predictor": {"model": str(model) if isinstance(model, Path) else model},
        "data": {"name": name, "title": name},
    }


def evaluate(options: Namespace) -> str:
    """Do what was asked for; the table of results."""
    settings = {"num_samples": options.num_samples, "seed": options.seed}
    if (options.run is None) == (options.uci is None) or (options.run is None) != (options.data is None):
        raise ValueError("give --run and --data.path to score a trained model, or --uci.root and --uci.name to fit one")
    if options.run is not None:
        splits = evaluate_run(options.run, options.data, **settings)
        title, facts = f"{options.run} on {options.data.path}", describe(options.run / "model", options.data.path)
    else:
        model = options.model.set_params(n_samples=options.num_samples)
        splits = evaluate_uci(options.uci, model, **settings)
        title = f"{options.uci.name}, {len(splits)} splits, preset {model.preset}"
        facts = describe({k: v for k, v in model.get_params().items() if v is not None}, options.uci.name)
    return write_evaluation(options.output, title, splits, {**facts, **settings})


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when written, 2 when nothing could be done."""
    parser = make_parser()
    options = parser.instantiate(parser.parse_args(arguments))
    try:
        text = evaluate(options)
    except (OSError, ValueError) as error:
        if os.environ.get("MARIGOLD_UQ_TRACEBACK"):
            raise
        print(f"eval_tabular: {error}", file=sys.stderr)
        return 2
    print(f"{text}written to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
