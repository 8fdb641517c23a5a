"""Does a model recognise inputs unlike its own? AUROC of `output_novelty` beside the nearest neighbour in input space.

python -m scripts.studies.novelty --output runs/novelty --part tables --data data/uci
python -m scripts.studies.novelty --output runs/novelty --part fields --data data/ks.h5 --model runs/ks/model
python -m scripts.studies.novelty --output runs/novelty --part pictures --data scenes/test --photographs data/depth_real

Each part has inputs in distribution that the model and the reference did not see, and shifted ones. `novelty` is the
strongest of the three signs, and the next three columns are the signs alone. `nearest` is the distance to the nearest
known input; `features` the same between a few statistics of the inputs. Finished rows (of tables: splits) are kept: run
the same command again to resume.

tables: a part of feature space is held out, as in scripts.studies.uci.shift; standard errors over splits.
fields: a Kuramoto-Sivashinsky model, domains of other lengths on as many points, and other viscosities.
pictures: the embedded depth model, rendered scenes, their pictures with noise or blur, and photographs.
For fields and pictures the standard errors are DeLong's, over inputs; one model is judged.
"""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.neighbors import NearestNeighbors

from marigold_uq import FieldForecastPipeline, MarigoldUQDepthPipeline
from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.depth.data import RenderedScenes
from marigold_uq.field.config import FieldData, PdeData
from marigold_uq.field.data import FieldSequences, KuramotoSivashinsky
from marigold_uq.field.splits import open_split
from marigold_uq.files import atomic_path, make_folder
from marigold_uq.metrics import auroc
from marigold_uq.novelty import SIGNS, Novelty
from marigold_uq.results import markdown_table, number, write_json
from marigold_uq.tabular.run import ModelOptions
from marigold_uq.tabular.scores import summarize_splits
from marigold_uq.tabular.uci import UCIDataset
from scripts.studies.uci.shift import ShiftedSplit, ShiftKind, hold_out, nearest_distance

_Array = NDArray[np.float64]
Numbers = dict[str, tuple[float, float | None]]
"""Column -> AUROC and standard error; `flagged` and `false_alarms` are shares of inputs."""
COLUMNS = ("novelty", *SIGNS, "nearest", "features", "flagged", "false_alarms")
_POINTS, _STATES = 128, 30
"""Of each trajectory; a model that sees fewer points sees every so many-th."""
NOISE, BLUR = 0.1, 3.0
"""Standard deviations: of noise in units of the full range, of blur in pixels."""


@dataclass(frozen=True)
class NoveltyStudy:
    """Score how well novelty tells shifted inputs from those in distribution.

    Args:
        output: Folder of the results.
        part: tables, fields or pictures.
        data: Folder of UCI sets, file of trajectories, or folder of rendered scenes.
        model: The forecast model; pictures take the embedded one by default.
        photographs: Folder with rgb/*.jpg.
        sets: Of tables.
        kinds: Ways to hold a part of a table out.
        splits: Of each table.
        options: How models of tables are trained.
        lengths: Of the shifted domains; the model's own is 100.
        viscosities: Of shifted equations, u_t + u u_x + u_xx + viscosity u_xxxx = 0; the model's own is 1.
        reference: Inputs that the reference is fitted on (fields and pictures).
        inputs: Inputs in distribution, and as many of each shifted kind.
        ensemble_size: Members of every call.
    """

    output: Path
    part: Literal["tables", "fields", "pictures"]
    data: Path
    model: Path | None = None
    photographs: Path | None = None
    sets: list[str] = field(default_factory=lambda: ["concrete", "energy"])
    kinds: list[ShiftKind] = field(default_factory=lambda: ["cluster", "range"])
    splits: int = 3
    options: ModelOptions = field(default_factory=lambda: ModelOptions(num_models=4, calibration_fraction=0.25))
    lengths: list[float] = field(default_factory=lambda: [60.0, 80.0, 90.0, 110.0, 120.0, 150.0])
    viscosities: list[float] = field(default_factory=lambda: [0.5, 0.8, 1.25, 2.0])
    reference: int = 100
    inputs: int = 80
    ensemble_size: int = 10


def compare(familiar: Novelty, shifted: Novelty, distances: dict[str, tuple[_Array, _Array]]) -> Numbers:
    """One row: AUROC of the novelty, of its signs and of distances (familiar, shifted), and the shares flagged."""
    pairs = {"novelty": (familiar.score, shifted.score), **distances}
    pairs |= {name: (familiar.signs[name], shifted.signs[name]) for name in SIGNS}
    found = {name: _auroc(*pair) for name, pair in pairs.items()}
    return {**found, "flagged": _share(shifted), "false_alarms": _share(familiar)}


def _auroc(familiar: _Array, shifted: _Array) -> tuple[float, float]:
    scores = torch.from_numpy(np.concatenate([familiar, shifted]))
    found = auroc(scores, torch.arange(len(scores)) >= len(familiar))
    return float(found.value), float(found.standard_error)


