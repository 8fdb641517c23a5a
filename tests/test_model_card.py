"""The text of model cards."""

import json
from pathlib import Path

import pytest

from marigold_uq.calibration import Calibration, IntervalGrid
from marigold_uq.hub import make_card
from marigold_uq.model_card import HUB_TASKS

CALIBRATION = Calibration(
    tau=0.25,
    kappa=(0.8, 1.2, 1.0),
    interval=IntervalGrid((0.5, 0.9, 0.975), ((0.7,), (1.7,), (2.3,))),
    uncertainty="trajectory",
    num_inference_steps=4,
    ensemble_size=10,
    num_calibration=120,
    note="rows | held out",
)


def card_of(folder: Path, task: str, **entries: object) -> str:
    """The card of a pipeline folder that holds nothing but its index."""
    index = {"_class_name": HUB_TASKS[task].class_name, **entries}
    (folder / "model_index.json").write_text(json.dumps(index))
    return str(make_card(folder))


@pytest.mark.parametrize("task", HUB_TASKS)
def test_a_card_shows_the_calibration_of_any_pipeline(task: str, tmp_path: Path) -> None:
    text = card_of(tmp_path, task, calibration=[CALIBRATION.to_dict(), Calibration(kappa=1.3).to_dict()])
    section = text.split("## Calibration\n")[1].split("\n## ")[0]
    assert "the pipeline warns about a call under other conditions" in section
    assert "| trajectory | 4 | 10 | 0.25 | 0.8 to 1.2 | 50 % to 97.5 % | 120 | rows \\| held out |" in section
    assert "| ensemble | any | any | 1 | 1.3 | none |  |  |" in section


def test_a_card_without_a_calibration_has_no_section_about_one(tmp_path: Path) -> None:
    assert "## Calibration" not in card_of(tmp_path, "depth", calibration=None)


def test_a_calibration_of_an_older_version_is_shown_too(tmp_path: Path) -> None:
    old = {"tau": 1.0, "kappa": 1.0, "conformal_scale": 1.5, "coverage": 0.9, "num_steps": 3, "num_calibration": 7}
    text = card_of(tmp_path, "depth", calibration={"ensemble": old})
    assert "| ensemble | 3 | any | 1 | 1 | 90 % | 7 |  |" in text


@pytest.mark.parametrize("task", HUB_TASKS)
def test_a_card_shows_how_to_use_the_model_and_what_to_cite(task: str, tmp_path: Path) -> None:
    text = card_of(tmp_path, task)
    for word in ("from_pretrained", "coverage=0.9", ".prediction", ".uncertainty", ".interval"):
        assert word in text.split("## Use")[1].split("## ")[0]
    assert "https://arxiv.org/abs/2510.04583" in text
    assert 'author  = {Kneissl, Carlo and B{\\"u}lte, Christopher' in text


def test_the_steps_are_those_of_the_model_not_those_that_were_asked_for(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "config.yaml").write_text("training:\n  max_steps: 30000\n")
    index = {"_class_name": "FieldForecastPipeline"}
    (tmp_path / "model" / "model_index.json").write_text(json.dumps(index))
    assert "| steps | 30000 |" in str(make_card(tmp_path))
    (tmp_path / "model" / "training.json").write_text('{"step": 1200}\n')  # a plateau ended the run
    assert "| steps | 1200 |" in str(make_card(tmp_path, overwrite=True))


def test_a_card_shows_what_a_chosen_family_was_compared_with(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    index = {"_class_name": HUB_TASKS["field"].class_name}
    (tmp_path / "model" / "model_index.json").write_text(json.dumps(index))
    (tmp_path / "selection.md").write_text("| round | family |\n|---|---|\n| 1 | gaussian |\n")
    section = str(make_card(tmp_path)).split("## Choice of the family\n")[1].split("\n## ")[0]
    assert "| 1 | gaussian |" in section
    assert "one standard error" in section
