"""Finetune a depth model: `accelerate launch train/train_depth.py --config configs/depth/gaussian.yaml`."""

import sys
from collections.abc import Sequence

from marigold_uq.commands.runner import run_command
from marigold_uq.depth.config import DEFAULTS, DepthTrainConfig
from marigold_uq.depth.run import run_training


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when finished, 130 when interrupted: the same command resumes."""
    given = sys.argv[1:] if arguments is None else arguments
    words = ["--dry_run" if word == "--dry-run" else word for word in given]
    return run_command("train/train_depth.py", DepthTrainConfig, run_training, words, defaults=DEFAULTS)


if __name__ == "__main__":
    sys.exit(main())
