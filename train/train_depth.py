"""Finetune a depth model: `accelerate launch train/train_depth.py --config configs/depth/gaussian.yaml`."""

import sys

from jsonargparse import ActionConfigFile, ArgumentParser

from marigold_uq.training.depth_config import DepthTrainConfig
from marigold_uq.training.depth_run import train_depth


def main() -> int:
    """Read the config, train, save; 0 when finished, 3 when interrupted (run again to go on)."""
    parser = ArgumentParser(description=DepthTrainConfig.__doc__.splitlines()[0])
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file; any field can be overridden by a flag")
    parser.add_class_arguments(DepthTrainConfig)
    arguments = parser.parse_args()
    text = parser.dump(arguments)
    values = parser.instantiate(arguments)
    values.pop("config", None)
    result = train_depth(DepthTrainConfig(**values), text)
    return 0 if result.finished else 3


if __name__ == "__main__":
    sys.exit(main())
