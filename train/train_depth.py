"""Finetune a depth model: `accelerate launch train/train_depth.py --config configs/depth/gaussian.yaml`."""

import sys
from collections.abc import Sequence
from dataclasses import asdict

from jsonargparse import ActionConfigFile, ArgumentParser

from marigold_uq.depth.config import DepthTrainConfig, paper_data
from marigold_uq.depth.run import train_depth


def make_parser() -> ArgumentParser:
    """Every field of `DepthTrainConfig` as a key of the YAML and as a flag."""
    parser = ArgumentParser(description="Finetune a depth model with uncertainty.", allow_abbrev=False)
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file; any field can be overridden by a flag")
    parser.add_class_arguments(DepthTrainConfig)
    parser.set_defaults({"data": [asdict(part) for part in paper_data()]})  # defaults are printed as plain values
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the config, train, save; 0 when finished, 3 when interrupted (run again to go on)."""
    parser = make_parser()
    parsed = parser.parse_args(arguments)
    text = parser.dump(parsed)
    values = parser.instantiate(parsed)
    values.pop("config", None)
    result = train_depth(DepthTrainConfig(**values), text)
    return 0 if result.finished else 3


if __name__ == "__main__":
    sys.exit(main())
