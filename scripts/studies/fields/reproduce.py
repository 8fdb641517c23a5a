"""Every table and figure of docs/results/fields.md. Interrupt it at any time; the same command resumes.

python -m scripts.studies.fields.reproduce --output runs/fields --air ../data/air_temperature.nc
python -m scripts.studies.fields.reproduce --output runs/fields --report   # tables and figures of what is there
python -m scripts.studies.fields.reproduce --output runs/fields --tasks ks --variants gaussian point --seeds 0

A model that fails is named and left out, the others are made. The tables are always of everything that is there;
figures that need data are drawn for the tasks that were asked for. Exit code 1: some model failed.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.field.calibrate import CalibrationOptions
from marigold_uq.field.data import Burgers, KuramotoSivashinsky, generate, read_trajectories
from marigold_uq.field.forecasters import Precision
from marigold_uq.files import atomic_path
from scripts.studies.fields.report import (
    calibration_table,
    collect,
    correlation_figure,
    lead_time_figure,
    member_figure,
    save_all,
    steps_figure,
    study_table,
    summary_table,
    tau_figure,
    uncertainty_figure,
)
from scripts.studies.fields.study import VARIANTS, ModelRun, StudyTask, score_baseline

__all__ = ["FAMILIES", "Options", "build_tasks", "existing_runs", "main", "make_models", "plan"]


CONFIGS = Path(__file__).parents[3] / "configs" / "field"
FAMILIES = ["point", "gaussian", "mixture", "low_rank_kernel", "low_rank_projected", "sample"]
OTHERS = ["gaussian_log", "one_pass", "point_uniform", "gaussian_uniform", "mixture_uniform"]
LONGER = ["point_long", "gaussian_long", "mixture_long"]
JOINT = ["gaussian", "low_rank_kernel", "low_rank_projected", "cholesky_kernel", "cholesky_energy"]
CURVES = [
    "point", "gaussian", "mixture", "low_rank_kernel", "low_rank_projected", "sample",
    "point_uniform", "gaussian_uniform", "mixture_uniform",
]  # fmt: skip
MEMBERS = ["point", "gaussian", "low_rank_kernel"]
"""Models whose ranks and spectra are drawn."""
PLAN = {
    "burgers": ([*FAMILIES, *OTHERS, *LONGER], [*FAMILIES, *LONGER]),
    "ks": ([*FAMILIES, *OTHERS], FAMILIES),
    "air": ([*FAMILIES, "one_pass"],),
    "burgers_32": (JOINT, JOINT),
}
"""Task -> the models of its first seed, of its second, ..."""
SHOWN_LEADS = {"burgers": (1, 5, 10), "ks": (1, 5, 10), "air": (1, 4, 8, 20), "burgers_32": (1, 10)}
BASELINES = ("persistence", "climatology")
REFERENCES = {
    "burgers": ("point", "point_long"),
    "ks": ("point", "point_uniform"),
    "air": (*BASELINES, "point"),
    "burgers_32": ("gaussian",),
}
"""Task -> the rows that others are compared with, window by window."""
SUMMARY_REFERENCE = {"burgers": "point", "ks": "point", "air": "climatology", "burgers_32": "gaussian"}
"""Task -> the row that differences in percent are from; models trained longer are compared among themselves."""
NUM_TRAJECTORIES = 2000
PDE_SCORES = {"num_one_step": 512, "num_rollouts": 96, "num_leads": 10, "figures": False}
AIR_SCORES = {"num_one_step": 144, "num_rollouts": 36, "num_leads": 20, "figures": False}


@dataclass(frozen=True)
class Options:
    """Reproduce the tables and figures of docs/results/fields.md.

    Args:
        output: Folder of all results.
        data: Folder of the generated trajectories; null takes OUTPUT/data.
        air: The weather record's netCDF file; by default it is downloaded.
        tasks: Of burgers, ks, air, burgers_32.
        variants: Only these models; by default all.
        seeds: Only these seeds; by default all.
        max_steps: Training steps of every model, more than 100; null takes the configs'.
        report: No computation: tables and figures of what is there.
        air_precision: bf16 takes half the time where the processor has it.
        threads: Of torch.
    """

    output: Path
    data: Path | None = None
    air: str = "air_temperature"
    tasks: list[str] = field(default_factory=lambda: list(PLAN))
    variants: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    max_steps: int | None = None
    report: bool = False
    air_precision: Precision = "no"
    threads: int = 1

    def __post_init__(self) -> None:
        unknown = [name for name in self.tasks if name not in PLAN]
        if unknown:
            raise ValueError(f"no task {', '.join(unknown)}; there are {', '.join(PLAN)}")


def build_tasks(data: Path, air: str, air_precision: Precision = "no") -> dict[str, StudyTask]:
    """The four tasks; the tiny grid is every fourth of 128 points, small enough for a full covariance."""
    pde = CalibrationOptions(steps=[1, 2, 5], num_windows=16, num_leads=10)
    weather = CalibrationOptions(
        steps=[1, 2],
        num_windows=16,
        interval_windows=64,
        tau_evaluations=4,
        num_leads=20,
        mixed_precision=air_precision,
    )
    paths = ["--config", str(CONFIGS / "air_small.yaml"), "--data.weather.path", air]
    tasks = [
        _pde_task("burgers", data, [], pde),
        _pde_task("ks", data, [], pde),
        _pde_task("burgers_32", data, ["--data.pde.point_stride", "4"], pde, source="burgers"),
        StudyTask(
            "air",
            [*paths, "--training.mixed_precision", air_precision],
            {**AIR_SCORES, "mixed_precision": air_precision},
            weather,
            raw_rollouts=0,
            curve_windows=12,
        ),
    ]
    return {task.name: task for task in tasks}


def _pde_task(
    name: str, data: Path, extra: Sequence[str], calibration: CalibrationOptions, source: str | None = None
) -> StudyTask:
    source = source or name
    arguments = ["--config", str(CONFIGS / f"{source}_small.yaml"), "--data.pde.path", str(data / f"{source}.h5")]
    return StudyTask(name, [*arguments, *extra], PDE_SCORES, calibration, raw_rollouts=12)


def generate_data(folder: Path, tasks: Sequence[str]) -> None:
    """Trajectories of the equations of these tasks, where they are missing."""
    folder.mkdir(parents=True, exist_ok=True)
    burgers = Burgers(num_points=512, num_states=52, save_interval=0.02)
    for name, equation, stride in (("ks", KuramotoSivashinsky(num_points=128), 1), ("burgers", burgers, 4)):
        path = folder / f"{name}.h5"
        if not any(task.startswith(name) for task in tasks):
            continue
        if not path.exists():
            generate(equation, path, NUM_TRAJECTORIES, point_stride=stride)
        elif len(read_trajectories(path)) != NUM_TRAJECTORIES:
            raise FileExistsError(f"{path} does not hold the study's {NUM_TRAJECTORIES} trajectories: remove it")


def plan(args: Options, tasks: dict[str, StudyTask]) -> list[ModelRun]:
    """All models that were asked for, first seeds first, so that every table has a row early."""
    known = {variant for name in args.tasks for variants in PLAN[name] for variant in variants}
    unknown = [variant for variant in args.variants if variant not in known]
    if unknown:
        raise ValueError(
            f"no model {', '.join(unknown)} in {', '.join(args.tasks)}; there are {', '.join(sorted(known))}"
        )
    extra = _shortened(args.max_steps)
    runs = [
        ModelRun(tasks[name], variant, seed, args.output, extra)
        for seed in range(max(len(seeds) for seeds in PLAN.values()))
        for name in args.tasks
        if seed < len(PLAN[name]) and (not args.seeds or seed in args.seeds)
        for variant in PLAN[name][seed]
        if not args.variants or variant in args.variants
    ]
    if not runs:
        raise ValueError(f"no model of {', '.join(args.tasks)} has these variants and seeds; PLAN says which there are")
    return runs


def _shortened(max_steps: int | None) -> list[str]:
    """Arguments of a training of another length than the config's."""
    if max_steps is None:
        return []
    steps = str(max_steps)
    return ["--training.max_steps", steps, "--training.optimizer.decay_steps", steps]


