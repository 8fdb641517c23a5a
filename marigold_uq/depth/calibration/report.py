"""The report of a calibration, one file: coverage before and after on images left out; where the model is unsure."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from marigold_uq import __version__, plotting
from marigold_uq.calibration import COVERAGES
from marigold_uq.depth.calibration.fitting import (
    FEW_UNITS,
    Before,
    Coverage,
    Fit,
    LeftOut,
    covered_before,
    leave_out,
    missing_units,
)
from marigold_uq.depth.calibration.options import REPORTED, DepthCalibration
from marigold_uq.depth.calibration.pixels import Pixels
from marigold_uq.depth.calibration.spread import Stated
from marigold_uq.depth.colors import color_depth, color_uncertainty, saturation
from marigold_uq.depth.data import DepthDataset
from marigold_uq.depth.evaluation.predictors import Predictor
from marigold_uq.files import atomic_path
from marigold_uq.pipelines.depth.images import to_uint8

_EDGE = 260
"""Longer edge of a picture in the page."""
_NUM_BINS = 10
_MAX_BARS = 40
_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;color:#1f2430;max-width:1080px;margin:24px auto;padding:0 16px}
h1{font-size:24px;margin:0 0 4px}h2{font-size:19px;margin:28px 0 8px;border-top:1px solid #ddd;padding-top:18px}
h3{font-size:15px;margin:16px 0 4px}p{margin:6px 0;max-width:78ch}.faint{color:#6b7280;font-size:13px}
table{border-collapse:collapse;margin:8px 0}td,th{padding:3px 12px;text-align:right;border-bottom:1px solid #e5e7eb}
td:first-child,th:first-child{text-align:left}.refused{color:#b45309}.warning{background:#fef3c7;padding:6px 10px}
.row{display:flex;flex-wrap:wrap;gap:10px;align-items:flex-start}figure{margin:0}figcaption{font-size:12px;color:#6b7280}
pre{background:#f3f4f6;padding:8px 10px;overflow-x:auto;font-size:12px}
"""


@dataclass(frozen=True)
class Subject:
    """What a section of the page is about: a way to uncertainty of a model, or maps made by others."""

    title: str
    fit: Fit
    pixels: tuple[Pixels, ...]
    predictor: Predictor
    before: Before


