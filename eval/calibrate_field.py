"""Calibrate a trained forecast model on the validation part of its data, and save it beside the model.

python eval/calibrate_field.py --run runs/field/ks_small
python eval/calibrate_field.py --run runs/field/air_small --num_leads 20 --steps 1 2 --mixed_precision bf16

RUN/calibrated is a pipeline for `from_pretrained`, RUN/calibration.json says what was compared; see docs/fields.md.
"""

import sys
from collections.abc import Sequence

from marigold_uq.commands.runner import run_command
from marigold_uq.field.calibrate import FieldCalibration, run_calibration


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the options, calibrate."""
    return run_command("eval/calibrate_field.py", FieldCalibration, run_calibration, arguments)


if __name__ == "__main__":
    sys.exit(main())
