"""The text of a model card: what the model is, how to use it, how good it is by which command, what it cannot do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import marigold_uq
from marigold_uq.calibration import Calibration, read_calibrations
from marigold_uq.results import markdown_table, number

if TYPE_CHECKING:
    from marigold_uq.hub import Evaluation, FinishedRun

__all__ = ["HUB_TASKS", "HubTask", "card_body", "metric_title", "shown_metrics", "task_of_class"]

_METRIC_TITLES = {
    "abs_relative_difference": "AbsRel",
    "delta1": "delta1",
    "rmse": "RMSE",
    "crps": "CRPS",
    "relative_crps": "CRPS / depth",
    "energy_score": "energy score",
    "gaussian_nll": "Gaussian NLL",
    "coverage": "coverage",
    "expected_coverage": "coverage expected of calibrated members",
    "interval_width": "interval width",
    "calibrated_coverage": "coverage of the calibrated interval",
    "calibrated_width": "width of the calibrated interval",
    "spread_skill_ratio": "spread / skill",
    "ause_abs_rel": "AUSE (AbsRel)",
    "spearman": "Spearman of uncertainty and error",
}
"""What a card shows where an evaluation has it, in this order; an evaluation without any is shown whole."""


_CITATION = """\
@article{kneissl2025improved,
  title   = {Improved probabilistic regression using diffusion models},
  author  = {Kneissl, Carlo and B{\\"u}lte, Christopher and Scholl, Philipp and Kutyniok, Gitta},
  journal = {arXiv preprint arXiv:2510.04583},
  year    = {2025}
}"""


@dataclass(frozen=True)
class HubTask:
    """How the Hub files a kind of model, and what a card says about it."""

    name: str
    pipeline_tag: str
    module: str
    class_name: str
    tags: tuple[str, ...]
    summary: str
    usage: str
    limits: tuple[str, ...]


_DEPTH_USAGE = """\
from marigold_uq import {class_name}

pipeline = {class_name}.from_pretrained("{source}")
output = pipeline("photo.jpg", uncertainty="{mode}", coverage=0.9)
output.prediction   # depth (1, H, W, 1), larger is farther
output.uncertainty  # its standard deviation, in the same units
output.interval     # lower and upper end of the 90 % interval (1, H, W, 2)"""

_FIELD_USAGE = """\
from marigold_uq import {class_name}

pipeline = {class_name}.from_pretrained("{source}")
forecast = pipeline(states, num_leads=10, coverage=0.9)  # the last states, oldest first, or an xarray Dataset
forecast.prediction   # one field per lead time
forecast.uncertainty  # its standard deviation
forecast.interval     # lower and upper end of the 90 % interval"""

_TABULAR_USAGE = """\
from marigold_uq import {class_name}

pipeline = {class_name}.from_pretrained("{source}")
output = pipeline(features, coverage=0.9)  # (rows, columns), or a DataFrame like that of the training
output.prediction   # (rows, targets)
output.uncertainty  # its standard deviation
output.interval     # lower and upper end of the 90 % interval (2, rows, targets)"""

HUB_TASKS = {
    task.name: task
    for task in (
        HubTask(
            name="depth",
            pipeline_tag="depth-estimation",
            module="marigold_uq.pipelines.depth",
            class_name="MarigoldUQDepthPipeline",
            tags=("depth-estimation", "monocular-depth", "marigold", "diffusion"),
            summary="Depth of a single photograph, with a standard deviation, quantiles and samples for every pixel.",
            usage=_DEPTH_USAGE,
            limits=(
                "Depth is affine-invariant unless the config says otherwise: right up to an unknown scale and shift "
                "per image. Metres need known distances (`marigold_uq.alignment.fit_metric`).",
                "The uncertainty describes images like those it was trained on. Mirrors, glass, sky and pictures of "
                "pictures can be wrong with confidence.",
                "An uncalibrated interval of a few members covers less than its nominal level, even if the members are "
                "perfect. Compare the coverage below with the one expected beside it.",
                "Do not base decisions about safety on it without a calibration on data of the place of use.",
            ),
        ),
        HubTask(
            name="field",
            pipeline_tag="time-series-forecasting",
            module="marigold_uq.pipelines.field",
            class_name="FieldForecastPipeline",
            tags=("spatio-temporal-forecasting", "probabilistic-forecasting", "diffusion"),
            summary="Probabilistic forecasts of fields on a grid: ensembles, one step ahead or rolled out.",
            usage=_FIELD_USAGE,
            limits=(
                "The model is bound to the grid, the time step and the variables of its training data.",
                "Uncertainty and errors were compared at the lead times below, and at no others.",
            ),
        ),
        HubTask(
            name="tabular",
            pipeline_tag="tabular-regression",
            module="marigold_uq.pipelines.tabular",
            class_name="TabularRegressionPipeline",
            tags=("tabular-regression", "probabilistic-regression", "diffusion"),
            summary="The distribution of a target given a row of features: samples, quantiles and intervals.",
            usage=_TABULAR_USAGE,
            limits=(
                "Features must come in the order and units of the training table.",
                "Do not trust the intervals outside the range of the training rows.",
            ),
        ),
    )
}


def task_of_class(class_name: str) -> HubTask:
    """The task of a pipeline class; an unknown one is an error that says what to do."""
    for task in HUB_TASKS.values():
        if task.class_name == class_name:
            return task
    raise ValueError(f"no card is known for the pipeline class {class_name!r}; name the task: {', '.join(HUB_TASKS)}")


def metric_title(name: str) -> str:
    """A metric's name in print."""
    return _METRIC_TITLES.get(name, name)


def shown_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an evaluation that a card shows."""
    shown = {name: metrics[name] for name in _METRIC_TITLES if name in metrics}
    return shown or dict(metrics)


def card_body(run: FinishedRun, *, repo_id: str | None, base_model: str | None, license: str | None) -> str:
    """The card below its metadata, in Markdown."""
    sections = [
        f"# {_plain(run.name)}\n\n{run.task.summary}{_family_sentence(run)}",
        _usage_section(run, repo_id),
        _calibration_section(run),
        _evaluation_section(run),
        _training_section(run, base_model),
        _selection_section(run),
        "## Limits\n\n" + "\n".join(f"- {limit}" for limit in run.task.limits),
        "## Licence\n\n" + (f"`{license}`" if license else "Not stated by the author of this model."),
        _reference_section(run),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _plain(text: object) -> str:
    """Words of others in a line of Markdown: no HTML, links, code or headings come of them."""
    line = " ".join(str(text).split())
    return re.sub(r"([\\`\[\]])", r"\\\1", line.replace("&", "&amp;").replace("<", "&lt;"))


def _fenced(code: str, language: str) -> str:
    """A block of code, whatever backticks are in it."""
    longest = max((len(run) for run in re.findall("`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{code}\n{fence}"


def _family_sentence(run: FinishedRun) -> str:
    family = run.scheduler.get("noise_family")
    if family is None:
        return ""
    if family == "point":
        return " The network predicts a point at every diffusion step; uncertainty comes from an ensemble of chains."
    return f" At every diffusion step the network predicts the distribution of the noise (family `{_plain(family)}`)."


def _usage_section(run: FinishedRun, repo_id: str | None) -> str:
    source = repo_id or "path/to/this/folder"
    mode = "ensemble" if run.scheduler.get("noise_family", "point") in ("point", "sample") else "trajectory"
    task = run.task
    code = task.usage.format(class_name=task.class_name, module=task.module, source=source, mode=mode)
    text = f"## Use\n\n```bash\npip install marigold_uq\n```\n\n```python\n{code}\n```"
    if not run.loads_with_diffusers:
        return text
    plain = (
        "from diffusers import DiffusionPipeline\n\n"
        f'pipeline = DiffusionPipeline.from_pretrained("{source}", custom_pipeline="{source}", trust_remote_code=True)'
    )
    return f"{text}\n\nThrough diffusers alone (marigold_uq must be installed):\n\n```python\n{plain}\n```"


def _calibration_section(run: FinishedRun) -> str:
    """What was chosen on held-out data, and the calls that it holds for."""
    records = read_calibrations(run.pipeline.get("calibration"))
    if not records:
        return ""
    text = "Chosen on held-out data and stored with the model; the pipeline warns about a call under other conditions."
    header = ["uncertainty", "steps", "members", "tau", "kappa", "intervals calibrated for coverages", "units", "data"]
    return f"## Calibration\n\n{text}\n\n{markdown_table(header, map(_calibration_row, records))}"


def _calibration_row(record: Calibration) -> list[Any]:
    grid = record.interval
    kappas = sorted({min(record.kappas), max(record.kappas)})
    levels = [] if grid is None else [f"{100 * level:g} %" for level in (grid.coverages[0], grid.coverages[-1])]
    return [
        record.uncertainty or "ensemble",
        record.num_inference_steps or "any",
        record.ensemble_size or "any",
        record.tau,
        " to ".join(map(number, kappas)),
        " to ".join(dict.fromkeys(levels)) or "none",
        record.num_calibration or None,
        _plain(record.note),
    ]


def _evaluation_section(run: FinishedRun) -> str:
    if not run.evaluations:
        return "## Evaluation\n\nNot evaluated yet."
    return "\n\n".join(["## Evaluation", *(_evaluation_text(evaluation) for evaluation in run.evaluations)])


def _evaluation_text(evaluation: Evaluation) -> str:
    """A table with standard errors, how it was made, and the command."""
    setting = f" ({_plain(evaluation.setting)})" if evaluation.setting else ""
    notes = _plain(evaluation.notes)
    rows = [
        [_plain(metric_title(name)), f"{value:.4g}", "" if error is None else f"{error:.2g}"]
        for name, (value, error) in evaluation.metrics.items()
    ]
    parts = [
        f"### {_plain(evaluation.dataset_title)}{setting}",
        markdown_table(["metric", "value", "standard error"], rows),
        notes[:1].upper() + notes[1:] + "." if notes else "",
        _fenced(evaluation.command, "bash") if evaluation.command else "",
    ]
    return "\n\n".join(part for part in parts if part)


def _training_section(run: FinishedRun, base_model: str | None) -> str:
    """What the run's config and the stored pipeline say."""
    training = _entries(run.config.get("training"))
    optimizer = _entries(training.get("optimizer"))
    parts = run.config.get("data")
    facts = {
        "started from": base_model,
        "data": ", ".join(str(_entries(part).get("name")) for part in parts) if isinstance(parts, list) else None,
        "trained": run.config.get("trainable"),
        "steps": run.step or training.get("max_steps"),
        "batch": training.get("batch_size"),
        "learning rate": optimizer.get("learning_rate"),
        "components": run.scheduler.get("num_components")
        if "mixture" in str(run.scheduler.get("noise_family"))
        else None,
        "rank": run.scheduler.get("rank") or None,
        "predicts": run.scheduler.get("prediction_type"),
        "default denoising steps": run.pipeline.get("default_denoising_steps"),
        "default resolution": run.pipeline.get("default_processing_resolution"),
    }
    rows = [[name, _plain(value)] for name, value in facts.items() if value not in (None, "")]
    return f"## Training\n\n{markdown_table(['setting', 'value'], rows)}" if rows else ""


def _entries(part: Any) -> Mapping[str, Any]:
    """A part of a config, empty where it is no mapping."""
    return part if isinstance(part, Mapping) else {}


def _selection_section(run: FinishedRun) -> str:
    """What was compared where the family was chosen on held-out data."""
    if not run.selection:
        return ""
    text = (
        "The family was chosen on held-out data: the simplest within one standard error of the best score. Scores are "
        "those of short trainings, and differences are paired."
    )
    return f"## Choice of the family\n\n{text}\n\n{run.selection.replace('<', '&lt;')}"


def _reference_section(run: FinishedRun) -> str:
    marigold = ", and Marigold (CVPR 2024) for depth from diffusion" if run.task.name == "depth" else ""
    return (
        "## Citation\n\n"
        f"Made with marigold_uq {marigold_uq.__version__}. The method: *Improved probabilistic regression using "
        f"diffusion models*, [arXiv 2510.04583](https://arxiv.org/abs/2510.04583){marigold}.\n\n"
        f"```bibtex\n{_CITATION}\n```"
    )