def _share(novelty: Novelty) -> tuple[float, float]:
    flags = novelty.is_novel
    return float(flags.mean()), float(flags.std() / np.sqrt(len(flags)))


def nearest(known: _Array, *inputs: _Array) -> tuple[_Array, ...]:
    """Distance of each standardised input (n, F) to the nearest known one."""
    scale = np.where(known.std(0) > 0, known.std(0), 1.0)
    index = NearestNeighbors(n_neighbors=1).fit(known / scale)
    return tuple(index.kneighbors(one / scale)[0][:, 0] for one in inputs)


# ------------------------------------------------------------------------------------------------------------ tables


SPLIT = ", split "


def table_rows(study: NoveltyStudy) -> Iterable[tuple[str, Callable[[], Numbers]]]:
    """One row per set, kind and split."""
    for name in study.sets:
        dataset = UCIDataset.load(study.data, name)
        for kind in study.kinds:
            for index in range(min(study.splits, dataset.num_splits)):
                part = hold_out(dataset.split(index), kind)
                yield f"{name}, {kind}{SPLIT}{index}", lambda index=index, part=part: _split(study, index, part)  # type: ignore[misc]


def _split(study: NoveltyStudy, seed: int, rows: ShiftedSplit) -> Numbers:
    model = study.options.estimator(seed=seed, ensemble_size=study.ensemble_size)
    model.fit(rows.train_features, rows.train_targets)
    familiar, shifted = (model.predict_novelty(part) for part in (rows.familiar, rows.shifted))
    distances = tuple(nearest_distance(rows.train_features, part) for part in (rows.familiar, rows.shifted))
    return compare(familiar, shifted, {"nearest": distances})  # type: ignore[dict-item]


def over_splits(rows: dict[str, Numbers]) -> dict[str, Numbers]:
    """Mean and standard error of the rows that differ in the split alone; other rows as they are."""
    groups: dict[str, list[Numbers]] = {}
    for name, row in rows.items():
        groups.setdefault(name.split(SPLIT)[0], []).append(row)
    return {name: _mean_row(group) if SPLIT in next(iter(rows)) else group[0] for name, group in groups.items()}


def _mean_row(group: Sequence[Numbers]) -> Numbers:
    spreads = summarize_splits([{column: value for column, (value, _) in row.items()} for row in group])
    return {column: (one.mean, one.standard_error) for column, one in spreads.items()}


# ------------------------------------------------------------------------------------------------------------ fields


