"""Calibrate a trained forecast model on the validation part of its data, and save it beside the model.

python scripts/calibrate_field.py --run runs/field/ks_small
python scripts/calibrate_field.py --run runs/field/air_small --num_leads 20 --steps [1,2] --mixed_precision bf16

Chooses the number of steps, the colour of the noise and tau, fits the spread of each lead time, and calibrates
intervals on trajectories that took part in none of these choices: docs/fields.md. RUN/calibrated is a pipeline for
`from_pretrained`, RUN/calibration.json says what was compared.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from marigold_uq.field.calibrate import CalibrationOptions
from marigold_uq.field.command import read_config
from marigold_uq.field.config import FieldTrainConfig
from scripts.studies.fields.study import calibrate_run


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the run's own config, calibrate, save; a calibration that is there is not replaced."""
    parser = ArgumentParser(prog="calibrate_field.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="folder that train_field.py wrote")
    parser.add_argument("--device", default="cpu", help="where the network runs")
    parser.add_class_arguments(CalibrationOptions, as_group=False)
    try:
        values = parser.instantiate(parser.parse_args(arguments))
        run, device = values.pop("run"), values.pop("device")
        config = read_run(run)
        found = calibrate_run(run, config, CalibrationOptions(**values), device=device, verbose=True)
    except (OSError, ValueError, ArithmeticError) as error:
        print(f"calibrate_field: {error}", file=sys.stderr)
        return 2
    best = found["best"]
    print(f"{best['name']}, {best['steps']} steps, tau {best['tau']:g}; written: {run / 'calibrated'}")
    if found["lead_interval_scales"] is None:
        units = found["num_interval_units"]
        print(f"no intervals: {units} independent units are too few, or members do not differ", file=sys.stderr)
    return 0


def read_run(run: Path) -> FieldTrainConfig:
    """The config of a finished training that is not calibrated yet."""
    config = run / "config.yaml"
    if not config.exists() or not (run / "model").exists():
        raise FileNotFoundError(f"{run} is not a finished training: it has no config.yaml or no model folder")
    for name in ("calibrated", "calibration.json"):
        if (run / name).exists():
            raise FileExistsError(f"{run / name} exists: remove it to calibrate again")
    return read_config(["--config", str(config)])[0]


if __name__ == "__main__":
    sys.exit(main())
