"""The table of the UCI sets: cells, resuming, and what the table says about epochs."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.tiny_sets import load_script, write_set

from marigold_uq.tabular import DiffusionRegressor
from marigold_uq.tabular.recipe import Recipe, paper_recipe
from marigold_uq.tabular.uci import UCIDataset
from scripts.studies.uci import reproduction, stacked
from scripts.studies.uci.cells import Cell, CellKey, CellStore
from scripts.studies.uci.reproduction import Reproduction, reproduce
from scripts.studies.uci.stacked import Interrupted, StackedRun, StackedTask, score_splits
from scripts.studies.uci.tables import epochs_text

SHORT = Recipe(baseline_epochs=6, batch_size=16, num_timesteps=8, max_epochs=10)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A set called yacht, for which the recipe is short and 10 epochs are published."""
    monkeypatch.setattr(reproduction, "paper_recipe", lambda rows, name: SHORT)
    settings = {**reproduction.PAPER_SETTINGS, "yacht": replace(reproduction.PAPER_SETTINGS["yacht"], max_epochs=10)}
    monkeypatch.setattr(reproduction, "PAPER_SETTINGS", settings)
    return write_set(tmp_path / "uci", "yacht")


def plan(data: Path, output: Path, **options: Any) -> Reproduction:
    options = {"columns": ("paper/gaussian",), "num_samples": 10, **options}
    return Reproduction(data, output, ("yacht",), **options)


def crps(cell: Cell) -> list[float]:
    return [split["crps"] for split in cell.splits]


def test_more_epochs_continue_fewer_and_equal_a_direct_run(data: Path, tmp_path: Path) -> None:
    (direct,) = dict(reproduce(plan(data, tmp_path / "direct"), verbose=False)).values()
    in_parts = dict(reproduce(plan(data, tmp_path / "parts", scales=(0.3, 1.0)), verbose=False))
    assert [key.epochs for key in in_parts] == [3, 10]
    short, full = in_parts.values()
    assert crps(full) == crps(direct)
    assert crps(short) != crps(direct)
    assert [epochs_text(cell) for cell in (short, full)] == ["3/10", "10/10"]
    assert short.is_partial
    assert not full.is_partial
    (best,) = CellStore(tmp_path / "parts").furthest().values()
    assert best == full


