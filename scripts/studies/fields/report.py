"""Tables and figures of a study of forecast models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch.utils.data import default_collate

from marigold_uq import plotting
from marigold_uq.denoising import predict_output
from marigold_uq.distributions import CholeskyDistribution, LowRankDistribution, NoiseDistribution
from marigold_uq.field import figures
from marigold_uq.field.config import read_config
from marigold_uq.field.data import Transitions
from marigold_uq.field.evaluate import CURVES, GROUPS, PAIRED, SHOWN
from marigold_uq.field.forecasters import load_quietly
from marigold_uq.field.splits import open_split
from marigold_uq.pipelines.field import FieldForecastPipeline
from marigold_uq.pipelines.field.output import FieldForecast
from scripts.studies.fields.study import ModelRun

__all__ = [
    "calibration_table",
    "collect",
    "correlation_figure",
    "grouped_error",
    "law_correlation",
    "lead_time_figure",
    "member_figure",
    "paired_cells",
    "save_all",
    "steps_figure",
    "study_table",
    "summary_table",
    "tau_figure",
    "uncertainty_figure",
]


Rows = Mapping[str, Sequence[Mapping[str, Any]]]
"""Model -> what was measured, one entry per seed."""


def collect(runs: Sequence[ModelRun], file: str) -> dict[str, list[dict[str, Any]]]:
    """Model -> the files of its seeds, of those that are finished."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        if (run.folder / file).exists():
            found.setdefault(run.name, []).append(run.read(file))
    return found


