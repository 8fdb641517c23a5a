"""Train a forecast model: `accelerate launch train/train_field.py --config configs/field/ks_small.yaml`."""

import sys
from collections.abc import Sequence

from marigold_uq.commands.runner import INTERRUPTED, Invocation, run_command
from marigold_uq.field.config import FieldTrainConfig
from marigold_uq.field.run import train_field


def run(config: FieldTrainConfig, invocation: Invocation) -> int:
    """Train and save; an interrupted run resumes with the same command."""
    return 0 if train_field(config, invocation.config).finished else INTERRUPTED


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the options, run."""
    return run_command("train/train_field.py", FieldTrainConfig, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
