"""One format for what evaluations leave behind."""

import json
import math
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch

import marigold_uq
from marigold_uq.results import markdown_table, number, read_results, versions, write_json, write_results


@dataclass(frozen=True)
class Options:
    """Of a command."""

    output: Path = Path("out")
    sizes: tuple[int, ...] = (1, 2)


def test_results_say_what_was_measured_by_which_command_and_versions(tmp_path: Path) -> None:
    metrics = {"crps": {"value": np.float64(0.5), "standard_error": None}, "rmse": 1.5}
    returned = write_results(
        tmp_path / "out", "field", metrics, command="python x.py", config=Options(), data={"name": "ks"}
    )
    written = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert written == returned
    assert written["metrics"] == {"crps": {"value": 0.5, "standard_error": None}, "rmse": 1.5}
    assert (written["task"], written["command"], written["data"]) == ("field", "python x.py", {"name": "ks"})
    assert written["config"] == {"output": "out", "sizes": [1, 2]}
    assert written["versions"] == versions()
    assert datetime.fromisoformat(written["date"]).tzinfo is not None
    assert read_results(tmp_path / "out") == read_results(tmp_path / "out" / "metrics.json") == written


def test_an_evaluation_is_replaced_only_if_asked_for(tmp_path: Path) -> None:
    write_results(tmp_path, "depth", {"a": 1.0})
    with pytest.raises(FileExistsError, match="already holds an evaluation"):
        write_results(tmp_path, "depth", {"a": 2.0})
    write_results(tmp_path, "depth", {"a": 2.0}, overwrite=True)
    assert read_results(tmp_path)["metrics"] == {"a": 2.0}


def test_a_number_that_is_undefined_by_accident_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        write_results(tmp_path, "depth", {"a": math.nan}, reports={"report.md": "# a\n"})
    assert list(tmp_path.iterdir()) == []
    write_results(tmp_path, "depth", {"a": None}, reports={"report.md": "# b\n"})
    assert (tmp_path / "report.md").read_text() == "# b\n"


def test_results_that_are_missing_or_something_else_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no results at .*metrics\.json"):
        read_results(tmp_path)
    for content, message in (("{", "not readable"), ("[]", "no evaluation"), ('{"metrics": []}', "no evaluation")):
        (tmp_path / "metrics.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            read_results(tmp_path)


def test_numbers_of_any_library_become_plain_json(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": np.arange(3), "b": torch.tensor(2.5), "c": np.float32(0.5), "d": Path("x"), "e": (1,)})
    assert json.loads(path.read_text()) == {"a": [0, 1, 2], "b": 2.5, "c": 0.5, "d": "x", "e": [1]}
    with pytest.raises(FileExistsError):
        write_json(path, {})
    with pytest.raises(TypeError, match="a object cannot be written"):
        write_json(path, {"a": object()}, overwrite=True)
    assert json.loads(path.read_text())["b"] == 2.5


def test_versions_name_python_and_the_packages() -> None:
    found = versions()
    assert found["marigold_uq"] == marigold_uq.__version__
    assert found["torch"] == torch.__version__
    assert {"python", "platform", "diffusers", "numpy"} <= set(found)


def test_a_table_has_a_row_per_result() -> None:
    text = markdown_table(["model", "CRPS", "rows"], [["a | b", 0.123456, 10], ["c", None, 2]])
    assert text.splitlines() == [
        "| model | CRPS | rows |",
        "|---|---|---|",
        "| a \\| b | 0.1235 | 10 |",
        "| c |  | 2 |",
    ]
    with pytest.raises(ValueError, match="a row has 1 cells, the header 2"):
        markdown_table(["a", "b"], [["x"]])


def test_a_number_comes_with_its_standard_error_where_there_is_one() -> None:
    assert number(0.123456, 0.01234) == "0.1235 ± 0.01"
    assert number(0.5, None) == number(0.5, math.nan) == "0.5"
    assert number(None) == number(math.nan, 1.0) == ""
    assert number(3) == "3"