def write_report(subjects: Sequence[Subject], data: DepthDataset, options: DepthCalibration, command: str) -> None:
    """One HTML file beside the output, with all pictures inside."""
    text = page(subjects, data, options, command)
    with atomic_path(options.report_path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def page(subjects: Sequence[Subject], data: DepthDataset, options: DepthCalibration, command: str) -> str:
    """The whole page."""
    name = options.model or f"maps of {options.files.folder}"
    parts = [
        f"<h1>Calibration of {html.escape(name)}</h1>",
        f'<p class="faint">marigold_uq {html.escape(__version__)}, {len(subjects[0].pixels)} images of '
        f"{html.escape(options.data.root or options.data.name)}</p>",
        f"<pre>{html.escape(command)}</pre>",
        *(part for subject in subjects for part in _section(subject, data, options)),
    ]
    head = f'<meta charset="utf-8"><title>Calibration of {html.escape(name)}</title><style>{_STYLE}</style>'
    return f"<!doctype html><html><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _section(subject: Subject, data: DepthDataset, options: DepthCalibration) -> Iterator[str]:
    yield f"<h2>{html.escape(subject.title)}</h2>"
    yield _choices(subject.fit)
    before = covered_before(subject.pixels, subject.before)
    try:
        left_out = leave_out(subject.pixels, options, metric=subject.predictor.metric)
    except ValueError as error:
        yield f'<p class="warning">No coverage on images left out: {html.escape(str(error))}</p>'
        return
    yield _coverage_table(subject.fit, before, left_out.summary)
    bars = _unit_bars(left_out)
    figures = [_reliability(before, left_out.summary), _spread_figure(left_out), *([bars] if bars else [])]
    yield f'<div class="row">{"".join(_image(_figure_bytes(one), 340) for one in figures)}</div>'
    yield "<h3>Where it is unsure</h3>"
    yield (
        '<p class="faint">Deviation and error share one colour scale. The last picture shows in orange where the truth '
        "lies outside the interval, by a calibration that has not seen the image; grey has no true depth.</p>"
    )
    for label, place in examples(left_out):
        yield _example(label, left_out, place, subject, data)


def _choices(fit: Fit) -> str:
    rule = {
        "stated": "the stated standard deviation",
        "map": "the standard deviation of the whole map",
        "one": "a constant",
        "depth": "a share of the predicted depth",
    }[fit.rule.base]
    learnt = ", times an error learnt from the confidence" if fit.rule.confidences else ""
    text = (
        f"<p>Spread: {rule}{learnt}, times kappa = {fit.kappa:.3f}. Intervals are the prediction -+ a number of these "
        f"standard deviations, set by {fit.num_units} units (images or groups) that did not choose kappa. They promise "
        f"coverages up to {fit.interval.coverages[-1]:.1%}.</p>"
    )
    if fit.num_units < FEW_UNITS:
        text += (
            f'<p class="warning">Only {fit.num_units} units: intervals are wide, and would be others with other '
            "images. Take 40 or more.</p>"
        )
    return text


def _coverage_table(fit: Fit, before: Coverage, after: Coverage) -> str:
    missing = dict(missing_units(fit, REPORTED))
    rows = []
    for level in REPORTED:
        place = COVERAGES.index(level)
        own = f"needs {missing[level]} units" if level in missing else f"{fit.interval.scale(level)[0]:.2f}"
        cells = [f"{level:.0%}", *_pair(before, place), *_pair(after, place)]
        marked = f'<td class="refused">{own}</td>' if level in missing else f"<td>{own}</td>"
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + marked + "</tr>")
    head = (
        "<tr><th>interval</th><th>covered before</th><th>mean width</th><th>covered after</th><th>mean width</th>"
        "<th>half width, in std</th></tr>"
    )
    note = (
        '<p class="faint">Share of pixels inside, mean over units ± standard error; widths in standard deviations of '
        "the image's true depth. After: every unit (or twentieth of them) is judged by a calibration made anew without "
        "it, from fewer images than the stored one; - where those were too few. Single images differ more.</p>"
    )
    return f"<h3>Coverage before and after</h3><table>{head}{''.join(rows)}</table>{note}"


def _pair(found: Coverage, place: int) -> tuple[str, str]:
    share, error, width = found.share[place], found.standard_error[place], found.width[place]
    if math.isnan(share):
        return "-", "-"
    return f"{share:.1%} ± {error:.1%}", f"{width:.2f}"


def _reliability(before: Coverage, after: Coverage) -> Figure:
    curves = {"before": before, "after, left out": after}
    shown = {label: list(one.share) for label, one in curves.items() if not all(map(math.isnan, one.share))}
    return plotting.reliability_diagram(COVERAGES, shown, title="Coverage before and after")


def _spread_figure(left_out: LeftOut) -> Figure:
    """Deciles of the calibrated deviation of all pixels."""
    stated = torch.cat([fit.std(one) for one, fit in zip(left_out.images, left_out.fits, strict=True)])
    error = torch.cat([one.truth - one.point for one in left_out.images])
    order = stated.argsort()
    bins = [part for part in order.tensor_split(_NUM_BINS) if len(part)]
    pairs = [(_root_mean_square(stated[part]), _root_mean_square(error[part])) for part in bins]
    return plotting.spread_plot(*zip(*pairs, strict=True))


