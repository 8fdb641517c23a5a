"""What the distributional head buys: CRPS against network calls, every model calibrated in the same way.

python -m scripts.studies.fields.heads --output runs/heads --air ../data/air_temperature.nc
python -m scripts.studies.fields.heads --output runs/heads --report   # tables and the figure of what is there

A cell is a task, a model, a seed and a number of denoising steps. It is calibrated on validation trajectories (tau out
of `TAUS`, then one kappa per lead time, all from the same rollouts), scored on test trajectories, and kept as a JSON
file. Interrupt it at any time: the same command resumes with the first cell that is missing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.utils.data import default_collate

from marigold_uq import scores
from marigold_uq.calibration import Calibration
from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.distributions import NoiseDistribution
from marigold_uq.field.config import read_config
from marigold_uq.field.data import (
    Burgers,
    FieldSequences,
    KuramotoSivashinsky,
    Transitions,
    generate,
    latitude_weights,
    statistics_of,
)
from marigold_uq.field.evaluate import GROUPS, MIN_SCALE_SHARE, PAIRED
from marigold_uq.field.forecasters import PipelineForecaster, load_quietly
from marigold_uq.field.lead_factors import best_kappas, smooth
from marigold_uq.field.scores import accumulate_scores, independent_groups, spread_windows
from marigold_uq.field.splits import open_split
from marigold_uq.files import atomic_path, fingerprint, require_same
from marigold_uq.metrics import crps, expected_coverage
from marigold_uq.pipelines.field import FieldForecastPipeline
from marigold_uq.plotting import COLORS, save_figure
from marigold_uq.results import as_json, markdown_table, write_json
from scripts.studies.fields.report import paired_cells
from scripts.studies.fields.study import ModelRun, StudyTask

__all__ = ["CLOSED", "TASKS", "Options", "Parts", "closed_form_scores", "fit_calibration", "main", "open_parts", "plan"]


CONFIGS = Path(__file__).parents[3] / "configs" / "field"
TASKS = ("ks", "burgers", "air")
TITLES = {"ks": "Kuramoto-Sivashinsky", "burgers": "Burgers'", "air": "air temperature (K)"}
SAMPLED = {
    "point_uniform": (1, 2, 5, 10),
    "gaussian": (1, 2),
    "one_pass": (1,),
    "point_edm": (1, 2, 5, 10),
    "mixture": (1, 2),
    "low_rank_projected": (1, 2),
    "low_rank_mixture": (1, 2),
    "gaussian_uniform": (1, 2, 5, 10),
    "gaussian_rollout": (1,),
}
"""Model -> the numbers of denoising steps it is tried with: few for those trained for one step."""
CLOSED = ("gaussian", "mixture", "low_rank_projected", "low_rank_mixture", "gaussian_uniform", "gaussian_rollout")
"""Models whose distribution of the next state is explicit after one network call."""
EXTRA = {"one_pass": ["--objective.num_draws", "2"]}
"""Two draws per sample, so twice the network passes of the others in training."""
REFERENCE = "point_uniform"
TAUS = (1.0, 0.1)
NUM_TRAJECTORIES = 1200
CLOSED_FILE = "closed.json"


@dataclass(frozen=True)
class Options:
    """Train, calibrate and score every cell, then write tables and the figure.

    Args:
        output: Folder of all results.
        air: The weather record's netCDF file; by default it is downloaded.
        tasks: Of ks, burgers, air.
        variants: Only these models; by default all.
        seeds: Models of each kind.
        ensemble_size: Samples of each forecast.
        validation_windows: Rollouts that tau and the kappas are fitted to, each of another trajectory.
        test_windows: Rollouts that are scored, each of another trajectory.
        num_leads: Lead times of a rollout.
        report: No computation: tables and the figure of what is there.
        threads: Of torch.
    """

    output: Path
    air: str = "air_temperature"
    tasks: list[str] = field(default_factory=lambda: list(TASKS))
    variants: list[str] = field(default_factory=list)
    seeds: int = 3
    ensemble_size: int = 8
    validation_windows: int = 8
    test_windows: int = 24
    num_leads: int = 10
    report: bool = False
    threads: int = 1

    def __post_init__(self) -> None:
        wrong = [name for name in (*self.tasks, *self.variants) if name not in (*TASKS, *SAMPLED)]
        if wrong:
            raise ValueError(f"tasks and variants are of {', '.join((*TASKS, *SAMPLED))}; got {', '.join(wrong)}")


def build_task(name: str, args: Options) -> StudyTask:
    """The config of a task at the study's size; air takes the part of the record over the south of North America."""
    path = ["--data.pde.path", str(args.output / "data" / f"{name}.h5")]
    if name == "air":
        path = ["--data.weather.path", args.air, "--data.weather.latitude", "[30, 60]"]
        path += ["--data.weather.longitude", "[240, 300]"]
    overlay = [word for file in (f"{name}_small", "heads") for word in ("--config", str(CONFIGS / f"{file}.yaml"))]
    return StudyTask(name, [*overlay, *path])


