"""Calibrate a depth model on held-out images and write a calibrated copy of it; see docs/depth.md.

python eval/calibrate_depth.py --model runs/mine/model --data.name nyu --data.root data/nyu --output calibrated
"""

import sys
from collections.abc import Sequence

from marigold_uq.commands.runner import run_command
from marigold_uq.depth.calibration import DepthCalibration, run_calibration


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 2 for an error that names what to mend."""
    return run_command("eval/calibrate_depth.py", DepthCalibration, run_calibration, arguments)


if __name__ == "__main__":
    sys.exit(main())
