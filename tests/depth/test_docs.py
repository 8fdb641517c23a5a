"""What docs/depth.md and its pages show runs, as far as it needs no download."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import torch
from PIL import Image
from support.scripts import ROOT, load_script, parse_options

from marigold_uq.cli import COMMANDS, Group
from marigold_uq.depth.calibration import DepthCalibration
from marigold_uq.depth.config import DepthTrainConfig
from marigold_uq.depth.evaluation import DepthEvaluation

PAGES = [ROOT / "docs" / "depth.md", *sorted((ROOT / "docs" / "depth").glob("*.md")), ROOT / "docs/results/embedded.md"]
OPTIONS = {
    "eval/eval_depth.py": DepthEvaluation,
    "eval/calibrate_depth.py": DepthCalibration,
    "train/train_depth.py": DepthTrainConfig,
}


def test_the_python_blocks_of_the_page_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the embedded model; the block of starting points names models that would be downloaded."""
    monkeypatch.chdir(tmp_path)
    with Image.open(ROOT / "marigold_uq/assets/samples/street.jpg") as picture:
        picture.resize((64, 48)).save("photo.jpg")
    blocks = re.findall(r"```python\n(.*?)```", PAGES[0].read_text(encoding="utf-8"), flags=re.DOTALL)
    heights = torch.tensor([20.0, 32.0, 46.0])  # the ground is near below, the end of the street far
    names = {"points": torch.stack([torch.full((3,), 32.0), heights], 1), "metres": torch.tensor([30.0, 8.0, 2.0])}
    runnable = [block for block in blocks if not block.startswith("MarigoldUQDepthPipeline.")]
    assert len(runnable) == len(blocks) - 1
    for block in runnable:
        exec(block, names)
    assert names["result"].prediction.shape == (1, 1, 48, 64)
    assert bool(names["depth_m"].isfinite().all())
    assert (tmp_path / "calibrated" / "model_index.json").is_file()
    assert names["pipeline"].calibration_for("trajectory").kappa == names["kappa"]


def commands() -> list[list[str]]:
    """Every call of a depth command in the pages, as words."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ").replace("$C/", "configs/depth/embedded/")
        lines = (line.strip() for line in text.splitlines())
        calls = (line for line in lines if re.match(r"(python|accelerate launch) \w+/", line))
        found += [shlex.split(line, comments=True) for line in calls]
    return [words[words.index("launch") + 1 if "launch" in words else 1 :] for words in found]


def installed_commands() -> list[list[str]]:
    """Every call in the pages of `marigold-uq` with a task, or for intervals, as words."""
    found = []
    for page in PAGES:
        lines = re.findall(
            r"^(?:pip .* && )?marigold-uq ((?:train|eval|calibrate|intervals|demo)\b.*)$", page.read_text(), re.M
        )
        found += [shlex.split(line, comments=True) for line in lines]
    return found


@pytest.mark.parametrize("words", installed_commands(), ids=" ".join)
def test_commands_of_the_installed_program_parse(words: list[str]) -> None:
    found, rest = COMMANDS[words[0]], words[1:]
    if isinstance(found, Group):
        found, rest = found.commands[rest[0]], rest[1:]
    module, _, name = found.options.partition(":")
    assert parse_options(getattr(import_module(module), name), *rest)


@pytest.mark.parametrize("words", [words for words in commands() if words[0] in OPTIONS], ids=" ".join)
def test_commands_in_the_pages_parse(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    script, *flags = words
    if "--import" in flags:
        place = flags.index("--import")
        flags = flags[:place] + flags[place + 2 :]
    if "--print_config" in flags:
        flags.remove("--print_config")
    defaults = getattr(load_script(script), "DEFAULTS", None)
    assert isinstance(parse_options(OPTIONS[script], *flags, defaults=defaults), OPTIONS[script])
