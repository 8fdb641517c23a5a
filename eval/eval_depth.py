"""Score depth and its uncertainty against ground truth; see docs/depth.md.

python eval/eval_depth.py --config configs/depth/eval_nyu.yaml --data.root data/nyu --pipeline.model runs/mine/model
python eval/eval_depth.py --predictor constant --data.root data/depth_real --output runs/eval/constant
torchrun --nproc_per_node 8 eval/eval_depth.py ...
"""

import sys
from collections.abc import Sequence

from marigold_uq.commands.runner import run_command
from marigold_uq.depth.evaluation import DepthEvaluation, run_evaluation


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all images were scored, 1 if some failed, 2 for an error that names what to mend."""
    return run_command("eval/eval_depth.py", DepthEvaluation, run_evaluation, arguments)


if __name__ == "__main__":
    sys.exit(main())