def study_table(
    rows: Rows, part: str, lead: int, metrics: Sequence[str] = SHOWN, references: Sequence[str] = ()
) -> str:
    """Markdown: a row per model, means over its seeds; `lead` counts from 1.

    Behind ± is half the range of the seeds, or the standard error over windows where there is one seed. For each of
    the `references`, rows of the table, there is a column with the CRPS minus that row's, window by window (both means
    over seeds), and the standard error of the mean difference, for which windows of one trajectory (of ten days, of a
    weather record) count as one; and one with the geometric mean of their ratios, which a few windows with large errors
    do not decide.
    """
    known = [name for name in references if name in rows]
    titles = [*metrics, *(f"crps {sign} {name}" for name in known for sign in ("-", "/"))]
    lines = ["| model | seeds | " + " | ".join(titles) + " |", "|---" * (2 + len(titles)) + "|"]
    for name, seeds in rows.items():
        cells = [_cell(seeds, part, metric, lead) for metric in metrics]
        for other in known:
            cells += ["", ""] if name == other else paired_cells(seeds, rows[other], part, lead)
        lines.append(f"| {name} | {len(seeds)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def summary_table(raw: Rows, calibrated: Rows, part: str, lead: int, reference: str) -> str:
    """Markdown: CRPS and coverage as trained and calibrated, and the difference from the row `reference` in percent.

    Coverage is that of the members' 95 % quantiles, "interval" that of the calibrated interval. The difference is of
    mean CRPS; "typical" is the geometric mean, over windows, of the ratio. Errors behind differences and ratios take
    windows of one trajectory for one, those behind other numbers do not. Baselines are in `calibrated` alone; `raw` may
    be empty.
    """
    own = [("crps", "crps"), ("coverage", "coverage")] if raw else []
    after = [("crps", "crps"), ("rmse", "rmse")]
    last = [("coverage", "coverage"), ("interval", "conformal_coverage"), ("spread/skill", "spread_skill_ratio")]
    titles = [f"{title}, as trained" for title, _ in own] + [title for title, _ in after]
    titles += [f"- {reference} (%)", f"/ {reference}, typical", *(title for title, _ in last)]
    lines = ["| model | seeds | " + " | ".join(titles) + " |", "|---" * (2 + len(titles)) + "|"]
    base = calibrated.get(reference, [])
    for name, seeds in calibrated.items():
        cells = [_cell(raw.get(name, []), part, metric, lead) for _, metric in own]
        cells += [_cell(seeds, part, metric, lead) for _, metric in after]
        cells += ["", ""] if name == reference else paired_cells(seeds, base, part, lead, percent=True)
        cells += [_cell(seeds, part, metric, lead) for _, metric in last]
        lines.append(f"| {name} | {len(seeds)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _number(metrics: Mapping[str, Any], part: str, metric: str, lead: int, key: str = "value") -> float | None:
    values = metrics.get(part, {}).get(metric, {}).get(key)
    return None if values is None or lead > len(values) else values[lead - 1]


def _cell(seeds: Sequence[Mapping[str, Any]], part: str, metric: str, lead: int) -> str:
    values = [_number(one, part, metric, lead) for one in seeds]
    known = [value for value in values if value is not None]
    if not known:
        return ""
    one_seed = _number(seeds[0], part, metric, lead, "standard_error")
    error = (max(known) - min(known)) / 2 if len(known) > 1 else one_seed
    return f"{math.fsum(known) / len(known):.4g}" + ("" if error is None else f" ± {error:.1g}")


def paired_cells(
    seeds: Sequence[Mapping[str, Any]],
    reference: Sequence[Mapping[str, Any]],
    part: str,
    lead: int,
    *,
    percent: bool = False,
) -> list[str]:
    """Mean CRPS of the seeds against that of the reference's, over windows that all have: difference and ratio."""
    tables = [one.get(part, {}).get(PAIRED, {}) for one in (*reference, *seeds)]
    shared = sorted(set.intersection(*(set(table) for table in tables)))
    if not reference or len(shared) < 2 or lead > len(tables[0][shared[0]]):
        return ["", ""]
    scores = [np.array([table[window][lead - 1] for window in shared]) for table in tables]
    own, base = np.mean(scores[len(reference) :], 0), np.mean(scores[: len(reference)], 0)
    groups = [seeds[0][part][GROUPS][window] for window in shared]
    if percent:
        share = own.mean() / base.mean()  # a ratio of two means over the same windows
        error = 100 * grouped_error(own - share * base, groups) / base.mean()
        cells = [f"{100 * (share - 1):+.1f} ± {error:.1f}"]
    else:
        cells = [f"{(own - base).mean():.3g} ± {grouped_error(own - base, groups):.1g}"]
    if min(own.min(), base.min()) <= 0:  # the fair CRPS can be negative
        return [*cells, ""]
    logs = np.log(own / base)
    ratio = math.exp(logs.mean())
    return [*cells, f"{ratio:.3g} ± {ratio * grouped_error(logs, groups):.1g}"]


def grouped_error(values: NDArray[np.float64], groups: Sequence[Any]) -> float:
    """Standard error of the mean of values that are independent between groups only; NaN with one group."""
    sums: dict[Any, float] = {}
    for value, group in zip(values - values.mean(), groups, strict=True):
        sums[group] = sums.get(group, 0.0) + float(value)
    count = len(sums)
    if count < 2:
        return math.nan
    return math.sqrt(count / (count - 1) * math.fsum(total**2 for total in sums.values())) / len(values)


def calibration_table(rows: Rows) -> str:
    """What was chosen on the validation part, a row per model, seed and number of steps.

    Numbers are the CRPS of rollouts, a mean over lead times in units of the first setting's that does not diverge.
    """
    titles = ["alone", "with kappa", "best tau alone", "best tau with kappa"]
    lines = [
        "| model | seed | steps | noise | chosen tau | " + " | ".join(titles) + " |",
        "|---" * (5 + len(titles)) + "|",
    ]
    for model, seeds in rows.items():
        for one in seeds:
            for steps, colored in sorted({(c["steps"], c["colored"]) for c in one["candidates"]}):
                own = [c for c in one["candidates"] if (c["steps"], c["colored"]) == (steps, colored)]
                plain = [candidate for candidate in own if candidate["tau"] == 1]
                keys = ("score_alone", "score")
                cells = [_least(plain, key) for key in keys] + [_least(own, key) for key in keys]
                is_best = (one["best"]["steps"], one["best"]["colored"]) == (steps, colored)
                chosen = f"{one['best']['tau']:.3g}" if is_best else ""
                row = [model, str(one["seed"]), str(steps), "coloured" if colored else "white", chosen, *cells]
                lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def _least(candidates: Sequence[Mapping[str, Any]], key: str) -> str:
    scores = [one[key] for one in candidates if one[key] is not None]
    return f"{min(scores):.4g}" if scores else "diverged"


def lead_time_figure(rows: Rows, time_step: float, expected: float | None) -> Figure:
    """Scores against lead time, the first seed of every model."""
    first = {name: seeds[0]["rollout"] for name, seeds in rows.items() if "rollout" in seeds[0]}
    num_leads = len(next(iter(first.values()))["rmse"]["value"])
    values = {m: {name: one[m]["value"] for name, one in first.items() if m in one} for m in CURVES}
    calendar = time_step >= 3600
    times = [time_step * lead / (86_400 if calendar else 1) for lead in range(1, num_leads + 1)]
    return figures.lead_time_curves(values, times, unit="(days)" if calendar else "", expected_coverage=expected)


def tau_figure(rows: Rows) -> Figure:
    """CRPS of rollouts against tau alone (Appendix D), first seed, for the number of steps that was chosen."""
    curves = {}
    for name, (one, *_) in rows.items():
        best = (one["best"]["steps"], one["best"]["colored"])
        same = [c for c in one["candidates"] if (c["steps"], c["colored"]) == best and c["score_alone"] is not None]
        points = sorted({(c["tau"], c["score_alone"]) for c in same})
        if len(points) > 1:
            least = min(score for _, score in points)
            curves[name] = ([tau for tau, _ in points], [score / least for _, score in points])
    return figures.parameter_curves(curves, xlabel="tau", ylabel="CRPS / best CRPS, validation")


def member_figure(rows: Rows, part: str = "rollout") -> Figure:
    """Ranks of the truth among the members and power spectra, first seed, at the first and the last lead time."""
    shown = {name: one[part] for name, (one, *_) in rows.items() if "rank_histogram" in one.get(part, {})}
    if not shown:
        raise FileNotFoundError("no rollouts with members")
    last = min(len(one["rank_histogram"]["value"]) for one in shown.values()) - 1
    labels = {"spectrum_target": "truth", "spectrum_members": "members", "spectrum_mean": "ensemble mean"}
    panels = {
        (name, lead + 1): (
            one["rank_histogram"]["value"][lead],
            {label: one[key]["value"][lead] for key, label in labels.items()},
        )
        for name, one in shown.items()
        for lead in sorted({0, last})
    }
    return figures.rank_and_spectrum_panels(panels)


def steps_figure(rows: Rows) -> Figure:
    """CRPS against the number of denoising steps."""
    curves = {
        name: ([int(n) for n in one["scores"]], [entry["crps"]["value"][0] for entry in one["scores"].values()])
        for name, (one, *_) in rows.items()
    }
    return figures.parameter_curves(curves, xlabel="denoising steps", ylabel="CRPS, one step ahead, test")


def uncertainty_figure(run: ModelRun, num_leads: int, *, index: int = 0, ensemble_size: int = 40) -> Figure:
    """Truth, mean, uncertainty and epistemic estimate of one forecast (Appendix E), from the calibrated model.

    A line is shown over space and lead time, a map at the last lead time. The spread is what the paper calls aleatoric.
    """
    pipeline = load_quietly(run.folder / "calibrated")
    split = open_split(read_config(run.arguments)[0].data)
    windows = Transitions(split.test, num_history=pipeline.encoder.config.num_history, num_leads=num_leads)
    batch = default_collate([windows[index]])
    forecast = pipeline(
        batch["history"],
        num_leads,
        ensemble_size=ensemble_size,
        time=np.asarray(batch["time"]),
        generator=torch.Generator().manual_seed(0),
        output_epistemic=True,
        output_type="pt",
    )
    truth = batch["future"][0, :, 0]
    values = {"truth": truth, "ensemble mean": forecast.prediction[0, :, 0]}
    assert isinstance(forecast, FieldForecast)
    assert forecast.epistemic is not None
    spreads = {"uncertainty (total)": forecast.uncertainty[0, :, 0], "epistemic (head)": forecast.epistemic[0, :, 0]}
    axes = list(pipeline.encoder.coordinates.items())
    if len(axes) == 1:
        return _space_time(values | spreads, axes[0], forecast.lead_times)
    chosen = {name: field[-1] for name, field in (values | spreads).items()}
    return _map(chosen, dict(axes), f"{forecast.lead_times[-1] / 3600:g} h ahead")


def _space_time(panels: Mapping[str, torch.Tensor], axis: tuple[str, NDArray[Any]], times: NDArray[Any]) -> Figure:
    name, x = axis
    step = times[0]
    return figures.field_panels(
        {title: field.numpy() for title, field in panels.items()},
        extent=(float(x[0]), float(x[-1]), float(times[0] - step / 2), float(times[-1] + step / 2)),
        shared={"states": ["truth", "ensemble mean"]},
        labels=(name, "lead time"),
    )


def _map(panels: Mapping[str, torch.Tensor], axes: Mapping[str, NDArray[Any]], title: str) -> Figure:
    latitude, longitude = axes["latitude"], axes["longitude"]
    low, high = sorted((float(latitude[0]), float(latitude[-1])))
    figure = figures.field_panels(
        {f"{name}, {title}" if name == "truth" else name: field.numpy() for name, field in panels.items()},
        extent=(float(longitude[0]), float(longitude[-1]), low, high),
        shared={"states": [f"truth, {title}", "ensemble mean"]},
        labels=("longitude", "latitude"),
        unit="K",
        flip=bool(latitude[0] > latitude[-1]),
    )
    return figure


def correlation_figure(runs: Sequence[ModelRun], timesteps: Sequence[int], *, index: int = 0) -> Figure:
    """Correlation matrices of joint distributions at several timesteps (Appendix A), for one test window."""
    matrices = {}
    for run in runs:
        pipeline = load_quietly(run.folder / "model")
        split = open_split(read_config(run.arguments)[0].data)
        windows = Transitions(split.test, num_history=pipeline.encoder.config.num_history)
        for timestep in timesteps:
            law = _law_at(pipeline, windows, index, timestep)
            matrices[f"{run.name}, t = {timestep}"] = law_correlation(law)[0].numpy()
    return figures.matrix_panels(matrices, columns=len(timesteps))


@torch.no_grad()
def _law_at(pipeline: FieldForecastPipeline, windows: Transitions, index: int, timestep: int) -> NoiseDistribution:
    batch = default_collate([windows[index]])
    history = batch["history"]
    x_0 = pipeline.encoder.encode_target(history[:, -1], batch["future"][:, 0])
    noise = torch.randn(x_0.shape, generator=torch.Generator().manual_seed(0))
    t = torch.tensor([timestep])
    x_t = pipeline.scheduler.add_noise(x_0, noise, t)
    condition = pipeline.encoder.condition(history, batch["time"])
    return predict_output(pipeline.denoiser(condition), pipeline.scheduler, x_t, t)


def law_correlation(law: NoiseDistribution) -> torch.Tensor:
    """Correlations (B, D, D) of a joint Gaussian; for figures of small events."""
    if isinstance(law, LowRankDistribution):
        factor = law.cov_factor.flatten(2)  # (B, R, D)
        covariance = torch.diag_embed(law.cov_diag.flatten(1)) + factor.mT @ factor
    elif isinstance(law, CholeskyDistribution):
        covariance = law.scale_tril @ law.scale_tril.mT
    else:
        raise TypeError(f"family {law.name!r} has no correlations to show")
    scale = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    return covariance / (scale.unsqueeze(-1) * scale.unsqueeze(-2))


def save_all(drawings: Mapping[str, Callable[[], Figure]], folder: Path) -> None:
    """Draw and write each figure; one whose results are not there yet is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in drawings.items():
        try:
            figure = draw()
        except (StopIteration, ImportError, OSError) as error:
            print(f"{name}: not drawn ({error})")
            continue
        plotting.save_figure(figure, folder / f"{name}.png", overwrite=True)