def _root_mean_square(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _unit_bars(left_out: LeftOut) -> Figure | None:
    """Coverage and deviation of every unit, the most uncertain first; none for many units, or too few for a level."""
    level = shown_level(left_out)
    units = [one.unit for one in left_out.images]
    names = list(dict.fromkeys(units))
    if level is None or not 1 < len(names) <= _MAX_BARS:
        return None
    covered = left_out.covered[:, COVERAGES.index(level)]
    stds = torch.tensor([mean_std(left_out, place) for place in range(len(units))])

    def means(values: Tensor) -> dict[str, tuple[float, float]]:
        by_unit = {n: values[torch.tensor([unit == n for unit in units])] for n in names}
        return {name: (float(own.mean()), math.nan) for name, own in by_unit.items()}

    spread, shares = means(stds), means(covered)
    ranked = sorted(names, key=lambda name: -spread[name][0])
    values = {f"{level:.0%} interval covers": shares, "mean standard deviation": spread}
    return plotting.group_bars(
        {metric: {name: found[name] for name in ranked} for metric, found in values.items()}, title="By unit"
    )


def shown_level(left_out: LeftOut) -> float | None:
    """The coverage that pictures show: 90 %, or the next lower one that all fits promise."""
    usable = [level for level in COVERAGES if level <= 0.9 and all(fit.promises(level) for fit in left_out.fits)]
    return max(usable, default=None)


def mean_std(left_out: LeftOut, place: int) -> float:
    """Mean calibrated deviation of an image, in standard deviations of its truth."""
    return float(left_out.fits[place].std(left_out.images[place]).mean())


def examples(left_out: LeftOut) -> list[tuple[str, int]]:
    """The most, a middling and the least certain image, and the one that is covered worst; each once."""
    order = sorted(range(len(left_out.images)), key=lambda place: mean_std(left_out, place))
    level = shown_level(left_out)
    chosen = {order[0]: "most certain", order[len(order) // 2]: "in the middle", order[-1]: "least certain"}
    if level is not None:
        worst = int(left_out.covered[:, COVERAGES.index(level)].argmin())
        chosen[worst] = f"{chosen[worst]}, covered worst" if worst in chosen else "covered worst"
    return [(label, place) for place, label in chosen.items()]


def _example(label: str, left_out: LeftOut, place: int, subject: Subject, data: DepthDataset) -> str:
    """One row of pictures."""
    own, fit, level = left_out.images[place], left_out.fits[place], shown_level(left_out)
    sample = data.read(own.index)
    stated = Stated.of(subject.predictor.predict(sample))
    valid = sample["valid"][0]
    depth = sample["depth"][0].double()
    truth = depth if subject.predictor.space == "depth" else depth.clamp(min=1e-12).reciprocal()
    truth = truth / truth[valid].std()
    std = fit.kappa * abs(own.scale) * fit.rule.spread(stated)
    error = torch.where(valid, (truth - (own.scale * stated.point + own.shift)).abs(), torch.nan)
    top = saturation(torch.where(valid, torch.maximum(std, error), torch.nan).numpy())
    inverse = (subject.predictor.space == "disparity") != (own.scale < 0)
    panels = {
        "image": to_uint8(sample["image"]),
        "prediction": color_depth(stated.point.numpy(), inverse=inverse),
        "standard deviation": color_uncertainty(std.numpy(), vmax=top),
        "error": color_uncertainty(error.numpy(), vmax=top),
    }
    name = html.escape(data.name_of(own.index))
    title = f"{label}: {name}"
    if level is not None:
        outside = (error > fit.interval.scale(level)[0] * std) & valid
        panels[f"outside {level:.0%}"] = _mask(outside, valid)
        title += f", {left_out.covered[place, COVERAGES.index(level)]:.0%} covered by its {level:.0%} interval"
    figures = "".join(
        f"<figure>{_image(_picture_bytes(pixels), 200)}<figcaption>{text}</figcaption></figure>"
        for text, pixels in panels.items()
    )
    return f'<h3>{title}</h3><div class="row">{figures}</div>'


def _mask(outside: Tensor, valid: Tensor) -> np.ndarray:
    """Orange outside, dark inside, grey where nothing is known; (H, W, 3)."""
    colors = np.array([[38, 42, 54], [234, 118, 43], [150, 150, 150]], dtype=np.uint8)
    return np.asarray(colors[torch.where(valid, outside.long(), 2).numpy()])


def _figure_bytes(figure: Figure) -> bytes:
    return _encoded(lambda buffer: figure.savefig(buffer, format="png", dpi=110))


def _picture_bytes(pixels: np.ndarray) -> bytes:
    picture = Image.fromarray(pixels)
    picture.thumbnail((_EDGE, _EDGE))
    return _encoded(lambda buffer: picture.save(buffer, format="PNG"))


def _encoded(write: Callable[[io.BytesIO], object]) -> bytes:
    buffer = io.BytesIO()
    write(buffer)
    return buffer.getvalue()


def _image(content: bytes, width: int) -> str:
    return f'<img width="{width}" alt="" src="data:image/png;base64,{base64.b64encode(content).decode()}">'
