"""The table of the UCI sets: cells, resuming, and what the table says about epochs."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.tiny_sets import write_set

from marigold_uq.tabular.recipe import Recipe, paper_recipe
from marigold_uq.tabular.uci import UCIDataset
from scripts.studies.uci import reproduce as command
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
    options = {"columns": ("paper/gaussian",), "ensemble_size": 10, **options}
    return Reproduction(data, output, ("yacht",), **options)


def crps(cell: Cell) -> list[float]:
    return [split["crps"] for split in cell.splits]


def test_more_epochs_continue_fewer_and_equal_a_direct_run(data: Path, tmp_path: Path) -> None:
    (direct,) = dict(reproduce(plan(data, tmp_path / "direct"), verbose=False)).values()
    in_parts = dict(reproduce(plan(data, tmp_path / "parts", epochs_scale=(0.3, 1.0)), verbose=False))
    assert [key.epochs for key in in_parts] == [3, 10]
    short, full = in_parts.values()
    assert crps(full) == crps(direct)
    assert crps(short) != crps(direct)
    assert [epochs_text(cell) for cell in (short, full)] == ["3/10", "10/10"]
    assert short.is_partial
    assert not full.is_partial
    (best,) = CellStore(tmp_path / "parts").furthest().values()
    assert best == full


def test_a_run_that_was_stopped_resumes_to_the_same_result(
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
        ("paper/gaussian", {"seed": 1}, "seed was 0, now 1"),
        ("paper/gaussian", {"ensemble_size": 11}, "ensemble_size was 10, now 11"),
        ("paper/sample", {"num_draws": 2}, "num_draws was 4, now 2"),
    ],
)
def test_finished_cells_of_another_run_are_refused(
    data: Path, tmp_path: Path, column: str, changes: dict[str, Any], message: str
) -> None:
    options: dict[str, Any] = {"columns": (column,), "max_epochs": {"yacht": 1}}
    list(reproduce(plan(data, tmp_path / "run", **options), verbose=False))
    list(reproduce(plan(data, tmp_path / "run", **options), verbose=False))
    with pytest.raises(ValueError, match=f"made with other settings: {message}. Choose another output"):
        list(reproduce(plan(data, tmp_path / "run", **options, **changes), verbose=False))


def test_finished_cells_of_other_data_are_refused(data: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_epochs": {"yacht": 1}}
    list(reproduce(plan(data, tmp_path / "run", **options), verbose=False))
    rows = (data / "yacht" / "data.txt").read_text().splitlines()
    (data / "yacht" / "data.txt").write_text("\n".join(rows[::-1]))
    with pytest.raises(ValueError, match="made with other settings: data was"):
        list(reproduce(plan(data, tmp_path / "run", **options), verbose=False))


def test_facts_of_published_cells_are_read_under_todays_names(tmp_path: Path) -> None:
    facts = {"num_samples": 5, "identity": {"num_samples": 5, "seed": 0}, "recipe": {"num_members": 2}}
    store, cell = CellStore(tmp_path), Cell(CellKey("paper", "point", "yacht", 1), 10, [{"crps": 1.0}], facts)
    store.save(cell)
    found = store.load(cell.key, {"ensemble_size": 5, "seed": 0})
    assert found is not None
    assert found.facts["recipe"] == {"num_models": 2}
    assert found.facts["ensemble_size"] == 5


def test_splits_of_different_recipes_are_not_mixed_and_the_draws_of_training_are_passed_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first split the rule of the preset changes."""
    made: list[int] = []

    class Changing(reproduction.ModelOptions):
        def estimator(self, **options: Any) -> Any:
            made.append(self.training_options.num_draws)
            changed = {"max_epochs": 1 + len(made), "num_models": 1, "baseline": "none"}
            return super().estimator(**options).set_params(**changed)

    monkeypatch.setattr(reproduction, "ModelOptions", Changing)
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
    with pytest.raises(ValueError, match="num_timesteps was 8, now 9"):
        StackedRun(StackedTask(dataset, replace(SHORT, num_timesteps=9)), folder)
    with pytest.raises(ValueError, match="seed was 0, now 1"):
        StackedRun(StackedTask(dataset, SHORT, seed=1), folder)


def test_looking_at_the_models_does_not_disturb_training(data: Path, tmp_path: Path) -> None:
    dataset = UCIDataset.load(data, "yacht")
    runs = [StackedRun(StackedTask(dataset, SHORT), tmp_path / name) for name in ("watched", "alone")]
    for epochs in (1, 2):
        runs[0].advance(epochs)
        score_splits(runs[0].pipeline(), dataset, ensemble_size=5)
    runs[1].advance(2)
    one, two = (score_splits(run.pipeline(), dataset, ensemble_size=5) for run in runs)
    assert one == two


def test_presets_that_are_fitted_split_by_split_keep_finished_splits(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = partial(reproduction.ModelOptions, max_epochs=2, num_models=1, baseline="none")
    monkeypatch.setattr(reproduction, "ModelOptions", quick)
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
    arguments = ["--data", str(data), "--output", str(tmp_path / "run"), "--sets", "yacht", "--ensemble_size", "10"]
    assert command.main([*arguments, "--columns", "paper/point", "--max_epochs.yacht", "2"]) == 0
    text = (tmp_path / "run" / "table.md").read_text()
    assert "Last command: `python -m scripts.studies.uci.reproduce --data" in text
    assert "[2/10, 2 splits]" in text
    assert "published gaussian" in text
    assert "peers at their defaults" in text
    (cell,) = json.loads((tmp_path / "run" / "results.json").read_text())["cells"]
    assert (cell["epochs"], cell["published_epochs"], cell["num_splits"]) == (2, 10, 2)
    assert (tmp_path / "run" / "figure.png").stat().st_size > 0


def test_references_have_their_numbers_where_they_belong() -> None:
    """The goal is the best of its row."""
    for name, goal in command.BEAT.items():
        assert goal == min(one.values[name][0] for one in command.REFERENCES if name in one.values)
    assert set(paper_recipe.__globals__["PAPER_SETTINGS"]) == set(command.SETS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": ("paper",)}, "a column must be paper/FAMILY"),
        ({"columns": ("best/gaussian",)}, "a column must be paper/FAMILY"),
        ({"epochs_scale": (1.5,)}, "within"),
        ({"max_epochs": {"boston": 3}}, "unknown data set boston"),
        ({"max_epochs": {"yacht": 0}}, "at least 1"),
        ({"max_epochs": {"yacht": 5}, "columns": ("default",)}, "max_epochs limits paper/FAMILY"),
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
