"""Options from flags and YAML, user code on request, and exit codes."""

import shlex
import sys
from pathlib import Path

import pytest
import yaml
from support import sample_command
from support.sample_command import Part, SampleOptions, run_sample

from marigold_uq.commands.runner import Command, run_command


@pytest.fixture(autouse=True)
def no_calls() -> None:
    sample_command.calls.clear()


def run(*words: str, **settings) -> int:
    return run_command("eval/sample.py", SampleOptions, run_sample, words, **settings)


def options() -> SampleOptions:
    """What the command was called with."""
    ((found, _),) = sample_command.calls
    return found


def test_without_words_every_option_has_its_default() -> None:
    assert run() == 0
    assert options() == SampleOptions()


def test_flags_are_the_fields_with_switches_and_lists_of_words() -> None:
    words = "-o results --steps 4 --levels 0.5 0.9 --formats npz png --part.size 3 --overwrite --inputs a b"
    assert run(*words.split()) == 0
    assert options() == SampleOptions(
        inputs=[Path("a"), Path("b")],
        output=Path("results"),
        steps=4,
        levels=[0.5, 0.9],
        formats=["npz", "png"],
        part=Part(3),
        overwrite=True,
    )


@pytest.mark.parametrize(
    ("words", "value"),
    [("--overwrite", True), ("--overwrite true", True), ("--overwrite=no", False), ("--no_overwrite", False)],
)
def test_a_switch_takes_a_word_or_none(words: str, value: bool) -> None:
    assert run(*words.split()) == 0
    assert options().overwrite is value


@pytest.mark.parametrize(
    ("words", "value"), [("--part.tidy", True), ("--part.tidy true", True), ("--part.tidy=false", False)]
)
def test_a_switch_of_a_part_takes_a_word_or_none(words: str, value: bool) -> None:
    assert run(*words.split(), "--steps", "4") == 0
    assert (options().part.tidy, options().steps) == (value, 4)
    sample_command.calls.clear()
    assert run("--steps", "4", *words.split()) == 0
    assert options().part.tidy is value