def test_a_run_that_was_stopped_goes_on_to_the_same_result(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal after 4 steps; 54 rows in batches of 16 are 4 steps an epoch."""
    (direct,) = dict(reproduce(plan(data, tmp_path / "direct"), verbose=False)).values()

    class AskedToEnd(stacked.InterruptGuard):
        @property
        def requested(self) -> bool:
            self.asked = getattr(self, "asked", 0) + 1
            return self.asked >= 4

        @requested.setter
        def requested(self, value: bool) -> None:
            pass

    with monkeypatch.context() as patch:
        patch.setattr(stacked, "InterruptGuard", AskedToEnd)
        with pytest.raises(Interrupted, match="saved at epoch"):
            list(reproduce(plan(data, tmp_path / "stopped"), verbose=False))
    assert not list(CellStore(tmp_path / "stopped"))
    (resumed,) = dict(reproduce(plan(data, tmp_path / "stopped"), verbose=False)).values()
    assert crps(resumed) == crps(direct)


def test_finished_cells_are_not_made_again(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = dict(reproduce(plan(data, tmp_path / "run"), verbose=False))
    monkeypatch.setattr(reproduction, "make_cell", lambda *a, **k: pytest.fail("trained again"))
    assert dict(reproduce(plan(data, tmp_path / "run"), verbose=False)) == want


@pytest.mark.parametrize(
    ("column", "changes", "message"),
    [
        ("paper/gaussian", {"seed": 1}, "another seed;"),
        ("paper/gaussian", {"num_samples": 11}, "another num_samples;"),
        ("paper/sample", {"num_draws": 2}, "another num_draws;"),
    ],
)
def test_finished_cells_of_another_run_are_refused(
    data: Path, tmp_path: Path, column: str, changes: dict[str, Any], message: str
) -> None:
    options: dict[str, Any] = {"columns": (column,), "max_epochs": {"yacht": 1}}
    list(reproduce(plan(data, tmp_path / "run", **options), verbose=False))
    list(reproduce(plan(data, tmp_path / "run", **options), verbose=False))
    with pytest.raises(ValueError, match=f"made with {message} choose another output folder"):
        list(reproduce(plan(data, tmp_path / "run", **options, **changes), verbose=False))


def test_finished_cells_of_other_data_are_refused_and_older_cells_are_taken_with_a_warning(
    data: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"max_epochs": {"yacht": 1}}
    ((key, cell),) = reproduce(plan(data, tmp_path / "run", **options), verbose=False)
    rows = (data / "yacht" / "data.txt").read_text().splitlines()
    (data / "yacht" / "data.txt").write_text("\n".join(rows[::-1]))
    with pytest.raises(ValueError, match="made with another data;"):
        list(reproduce(plan(data, tmp_path / "run", **options), verbose=False))
    older = replace(cell, facts={name: fact for name, fact in cell.facts.items() if name != "identity"})
    CellStore(tmp_path / "older").save(older)
    with pytest.warns(UserWarning, match="does not state its data; it is taken as it is"):
        assert list(reproduce(plan(data, tmp_path / "older", **options), verbose=False)) == [(key, older)]
    with pytest.warns(UserWarning, match="does not state"), pytest.raises(ValueError, match="another seed"):
        list(reproduce(plan(data, tmp_path / "older", seed=1, **options), verbose=False))


def test_splits_of_different_recipes_are_not_mixed_and_the_draws_of_training_are_passed_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first split the rule of the preset changes."""
    made: list[int] = []

    def changing(*arguments: Any, **options: Any) -> DiffusionRegressor:
        made.append(options["num_draws"])
        return DiffusionRegressor(*arguments, max_epochs=1 + len(made), num_members=1, baseline="none", **options)

    monkeypatch.setattr(reproduction, "DiffusionRegressor", changing)
    options: dict[str, Any] = {"columns": ("default/sample",), "num_draws": 3}
    with pytest.raises(ValueError, match="split 1 has another max_epochs than split 0"):
        list(reproduce(plan(data, tmp_path / "run", **options), verbose=False))
    assert made == [3, 3]
    kept = json.loads((tmp_path / "run" / "unfinished" / "default-sample-yacht-0.json").read_text())
    assert len(kept["splits"]) == 1


def test_the_baseline_is_shared_by_families_and_states_of_another_run_are_refused(data: Path, tmp_path: Path) -> None:
    dataset, folder = UCIDataset.load(data, "yacht"), tmp_path / "states"
    first = StackedRun(StackedTask(dataset, SHORT), folder)
    second = StackedRun(StackedTask(dataset, replace(SHORT, noise_family="point")), folder)
    assert all((a == b).all() for a, b in zip(first.baseline.parameters(), second.baseline.parameters(), strict=True))
    first.advance(1)
    with pytest.raises(ValueError, match="another num_timesteps"):
        StackedRun(StackedTask(dataset, replace(SHORT, num_timesteps=9)), folder)
    with pytest.raises(ValueError, match=r"other data, another recipe or other seeds|another seed"):
        StackedRun(StackedTask(dataset, SHORT, seed=1), folder)


def test_looking_at_the_models_does_not_disturb_training(data: Path, tmp_path: Path) -> None:
    dataset = UCIDataset.load(data, "yacht")
    runs = [StackedRun(StackedTask(dataset, SHORT), tmp_path / name) for name in ("watched", "alone")]
    for epochs in (1, 2):
        runs[0].advance(epochs)
        score_splits(runs[0].pipeline(), dataset, num_samples=5)
    runs[1].advance(2)
    one, two = (score_splits(run.pipeline(), dataset, num_samples=5) for run in runs)
    assert one == two


def test_presets_that_are_fitted_split_by_split_keep_finished_splits(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = partial(reproduction.DiffusionRegressor, max_epochs=2, num_members=1, baseline="none")
    monkeypatch.setattr(reproduction, "DiffusionRegressor", quick)
    (direct,) = dict(reproduce(plan(data, tmp_path / "direct", columns=("default",)), verbose=False)).values()
    save, saved = CellStore.save_splits, []

    def save_once(self: CellStore, *arguments: Any) -> None:
        save(self, *arguments)
        saved.append(arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CellStore, "save_splits", save_once)
        with pytest.raises(KeyboardInterrupt):
            list(reproduce(plan(data, tmp_path / "stopped", columns=("default",)), verbose=False))
    (resumed,) = dict(reproduce(plan(data, tmp_path / "stopped", columns=("default",)), verbose=False)).values()
    assert crps(resumed) == crps(direct)
    assert resumed.splits[0]["fit_seconds"] == saved[0][2][0]["fit_seconds"]
    assert not list((tmp_path / "stopped" / "unfinished").iterdir())
    assert direct.facts["recipe"]["baseline"] == "none"


def test_the_files_of_a_run_state_epochs_and_name_the_sources(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("scripts/studies/uci/reproduce.py")
    arguments = ["--data", str(data), "--output", str(tmp_path / "run"), "--sets", "yacht", "--num-samples", "10"]
    assert script.main([*arguments, "--columns", "paper/point", "--max-epochs", "yacht=2"]) == 0
    text = (tmp_path / "run" / "table.md").read_text()
    assert "[2/10, 2 splits]" in text
    assert "published gaussian" in text
    assert "peers at their defaults" in text
    (cell,) = json.loads((tmp_path / "run" / "results.json").read_text())["cells"]
    assert (cell["epochs"], cell["published_epochs"], cell["num_splits"]) == (2, 10, 2)
    assert (tmp_path / "run" / "figure.png").stat().st_size > 0


def test_references_have_their_numbers_where_they_belong() -> None:
    """The goal is the best of its row."""
    script = load_script("scripts/studies/uci/reproduce.py")
    for name, goal in script.BEAT.items():
        assert goal == min(one.values[name][0] for one in script.REFERENCES if name in one.values)
    assert set(paper_recipe.__globals__["PAPER_SETTINGS"]) == set(script.SETS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": ("paper",)}, "a column is paper/FAMILY"),
        ({"columns": ("best/gaussian",)}, "a column is paper/FAMILY"),
        ({"scales": (1.5,)}, "within"),
        ({"max_epochs": {"boston": 3}}, "unknown data set boston"),
        ({"max_epochs": {"yacht": 0}}, "at least 1"),
        ({"max_epochs": {"yacht": 5}, "columns": ("default",)}, "max_epochs limit paper/FAMILY"),
    ],
)
def test_wrong_plans_are_explained(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(Path(), Path(), **options)


def test_a_cell_is_never_replaced(tmp_path: Path) -> None:
    store, cell = CellStore(tmp_path), Cell(CellKey("paper", "point", "yacht", 1), 10, [{"crps": 1.0}])
    store.save(cell)
    assert store.load(cell.key) == cell
    with pytest.raises(FileExistsError):
        store.save(cell)
    (tmp_path / "cells" / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a cell"):
        list(store)
