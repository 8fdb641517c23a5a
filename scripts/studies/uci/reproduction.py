"""Fill the cells of the UCI table: presets and families x data sets, to any number of epochs, resumable."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from marigold_uq.results import versions
from marigold_uq.tabular.recipe import PAPER_SETTINGS, PRESETS, TABLE_FAMILIES, TrainingOptions, paper_recipe
from marigold_uq.tabular.run import ModelOptions
from marigold_uq.tabular.scores import SplitScores, score_all_splits
from marigold_uq.tabular.uci import UCIDataset
from scripts.studies.uci.cells import Cell, CellKey, CellStore, dataset_digest
from scripts.studies.uci.stacked import StackedRun, StackedTask, score_splits

_OWN = "own"
"""The family of a preset that chooses it by itself, and its epochs (0)."""


@dataclass(frozen=True)
class Reproduction:
    """Make the table of the UCI regression sets: presets and families x sets, over all splits; resumable.

    Args:
        data: Folder with one folder per UCI set.
        output: Folder of the results.
        sets: Names of sets, in the order in which to make them.
        columns: "paper/FAMILY" (stacked), "default" or "default/FAMILY" (one fit per split).
        epochs_scale: Shares of the published epochs; all cells of the first share are made first, and so on.
        max_epochs: Set -> at most this many epochs of the published recipe.
        ensemble_size: Draws per test row.
        num_draws: Draws per row in training of the family `sample`.
        seed: Of everything.
        checkpoint_seconds: Time between saved states.
        threads: Of torch; small products gain little from more.
        render_only: Only renew the files of finished cells.
    """

    data: Path
    output: Path
    sets: list[str] = field(default_factory=lambda: list(PAPER_SETTINGS))
    columns: list[str] = field(default_factory=lambda: [f"paper/{family}" for family in TABLE_FAMILIES])
    epochs_scale: list[float] = field(default_factory=lambda: [1.0])
    max_epochs: dict[str, int] = field(default_factory=dict)
    ensemble_size: int = 100
    num_draws: int = 4
    seed: int = 0
    checkpoint_seconds: float = 120.0
    threads: int = 1
    render_only: bool = False

    def __post_init__(self) -> None:
        for name in self.columns:
            split_column(name)
        if not all(0 < scale <= 1 for scale in self.epochs_scale) or not self.epochs_scale:
            raise ValueError(f"epochs_scale must hold shares within (0, 1]; got {list(self.epochs_scale)}")
        unknown = {*self.sets, *self.max_epochs} - set(PAPER_SETTINGS)
        if unknown:
            raise ValueError(f"unknown data set {', '.join(sorted(unknown))}; expected {', '.join(PAPER_SETTINGS)}")
        if self.max_epochs and not any(name.startswith("paper/") for name in self.columns):
            raise ValueError(f"max_epochs limits paper/FAMILY, which {', '.join(self.columns)} does not have")
        if any(epochs < 1 for epochs in self.max_epochs.values()):
            raise ValueError(f"max_epochs must be at least 1; got {dict(self.max_epochs)}")

    def keys(self) -> list[CellKey]:
        """All cells in the order in which they are made."""
        return list(dict.fromkeys(self._keys()))

    def _keys(self) -> Iterator[CellKey]:
        for scale in self.epochs_scale:
            for dataset in self.sets:
                for column in self.columns:
                    preset, family = split_column(column)
                    yield CellKey(preset, family, dataset, self._epochs(preset, dataset, scale))

    def _epochs(self, preset: str, dataset: str, scale: float) -> int:
        if preset != "paper":
            return 0
        published = PAPER_SETTINGS[dataset].max_epochs
        return min(max(1, round(scale * published)), self.max_epochs.get(dataset, published))


def split_column(column: str) -> tuple[str, str]:
    """Preset and family of "paper/gaussian", say; "default" alone leaves the family to the preset."""
    preset, _, family = column.partition("/")
    stacked = preset == "paper"
    if preset not in PRESETS or ((stacked or family) and family not in TABLE_FAMILIES):
        families = ", ".join(TABLE_FAMILIES)
        raise ValueError(f"a column must be paper/FAMILY or default[/FAMILY], FAMILY of {families}; got {column}")
    return preset, family or _OWN


def reproduce(plan: Reproduction, *, verbose: bool = True) -> Iterator[tuple[CellKey, Cell]]:
    """Make every cell that is not there yet, and yield all of them as they come.

    A killed process loses at most `checkpoint_seconds` of training, or one split of a preset that is fitted split by
    split; Ctrl-C and SIGTERM in the training of a stack save first and raise `Interrupted`. A finished cell of other
    data or with another seed or number of draws is an error.
    """
    store, keys = CellStore(plan.output), plan.keys()
    digest = cache(lambda name: dataset_digest(UCIDataset.load(plan.data, name)))
    for number, key in enumerate(keys):
        cell = store.load(key, _identity(plan, key, digest(key.dataset)))
        if cell is None:
            if verbose:
                tqdm.write(f"cell {number + 1} of {len(keys)}: {key.name}")
            cell = make_cell(plan, key, verbose=verbose)
            store.save(cell)
        yield key, cell


def make_cell(plan: Reproduction, key: CellKey, *, verbose: bool = False) -> Cell:
    """Train and score one cell."""
    dataset = UCIDataset.load(plan.data, key.dataset)
    if key.preset == "paper":
        return _stacked_cell(plan, key, dataset, verbose)
    return _estimator_cell(plan, key, dataset, verbose)


def _stacked_cell(plan: Reproduction, key: CellKey, dataset: UCIDataset, verbose: bool) -> Cell:
    """All splits at once."""
    rows = len(dataset.indices[0][0])
    recipe = replace(paper_recipe(rows, key.dataset), noise_family=key.family, num_draws=plan.num_draws)
    published = recipe.max_epochs
    recipe = replace(recipe, max_epochs=key.epochs)
    run = StackedRun(
        StackedTask(dataset, recipe, plan.seed),
        plan.output / "states" / key.preset,
        checkpoint_seconds=plan.checkpoint_seconds,
        verbose=verbose,
    )
    if run.epoch > key.epochs:
        raise ValueError(f"{run.state_path} is at epoch {run.epoch} already, past {key.epochs}; ask for at least that")
    run.advance(key.epochs)
    start = time.process_time()
    splits = score_splits(run.pipeline(), dataset, ensemble_size=plan.ensemble_size, seed=plan.seed, verbose=verbose)
    sampling = time.process_time() - start
    facts = {"train_cpu_seconds": run.seconds, "sample_cpu_seconds": sampling, "recipe": asdict(recipe)}
    return Cell(key, published, splits, {**_common_facts(plan, key, dataset), **facts})


def _estimator_cell(plan: Reproduction, key: CellKey, dataset: UCIDataset, verbose: bool) -> Cell:
    """One fit per split; finished splits are kept."""
    store = CellStore(plan.output)
    changes: dict[str, Any] = {} if key.family == _OWN else {"noise_family": key.family}
    if key.family == "sample":
        changes["training_options"] = TrainingOptions(num_draws=plan.num_draws)
    model = ModelOptions(key.preset, **changes)
    identity = {**_identity(plan, key, dataset_digest(dataset)), **model.changes()}
    done = store.load_splits(key, identity)
    bar = tqdm(total=dataset.num_splits, initial=len(done), desc=key.name, unit="split", disable=not verbose)

    def keep(scores: list[SplitScores]) -> None:
        _common_recipe(key, scores)
        store.save_splits(key, identity, scores)
        bar.update()

    with bar:
        splits = score_all_splits(
            lambda seed: model.estimator(seed=seed, ensemble_size=plan.ensemble_size),
            list(dataset),
            ensemble_size=plan.ensemble_size,
            seed=plan.seed,
            done=done,
            keep=keep,
            settings=_choices_of,
        )
    recipe = _common_recipe(key, splits)
    splits = [{name: value for name, value in split.items() if name != "recipe"} for split in splits]
    return Cell(key, None, splits, {**_common_facts(plan, key, dataset), "recipe": recipe})


def _common_recipe(key: CellKey, splits: Sequence[SplitScores]) -> dict[str, Any]:
    """The recipe of all splits: the same rule for all of them, which have equally many rows."""
    recipe: dict[str, Any] = splits[0]["recipe"]
    for number, other in enumerate(split["recipe"] for split in splits):
        different = sorted(name for name in {*recipe, *other} if recipe.get(name) != other.get(name))
        if different:
            raise ValueError(
                f"{key.name}: split {number} has another {', '.join(different)} than split 0, so the rule of the "
                "preset has changed since; choose another output folder, or remove the unfinished cell"
            )
    return recipe


def _choices_of(model: Any) -> dict[str, Any]:
    """Epochs that the models used, and the recipe."""
    recipe = json.loads(json.dumps(asdict(model.recipe_)))  # as the file of a split gives it back
    return {"epochs": [int(epoch) for epoch in model.n_epochs_], "recipe": recipe}


def _identity(plan: Reproduction, key: CellKey, digest: str) -> dict[str, Any]:
    """What the scores of a cell depend on, besides its key."""
    draws = {"num_draws": plan.num_draws} if key.family == "sample" else {}
    return {"data": digest, "seed": plan.seed, "ensemble_size": plan.ensemble_size, **draws}


def _common_facts(plan: Reproduction, key: CellKey, dataset: UCIDataset) -> dict[str, Any]:
    identity = _identity(plan, key, dataset_digest(dataset))
    return {"seed": plan.seed, "ensemble_size": plan.ensemble_size, "identity": identity, "versions": versions()}