def write_report(args: Options, tasks: dict[str, StudyTask]) -> None:
    """results.md and figures/ from whatever is finished, whatever part of it was asked for now."""
    found = {name: existing_runs(tasks[name], args) for name in PLAN}
    parts = [line for name, own in found.items() if own for line in _task_tables(args.output, name, own)]
    with atomic_path(args.output / "results.md", overwrite=True) as temporary:
        temporary.write_text("\n".join(parts) + "\n", encoding="utf-8")
    for name, own in found.items():
        if own:
            drawings = _score_figures(name, own, _baselines(args.output / name) if name == "air" else {})
            if name in args.tasks:
                drawings |= _data_figures(name, own)
            save_all(drawings, args.output / "figures")
    print(f"written: {args.output / 'results.md'} and {args.output / 'figures'}")


def existing_runs(task: StudyTask, args: Options) -> list[ModelRun]:
    """Models of a task that have a folder, in the order of the plan."""
    order = {variant: place for place, variant in enumerate(dict.fromkeys(v for some in PLAN[task.name] for v in some))}
    names = [path.name.rpartition("-") for path in sorted((args.output / task.name).glob("*-*"))]
    runs = [
        ModelRun(task, variant, int(seed), args.output, _shortened(args.max_steps))
        for variant, _, seed in names
        if variant in VARIANTS and seed.isdecimal()
    ]
    return sorted(runs, key=lambda run: (order.get(run.variant, len(order)), run.seed))


