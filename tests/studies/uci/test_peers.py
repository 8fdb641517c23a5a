"""Other people's models behind our interface, and the benchmark."""

import json
import sys
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from support.scripts import load_script
from support.tiny_sets import write_set

from marigold_uq.tabular.uci import UCIDataset
from scripts.studies.uci import peer_models, peers
from scripts.studies.uci.cells import CellKey, CellStore


class Oracle:
    """Knows mean and standard deviation: 2 x and 3."""

    def fit(self, X: np.ndarray, y: np.ndarray) -> None:
        self.rows = len(y)


def normal_quantiles(model: Oracle, rows: np.ndarray) -> np.ndarray:
    return 2 * rows + 3 * np.array([[NormalDist().inv_cdf(level) for level in LEVELS]])


LEVELS = tuple(np.linspace(0.001, 0.999, 999).tolist())


def check_draws(peer: peer_models.PeerModel) -> None:
    """10000 draws of N(2 x, 9): five standard errors of mean and standard deviation, and the ends at 95 %."""
    x = np.array([[0.0], [10.0]])
    draws = peer.fit(x, x[:, 0]).sample(x, 10000)
    np.testing.assert_allclose(draws.mean(0), [0, 20], atol=5 * 3 / 100)
    np.testing.assert_allclose(draws.std(0), 3, atol=5 * 3 / np.sqrt(2 * 10000))
    np.testing.assert_allclose(peer.predict_interval(x, 0.95)[1], [20 - 1.959964 * 3, 20 + 1.959964 * 3], rtol=1e-3)


def test_a_gaussian_peer_draws_from_its_distribution() -> None:
    check_draws(peer_models.GaussianPeer(Oracle(), lambda model, x: (2 * x[:, 0], np.full(len(x), 3.0)), seed=0))


def test_a_quantile_peer_draws_from_its_distribution() -> None:
    check_draws(peer_models.QuantilePeer(Oracle(), normal_quantiles, LEVELS, seed=0))


def test_quantiles_that_cross_are_sorted() -> None:
    peer = peer_models.QuantilePeer(Oracle(), lambda model, x: np.array([[3.0, 1.0, 2.0]]), (0.1, 0.5, 0.9), 0)
    np.testing.assert_allclose(peer.predict_interval(np.zeros((1, 1)), 0.8), [[1, 3]])


def test_a_forest_is_rounded_where_the_target_is_discrete() -> None:
    """Marks 1, 2 and 5, each seen 40 times; the same numbers with noise are continuous."""
    marks, x = np.repeat([1.0, 2.0, 5.0], 40), np.zeros((120, 1))
    peer = peer_models.QuantilePeer(Oracle(), normal_quantiles, LEVELS, 0, rounds=True)
    assert set(np.unique(peer.fit(x, marks).sample(x, 50))) == {1.0, 2.0, 5.0}
    assert len(np.unique(peer.fit(x, marks + np.arange(120)).sample(x, 50))) > 1000


def test_the_interval_of_a_sampling_peer_is_that_of_its_draws() -> None:
    calls = []

    def draw(model: Oracle, rows: np.ndarray, number: int, seed: int) -> np.ndarray:
        calls.append(number)
        return np.arange(1.0, number + 1)[:, None] * np.ones(len(rows))

    x = np.zeros((2, 1))
    peer = peer_models.SamplingPeer(Oracle(), draw, seed=0)
    peer.sample(x, 99)
    np.testing.assert_allclose(peer.predict_interval(x, 0.9), [[5, 95], [5, 95]])
    assert calls == [99]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(peer_models.MODELS))
def test_peers_learn_a_simple_table(name: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 2))
    try:
        model = peer_models.MODELS[name](0)
    except ImportError as error:
        pytest.skip(str(error))
    model.fit(x, 5 * x[:, 0] + 0.1 * rng.normal(size=100))
    assert np.corrcoef(model.sample(x, 20).mean(0), x[:, 0])[0, 1] > 0.9
    low, high = model.predict_interval(x, 0.9).T
    assert (low <= high).all()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(peer_models, "import_module", missing)
    with pytest.raises(ImportError, match="pip install ngboost"):
        peer_models.ngboost(0)


FAKE_PEER = """
import sys
import numpy as np
arguments = sys.argv[4:]
files = arguments[: arguments.index("--seed")]
for given, output in zip(files[::2], files[1::2]):
    rows = np.load(given)
    assert sorted(rows.files) == ["test_features", "train_features", "train_targets"]
    if len(rows["train_targets"]) == 3:
        raise SystemExit("three rows are too few")
    draws = np.full((10, len(rows["test_features"])), rows["train_targets"].mean())
    np.savez(output, samples=draws, interval=draws[:2].T, fit_seconds=1.0, fit_cpu_seconds=2.0)
    print("a word of the package")
    print(output, flush=True)
"""


