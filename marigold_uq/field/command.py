"""The command line of `train/train_field.py`, and configs read from code."""

from __future__ import annotations

from collections.abc import Sequence

from jsonargparse import ActionConfigFile, ArgumentParser

from marigold_uq.field.config import FieldTrainConfig
from marigold_uq.field.run import train_field


def make_parser() -> ArgumentParser:
    """Every field of `FieldTrainConfig` as a key of the YAML and as a flag."""
    parser = ArgumentParser(description="Train a probabilistic forecast model.", allow_abbrev=False)
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file; any field can be overridden by a flag")
    parser.add_class_arguments(FieldTrainConfig)
    return parser


def read_config(arguments: Sequence[str] | None = None) -> tuple[FieldTrainConfig, str]:
    """Command line and YAML files to a config, and its complete text; an unknown key or a wrong type is an error."""
    parser = make_parser()
    parsed = parser.parse_args(arguments)
    text = parser.dump(parsed)
    values = parser.instantiate(parsed)
    values.pop("config", None)
    return FieldTrainConfig(**values), text


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the config, train, save; 0 when finished, 3 when interrupted (run again to go on)."""
    return 0 if train_field(*read_config(arguments)).finished else 3