def _task_tables(output: Path, name: str, runs: list[ModelRun]) -> list[str]:
    raw, calibrated = collect(runs, "raw/metrics.json"), collect(runs, "calibrated_scores/metrics.json")
    chosen = collect(runs, "calibration.json")
    baselines, table = _baselines(output / name), partial(study_table, references=REFERENCES.get(name, ("point",)))
    longer = {model: calibrated.pop(model) for model in LONGER if model in calibrated}
    summaries = [("Summary", {**baselines, **calibrated}, SUMMARY_REFERENCE[name])]
    summaries += [("Summary, trained longer", longer, LONGER[0])] if longer else []
    calibrated |= longer
    parts = [f"# {name}"]
    for title, rows, reference in summaries:
        parts += [f"\n## {title}, one step ahead\n", summary_table(raw, rows, "one_step", 1, reference)]
        for lead in SHOWN_LEADS[name]:
            if lead > 1:
                parts += [f"\n## {title}, lead time {lead}\n", summary_table({}, rows, "rollout", lead, reference)]
    parts += ["\n## One step ahead, as trained\n", table({**baselines, **raw}, "one_step", 1)]
    parts += ["\n## One step ahead, calibrated\n", table({**baselines, **calibrated}, "one_step", 1)]
    for lead in SHOWN_LEADS[name]:
        parts += [f"\n## Lead time {lead}, calibrated\n", table({**baselines, **calibrated}, "rollout", lead)]
        if any("rollout" in one for seeds in raw.values() for one in seeds):
            parts += [f"\n## Lead time {lead}, as trained\n", table(raw, "rollout", lead)]
    if chosen:
        parts += ["\n## Calibration, relative CRPS of validation rollouts\n", calibration_table(chosen)]
    return [*parts, ""]


def _baselines(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Scores of the baselines that are there, as those of models with one seed."""
    paths = {name: folder / name / "metrics.json" for name in BASELINES}
    return {name: [json.loads(path.read_text(encoding="utf-8"))] for name, path in paths.items() if path.exists()}


def _score_figures(
    name: str, runs: list[ModelRun], baselines: Mapping[str, list[dict[str, Any]]]
) -> dict[str, Callable[[], Figure]]:
    """Figures of what was measured."""
    calibrated, chosen = collect(runs, "calibrated_scores/metrics.json"), collect(runs, "calibration.json")
    steps = collect(runs, "steps.json")
    drawings: dict[str, Callable[[], Figure]] = {}
    if calibrated:
        first = next(iter(calibrated.values()))[0]
        facts = (first["lead_time_step"], first["expected_coverage"])
        drawings[f"{name}_lead_times"] = partial(lead_time_figure, {**baselines, **calibrated}, *facts)
        some = {model: calibrated[model] for model in MEMBERS if model in calibrated}
        drawings[f"{name}_members"] = partial(member_figure, some)
    if chosen:
        drawings[f"{name}_tau"] = partial(tau_figure, chosen)
    if steps:
        drawings[f"{name}_steps"] = partial(steps_figure, steps)
    return drawings


def _data_figures(name: str, runs: list[ModelRun]) -> dict[str, Callable[[], Figure]]:
    """Figures for which models forecast again."""
    drawings: dict[str, Callable[[], Figure]] = {}
    gaussian = [run for run in runs if run.variant == "gaussian" and (run.folder / "calibrated").exists()]
    if gaussian:
        leads = {"air": 4, "ks": 20}.get(name, 20)
        drawings[f"{name}_uncertainty"] = partial(uncertainty_figure, gaussian[0], leads)
    joint = [run for run in runs if "low_rank" in run.variant or "cholesky" in run.variant]
    joint = [run for run in joint if run.seed == 0 and (run.folder / "model").exists()]
    if joint and name == "burgers_32":
        drawings[f"{name}_correlations"] = partial(correlation_figure, joint, [0, 10, 25, 40, 49])
    return drawings


def run(args: Options, invocation: Invocation) -> int:
    """Data, baselines, models, report; 1 when a model failed."""
    torch.set_num_threads(args.threads)
    data = args.data or args.output / "data"
    tasks = build_tasks(data, args.air, args.air_precision)
    runs = plan(args, tasks)
    failed: list[str] = []
    if not args.report:
        generate_data(data, args.tasks)
        for name in args.tasks:
            for baseline in BASELINES:
                score_baseline(tasks[name], baseline, args.output)
        failed = make_models(runs)
    write_report(args, tasks)
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the options, run."""
    return run_command("scripts/studies/fields/reproduce.py", Options, run, arguments)


def make_models(runs: Sequence[ModelRun]) -> list[str]:
    """All stages of all models; returns those that fail, by a loss or a forecast that is not finite."""
    failed = []
    for number, one in enumerate(runs):
        started = time.process_time()
        try:
            one.run(curve=one.variant in CURVES and one.seed == 0)
        except ArithmeticError as error:
            failed.append(f"{one.folder}: {error}")
            print(f"failed: {failed[-1]}", file=sys.stderr, flush=True)
        used = time.process_time() - started
        print(f"[{number + 1}/{len(runs)}] {one.folder} {used:.0f} s of processor time", flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