@pytest.fixture
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Environments that are there already, and a peer that predicts the mean of the training targets."""
    folder = tmp_path / "environments"
    for name, requirements in peers.ENVIRONMENTS.items():
        (folder / name / "bin").mkdir(parents=True)
        python = folder / name / "bin" / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        (folder / name / "requirements.txt").write_text("\n".join(requirements) + "\n")
    (tmp_path / "fake.py").write_text(FAKE_PEER)
    monkeypatch.setattr(peers, "_MODULE", tmp_path / "fake.py")
    return folder


def study(tmp_path: Path, environments: Path, **options: Any) -> list[str]:
    data = tmp_path / "uci"
    if not data.exists():
        write_set(data, "yacht")
    given = {"data": data, "output": tmp_path / "run", "environments": environments, "sets": "yacht", **options}
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


def test_a_peer_is_scored_on_every_split_and_resumes(
    tmp_path: Path, environments: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All draws equal the mean of the training targets, so the CRPS is the mean absolute error."""
    arguments = study(tmp_path, environments, peers="lightgbm")
    assert peers.main(arguments) == 0
    (cell,) = CellStore(tmp_path / "run")
    split = UCIDataset.load(tmp_path / "uci", "yacht").split(1)
    want = np.abs(split.test_targets - split.train_targets.mean()).mean()
    assert cell.key == CellKey("peer", "lightgbm", "yacht", 2)
    assert cell.splits[1]["crps"] == pytest.approx(want)
    assert cell.splits[1]["crps_new"] == pytest.approx(want)
    assert (cell.splits[1]["fit_seconds"], cell.splits[1]["fit_cpu_seconds"]) == (1.0, 2.0)
    assert "numpy" in cell.facts["peer_versions"]
    monkeypatch.setattr(peers, "score_peer", lambda *a, **k: pytest.fail("fitted again"))
    assert peers.main(arguments) == 0
    assert "peer-lightgbm-yacht-2: CRPS" in capsys.readouterr().out


def test_fewer_splits_are_a_cell_of_their_own(tmp_path: Path, environments: Path) -> None:
    assert peers.main(study(tmp_path, environments, peers="ngboost", splits=1)) == 0
    (cell,) = CellStore(tmp_path / "run")
    assert (cell.key.epochs, len(cell.splits)) == (1, 1)


def test_a_peer_that_fails_is_named_with_what_it_said(
    tmp_path: Path, environments: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_set(tmp_path / "uci", "yacht", rows=4, num_splits=1)
    (tmp_path / "uci" / "yacht" / "index_test_0.txt").write_text("0\n")
    (tmp_path / "uci" / "yacht" / "index_train_0.txt").write_text("1\n2\n3\n")
    assert peers.main(study(tmp_path, environments, peers="catboost")) == 1
    assert "three rows are too few" in capsys.readouterr().err
    assert not list(CellStore(tmp_path / "run"))


def test_an_environment_is_made_once_and_again_for_other_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def run(command: list[str], check: bool) -> None:
        calls.append(command)
        (tmp_path / "diffgbm").mkdir(exist_ok=True)

    monkeypatch.setattr(peers.subprocess, "run", run)
    for _ in range(2):
        assert peers.make_environment(tmp_path, "diffgbm") == tmp_path / "diffgbm" / "bin" / "python"
    assert [command[1:3] for command in calls] == [["-m", "venv"], ["-m", "pip"]]
    monkeypatch.setitem(peers.ENVIRONMENTS, "diffgbm", ("diffgbm==9",))
    peers.make_environment(tmp_path, "diffgbm")
    assert calls[-1][-1] == "diffgbm==9"
    assert [peers.environment_of(name) for name in ("treeffuser", "extra_leaf1")] == ["treeffuser", "common"]


def test_unknown_peers_sets_and_numbers_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"peers must be some of extra_leaf1, .*; got oracle"):
        peers.PeerStudy(tmp_path, tmp_path, tmp_path, peers=["oracle"])
    with pytest.raises(ValueError, match="unknown data set boston"):
        peers.PeerStudy(tmp_path, tmp_path, tmp_path, sets=["boston"])
    with pytest.raises(ValueError, match="splits must be at least 1; got 0"):
        peers.PeerStudy(tmp_path, tmp_path, tmp_path, splits=0)


def test_the_benchmark_reports_ratios(tmp_path: Path) -> None:
    """Only that it measures; how fast is no test on a shared machine."""
    script = load_script("scripts/benchmarks/tabular.py")
    data, output = str(write_set(tmp_path / "uci", "yacht")), tmp_path / "out.json"
    options = {"data": data, "set": "yacht", "steps": 2, "repeats": 1, "splits": 0, "ensemble_size": 4}
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    assert script.main([*arguments, "--output", str(output)]) == 0
    results = json.loads(output.read_text())
    assert results["training"]["num_splits"] == 2
    for part in ("training", "sampling"):
        assert results[part]["times_faster"]["cpu_seconds"] > 0
