"""`default` and other people's models on the ten public tables of `prepare_tables`; five seeded splits; resumable.

    python scripts/prepare_tables.py --root data/tables
    python -m scripts.studies.tables.compare --data data/tables --output runs/tables --environments runs/peers
    python -m scripts.studies.tables.compare --data data/tables --output runs/tables --models default
    python -m scripts.studies.tables.compare --data data/tables --output runs/tables --render_only

A tenth of the rows is each split's test set. The columns become numbers by the encoder of `DiffusionRegressor`, fitted
on the training rows, so that all models see the same matrix. Peers run at their defaults in environments of their own
(`scripts.studies.uci.peers`); every fit is on one thread. Cells are kept; run the same command again to resume.
table.md is renewed at the end.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.files import atomic_path, make_folder
from marigold_uq.results import versions
from marigold_uq.tabular.duplicates import score_apart
from marigold_uq.tabular.public_tables import NUM_SPLITS, PUBLIC_TABLES, PublicTable
from marigold_uq.tabular.run import ModelOptions
from marigold_uq.tabular.scores import SplitScores, score_estimator
from marigold_uq.tabular.uci import UCISplit
from scripts.studies.tables.report import render
from scripts.studies.uci.cells import Cell, CellKey, CellStore
from scripts.studies.uci.peer_models import MODELS
from scripts.studies.uci.peers import check_peers, peer_cell

OURS = "default"


@dataclass(frozen=True)
class TableStudy:
    """Compare `default` with other people's models on ten public tables.

    Args:
        data: Folder of the tables.
        output: Folder of the cells and of table.md.
        environments: Folder of the virtual environments of the peers; what is missing is made.
        tables: Names of tables.
        models: "default", or names of peers, see `peer_models.MODELS`.
        ensemble_size: Draws per test row.
        seed: Of split 0; that of the others is added to their number.
        threads: Of torch.
        render_only: Only renew table.md.
    """

    data: Path
    output: Path
    environments: Path | None = None
    tables: list[str] = field(default_factory=lambda: list(PUBLIC_TABLES))
    models: list[str] = field(default_factory=lambda: [*MODELS, OURS])
    ensemble_size: int = 100
    seed: int = 0
    threads: int = 1
    render_only: bool = False

    def __post_init__(self) -> None:
        unknown = set(self.tables) - set(PUBLIC_TABLES)
        if unknown:
            raise ValueError(f"unknown table {', '.join(sorted(unknown))}; expected {', '.join(PUBLIC_TABLES)}")
        peers = [name for name in self.models if name != OURS]
        check_peers(peers)
        if peers and self.environments is None and not self.render_only:
            raise ValueError(f"environments must name a folder where {', '.join(peers)} can be installed; got None")


def make_cell(study: TableStudy, model: str, name: str) -> Cell:
    """The cell of a model and a table; one that is there already is read."""
    key = CellKey(OURS, "own", name, 0) if model == OURS else CellKey("peer", model, name, NUM_SPLITS)
    identity = {"data": PUBLIC_TABLES[name].digest, "seed": study.seed, "ensemble_size": study.ensemble_size}
    store = CellStore(study.output)
    cell = store.load(key, identity)
    if cell is not None:
        return cell
    splits = list(PublicTable.load(study.data, name))
    if model == OURS:
        return _own_cell(store, key, splits, identity)
    assert study.environments is not None
    return peer_cell(store, study.environments, key, splits, identity)


def _own_cell(store: CellStore, key: CellKey, splits: Sequence[UCISplit], identity: dict[str, Any]) -> Cell:
    """One fit of `default` per split; finished splits are kept."""
    scores = store.load_splits(key, identity)
    with tqdm(total=len(splits), initial=len(scores), desc=key.name, unit="split") as bar:
        for number in range(len(scores), len(splits)):
            scores.append(_fit_default(splits[number], number, identity))
            store.save_splits(key, identity, scores)
            bar.update()
    settings = {name: identity[name] for name in ("seed", "ensemble_size")}
    recipe = scores[0]["recipe"]
    kept = [{name: value for name, value in one.items() if name != "recipe"} for one in scores]
    cell = Cell(key, None, kept, {**settings, "identity": identity, "recipe": recipe, "versions": versions()})
    store.save(cell)
    return cell


def _fit_default(split: UCISplit, number: int, identity: dict[str, Any]) -> SplitScores:
    """Scores of one fit, also on new rows apart."""
    seed, size = identity["seed"], identity["ensemble_size"]
    model = ModelOptions(OURS).estimator(seed=seed + number, ensemble_size=size)
    scores = score_estimator(model, split, ensemble_size=size, seed=seed)
    apart = score_apart(model.sample(split.test_features, size), split)
    return {**scores, **apart, "recipe": asdict(model.recipe_)}


def _run(study: TableStudy, invocation: Invocation) -> int:
    """Make what is missing, and renew table.md; a peer that fails on a table is named, and the others go on."""
    torch.set_num_threads(study.threads)
    make_folder(study.output)
    failed = 0
    for name in [] if study.render_only else study.tables:
        for model in study.models:
            try:
                score = make_cell(study, model, name).summary["crps"]
            except RuntimeError as error:
                failed += 1
                print(f"{model} on {name}: {error}", file=sys.stderr, flush=True)
                continue
            print(f"{name}, {model}: CRPS {score.mean:.4g}", flush=True)
    with atomic_path(study.output / "table.md", overwrite=True) as temporary:
        temporary.write_text(render(CellStore(study.output)), encoding="utf-8")
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return run_command("scripts.studies.tables.compare", TableStudy, _run, arguments)


if __name__ == "__main__":
    sys.exit(main())
