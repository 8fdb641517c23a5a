"""How good a fitted model is on rows it has not seen, as one page: scores, calibration, intervals, importance."""

import base64
import html
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

from marigold_uq.files import atomic_path
from marigold_uq.metrics import crps, ensemble_variance, squared_error
from marigold_uq.pipelines.tabular.columns import is_frame
from marigold_uq.plotting import spread_plot
from marigold_uq.results import markdown_table
from marigold_uq.tabular.figures import calibration_figure, importance_figure, interval_figure
from marigold_uq.tabular.scores import score_rows

__all__ = ["TableReport", "make_report"]

Array = NDArray[np.float64]
_COVERAGE = 0.95
_SPREAD_BINS = 10
_SCORES = {
    "crps": "CRPS, mean over rows",
    "rmse": "root mean square error of the mean",
    "interval_coverage_95": "coverage of the 95 % interval",
    "interval_width_95": "its mean width",
    "coverage_50": "coverage of the 50 % interval of the draws",
    "coverage_90": "coverage of the 90 % interval of the draws",
}
_NOTES = {
    "calibration": "On the dashed line intervals contain the truth as often as they say. A flat histogram means the "
    "same; a U means too narrow, a hump too wide, a slope biased.",
    "intervals": "Rows from the lowest to the highest prediction.",
    "spread": "Rows in ten groups of equal size, by the standard deviation that was stated for them.",
    "importance": "One column at a time is shuffled among the rows. Columns that say the same share their importance. "
    "A bar within its error of 0 is noise.",
}


class _Predictor(Protocol):
    """What is reported on: `DiffusionRegressor`, or any other with these two methods."""

    def sample(self, X: Any, ensemble_size: int) -> Array:
        """Draws (ensemble_size, rows[, outputs])."""
        ...

    def predict_interval(self, X: Any, coverage: float) -> Array:
        """Central intervals (rows, 2[, outputs])."""
        ...