def test_a_list_that_may_be_missing_takes_words_too(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for content, words, tags in (
        ("tags: [a]", "", ["a"]),
        ("tags: null", "", None),
        ("steps: 1", "--tags a b", ["a", "b"]),
    ):
        path.write_text(content)
        sample_command.calls.clear()
        assert run("--config", str(path), *words.split()) == 0
        assert options().tags == tags


@pytest.mark.parametrize(("line", "got"), [("tags: q", "'q'"), ("levels: abc", "'abc'"), ("levels: 0.5", "0.5")])
def test_one_value_for_a_list_in_a_file_is_named(
    line: str, got: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(line)
    assert run("--config", str(path)) == 2
    name = line.split(":")[0]
    assert f"config.yaml: {name} must be a list, [{got.strip(chr(39))}]; got {got}\n" in capsys.readouterr().err


def test_a_positional_field_takes_words_without_a_name_also_after_a_switch() -> None:
    assert run("--overwrite", "a", "b", positional="inputs") == 0
    assert options() == SampleOptions(inputs=[Path("a"), Path("b")], overwrite=True)


def test_a_file_gives_options_and_flags_win(tmp_path: Path) -> None:
    content = {"steps": 4, "levels": [0.8], "parts": [{"size": 2}, {"tidy": True}], "inputs": ["a"], "overwrite": True}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    assert run("--config", str(path), "--steps", "8") == 0
    expected = SampleOptions([Path("a")], steps=8, levels=[0.8], parts=[Part(2), Part(tidy=True)], overwrite=True)
    assert options() == expected
    sample_command.calls.clear()
    assert run("--config", str(path), "--steps", "8", positional="inputs") == 0  # no words do not hide the file's
    assert options() == expected


def test_defaults_of_the_command_replace_those_of_the_class() -> None:
    assert run(defaults={"part.size": 5, "steps": 2}) == 0
    assert (options().part.size, options().steps) == (5, 2)


def test_the_record_of_a_call_can_be_typed_again(tmp_path: Path) -> None:
    words = ["--inputs", "my photo.jpg", "--steps", "4"]
    assert run(*words) == 0
    ((found, invocation),) = sample_command.calls
    assert shlex.split(invocation.command) == ["python", "eval/sample.py", *words]
    path = tmp_path / "config.yaml"
    path.write_text(invocation.config)
    sample_command.calls.clear()
    assert run("--config", str(path)) == 0
    assert options() == found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--stepz 4", "stepz"),
        ("--step 4", "step"),  # no abbreviations: a new option must not change the meaning of old commands
        ("--steps four", "steps"),
        ("--formats gif", "gif"),
        ("--part.size 0", "size must be at least 1"),
        ("--config missing.yaml", "missing.yaml"),
    ],
)
def test_a_wrong_word_ends_with_two_and_names_it(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = run(*words.split())
    except SystemExit as leave:  # jsonargparse's own errors
        code = leave.code  # type: ignore[assignment]
    assert code == 2
    assert message in capsys.readouterr().err
    assert not sample_command.calls


def test_an_unknown_key_in_a_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("stepz: 4\n")
    with pytest.raises(SystemExit) as leave:
        run("--config", str(path))
    assert leave.value.code == 2
    assert "stepz" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fail", "code", "message"),
    [
        ("value", 2, "eval/sample.py: steps must be at least 1\n"),
        ("file", 2, "eval/sample.py: no such folder: x\n"),
        ("interrupt", 130, "interrupted; run the same command again to resume\n"),
    ],
)
def test_an_error_that_the_user_can_fix_is_one_line(
    fail: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--fail", fail) == code
    assert capsys.readouterr().err == message


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        run("--fail", "bug")


def test_the_traceback_of_any_error_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARIGOLD_UQ_TRACEBACK", "1")
    with pytest.raises(ValueError, match="at least 1"):
        run("--fail", "value")


def test_a_module_of_the_user_is_imported_before_anything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a registered data set or noise family is: the module changes what the command finds."""
    (tmp_path / "my_registration.py").write_text(
        "from marigold_uq.distributions import FAMILIES, family_class\nFAMILIES['mine'] = family_class('gaussian')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    from marigold_uq.distributions import FAMILIES

    try:
        assert run("--import", "my_registration", "--steps", "4") == 0
        assert "mine" in FAMILIES
    finally:
        FAMILIES.pop("mine", None)
    ((found, invocation),) = sample_command.calls
    assert found == SampleOptions(steps=4)
    assert invocation.command == "python eval/sample.py --import my_registration --steps 4"


def test_a_module_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--import", "no_such_module") == 2
    assert "--import no_such_module: No module named 'no_such_module'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["./mod.py", ".mod", "a/b", ""])
def test_a_path_is_not_a_module(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--import", name) == 2
    assert f"--import takes the name of a module, my_module for the file my_module.py; got {name!r}" in (
        capsys.readouterr().err
    )


def test_help_describes_every_option_and_how_to_import_a_module(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        run("--help")
    assert leave.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    expected = ["Do nothing, and remember how.", "What to read.", "--part.size", "How large.", "Replace results", "-o"]
    for part in [*expected, "--import MODULE imports a module of yours first"]:
        assert part in text


def test_a_command_is_known_by_names_and_imported_when_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    command = Command("support.sample_command:SampleOptions", "support.sample_command:run_sample", positional="inputs")
    assert command.main("marigold-uq sample", ["a", "--steps", "3"]) == 0
    ((found, invocation),) = sample_command.calls
    assert found == SampleOptions([Path("a")], steps=3)
    assert invocation.command == "marigold-uq sample a --steps 3"
    assert command.main("marigold-uq sample", ["--fail", "value"]) == 2
    assert capsys.readouterr().err == "marigold-uq sample: steps must be at least 1\n"


def test_an_interruption_while_modules_load_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow_to_load.py").write_text("raise KeyboardInterrupt\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert Command("slow_to_load:Options", "slow_to_load:run").main("marigold-uq slow", []) == 130
    assert capsys.readouterr().err == "interrupted; run the same command again to resume\n"
