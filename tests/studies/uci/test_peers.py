"""Other people's models behind our interface, and the benchmark."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.tiny_sets import load_script, write_set

from scripts.studies.uci import peers


class Oracle:
    """Knows mean and standard deviation: 2 x and 3."""

    def fit(self, X: np.ndarray, y: np.ndarray) -> None:
        self.rows = len(y)


def test_a_gaussian_peer_draws_from_its_distribution() -> None:
    """10000 draws: five standard errors of mean and standard deviation."""
    x = np.array([[0.0], [10.0]])
    peer = peers.GaussianPeer(Oracle(), lambda model, rows: (2 * rows[:, 0], np.full(len(rows), 3.0)), seed=0)
    draws = peer.fit(x, x[:, 0]).sample(x, 10000)
    np.testing.assert_allclose(draws.mean(0), [0, 20], atol=5 * 3 / 100)
    np.testing.assert_allclose(draws.std(0), 3, atol=5 * 3 / np.sqrt(2 * 10000))
    np.testing.assert_allclose(peer.predict_interval(x, 0.95)[1], [20 - 1.959964 * 3, 20 + 1.959964 * 3], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(peers.PEERS))
def test_peers_learn_a_simple_table(name: str) -> None:
    if not peers.is_installed(name):
        pytest.skip(f"{name} is not installed")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 2))
    model = peers.PEERS[name](0)
    model.fit(x, 5 * x[:, 0] + 0.1 * rng.normal(size=100))
    assert np.corrcoef(model.sample(x, 20).mean(0), x[:, 0])[0, 1] > 0.9
    low, high = model.predict_interval(x, 0.9).T
    assert (low < high).all()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(peers, "import_module", missing)
    assert not peers.is_installed("no_such_package")
    with pytest.raises(ImportError, match="pip install ngboost"):
        peers.ngboost(0)


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
