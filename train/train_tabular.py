"""Fit a model to a table and save it.

python train/train_tabular.py --data.path rows.csv --data.target '[price]' --output runs/price
python train/train_tabular.py --config configs/tabular/paper.yaml --data.path data/uci/yacht --output runs/yacht

The folder gets model/ (a TabularRegressionPipeline with its calibration), config.yaml and run.json; it must not exist.
"""

import sys
from collections.abc import Sequence

from marigold_uq.commands.runner import run_command
from marigold_uq.tabular.run import TrainTabular, run_training


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the config, fit, save."""
    return run_command("train/train_tabular.py", TrainTabular, run_training, arguments)


if __name__ == "__main__":
    sys.exit(main())
