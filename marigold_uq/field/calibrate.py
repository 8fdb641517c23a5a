"""Calibrate a forecast model on validation windows never seen in training, in four stages.

1. `choose_settings`: rollouts from the same windows with the same random numbers. They compare numbers of steps, white
   and (family `gaussian`) coloured noise, and then several tau for the best of them, by the fair CRPS after the best
   kappa of each variable and lead time.
   Each variable and lead time counts in units of the first setting's CRPS, so that late ones, whose errors are larger,
   and variables of large numbers do not decide alone. One step ahead would not do: the CRPS sees each point by itself.
   Whether samples are as smooth as the truth shows only once they are fed back.
2. `fit_factors`: kappas of each variable, smoothed over lead times. Where the model knows the season, the mean forecast
   is first damped towards the season's mean, and with the training part at hand the spread also gets a share of the
   season's own.
3. `fit_intervals`: half widths by conformal risk control, on trajectories that took part in none of this.
4. `pipeline.calibrate` keeps the result.

Points of a geographic grid weigh by their area throughout, and missing ones do not count.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from marigold_uq.calibration import Calibration, IntervalGrid, residual_ratio, stack_grids
from marigold_uq.commands.runner import Invocation
from marigold_uq.distributions import GaussianDistribution
from marigold_uq.field.calibration_windows import (
    Rollouts,
    Sampling,
    Windows,
    allot_windows,
    draw_samples,
    has_diverged,
    open_rollouts,
    untouched_windows,
)
from marigold_uq.field.config import read_config
from marigold_uq.field.data import FieldSequences, Transitions
from marigold_uq.field.encoding import fit_color, fit_season, require_data
from marigold_uq.field.forecasters import load_quietly
from marigold_uq.field.intervals import weighted_interval_grid
from marigold_uq.field.lead_factors import Factors
from marigold_uq.field.scores import independent_groups
from marigold_uq.field.settings import CalibrationOptions, Candidate, choose_settings, keep_taus
from marigold_uq.field.splits import open_split, target_hours
from marigold_uq.field.variable_factors import fit_variable_factors, of_variables
from marigold_uq.files import atomic_folder, fingerprint
from marigold_uq.models.noise_color import NoiseColor
from marigold_uq.pipelines.field import FieldForecastPipeline
from marigold_uq.results import write_json

__all__ = [
    "CalibrationOptions",
    "Candidate",
    "FieldCalibration",
    "calibrate_field",
    "calibrate_run",
    "calibration_settings",
    "fit_factors",
    "fit_intervals",
    "run_calibration",
]


WIDTH_SHOWN = 0.95
"""Coverage whose half widths calibration.json shows by variable."""


@dataclass(frozen=True)
class FieldCalibration(CalibrationOptions):
    """Calibrate a trained forecast model.

    Args:
        run: Folder that train_field.py wrote.
        device: Where the network runs.
    """

    run: Path = Path("runs/field")
    device: str = "cpu"


def run_calibration(options: FieldCalibration, invocation: Invocation) -> int:
    """The command `eval/calibrate_field.py`: calibrate, save, and say what was chosen."""
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


def calibrate_run(
    run: Path, options: CalibrationOptions, *, device: str = "cpu", verbose: bool = False
) -> dict[str, Any]:
    """Calibrate RUN/model on the validation part of its data: RUN/calibrated and, last, RUN/calibration.json."""
    config_file, model = run / "config.yaml", run / "model"
    if not config_file.exists() or not model.exists():
        raise FileNotFoundError(f"{run} is not a finished training: it has no config.yaml or no model folder")
    if (run / "calibration.json").exists():
        raise FileExistsError(f"{run / 'calibration.json'} exists: remove it to calibrate again")
    config, _ = read_config(["--config", str(config_file)])
    split, pipeline = open_split(config.data), load_quietly(model).to(device)
    require_data(pipeline.encoder, split.validation)
    hours = target_hours(config.data)
    found = calibrate_field(pipeline, split.validation, options, train=split.train, target_hours=hours, verbose=verbose)
    found |= {"seed": config.training.seed, "settings": calibration_settings(run, options)}
    with atomic_folder(run / "calibrated", overwrite=True) as temporary:  # one may be there of a killed calibration
        pipeline.save_pretrained(temporary)
    write_json(run / "calibration.json", found)
    return found


def calibration_settings(run: Path, options: CalibrationOptions) -> dict[str, Any]:
    """What a calibration of RUN/model depends on, as JSON has it."""
    return {
        **{one.name: getattr(options, one.name) for one in fields(CalibrationOptions)},
        "model": fingerprint(run / "model"),
    }


class _Stages(NamedTuple):
    """What the stages of a calibration share."""

    pipeline: FieldForecastPipeline
    windows: Transitions
    allotted: Windows
    options: CalibrationOptions


def calibrate_field(
    pipeline: FieldForecastPipeline,
    validation: FieldSequences,
    options: CalibrationOptions,
    *,
    train: FieldSequences | None = None,
    target_hours: Sequence[int] | None = None,
    verbose: bool = False,
) -> dict[str, Any]:
    """Calibrate the pipeline in place, and return what was compared and chosen as plain numbers.

    `train` is what the model was trained with; a model that knows the season learns from it what else is usual then.
    `verbose` shows a progress bar.
    """
    _learn_season(pipeline, train)
    stages = _open_stages(pipeline, validation, options, target_hours)
    best, candidates = _choose(stages, verbose)
    note = f"validation part of {validation.source}"
    chosen = Calibration(num_inference_steps=best.steps, ensemble_size=options.ensemble_size, note=note)
    chosen, taus = keep_taus(pipeline, best.taus, chosen)
    factors = fit_factors(pipeline, open_rollouts(pipeline, stages.windows, stages.allotted.fitted), chosen, options)
    keep(pipeline, factors, taus)
    ids = untouched_windows(stages.windows, stages.allotted)
    grid, num_units = fit_intervals(pipeline, stages.windows, ids, factors, options, taus)
    final = replace(factors.calibration, interval=grid, num_calibration=num_units if grid else 0)
    keep(pipeline, replace(factors, calibration=final), taus)
    return {
        "candidates": [one.to_dict() for one in candidates],
        "best": best.to_dict(),
        "calibration": final.to_dict(),
        "lead_dampings": factors.dampings,
        "lead_season_shares": factors.shares,
        "num_interval_units": num_units,
        "variables": by_variable(pipeline, factors, taus, grid),
    }


def _learn_season(pipeline: FieldForecastPipeline, train: FieldSequences | None) -> None:
    """Start without a colour, and with the season of the training part where the model knows seasons."""
    encoder, season = pipeline.encoder, None
    if train is not None and encoder.config.seasonal:
        season = fit_season(encoder, train).to(pipeline.device)
    pipeline.register_modules(noise_color=None, season=season)


def _open_stages(
    pipeline: FieldForecastPipeline,
    validation: FieldSequences,
    options: CalibrationOptions,
    hours: Sequence[int] | None,
) -> _Stages:
    config = pipeline.encoder.config
    leads = options.num_leads if list(config.targets) == list(config.variables) else 1
    windows = Transitions(validation, num_history=config.num_history, num_leads=leads, target_hours=hours)
    wanted = options.num_windows, options.fit_windows, options.interval_windows
    return _Stages(pipeline, windows, allot_windows(*wanted, len(windows)), options)


def _choose(stages: _Stages, verbose: bool) -> tuple[Candidate, list[Candidate]]:
    """Steps, noise and taus; the pipeline gets the colour of the best."""
    pipeline, windows, allotted, options = stages
    color: NoiseColor | None = None
    if (
        options.color
        and pipeline.scheduler.family is GaussianDistribution
        and not pipeline.encoder.config.get("masked")
    ):
        color = fit_color(pipeline, windows, allotted.color, options.seed)
    best, candidates = choose_settings(
        pipeline, open_rollouts(pipeline, windows, allotted.scored), options, color, verbose
    )
    pipeline.register_modules(noise_color=color if best.colored else None)
    return best, candidates


def keep(pipeline: FieldForecastPipeline, factors: Factors, taus: list[float] | None = None) -> None:
    """Store factors that hold all lead times of one variable after the other."""
    pipeline.calibrate(
        factors.calibration,
        lead_dampings=factors.dampings,
        lead_season_shares=factors.shares,
        target_taus=taus,
        by_variable=len(pipeline.encoder.config.targets) > 1,
    )


def fit_factors(
    pipeline: FieldForecastPipeline, rollouts: Rollouts, chosen: Calibration, options: CalibrationOptions
) -> Factors:
    """Dampings where the season is known, then kappas, with shares of the season's spread where it was fitted."""
    samples = _finite_samples(pipeline, rollouts, options)
    usual = None
    if pipeline.season is not None:
        usual = pipeline.season_deviations(np.asarray(rollouts.batch["time"]), rollouts.target.shape[1])
    return fit_variable_factors(samples, rollouts, chosen, usual)


