"""Scripts that nobody imports go on fitting the package when its modules move."""

from importlib import import_module
from pathlib import Path

import pytest

from scripts.fuzz.endurance import Endurance, run

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "scripts").glob("benchmarks/*.py")) + sorted((ROOT / "scripts").glob("fuzz/*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_imports(path: Path) -> None:
    pytest.importorskip("h5py")
    import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def test_long_use_runs_and_tells_the_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Endurance(tmp_path, pictures=10, calls=12)) in (0, 1)  # so short a use may still fill caches
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| pictures | 10 |", "| calls"))]
    assert len(rows) == 2
    assert (tmp_path / "results" / "picture.npz").exists()
