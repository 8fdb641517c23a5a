"""Score forecasts, one step ahead and rolled out; see docs/fields.md.

python eval/eval_field.py --run runs/field/ks_small --output runs/eval/ks_small
python eval/eval_field.py --run runs/field/air_small --model persistence --output runs/eval/air_persistence
"""

import sys
from collections.abc import Sequence

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.field.evaluate import FieldEvaluation, evaluate_field, report


def run(options: FieldEvaluation, invocation: Invocation) -> int:
    """Evaluate and print the tables."""
    metrics = evaluate_field(options, command=invocation.command)
    print(report({metrics["predictor"]["model"]: metrics}))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the options, run."""
    return run_command("eval/eval_field.py", FieldEvaluation, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
