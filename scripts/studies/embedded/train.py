r"""Stage 3: train a depth model on cached features. Resumable.

python scripts/studies/embedded/train.py --config configs/depth/embedded_conditioned.yaml
"""

import sys
from collections.abc import Sequence

from jsonargparse import ActionConfigFile, ArgumentParser

from marigold_uq.training.condition_run import ConditionTrainConfig, train_conditioned


def main(given: Sequence[str] | None = None) -> int:
    """Read the config, train, save; 0 when finished, 3 when interrupted (run again to go on)."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--config", action=ActionConfigFile)
    parser.add_class_arguments(ConditionTrainConfig)
    arguments = parser.parse_args(given)
    text = parser.dump(arguments)
    values = parser.instantiate(arguments)
    values.pop("config", None)
    return 0 if train_conditioned(ConditionTrainConfig(**values), text).finished else 3


if __name__ == "__main__":
    sys.exit(main())
