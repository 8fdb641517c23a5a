"""The evaluation of a depth model: predict, align, score, image by image and over any number of processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from marigold_uq.commands.runner import Invocation
from marigold_uq.depth.data import DepthDataError, DepthDataset, build_dataset
from marigold_uq.depth.evaluation.options import DataOptions, DepthEvaluation
from marigold_uq.depth.evaluation.panels import check_panels, image_statistics
from marigold_uq.depth.evaluation.prediction import Prediction, PredictionError
from marigold_uq.depth.evaluation.predictors import Predictor, build_predictor, prediction_path
from marigold_uq.depth.evaluation.protocol import DepthProtocol
from marigold_uq.depth.evaluation.records import Failure, ImageRecord, ResultFolder
from marigold_uq.depth.evaluation.report import Summary, report_text, summarize, write_report
from marigold_uq.depth.export import save_npz
from marigold_uq.files import make_folder


@dataclass(frozen=True)
class EvaluationResult:
    """What an evaluation found; `metrics` is what metrics.json holds."""

    summary: Summary
    records: list[ImageRecord]
    failures: list[Failure]
    metrics: dict[str, Any]


def run_evaluation(options: DepthEvaluation, invocation: Invocation) -> int:
    """The command `eval/eval_depth.py`: 0 if all images were scored, 1 if some failed."""
    result = evaluate_depth(options, command=invocation.command)
    if PartialState().is_main_process:
        print(report_text(result.metrics, options.output))
    return 1 if result.failures else 0


def evaluate_depth(
    options: DepthEvaluation,
    *,
    dataset: Dataset[Any] | None = None,
    predictor: Predictor | None = None,
    command: str | None = None,
) -> EvaluationResult:
    """Score a predictor on a data set and write the results to `options.output`.

    Images are shared out over the processes of `accelerate launch` or torchrun; the numbers do not depend on how many
    there are. Results of finished images are kept, so an interrupted run resumes.

    Args:
        options: Everything; see the dataclass.
        dataset: Used instead of `options.data`.
        predictor: Used instead of `options.predictor`.
        command: The command line, for the record.
    """
    check_panels(options.score.metrics)
    on_cpu = options.pipeline.device == "cpu" or not torch.accelerator.is_available()
    state = PartialState(cpu=on_cpu, timeout=timedelta(days=30))  # a resumed run is uneven: processes wait long
    data = check_dataset(dataset if dataset is not None else open_dataset(options.data))
    folder = ResultFolder(options.output)
    if state.is_main_process:
        folder.check(options)  # before a model is loaded
    model = predictor if predictor is not None else build_predictor(options)
    scorer = _Scorer(options, data, model, folder)
    with folder.lock() if state.is_main_process else nullcontext():
        if state.is_main_process:
            folder.open(options)  # after it was found that there is a model to evaluate
        state.wait_for_everyone()
        records, failures = _run(scorer, chosen_indices(len(data), options.data.limit), state)
        if not records:
            first = f"the first: {failures[0].name}: {failures[0].reason}" if failures else "the data set is empty"
            raise ValueError(f"none of {len(failures)} images could be scored; {first}")
        summary = summarize(records)
        to = folder if state.is_main_process else None
        metrics = write_report(to, options, scorer.protocol, model, summary, records, failures, command)
        state.wait_for_everyone()
    return EvaluationResult(summary, records, failures, metrics)


def open_dataset(options: DataOptions) -> Dataset[Any]:
    """The data set that the options name; a broken sample raises, so that it can be counted."""
    return build_dataset(options.name, options.root, options.filenames, **{**options.options, "on_error": "raise"})


def check_dataset(dataset: Dataset[Any]) -> DepthDataset:
    """A data set of pictures with depth, whose samples have different names."""
    if not isinstance(dataset, DepthDataset):
        raise ValueError(f"expected a marigold_uq.depth.data.DepthDataset; got a {type(dataset).__name__}")
    counts = Counter(dataset.name_of(index) for index in range(len(dataset)))
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise ValueError(f"{len(twice)} samples share their name, for instance {twice[0]!r}; results need one each")
    return dataset


def chosen_indices(length: int, limit: int | None) -> list[int]:
    """All indices, or `limit` of them evenly spaced."""
    if limit is None or limit >= length:
        return list(range(length))
    if limit < 1:
        raise ValueError(f"data.limit must be at least 1; got {limit}")
    return [i * length // limit for i in range(limit)]


class _Scorer:
    """One image at a time: stored result, or prediction and score."""

    def __init__(
        self, options: DepthEvaluation, dataset: DepthDataset, predictor: Predictor, folder: ResultFolder
    ) -> None:
        self.options, self.dataset, self.predictor, self.folder = options, dataset, predictor, folder
        self.protocol = DepthProtocol.of(options.alignment, predictor, dataset, options.data.name)
        self.groups: dict[str, str] = getattr(dataset, "groups", {})

    def __call__(self, index: int) -> ImageRecord | Failure:
        name = self.dataset.name_of(index)
        try:
            identity = self.predictor.identity(name)
            stored = self.folder.load(name, identity) if self._is_saved(name) else None
            return stored if stored is not None else self._score(index, name, identity)
        except (DepthDataError, PredictionError) as error:
            return Failure(name, str(error))

    def _score(self, index: int, name: str, identity: str) -> ImageRecord:
        sample = self.dataset.read(index)
        sample["name"] = name  # the id of its results, also where the data set knows another name for it
        prediction = self.predictor.predict(sample)
        aligned = self.protocol.align(prediction, sample)
        found = image_statistics(aligned, name, self.options.score)
        record = ImageRecord(
            name=name,
            group=self.groups.get(name, ""),
            kind=prediction.kind,
            identity=identity,
            num_valid=aligned.target.numel(),
            scale=aligned.scale,
            shift=aligned.shift,
            statistics={key: float(value) for key, value in found.items() if value.ndim == 0},
            curves={key: value.tolist() for key, value in found.items() if value.ndim == 1},
        )
        self.folder.store(
            record
        )  # before the prediction: a result without its file is made again, a file is not replaced
        self._save(name, prediction)
        return record

    def _target(self, name: str) -> Path | None:
        folder = self.options.save_predictions
        return None if folder is None else prediction_path(folder, name)

    def _is_saved(self, name: str) -> bool:
        path = self._target(name)
        return path is None or path.exists()

    def _save(self, name: str, prediction: Prediction) -> None:
        path = self._target(name)
        if path is not None:
            make_folder(path.parent)
            save_npz(path, overwrite=self.options.overwrite, **prediction.arrays())


def _run(scorer: _Scorer, indices: Sequence[int], state: PartialState) -> tuple[list[ImageRecord], list[Failure]]:
    """Score the share of this process, then gather everybody's results, sorted by name."""
    mine = indices[state.process_index :: state.num_processes]
    hidden = {} if state.is_local_main_process else {"disable": True}  # any other value would overrule TQDM_DISABLE
    with torch.inference_mode():
        results = [scorer(index) for index in tqdm(mine, desc="evaluation", unit="image", **hidden)]
    everyone = gather_object(results) if state.num_processes > 1 else results
    records = [result for result in everyone if isinstance(result, ImageRecord)]
    failures = [result for result in everyone if isinstance(result, Failure)]
    return sorted(records, key=lambda one: one.name), sorted(failures, key=lambda one: one.name)
