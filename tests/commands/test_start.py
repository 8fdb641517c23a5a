"""The first half second of `marigold-uq`: nothing heavy is imported before a command runs."""

import subprocess
import sys

import pytest

import marigold_uq
from marigold_uq.cli import COMMANDS, main

HEAVY = ("torch", "diffusers", "transformers", "numpy", "jsonargparse", "huggingface_hub")


def imported_by(*words: str) -> set[str]:
    """Heavy modules that are there after a command."""
    code = (
        "import sys; from marigold_uq.cli import main\n"
        f"try: main({list(words)!r})\n"
        "except SystemExit: pass\n"
        f"print('modules:', *[name for name in {HEAVY!r} if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_help_and_version_import_nothing_heavy(word: str) -> None:
    assert imported_by(word) == set()


@pytest.mark.parametrize("command", ["depth", "card", "export-onnx", "info"])
def test_the_help_of_a_command_needs_no_torch(command: str) -> None:
    assert not imported_by(command, "--help") & {"torch", "diffusers", "transformers", "huggingface_hub"}


@pytest.mark.parametrize(("words", "code"), [([], 2), (["-h"], 0), (["--help"], 0)])
def test_help_lists_the_commands(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == code
    told = capsys.readouterr()
    text = told.err if code else told.out
    for name, command in COMMANDS.items():
        assert f"  {name} " in text
        assert command.summary in text


def test_the_version_names_the_program_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"marigold-uq {marigold_uq.__version__}\n"


def test_an_unknown_command_ends_with_two_and_lists_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dpeth"]) == 2
    assert capsys.readouterr().err == f"marigold-uq: unknown command 'dpeth'; choose from {', '.join(COMMANDS)}\n"
