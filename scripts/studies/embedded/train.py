"""Train a depth model with an image encoder, on kept features or on pictures.

python -m scripts.studies.embedded.train --config configs/depth/embedded/base.yaml
"""

import sys
from collections.abc import Sequence

from marigold_uq.commands.runner import run_command
from marigold_uq.depth.conditioned_run import ConditionedTrainConfig, run_conditioned_training


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when finished, 3 when interrupted: the same command resumes."""
    return run_command("scripts.studies.embedded.train", ConditionedTrainConfig, run_conditioned_training, arguments)


if __name__ == "__main__":
    sys.exit(main())
