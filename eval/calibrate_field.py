"""Calibrate a trained forecast model on the validation part of its data, and save it beside the model.

python eval/calibrate_field.py --run runs/field/ks_small
python eval/calibrate_field.py --run runs/field/air_small --num_leads 20 --steps 1 2 --mixed_precision bf16

RUN/calibrated is a pipeline for `from_pretrained`, RUN/calibration.json says what was compared; see docs/fields.md.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.field.calibrate import CalibrationOptions, calibrate_run


@dataclass(frozen=True)
class Options(CalibrationOptions):
    """Calibrate a trained forecast model.

    Args:
        run: Folder that train_field.py wrote.
        device: Where the network runs.
    """

    run: Path = Path("runs/field")
    device: str = "cpu"


def run(options: Options, invocation: Invocation) -> int:
    """Calibrate, save, and say what was chosen."""
    try:
        found = calibrate_run(options.run, options, device=options.device, verbose=True)
    except FloatingPointError as error:
        raise ValueError(str(error)) from error
    best = found["best"]
    print(f"{best['steps']} steps, tau {best['tau']:.3g}; written: {options.run / 'calibrated'}")
    grid, units = found["calibration"]["interval"], found["num_interval_units"]
    if grid is None:
        print(f"no intervals: {units} independent units are too few, or samples do not differ", file=sys.stderr)
    else:
        print(f"intervals for coverages up to {grid['coverages'][-1]:g}, from {units} independent units")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the options, run."""
    return run_command("eval/calibrate_field.py", Options, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