@dataclass(frozen=True)
class TableReport:
    """Scores and figures of one target; shown as a page in notebooks, and saved as one.

    Attributes:
        scores: As `marigold_uq.tabular.scores.score_rows` returns them.
        importance: Column -> rise of the CRPS when it is shuffled, mean and standard deviation over shuffles.
        figures: Name -> figure: calibration, intervals, spread, and importance.
    """

    scores: dict[str, Any]
    importance: dict[str, tuple[float, float]]
    figures: dict[str, Figure]
    title: str = field(default="Report", kw_only=True)

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write one HTML page that holds everything."""
        if Path(path).suffix not in (".html", ".htm"):
            raise ValueError(f"path must end in .html; got {path}. For single pictures, use the figures")
        with atomic_path(path, overwrite=overwrite) as temporary:
            temporary.write_text(self.to_html(), encoding="utf-8")
        return Path(path)

    def markdown(self) -> str:
        """The scores as a table."""
        shown = [[text, self.scores[name]] for name, text in _SCORES.items() if name in self.scores]
        return markdown_table(["score", "value"], [["rows", self.scores["num_rows"]], *shown])

    def to_html(self) -> str:
        """The page."""
        title = html.escape(self.title)
        head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        return f"{head}<body>{self._repr_html_()}</body></html>\n"

    def _repr_html_(self) -> str:
        parts = [f"<h1>{html.escape(self.title)}</h1>", self._score_table()]
        for name, figure in self.figures.items():
            alt = html.escape(f"figure: {name}")
            parts.append(f'<p>{_NOTES[name]}</p><img alt="{alt}" src="data:image/png;base64,{_png(figure)}">')
        return "\n".join(parts)

    def _score_table(self) -> str:
        lines = self.markdown().splitlines()[2:]
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        return "<table>" + "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in rows) + "</table>"


_STYLE = (
    "body{font-family:sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "h1{font-size:1.3rem}table{border-collapse:collapse}td{padding:.2rem 1.5rem .2rem 0;border-bottom:1px solid #ddd}"
    "img{max-width:100%;height:auto}p{margin-top:2rem}"
)


def _png(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return base64.b64encode(buffer.getvalue()).decode()


def make_report(
    model: _Predictor,
    X: Any,
    y: ArrayLike,
    *,
    output: int = 0,
    ensemble_size: int = 100,
    num_repeats: int = 5,
    importance_rows: int = 300,
    seed: int = 0,
    title: str = "Predictions of new rows",
) -> TableReport:
    """Score a fitted model on rows it has not seen, and draw what that looks like.

    Args:
        model: Fitted.
        X: Rows, an array or a DataFrame as in `fit`.
        y: What was true, (rows,) or (rows, outputs).
        output: Which of several outputs.
        ensemble_size: Draws per row.
        num_repeats: Shuffles of each column; 0 leaves importance out, the longest part.
        importance_rows: At most so many random rows for it.
        seed: Of shuffles and ties.
        title: Above the page.
    """
    targets = _one_output(np.asarray(y, dtype=np.float64), output, axis=1)
    if len(targets) != len(X) or len(targets) < 2:
        raise ValueError(f"X and y must have the same number of rows, at least 2; got {len(X)} and {len(targets)}")
    samples = _one_output(model.sample(X, ensemble_size), output, axis=2)  # (M, rows)
    interval = _one_output(model.predict_interval(X, _COVERAGE), output, axis=2)  # (rows, 2)
    scale = float(targets.std()) or 1.0
    scores = score_rows(samples, targets, target_scale=scale, interval=interval, seed=seed)
    curves = {"": (scores["reliability"], scores["pit"])}
    figures = {
        "calibration": calibration_figure(curves, title="Calibration", ensemble_size=ensemble_size),
        "intervals": interval_figure(targets, samples.mean(0), interval, title="Intervals", unit="target"),
        "spread": _spread_figure(samples, targets),
    }
    importance: dict[str, tuple[float, float]] = {}
    if num_repeats:
        rows = np.random.default_rng(seed).permutation(len(targets))[:importance_rows]
        draw = _Scored(model, output, ensemble_size)
        before, importance = column_importance(draw, _take(X, rows), targets[rows], num_repeats=num_repeats, seed=seed)
        figures["importance"] = importance_figure(importance, crps=before)
    return TableReport(scores, importance, figures, title=title)


@dataclass(frozen=True)
class _Scored:
    """Rows and truths -> CRPS of one output of a model."""

    model: _Predictor
    output: int
    ensemble_size: int

    def __call__(self, X: Any, targets: Array) -> float:
        draws = _one_output(self.model.sample(X, self.ensemble_size), self.output, axis=2)
        return float(crps(torch.from_numpy(np.array(draws)), torch.from_numpy(targets)).mean())


def column_importance(
    score: _Scored, X: Any, targets: Array, *, num_repeats: int, seed: int
) -> tuple[float, dict[str, tuple[float, float]]]:
    """The score of the rows, and for every column its mean rise and deviation when that column is shuffled."""
    before, random = score(X, targets), np.random.default_rng(seed)
    orders = [random.permutation(len(targets)) for _ in range(num_repeats)]
    found = {}
    for number, name in enumerate(_column_names(X)):
        rises = [score(_shuffled(X, number, order), targets) - before for order in orders]
        found[name] = (float(np.mean(rises)), float(np.std(rises)))
    return before, found


def _spread_figure(samples: Array, targets: Array) -> Figure:
    """Root mean square error against stated deviation, in groups of rows."""
    draws, truth = torch.from_numpy(np.array(samples)), torch.from_numpy(targets)
    variance, error = ensemble_variance(draws).numpy(), squared_error(draws, truth).numpy()
    groups = np.array_split(np.argsort(variance, kind="stable"), min(_SPREAD_BINS, len(targets)))
    stated, found = ([float(np.sqrt(part[g].mean())) for g in groups] for part in (variance, error))
    return spread_plot(stated, found)


def _one_output(values: Array, output: int, axis: int) -> Array:
    """Values without the axis of outputs, where there is one."""
    if values.ndim <= axis:
        return values
    if not 0 <= output < values.shape[axis]:
        raise ValueError(f"output must be within 0..{values.shape[axis] - 1}; got {output}")
    return np.take(values, output, axis)


def _column_names(X: Any) -> list[str]:
    names = X.columns if is_frame(X) else range(np.asarray(X).shape[1])
    return [str(name) if is_frame(X) else f"column {name}" for name in names]


def _take(X: Any, rows: NDArray[np.int64]) -> Any:
    return X.iloc[rows] if is_frame(X) else np.asarray(X)[rows]


def _shuffled(X: Any, number: int, order: NDArray[np.int64]) -> Any:
    """A copy with one column in another order."""
    if not is_frame(X):
        changed = np.array(X)
        changed[:, number] = changed[order, number]
        return changed
    changed = X.copy()
    changed.isetitem(number, X.iloc[order, number].array)
    return changed
