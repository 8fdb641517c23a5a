"""Score depth and its uncertainty against ground truth; see docs/depth.md.

python eval/eval_depth.py --config configs/depth/eval_nyu.yaml --data.root data/nyu --pipeline.model runs/mine/model
python eval/eval_depth.py --predictor constant --data.root data/depth_real --output runs/eval/constant
torchrun --nproc_per_node 8 eval/eval_depth.py ...
"""

import sys

from marigold_uq.commands.runner import run_command
from marigold_uq.depth.evaluation import DepthEvaluation, run_evaluation

if __name__ == "__main__":
    sys.exit(run_command("eval/eval_depth.py", DepthEvaluation, run_evaluation))
