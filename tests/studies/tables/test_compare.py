"""The comparison on public tables: cells of peers and of `default`, and the tables in Markdown."""

from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_sets import quick_model

from marigold_uq.tabular.public_tables import PUBLIC_TABLES
from scripts.studies.tables import compare
from scripts.studies.tables.report import render
from scripts.studies.uci import peers
from scripts.studies.uci.cells import Cell, CellKey, CellStore

pytest.importorskip("pandas")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table of 60 rows, of which 50 differ, under the name of one of the ten."""
    x = np.random.default_rng(0).normal(size=(50, 2))
    x = np.concatenate([x, x[:10]])
    text = "a,b,wage\n" + "".join(f"{a},{b},{a - b}\n" for a, b in x)
    facts = replace(PUBLIC_TABLES["wage"], digest=sha256(text.encode()).hexdigest(), leave_out=())
    monkeypatch.setitem(PUBLIC_TABLES, "wage", facts)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "wage.csv").write_text(text)
    return tmp_path / "data"


def arguments(data: Path, **options: Any) -> list[str]:
    given = {"data": data, "output": data.parent / "run", "tables": "wage", **options}
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


def test_default_is_scored_on_every_split_new_rows_apart(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted: list[int] = []

    class Quick(compare.ModelOptions):
        def estimator(self, *, seed: int, ensemble_size: int) -> Any:
            fitted.append(seed)
            return quick_model(random_state=seed, ensemble_size=ensemble_size, baseline="none", num_models=1)

    monkeypatch.setattr(compare, "ModelOptions", Quick)
    command = arguments(data, models="default", ensemble_size=20)
    assert compare.main(command) == 0
    assert compare.main(command) == 0
    assert fitted == [0, 1, 2, 3, 4]
    (cell,) = CellStore(data.parent / "run")
    assert cell.key == CellKey("default", "own", "wage", 0)
    assert cell.facts["recipe"]["baseline"] == "none"
    for split in cell.splits:
        new, old, share = (split.get(name, 0.0) for name in ("crps_new", "crps_duplicates", "duplicates"))
        assert split["crps"] == pytest.approx((1 - share) * new + share * old)
    assert any(split["duplicates"] for split in cell.splits)
    other = compare.TableStudy(data, data.parent / "run", models=["default"], ensemble_size=20, seed=1)
    with pytest.raises(ValueError, match="seed was 0, now 1"):
        compare.make_cell(other, "default", "wage")


def test_peers_run_on_the_same_splits_and_failures_are_named(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "make_environment", lambda folder, name: Path("python"))
    monkeypatch.setattr(peers, "peer_versions", lambda python: {"numpy": "1"})

    def score(python: Path, peer: str, splits: list, **settings: Any) -> list[dict[str, Any]]:
        if peer == "ngboost":
            raise RuntimeError("ngboost failed")
        return [scores(float(split.test_targets.std())) for split in splits]

    monkeypatch.setattr(peers, "score_peer", score)
    command = [*arguments(data, environments=data.parent / "environments"), "--models", "lightgbm", "ngboost"]
    assert compare.main(command) == 1
    assert "ngboost on wage: ngboost failed" in capsys.readouterr().err
    (cell,) = CellStore(data.parent / "run")
    assert cell.key == CellKey("peer", "lightgbm", "wage", 5)
    assert "| wage | **" in (data.parent / "run" / "table.md").read_text()


def scores(crps: float) -> dict[str, Any]:
    names = ("rmse", "coverage_50", "coverage_90", "interval_coverage_95", "interval_width_95", "duplicates")
    return {
        "crps": crps,
        "crps_new": 2 * crps,
        **dict.fromkeys(names, 0.5),
        "fit_cpu_seconds": 1.0,
        "sample_cpu_seconds": 2.0,
    }


def test_the_ratio_is_that_to_the_best_peer(tmp_path: Path) -> None:
    """1 / 2 on one table and 8 / 4 on the other: a geometric mean of 1."""
    store = CellStore(tmp_path)
    given = {("default", "wage"): 1.0, ("lightgbm", "wage"): 2.0, ("ngboost", "wage"): 3.0}
    given |= {("default", "fair"): 8.0, ("ngboost", "fair"): 4.0}
    for (model, table), score in given.items():
        key = CellKey("default", "own", table, 0) if model == "default" else CellKey("peer", model, table, 5)
        store.save(Cell(key, None, [scores(score)]))
    text = render(store)
    assert "| table | lightgbm | ngboost | default | `default` / best peer |" in text
    assert "| wage | **2** | 3 | 1 | 0.500 |" in text
    assert "| fair |  | **4** | 8 | 2.000 |" in text
    assert "| geometric mean |  |  |  | 1.000 |" in text
    assert "| fair |  | 1 / 2 | 1 / 2 |" in text
    assert "| wage | 50.0% | 4 | 6 | 2 |" in text


def test_wrong_plans_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown table boston"):
        compare.TableStudy(tmp_path, tmp_path, tables=["boston"])
    with pytest.raises(ValueError, match="peers must be some of"):
        compare.TableStudy(tmp_path, tmp_path, models=["oracle"])
    with pytest.raises(ValueError, match="environments must name a folder where lightgbm can be installed; got None"):
        compare.TableStudy(tmp_path, tmp_path, models=["default", "lightgbm"])