def generate_data(args: Options) -> None:
    """Trajectories on 64 points where they are missing."""
    (args.output / "data").mkdir(parents=True, exist_ok=True)
    equations = {
        "ks": (KuramotoSivashinsky(num_points=128, time_step=0.25), 2),
        "burgers": (Burgers(num_points=256, num_states=52, save_interval=0.02), 4),
    }
    for name, (equation, stride) in equations.items():
        path = args.output / "data" / f"{name}.h5"
        if name in args.tasks and not path.exists():
            generate(equation, path, NUM_TRAJECTORIES, point_stride=stride)


def plan(args: Options) -> list[ModelRun]:
    """All models, first seeds first, so that every table has a row early."""
    tasks = {name: build_task(name, args) for name in args.tasks}
    names = [name for name in SAMPLED if not args.variants or name in args.variants]
    cells = product(range(args.seeds), args.tasks, names)
    return [ModelRun(tasks[task], variant, seed, args.output, EXTRA.get(variant, [])) for seed, task, variant in cells]


@dataclass(frozen=True)
class Parts:
    """What the cells of one task share: windows of all lead times, and the trajectories behind the choices."""

    train: FieldSequences
    validation: Transitions
    test: Transitions
    fitted: list[int]
    scored: list[int]


class Sizes(Protocol):
    """How many windows choose and score, and how long they are."""

    @property
    def validation_windows(self) -> int: ...

    @property
    def test_windows(self) -> int: ...

    @property
    def num_leads(self) -> int: ...


def open_parts(run: ModelRun, args: Sizes) -> Parts:
    """The same for all models of a task."""
    config = read_config(run.arguments)[0]
    split = open_split(config.data)
    windows = partial(Transitions, num_history=config.model.num_history, num_leads=args.num_leads)
    validation, test = windows(split.validation), windows(split.test)
    fitted = spread_windows(args.validation_windows, len(validation))
    return Parts(split.train, validation, test, fitted, spread_windows(args.test_windows, len(test)))


def fit_calibration(forecaster: PipelineForecaster, windows: Transitions, ids: Sequence[int]) -> dict[str, Any]:
    """Keep the tau and the kappas with the best CRPS over all lead times; each tau is rolled out once.

    A lead time counts by the logarithm of its CRPS, so that late ones do not decide alone.
    """
    batch = default_collate([windows[index] for index in ids])
    pipeline = forecaster.pipeline
    target = pipeline.encoder.select_targets(batch["future"])  # (B, L, C, *space)
    size: dict[str, Any] = {
        "num_inference_steps": forecaster.num_inference_steps,
        "ensemble_size": forecaster.ensemble_size,
    }
    found = []
    for tau in TAUS:
        pipeline.calibrate(Calibration(tau=tau, **size))
        samples = forecaster.forecast(batch, ids, windows.num_leads)
        kappas = tuple(smooth(best_kappas(samples, target)))
        pipeline.calibrate(Calibration(tau=tau, kappa=kappas, **size))
        samples = pipeline.calibrate_samples(samples, np.asarray(batch["time"]))
        leads = crps(samples, target).double().transpose(0, 1).flatten(1).mean(1)
        found.append((float(leads.log().mean()), tau, kappas, leads.tolist()))
    score, tau, kappas, lead_scores = min(found)
    pipeline.calibrate(Calibration(tau=tau, kappa=kappas, **size))
    return {"tau": tau, "kappas": list(kappas), "validation_crps": lead_scores, "validation_score": score}


