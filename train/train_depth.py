"""Finetune a depth model: `accelerate launch train/train_depth.py --config configs/depth/gaussian.yaml`."""

import sys
from dataclasses import asdict

from marigold_uq.commands.runner import run_command
from marigold_uq.depth.config import DepthTrainConfig, paper_data
from marigold_uq.depth.run import run_training

DEFAULTS = {"data": [asdict(part) for part in paper_data()]}  # printed as plain values

if __name__ == "__main__":
    sys.exit(run_command("train/train_depth.py", DepthTrainConfig, run_training, defaults=DEFAULTS))