def field_rows(study: NoveltyStudy) -> Iterable[tuple[str, Callable[[], Numbers]]]:
    """One row per length of the domain and per viscosity."""
    if study.model is None:
        raise ValueError("--part fields needs --model, a trained forecast pipeline")
    pipeline = FieldForecastPipeline.from_pretrained(study.model)
    pipeline.set_progress_bar_config(disable=True)
    # The parts of configs/field/ks_small.yaml: train, validation, test.
    split = open_split(FieldData(pde=PdeData(path=str(study.data), test=0.15, validation=0.3)))
    known, reference, familiar = windows(split.train), windows(split.validation), windows(split.test)
    call: dict[str, Any] = {"ensemble_size": study.ensemble_size}
    pipeline.fit_novelty(reference[: study.reference], **call)
    familiar = familiar[: study.inputs]

    def judge(states: torch.Tensor) -> Novelty:
        found: Any = pipeline(states, output_novelty=True, **call)
        return cast(Novelty, found.novelty)

    def row(length: float, viscosity: float) -> Numbers:
        states = trajectories(length, viscosity, study.inputs)[..., :: _POINTS // familiar.shape[-1]].float()
        shifted = torch.stack([states[i, s - 2 : s, None] for i, s in enumerate(_moments(len(states), _STATES))])
        distances = {
            name: nearest(*(view(part) for part in (known, familiar, shifted)))
            for name, view in (("nearest", _points), ("features", _spectrum))
        }
        return compare(judge(familiar), judge(shifted), distances)  # type: ignore[arg-type]

    own = KuramotoSivashinsky.length
    for length in study.lengths:
        yield f"length {length:g}", lambda length=length: row(length, 1.0)  # type: ignore[misc]
    for viscosity in study.viscosities:
        yield f"viscosity {viscosity:g}", lambda viscosity=viscosity: row(own, viscosity)  # type: ignore[misc]


def trajectories(length: float, viscosity: float, count: int) -> torch.Tensor:
    """States (count, 30, 128 points) of u_t + u u_x + u_xx + viscosity u_xxxx = 0, saved every 2.

    With r = sqrt(viscosity) it is u(x, t) = v(x / r, t / viscosity) / r for the solution v of viscosity 1.
    """
    root, own = viscosity**0.5, KuramotoSivashinsky()
    equation = KuramotoSivashinsky(
        length=length / root,
        num_points=_POINTS,
        num_states=_STATES,
        save_interval=own.save_interval / viscosity,
        first_time=own.first_time / viscosity,
        amplitude=own.amplitude * root,
    )
    return torch.as_tensor(equation.solve(equation.initial_states(1, range(count)))) / root


def windows(sequences: FieldSequences) -> torch.Tensor:
    """Two states of each trajectory, (n, 2, 1, points), late enough that the initial noise is forgotten."""
    count = len(sequences.times(0))
    moments = _moments(sequences.num_sequences, count)
    return torch.stack([sequences.read(i, s - 2, s) for i, s in enumerate(moments)])


def _moments(count: int, num_states: int) -> list[int]:
    """Ends of windows, spread over the last third of trajectories of `num_states` states (at most 30)."""
    last = min(num_states, _STATES)
    return [last - i % (last // 3) for i in range(count)]


def _points(states: torch.Tensor) -> _Array:
    return states.flatten(1).double().numpy()


def _spectrum(states: torch.Tensor) -> _Array:
    """Log power at the first 32 wave numbers of the last state: what does not depend on where the waves are."""
    power = np.abs(np.fft.rfft(states[:, -1, 0].double().numpy())) ** 2
    return np.log(power[:, 1:33] + 1e-9)


# ---------------------------------------------------------------------------------------------------------- pictures


def picture_rows(study: NoveltyStudy) -> Iterable[tuple[str, Callable[[], Numbers]]]:
    """One row per kind of shifted pictures."""
    pipeline = MarigoldUQDepthPipeline.from_pretrained("embedded" if study.model is None else study.model)
    pipeline.set_progress_bar_config(disable=True)
    scenes = RenderedScenes(study.data)
    images = [scenes.read(i)["image"].permute(1, 2, 0).double().numpy() for i in range(study.reference + study.inputs)]
    reference, familiar = images[: study.reference], images[study.reference :]
    call: dict[str, Any] = {"ensemble_size": study.ensemble_size, "uncertainty": "trajectory", "batch_size": 4}
    pipeline.fit_novelty(reference, generator=torch.Generator().manual_seed(0), **call)

    def judge(pictures: list[_Array]) -> Novelty:
        generator = torch.Generator().manual_seed(1)
        found: Any = pipeline(pictures, generator=generator, output_novelty=True, **call)
        return cast(Novelty, found.novelty)

    judged: list[Novelty] = []

    def row(shifted: list[_Array]) -> Numbers:
        if not judged:
            judged.append(judge(familiar))
        distances = {
            name: nearest(*(np.stack([view(one) for one in part]) for part in (reference, familiar, shifted)))
            for name, view in (("nearest", _thumbnail), ("features", _statistics))
        }
        return compare(judged[0], judge(shifted), distances)  # type: ignore[arg-type]

    rng = np.random.default_rng(0)
    noisy = [np.clip(one + NOISE * rng.normal(size=one.shape), 0, 1) for one in familiar]
    blurred = [cv2.GaussianBlur(one, (0, 0), BLUR) for one in familiar]
    yield f"noise {NOISE:g}", lambda: row(noisy)
    yield f"blur {BLUR:g} pixels", lambda: row(blurred)
    if study.photographs is not None:
        yield "photographs", lambda: row(_photographs(study.photographs, familiar[0].shape))  # type: ignore[arg-type]


def _photographs(folder: Path, shape: tuple[int, ...]) -> list[_Array]:
    """As large as the scenes, so that size tells nothing."""
    paths = sorted((folder / "rgb").glob("*.jpg"))
    pictures = [cv2.cvtColor(cv2.imread(str(path)), cv2.COLOR_BGR2RGB) for path in paths]
    return [cv2.resize(one, shape[1::-1], interpolation=cv2.INTER_AREA) / 255.0 for one in pictures]


def _thumbnail(picture: _Array) -> _Array:
    return cv2.resize(picture, (16, 12), interpolation=cv2.INTER_AREA).ravel()


def _statistics(picture: _Array) -> _Array:
    """Mean and log spread of each colour, and of its differences between neighbours."""
    parts = (picture, np.diff(picture, axis=0), np.diff(picture, axis=1))
    spreads = [np.log(part.std((0, 1)) + 1e-6) for part in parts]
    return np.concatenate([picture.mean((0, 1)), *spreads])


# --------------------------------------------------------------------------------------------------------------- run

PARTS = {"tables": table_rows, "fields": field_rows, "pictures": picture_rows}


def _run(study: NoveltyStudy, invocation: Invocation) -> int:
    """Make the rows that are missing, and write table.md."""
    make_folder(study.output)
    path = study.output / f"{study.part}.json"
    rows: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name, make in PARTS[study.part](study):
        if name not in rows:
            rows[name] = make()
            write_json(path, rows, overwrite=True)
    table = over_splits(rows)
    used = [column for column in COLUMNS if any(column in row for row in table.values())]
    entries = [[name, *(number(*row[column]) for column in used)] for name, row in table.items()]
    text = markdown_table([study.part, *used], entries)
    print(text)
    with atomic_path(study.output / f"{study.part}.md", overwrite=True) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return run_command("scripts.studies.novelty", NoveltyStudy, _run, arguments)


if __name__ == "__main__":
    sys.exit(main())