def sampled_cell(run: ModelRun, parts: Parts, steps: int, args: Options) -> None:
    """Calibrate and score one number of steps, where that is missing."""
    path, facts = run.folder / f"steps_{steps}.json", _facts(run, args)
    if _is_done(path, facts):
        return
    pipeline = load_quietly(run.folder / "model")
    forecaster = PipelineForecaster(pipeline, ensemble_size=args.ensemble_size, num_inference_steps=steps)
    chosen = fit_calibration(forecaster, parts.validation, parts.fitted)
    spread = max(statistics_of(parts.train)[name].increment_std for name in pipeline.encoder.config.targets)
    found = accumulate_scores(
        forecaster,
        parts.test,
        parts.scored,
        select_targets=pipeline.encoder.select_targets,
        min_scale=MIN_SCALE_SHARE * spread,
        batch_size=16,
    )
    table = found.samples()["crps"]
    windows = {str(i): row for i, row in zip(table.ids, table.values.tolist(), strict=True)}
    write_json(path, {"rollout": _entry(windows, parts, as_json(found.compute())), **chosen, "facts": facts})


def _facts(run: ModelRun, args: Options) -> dict[str, Any]:
    """What a cell depends on."""
    names = ("ensemble_size", "validation_windows", "test_windows", "num_leads")
    return {**{name: getattr(args, name) for name in names}, "model": fingerprint(run.folder / "model")}


def _is_done(path: Path, facts: Mapping[str, Any]) -> bool:
    if not path.exists():
        return False
    require_same(path, json.loads(path.read_text(encoding="utf-8"))["facts"], dict(facts))
    return True


def _entry(windows: Mapping[str, list[float]], parts: Parts, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Scores as `evaluate_field` has them, for `paired_cells`."""
    groups = dict(zip(map(str, parts.scored), independent_groups(parts.test, parts.scored), strict=True))
    return {**metrics, PAIRED: dict(windows), GROUPS: groups}


def closed_cell(run: ModelRun, parts: Parts, args: Options) -> None:
    """Score the explicit distribution of the next state: one network call for the whole forecast."""
    path, facts = run.folder / CLOSED_FILE, _facts(run, args)
    if _is_done(path, facts):
        return
    pipeline = load_quietly(run.folder / "model")
    tau = _best_closed_tau(partial(closed_form_scores, pipeline, parts.validation, parts.fitted))
    rows = closed_form_scores(pipeline, parts.test, parts.scored, tau)
    windows = {str(i): [float(row)] for i, row in zip(parts.scored, rows, strict=True)}
    entry = _entry(windows, parts, {"crps": {"value": [float(rows.mean())]}})
    write_json(path, {"rollout": entry, "tau": tau, "facts": facts})


def _best_closed_tau(score: Any) -> float:
    """The factor on the distribution's covariance with the best validation CRPS."""
    found = minimize_scalar(
        lambda log_tau: float(score(float(np.exp(log_tau))).mean()),
        bounds=(np.log(1e-3), np.log(10.0)),
        method="bounded",
        options={"xatol": 0.05},
    )
    return float(np.exp(found.x))


def closed_form_scores(pipeline: FieldForecastPipeline, windows: Transitions, ids: Sequence[int], tau: float) -> Tensor:
    """CRPS (B,) of the distribution of the next state, its covariance times tau, averaged over space."""
    batch = default_collate([windows[index] for index in ids])
    starts = [torch.Generator().manual_seed(index) for index in ids]
    law: NoiseDistribution = pipeline.one_step_distribution(
        batch["history"], time=np.asarray(batch["time"]), generator=starts
    )
    values = scores.crps(law.scaled(tau), pipeline.encoder.select_targets(batch["future"][:, 0]))
    weight = latitude_weights(windows.sequences.coordinates)
    weight = torch.ones(()) if weight is None else weight.to(values)
    return (values * weight).flatten(1).sum(1) / weight.expand(values.shape).flatten(1).sum(1)


def read_cells(args: Options) -> dict[str, dict[str, dict[str, list[dict[str, Any]]]]]:
    """Task -> model -> "1", "2", ..., "closed" -> what was measured, one entry per seed."""
    found: dict[str, dict[str, dict[str, list[dict[str, Any]]]]] = {}
    for run in plan(args):
        for path in sorted(run.folder.glob("steps_*.json")) + sorted(run.folder.glob(CLOSED_FILE)):
            key = path.stem.removeprefix("steps_")
            models = found.setdefault(run.task.name, {})
            cell = json.loads(path.read_text(encoding="utf-8"))
            models.setdefault(run.variant, {}).setdefault(key, []).append(cell)
    return found


Cells = Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]
"""Model -> number of steps -> seeds, of one task."""


