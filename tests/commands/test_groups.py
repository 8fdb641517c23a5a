"""`marigold-uq train | eval | calibrate TASK`: the entry points of train/ and eval/ from the one command."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from support.scripts import ROOT, load_script

from marigold_uq.cli import COMMANDS, Group, main
from marigold_uq.commands.runner import Command

GROUPS = {name: found for name, found in COMMANDS.items() if isinstance(found, Group)}
CALLS = [(name, task) for name, found in GROUPS.items() for task in found.commands]


def test_every_script_of_train_and_eval_is_reached() -> None:
    scripts = {path.stem for folder in ("train", "eval") for path in (ROOT / folder).glob("*.py")}
    assert scripts == {f"{name}_{task}" for name, task in CALLS}


def test_every_command_lives_in_the_installed_package() -> None:
    """A wheel holds marigold_uq alone, without train/ and eval/."""
    commands = [command for found in COMMANDS.values() for command in _commands(found)]
    for command in commands:
        for name in (command.options, command.run, command.defaults):
            if name is None:
                continue
            module, _, attribute = name.partition(":")
            assert module.startswith("marigold_uq.")
            assert hasattr(import_module(module), attribute), name


def _commands(found: Command | Group) -> list[Command]:
    return [found] if isinstance(found, Command) else list(found.commands.values())


@pytest.mark.parametrize(("name", "task"), CALLS)
def test_a_command_means_what_its_script_means(name: str, task: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same options with the same defaults: both print the same config."""
    words = ["--model", "x", "--print_config"] if (name, task) == ("calibrate", "depth") else ["--print_config"]
    texts = []
    folder = "train" if name == "train" else "eval"
    for run in (lambda: main([name, task, *words]), lambda: load_script(f"{folder}/{name}_{task}.py").main(words)):
        with pytest.raises(SystemExit) as stop:
            run()
        assert stop.value.code == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert isinstance(yaml.safe_load(texts[0]), dict)


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_lists_its_tasks(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    for task, command in GROUPS[name].commands.items():
        assert f"  {task} " in text
        assert command.summary in text
    assert main([name]) == 2
    assert main([name, "dpeth"]) == 2
    told = capsys.readouterr().err
    assert f"marigold-uq {name}: unknown command 'dpeth'; choose from {', '.join(GROUPS[name].commands)}" in told


def test_a_model_is_trained_and_scored_by_the_one_command(tmp_path: Path) -> None:
    """In processes of their own, far from the repository, as a user would."""
    rows = ["x,price", *(f"{i / 40},{i / 20 + (i % 7) / 10}" for i in range(80))]
    (tmp_path / "rows.csv").write_text("\n".join(rows) + "\n")
    table = ["--data.path", "rows.csv", "--data.target", "[price]"]
    quick = ["--model.num_models", "1", "--model.max_epochs", "3", "--model.baseline", "none"]
    for words in (
        ["train", "tabular", *table, *quick, "--output", "run"],
        ["eval", "tabular", "--run", "run", *table, "--output", "scores"],
    ):
        command = [sys.executable, "-m", "marigold_uq.cli", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/model/model_index.json").is_file()
    assert (tmp_path / "scores/metrics.json").is_file()
