"""Train a forecast model: `accelerate launch train/train_field.py --config configs/field/ks_small.yaml`."""

import sys
from collections.abc import Sequence

from marigold_uq.commands.runner import run_command
from marigold_uq.field.config import FieldTrainConfig
from marigold_uq.field.run import run_training


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when finished, 130 when interrupted: the same command resumes."""
    return run_command("train/train_field.py", FieldTrainConfig, run_training, arguments)


if __name__ == "__main__":
    sys.exit(main())