def lead_crps(seeds: Sequence[Mapping[str, Any]], lead: int) -> list[float]:
    """Mean CRPS of every seed at a lead time that counts from 1; empty where there is none."""
    values = [one["rollout"]["crps"]["value"] for one in seeds]
    return [one[lead - 1] for one in values if len(one) >= lead]


def own_steps(cells: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The number of steps with the best validation score, a mean over seeds."""
    sampled = {steps: seeds for steps, seeds in cells.items() if steps != "closed"}
    return min(sampled, key=lambda steps: float(np.mean([one["validation_score"] for one in sampled[steps]])))


def calls_table(cells: Cells, lead: int) -> str:
    """CRPS by network calls per sample, and the paired difference from `REFERENCE` with as many calls."""
    columns = [key for key in ("closed", "1", "2", "5", "10") if any(key in one for one in cells.values())]
    columns = columns if lead == 1 else [key for key in columns if key != "closed"]
    rows = []
    for name, own in cells.items():
        rows.append([name, str(max(map(len, own.values()))), *(_crps_cell(cells, name, key, lead) for key in columns)])
    return markdown_table(["model", "seeds", *columns], rows)


def _crps_cell(cells: Cells, name: str, steps: str, lead: int) -> str:
    seeds = cells[name].get(steps, [])
    values = lead_crps(seeds, lead)
    if not values:
        return ""
    text = f"{np.mean(values):.4g}" + (f" ± {(max(values) - min(values)) / 2:.1g}" if len(values) > 1 else "")
    reference = cells.get(REFERENCE, {}).get("1" if steps == "closed" else steps, [])
    if name == REFERENCE or not reference:
        return text
    return f"{text} ({_difference(seeds, reference, lead)})"


def _difference(seeds: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]], lead: int) -> str:
    return paired_cells(seeds, reference, "rollout", lead, percent=True)[0] + " %"


def best_table(cells: Cells) -> str:
    """Each model with the steps that validation data chose, against `REFERENCE` with its own."""
    titles = ["model", "calls per sample", "tau", "kappa, lead 1"]
    titles += [f"{title}, lead {lead}" for lead in (1, 10) for title in ("CRPS", f"- {REFERENCE} (%)", "coverage")]
    return markdown_table(titles, [_best_row(cells, name) for name in cells])


def _best_row(cells: Cells, name: str) -> list[str]:
    steps = own_steps(cells[name])
    seeds = cells[name][steps]
    row = [name, steps, ", ".join(f"{one['tau']:g}" for one in seeds)]
    row.append(", ".join(f"{one['kappas'][0]:.2f}" for one in seeds))
    for lead in (1, 10):
        base = cells[REFERENCE][own_steps(cells[REFERENCE])] if REFERENCE in cells else []
        coverage = np.mean([one["rollout"]["coverage"]["value"][lead - 1] for one in seeds])
        paired = _difference(seeds, base, lead) if base and name != REFERENCE else ""
        row += [f"{np.mean(lead_crps(seeds, lead)):.4g}", paired, f"{coverage:.3f}"]
    return row


def calls_figure(found: Mapping[str, Cells], ensemble_size: int) -> Figure:
    """CRPS against network calls per forecast and lead time: a row per task, lead times 1 and 10."""
    figure = Figure(figsize=(9.5, 2.9 * len(found)), layout="constrained")
    panels = figure.subplots(len(found), 2, squeeze=False)
    for row, (task, cells) in zip(panels, found.items(), strict=True):
        for axes, lead in zip(row, (1, 10), strict=True):
            for place, name in enumerate(SAMPLED):
                if name in cells:
                    _calls_curve(axes, cells[name], lead, ensemble_size, name, place)
            _log_axes(axes, [1, *(ensemble_size * steps for steps in (1, 2, 5, 10))])
            axes.set_title(f"{TITLES[task]}, lead {lead}", fontsize=10)
            axes.set_xlabel(f"network calls per lead time for {ensemble_size} samples", fontsize=9)
            axes.set_ylabel("CRPS", fontsize=9)
            axes.spines[["top", "right"]].set_visible(False)
    fullest = max(panels.flatten(), key=lambda axes: len(axes.get_legend_handles_labels()[0]))
    handles, labels = fullest.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _log_axes(axes: Any, calls: Sequence[int]) -> None:
    """Both logarithmic, with plain numbers; ticks where there are cells."""
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(calls, [str(number) for number in calls])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(0.8 * calls[0], 1.25 * calls[-1])
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.tick_params(which="both", labelsize=8)


def _calls_curve(
    axes: Any, cells: Mapping[str, Sequence[Mapping[str, Any]]], lead: int, size: int, name: str, place: int
) -> None:
    """Means over seeds with the range of the seeds; the closed form is one call."""
    calls = {key: 1 if key == "closed" else size * int(key) for key in cells if lead_crps(cells[key], lead)}
    order = sorted(calls, key=calls.__getitem__)
    values = [lead_crps(cells[key], lead) for key in order]
    means = [float(np.mean(one)) for one in values]
    reach = [[m - min(one) for m, one in zip(means, values, strict=True)]]
    reach += [[max(one) - m for m, one in zip(means, values, strict=True)]]
    style = "--" if name.startswith("point") or name == "one_pass" else "-"
    marker = "os^Dv*PXh"[place]
    color = (
        COLORS[place % len(COLORS)] if place < len(COLORS) else ("#111111", "#cc6699", "#44aaaa")[place - len(COLORS)]
    )
    axes.errorbar([calls[k] for k in order], means, reach, fmt=style + marker, markersize=4, color=color, label=name)


def write_report(args: Options) -> None:
    """heads.md and heads.png from whatever is finished."""
    found = read_cells(args)
    expected = expected_coverage(args.ensemble_size, 0.95)
    parts = [f"Coverage of perfect samples: {expected:.3f}.", ""]
    for task, cells in found.items():
        parts += [f"# {task}", "", "## Best number of calls, by validation", "", best_table(cells), ""]
        for lead in (1, 10):
            parts += [f"## Lead time {lead}, by network calls per sample", "", calls_table(cells, lead), ""]
    with atomic_path(args.output / "heads.md", overwrite=True) as temporary:
        temporary.write_text("\n".join(parts), encoding="utf-8")
    if found:
        save_figure(calls_figure(found, args.ensemble_size), args.output / "heads.png", overwrite=True)
    print(f"written: {args.output / 'heads.md'} and heads.png")


def run(args: Options, invocation: Invocation) -> int:
    """Data, then every cell, then the report."""
    torch.set_num_threads(args.threads)
    if not args.report:
        generate_data(args)
        runs = plan(args)
        for number, one in enumerate(runs):
            one.train()
            parts = open_parts(one, args)
            for steps in SAMPLED[one.variant]:
                sampled_cell(one, parts, steps, args)
            if one.variant in CLOSED:
                closed_cell(one, parts, args)
            print(f"[{number + 1}/{len(runs)}] {one.folder}", flush=True)
    write_report(args)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the options, run."""
    return run_command("scripts.studies.fields.heads", Options, run, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
