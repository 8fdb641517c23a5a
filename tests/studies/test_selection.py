"""The study of `auto`: what is there is not repeated, and the report says where the choice was wrong."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from marigold_uq.commands.runner import Invocation
from marigold_uq.training.selection import FamilyCandidate
from scripts.studies.selection.compare import Compare, Problem, compare, report, run_study, toy

CANDIDATES = [FamilyCandidate("gaussian"), FamilyCandidate("point")]


def problem(choice: str, made: list[str]) -> Problem:
    """gaussian is better by 1 on each of ten test units."""

    def choose() -> str:
        made.append("auto")
        return choice

    def score(candidate: FamilyCandidate) -> Tensor:
        made.append(candidate.name)
        return torch.arange(10.0) + (candidate.name == "point")

    return Problem(CANDIDATES, choose, score)


@pytest.mark.parametrize(("choice", "verdict"), [("gaussian", "is within one"), ("point", "is NOT within one")])
def test_every_record_is_made_once_and_the_report_judges_the_choice(tmp_path: Path, choice: str, verdict: str) -> None:
    made: list[str] = []
    folder = tmp_path / "known-0"
    folder.mkdir()
    for _ in range(2):
        compare(problem(choice, made), folder)
    assert made == ["auto", "point", "gaussian"]
    text = report(tmp_path)
    assert "### known-0, 10 test units" in text
    assert verdict in text
    (folder / f"{choice}.json").unlink()
    assert "known-0" not in report(tmp_path)


def test_the_toy_is_scored_on_rows_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TOY_ROWS": 200, "TOY_STEPS": 8, "TOY_UNITS": 20, "TOY_DRAWS": 4}.items():
        monkeypatch.setattr(f"scripts.studies.selection.compare.{name}", value)
    made = toy(Compare(tmp_path), 0, tmp_path)
    assert made.choose() in {candidate.name for candidate in made.candidates}
    assert made.score(made.candidates[0]).shape == (20,)
    assert "| mixture-3 |" in (tmp_path / "selection.md").read_text()


def test_a_study_without_records_reports_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_study(Compare(tmp_path / "out"), Invocation("", "")) == 0
    assert (tmp_path / "out" / "report.md").read_text() == "\n"
