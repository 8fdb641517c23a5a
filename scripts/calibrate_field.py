"""Calibrate a trained forecast model on the validation part of its data, and save it beside the model.

python scripts/calibrate_field.py --run runs/field/ks_small
python scripts/calibrate_field.py --run runs/field/air_small --num_leads 20 --steps [1,2] --mixed_precision bf16

Chooses the number of steps, the colour of the noise and tau, fits the spread of each lead time, and calibrates
intervals on windows that took part in nothing else: docs/fields.md. RUN/calibrated is a pipeline for `from_pretrained`,
RUN/calibration.json says what was compared.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from marigold_uq.evaluation.fields.calibration import CalibrationOptions, calibrate_model
from marigold_uq.evaluation.fields.study import write_json
from marigold_uq.training.field_command import read_config
from marigold_uq.training.run_folder import replacing_folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the run's own config, calibrate, save; nothing is replaced."""
    parser = ArgumentParser(prog="calibrate_field.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="folder that train_field.py wrote")
    parser.add_class_arguments(CalibrationOptions, as_group=False)
    values = parser.instantiate(parser.parse_args(arguments))
    run = values.pop("run")
    try:
        found = calibrate_run(run, CalibrationOptions(**values))
    except (OSError, ValueError, ArithmeticError) as error:
        print(f"calibrate_field: {error}", file=sys.stderr)
        return 2
    best = found["best"]
    print(f"{best['name']}, {best['steps']} steps, tau {best['tau']:g}; written: {run / 'calibrated'}")
    if found["lead_interval_scales"] is None:
        print(f"no intervals: {found['num_interval_units']} independent windows are too few", file=sys.stderr)
    return 0


def calibrate_run(run: Path, options: CalibrationOptions) -> dict[str, object]:
    """RUN/calibration.json and RUN/calibrated from RUN/model."""
    output, config = run / "calibrated", run / "config.yaml"
    if not config.exists() or not (run / "model").exists():
        raise FileNotFoundError(f"{run} is not a finished training: it has no config.yaml or no model folder")
    if output.exists():
        raise FileExistsError(f"{output} exists: remove it to calibrate again")
    pipeline, found = calibrate_model(
        run / "model", read_config(["--config", str(config)])[0].data, options, verbose=True
    )
    write_json(run / "calibration.json", found)
    with replacing_folder(output) as temporary:
        pipeline.save_pretrained(temporary)
    return found


if __name__ == "__main__":
    sys.exit(main())
