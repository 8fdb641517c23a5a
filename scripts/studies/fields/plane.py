"""Two-dimensional turbulence: forecasts as maps, power by wave number, and how well strong vortices are foreseen.

python -m scripts.studies.fields.plane --output runs/plane

Models are calibrated on validation trajectories as those of `heads` are, and scored on test trajectories beside
persistence and climatology. Interrupt it at any time: the same command resumes.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils.data import default_collate

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.field import figures
from marigold_uq.field.data import NavierStokes, generate
from marigold_uq.field.forecasters import Climatology, Forecaster, Persistence, PipelineForecaster, load_quietly
from marigold_uq.field.maps import exceedance_brier, isotropic_spectrum
from marigold_uq.field.scores import independent_groups
from marigold_uq.files import atomic_path, fingerprint
from marigold_uq.metrics import crps
from marigold_uq.plotting import save_figure
from marigold_uq.results import markdown_table, write_json
from scripts.studies.fields.heads import Parts, fit_calibration, open_parts
from scripts.studies.fields.report import grouped_error
from scripts.studies.fields.study import ModelRun, StudyTask

__all__ = ["Options", "main", "score_forecaster"]


CONFIG = Path(__file__).parents[3] / "configs" / "field" / "navier_stokes_small.yaml"
EQUATION = NavierStokes(
    num_points=32 * 32, nu=0.02, forcing_wave=2, time_step=0.05, first_time=5.0, num_states=16,
)  # fmt: skip
LAST_SHELL = 10
"""The last that is drawn; the solver cuts waves from 32 / 3 on."""
STEPS = {"gaussian": 1, "point": 5, "one_pass": 1, "mixture": 1}
"""Model -> denoising steps of its forecasts."""
EVENTS = {"90 %": 0.9, "99 %": 0.99}
"""Event -> the quantile of |vorticity| in training states that it exceeds."""
SCORES = ("rmse", "crps", *(f"Brier, beyond {name}" for name in EVENTS))


@dataclass(frozen=True)
class Options:
    """Generate, train, calibrate, score and draw.

    Args:
        output: Folder of all results.
        variants: Models, of gaussian, point, one_pass and mixture.
        seed: Of the models.
        trajectories: That are generated.
        ensemble_size: Samples of each forecast.
        validation_windows: Rollouts that tau and the kappas are fitted to.
        test_windows: Rollouts that are scored.
        num_leads: Lead times.
        threads: Of torch.
    """

    output: Path
    variants: list[str] = field(default_factory=lambda: ["gaussian", "point"])
    seed: int = 0
    trajectories: int = 160
    ensemble_size: int = 8
    validation_windows: int = 10
    test_windows: int = 20
    num_leads: int = 8
    threads: int = 1

    def __post_init__(self) -> None:
        unknown = [name for name in self.variants if name not in STEPS]
        if unknown:
            raise ValueError(f"variants are of {', '.join(STEPS)}; got {', '.join(unknown)}")


def model_run(variant: str, args: Options) -> ModelRun:
    """One model of the study."""
    data = args.output / "data" / "navier_stokes.h5"
    if not data.exists():
        data.parent.mkdir(parents=True, exist_ok=True)
        generate(EQUATION, data, args.trajectories, batch_size=32)
    task = StudyTask("navier_stokes", ["--config", str(CONFIG), "--data.pde.path", str(data)])
    return ModelRun(task, variant, args.seed, args.output)


def thresholds(parts: Parts) -> dict[str, float]:
    """The quantiles of |vorticity| over training states."""
    train = parts.train
    states = torch.cat([train.read(i, 0, len(train.times(i))) for i in range(min(40, train.num_sequences))])
    ordered = states.abs().flatten().sort().values
    return {name: float(ordered[int(level * len(ordered))]) for name, level in EVENTS.items()}


def score_forecaster(forecaster: Forecaster, parts: Parts, events: dict[str, float]) -> dict[str, Any]:
    """Score -> windows -> lead times, spectra (L, shells) of truth, members and mean, and the groups of windows."""
    batch = default_collate([parts.test[index] for index in parts.scored])
    target = batch["future"]  # (B, L, 1, Y, X)
    samples = forecaster.forecast(batch, parts.scored, parts.test.num_leads)
    found = {"rmse": (samples.mean(0) - target).square(), "crps": crps(samples, target)}
    for name, threshold in events.items():
        pair = samples if len(samples) > 1 else samples.expand(2, *samples.shape[1:])  # one sample: its indicator
        found[f"Brier, beyond {name}"] = exceedance_brier(pair, target, threshold)
    spectra = {"truth": target, "members": samples.flatten(0, 1), "ensemble mean": samples.mean(0)}
    return {
        "scores": {name: _window_means(values).tolist() for name, values in found.items()},
        "spectra": {name: isotropic_spectrum(one[:, :, 0]).mean(0).tolist() for name, one in spectra.items()},
        "groups": independent_groups(parts.test, parts.scored),
    }


def _window_means(values: Tensor) -> Tensor:
    """(B, L) of (B, L, C, Y, X)."""
    return values.double().flatten(2).mean(2)


def score_model(run: ModelRun, parts: Parts, args: Options) -> dict[str, Any]:
    """Train, calibrate and score one model, where that is missing."""
    run.train()
    path = run.folder / "plane.json"
    if path.exists():
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["model"] == fingerprint(run.folder / "model"):
            return stored
    pipeline = load_quietly(run.folder / "model")
    forecaster = PipelineForecaster(
        pipeline, ensemble_size=args.ensemble_size, num_inference_steps=STEPS[run.variant], batch_size=64
    )
    chosen = fit_calibration(forecaster, parts.validation, parts.fitted)
    pipeline.save_pretrained(run.folder / "calibrated")
    found = {**score_forecaster(forecaster, parts, thresholds(parts)), "calibration": chosen}
    write_json(path, {**found, "model": fingerprint(run.folder / "model")})
    return found


def table(found: dict[str, dict[str, Any]], lead: int) -> str:
    """A row per forecaster: means over windows with the standard error over trajectories, at one lead time."""
    rows = []
    for name, one in found.items():
        cells = [name]
        for score in SCORES:
            values = torch.tensor(one["scores"][score], dtype=torch.float64)[:, lead - 1]
            error = grouped_error(values.numpy(), one["groups"])
            mean = float(values.mean())
            value, error = (mean**0.5, error / (2 * mean**0.5)) if score == "rmse" else (mean, error)
            cells.append(f"{value:.4g} ± {error:.1g}")
        rows.append(cells)
    return markdown_table(["model", *SCORES], rows)


def maps_figure(run: ModelRun, parts: Parts, args: Options, leads: Sequence[int]) -> Figure:
    """Truth, mean, a sample and the spread of one forecast at some lead times."""
    pipeline = load_quietly(run.folder / "calibrated")
    forecaster = PipelineForecaster(
        pipeline, ensemble_size=args.ensemble_size, num_inference_steps=STEPS[run.variant], batch_size=64
    )
    index = parts.scored[0]
    batch = default_collate([parts.test[index]])
    samples = forecaster.forecast(batch, [index], args.num_leads)[:, 0, :, 0]  # (M, L, Y, X)
    rows = {"truth": batch["future"][0, :, 0], "mean": samples.mean(0), "sample": samples[0], "spread": samples.std(0)}
    panels = {f"{name}, lead {lead}": field[lead - 1].numpy() for lead in leads for name, field in rows.items()}
    states = [title for title in panels if not title.startswith("spread")]
    side = 2 * torch.pi
    return figures.field_panels(
        panels, extent=(0.0, side, 0.0, side), shared={"states": states}, columns=len(rows), labels=("x", "y")
    )


def write_report(found: dict[str, dict[str, Any]], runs: dict[str, ModelRun], parts: Parts, args: Options) -> None:
    """plane.md, plane_spectra.png and plane_maps.png."""
    leads = sorted({1, args.num_leads // 2, args.num_leads})
    sections = [line for lead in leads for line in (f"## Lead {lead}", "", table(found, lead), "")]
    with atomic_path(args.output / "plane.md", overwrite=True) as temporary:
        temporary.write_text("\n".join(sections), encoding="utf-8")
    for name, run in runs.items():
        spectra = found[name]["spectra"]
        curves = {
            f"{name}, lead {lead}": {key: one[lead - 1][: LAST_SHELL + 1] for key, one in spectra.items()}
            for lead in leads
        }
        save_figure(figures.spectrum_plot(curves), args.output / f"plane_spectra_{name}.png", overwrite=True)
        drawn = maps_figure(run, parts, args, (leads[0], leads[-1]))
        save_figure(drawn, args.output / f"plane_maps_{name}.png", overwrite=True)
    print("\n".join(sections))


def run(args: Options, invocation: Invocation) -> int:
    """Data, models, baselines, report."""
    torch.set_num_threads(args.threads)
    runs = {name: model_run(name, args) for name in args.variants}
    parts = open_parts(next(iter(runs.values())), args)
    events = thresholds(parts)
    baselines = (Persistence(), Climatology(parts.train, ensemble_size=args.ensemble_size))
    found = {one.name: score_forecaster(one, parts, events) for one in baselines}
    found |= {name: score_model(one, parts, args) for name, one in runs.items()}
    write_report(found, runs, parts, args)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the options, run."""
    return run_command("scripts.studies.fields.plane", Options, run, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
