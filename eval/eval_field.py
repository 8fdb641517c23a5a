"""Score forecasts, one step ahead and rolled out; see docs/fields.md.

python eval/eval_field.py --config configs/field/eval_ks_small.yaml --model runs/field/ks_small/model
python eval/eval_field.py --config configs/field/eval_air_small.yaml --model persistence --output runs/eval/persistence
"""

import shlex
import sys
from collections.abc import Sequence

from jsonargparse import ActionConfigFile, ArgumentParser

from marigold_uq.field.evaluate import FieldEvaluation, evaluate_field, report


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the options, evaluate, print the tables."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = ArgumentParser(prog="eval_field.py", description=(FieldEvaluation.__doc__ or "").splitlines()[0])
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file; any field can be overridden by a flag")
    parser.add_class_arguments(FieldEvaluation, as_group=False)
    values = parser.instantiate(parser.parse_args(given))
    values.pop("config", None)
    options = FieldEvaluation(**values)
    try:
        metrics = evaluate_field(options, command=shlex.join(["python", "eval/eval_field.py", *given]))
    except (OSError, ValueError) as error:
        print(f"eval_field: {error}", file=sys.stderr)
        return 2
    print(report({options.model: metrics}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
