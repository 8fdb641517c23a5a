"""Fit a model to a table and save it.

python train/train_tabular.py --data.path rows.csv --data.target '[price]' --output runs/price
python train/train_tabular.py --config configs/tabular/paper.yaml --data.path data/uci/yacht --output runs/yacht

The folder gets model/ (a TabularRegressionPipeline), config.yaml, run.json and conformal.npz; it must not exist.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ActionConfigFile, ArgumentParser

from marigold_uq.tabular import DiffusionRegressor
from marigold_uq.tabular.data import TableSource
from marigold_uq.tabular.run import train_tabular


def make_parser() -> ArgumentParser:
    """Every argument of `TableSource` and `DiffusionRegressor` as a key of the YAML and as a flag."""
    parser = ArgumentParser(description="Fit a probabilistic model to a table.", allow_abbrev=False)
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file; any field can be overridden by a flag")
    parser.add_class_arguments(TableSource, "data")
    parser.add_class_arguments(DiffusionRegressor, "model", skip={"random_state"})
    parser.add_argument("--seed", type=int, default=0, help="the same seed and data give the same model")
    parser.add_argument("--output", type=Path, required=True, help="folder of the run; must not exist")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the config, fit, save; 0 when finished, 2 when something is wrong with data or config."""
    parser = make_parser()
    parsed = parser.parse_args(arguments)
    text = parser.dump(parsed)
    values = parser.instantiate(parsed)
    try:
        output = train_tabular(values.data, values.model.set_params(random_state=values.seed), values.output, text)
    except (OSError, ValueError) as error:
        if os.environ.get("MARIGOLD_UQ_TRACEBACK"):
            raise
        print(f"train_tabular: {error}", file=sys.stderr)
        return 2
    print(f"written to {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
