"""Score forecasts, one step ahead and rolled out; see docs/fields.md.

python eval/eval_field.py --run runs/field/ks_small --output runs/eval/ks_small
python eval/eval_field.py --run runs/field/air_small --model persistence --output runs/eval/air_persistence
"""

import sys
from collections.abc import Sequence

from marigold_uq.commands.runner import run_command
from marigold_uq.field.evaluate import FieldEvaluation, run_evaluation


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the options, evaluate, print the tables."""
    return run_command("eval/eval_field.py", FieldEvaluation, run_evaluation, arguments)


if __name__ == "__main__":
    sys.exit(main())
