"""Score predictions for tables: RMSE, fair CRPS, Gaussian NLL, coverage and width of intervals, PIT.

python eval/eval_tabular.py --uci data/uci/yacht --output runs/yacht
python eval/eval_tabular.py --run runs/price --data.path new_rows.csv --data.target '[price]' --output runs/price_scores

The first fits a model to every split of a UCI set, the second scores a folder of train/train_tabular.py. Both write
metrics.json, metrics.md and calibration.png.
"""

import sys
from collections.abc import Sequence

from marigold_uq.commands.runner import run_command
from marigold_uq.tabular.evaluate import EvaluateTabular, run_evaluation


def main(arguments: Sequence[str] | None = None) -> int:
    """Score what was asked for."""
    return run_command("eval/eval_tabular.py", EvaluateTabular, run_evaluation, arguments)


if __name__ == "__main__":
    sys.exit(main())