def fit_intervals(
    pipeline: FieldForecastPipeline,
    windows: Transitions,
    ids: list[int],
    factors: Factors,
    options: CalibrationOptions,
    taus: list[float] | None = None,
) -> tuple[IntervalGrid | None, int]:
    """Half widths in standard deviations, one per variable and lead time, and the number of units behind them.

    The share of a window's area outside is its loss, and the unit is what is independent: the trajectory, or ten days
    of a record. None where there are too few units for any promise, or no spread to scale.
    """
    groups = independent_groups(windows, ids)
    if not groups:
        return None, 0
    keep(pipeline, factors, taus)
    rollouts = open_rollouts(pipeline, windows, ids)
    samples = _finite_samples(pipeline, rollouts, options)
    grids = []
    for values, target, _, weight in of_variables(samples, rollouts):
        ratios = residual_ratio(values.mean(0), values.std(0), target)  # (B, L, 1, *space)
        grids += [weighted_interval_grid(ratios[:, lead], weight[:, lead], groups) for lead in range(ratios.shape[1])]
    return stack_grids(grids), len(set(groups))


def by_variable(
    pipeline: FieldForecastPipeline, factors: Factors, taus: list[float] | None, grid: IntervalGrid | None
) -> dict[str, dict[str, Any]]:
    """Variable -> its unit, tau, kappas and 95 % half widths per lead time, as plain numbers."""
    targets = list(pipeline.encoder.config.targets)
    kappas = pipeline.by_variable(factors.calibration.kappas)
    known = grid is not None and grid.coverages[-1] >= WIDTH_SHOWN
    widths = pipeline.by_variable(grid.scale(WIDTH_SHOWN)) if grid is not None and known else [None] * len(targets)
    return {
        name: {
            "unit": pipeline.encoder.units.get(name),
            "tau": (taus or [factors.calibration.tau] * len(targets))[number],
            "kappas": kappas[number],
            "half_widths_95": widths[number],
        }
        for number, name in enumerate(targets)
    }


def _finite_samples(pipeline: FieldForecastPipeline, rollouts: Rollouts, options: CalibrationOptions) -> Tensor:
    """As many samples as the calibration is for, with its number of steps."""
    steps = pipeline.calibration_for().num_inference_steps
    assert steps is not None
    how = Sampling(steps, options.ensemble_size, options.seed, options.batch_size, options.mixed_precision)
    samples = draw_samples(pipeline, rollouts, how)
    if has_diverged(samples):
        raise FloatingPointError(f"{steps} steps: rollouts of {len(rollouts.ids)} windows diverge: train more")
    return samples
