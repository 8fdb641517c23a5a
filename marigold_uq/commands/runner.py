"""How every command runs: options from flags and YAML, user code on request, one line for an error the user can fix."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from argparse import SUPPRESS
from argparse import ArgumentParser as PlainParser
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from marigold_uq.terminal import (
    INTERRUPTED,
    STOPPED_MESSAGE,
    Stopped,
    leave_at_once,
    stoppable,
    unbreakable_output,
)

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

__all__ = ["INTERRUPTED", "SHOW_TRACEBACK", "Command", "Invocation", "make_parser", "parse_options", "run_command"]

Options = TypeVar("Options")
SHOW_TRACEBACK = "MARIGOLD_UQ_TRACEBACK"
"""Set in the environment, errors show where they come from."""
_BOOLEANS = {"true", "false", "yes", "no"}
_SHORT = {"output": ["-o"]}
_IMPORT_HELP = (
    "--import MODULE imports a module of yours first, from the current folder or the environment; it may register data "
    "sets or noise families. May be repeated."
)


@dataclass(frozen=True)
class Invocation:
    """How a command was called, for the records of what it makes."""

    command: str  # as it could be typed again
    config: str  # all options, resolved, as YAML


@dataclass(frozen=True)
class Command:
    """A command by the names of its parts, "module:name", so that listing commands imports none of them.

    Args:
        options: A frozen dataclass; see `run_command`.
        run: A function of (options, invocation) that returns the exit code.
        summary: One line for the list of commands.
        positional: The field that is given without a name.
        defaults: The name of defaults that a dataclass cannot express.
    """

    options: str
    run: str
    summary: str = ""
    positional: str | None = None
    defaults: str | None = None

    def main(self, program: str, arguments: Sequence[str] | None = None, *, last: bool = False) -> int:
        """Parse and run; Ctrl-C and SIGTERM end with one line, also while modules are being imported.

        Args:
            program: As it is typed.
            arguments: Words of the command line; by default those of the process.
            last: The process ends with this command.
        """
        return _guarded(program, lambda: self._run(program, arguments), last=last)

    def _run(self, program: str, arguments: Sequence[str] | None) -> int:
        given = list(sys.argv[1:] if arguments is None else arguments)
        with leave_at_once():
            defaults = None if self.defaults is None else _resolve(self.defaults)
            parsed = parse_options(program, _resolve(self.options), given, defaults, self.positional)
            run = _resolve(self.run)
        return int(run(*parsed))


def run_command(
    program: str,
    options: type[Options],
    run: Callable[[Options, Invocation], int],
    arguments: Sequence[str] | None = None,
    *,
    defaults: dict[str, Any] | None = None,
    positional: str | None = None,
) -> int:
    """Parse, run, and turn errors into exit codes.

    Every field of the dataclass `options` is a flag and a key of `--config`; an unknown key or a wrong type is an
    error. `--import my_module` imports a module of the user's first, which may register data sets or families.

    Args:
        program: How the command is started, for example "eval/eval_depth.py" or "scripts.studies.fields.sweep".
        options: A frozen dataclass whose docstring describes the command and its fields.
        run: Does the work; returns the exit code.
        arguments: Words of the command line; by default those of the process.
        defaults: Defaults that a dataclass cannot express, as plain values.
        positional: The field that is given without a name.

    Returns:
        What `run` returns; 130 after Ctrl-C, 143 after SIGTERM, 2 for an error that the user can fix.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    return _guarded(program, lambda: run(*parse_options(program, options, given, defaults, positional)))


def _guarded(program: str, run: Callable[[], int], *, last: bool = False) -> int:
    with unbreakable_output(), stoppable(last=last):
        try:
            return run()
        except KeyboardInterrupt as stop:
            print(STOPPED_MESSAGE, file=sys.stderr)
            return stop.code if isinstance(stop, Stopped) else INTERRUPTED
        except (OSError, ValueError) as error:
            if os.environ.get(SHOW_TRACEBACK):
                raise
            print(f"{program}: {error}", file=sys.stderr)
            return 2


def parse_options(
    program: str,
    options: type[Options],
    arguments: Sequence[str],
    defaults: dict[str, Any] | None = None,
    positional: str | None = None,
) -> tuple[Options, Invocation]:
    """The options that these words of a command line mean, and the record of the call."""
    parser = make_parser(program, options, defaults, positional)
    words = _import_user_modules(_with_underscores(options, arguments))
    _check_lists(options, words)
    parsed = parser.parse_args(_with_values(options, words))
    invocation = Invocation(" ".join([parser.prog, *map(shlex.quote, arguments)]), parser.dump(parsed))
    values = parser.instantiate(parsed)
    names = [one.name for one in dataclasses.fields(options) if one.name in values]  # type: ignore[arg-type]
    return options(**{name: values[name] for name in names}), invocation


def make_parser(
    program: str, options: type[Any], defaults: dict[str, Any] | None = None, positional: str | None = None
) -> ArgumentParser:
    """A flag and a YAML key per field; booleans are switches, lists take several words."""
    from jsonargparse import ActionConfigFile, ArgumentParser

    description = (options.__doc__ or "").splitlines()[0]
    start = "" if program.startswith("marigold-uq") else "python " if "/" in program else "python -m "
    parser = ArgumentParser(prog=start + program, description=description, epilog=_IMPORT_HELP, allow_abbrev=False)
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file; any field can be overridden by a flag")
    own = _own_arguments(options, positional)
    parser.add_class_arguments(options, as_group=False, skip=set(own))
    for name, settings in own.items():
        names = [name] if name == positional else [*_SHORT.get(name, ()), f"--{name}"]
        parser.add_argument(*names, **settings)
    if defaults:
        parser.set_defaults(defaults)
    return parser


def _own_arguments(options: type[Any], positional: str | None) -> dict[str, dict[str, Any]]:
    """Fields that read better on a command line than jsonargparse would have them: switches, word lists, `-o`."""
    from docstring_parser import parse
    from jsonargparse import ActionYesNo

    described = {entry.arg_name: entry.description for entry in parse(options.__doc__ or "").params}
    types, found = get_type_hints(options), {}
    for one in dataclasses.fields(options):
        whole = types[one.name]
        kind, default = _without_none(whole), _default(one)
        settings: dict[str, Any] = {"help": described.get(one.name), "default": default}
        if one.name == positional:
            settings |= {"type": get_args(kind)[0], "nargs": "*", "default": SUPPRESS}  # or it would hide the file's
        elif whole is bool and default is not dataclasses.MISSING:
            # Beside a positional argument the word after a switch belongs to that.
            settings |= (
                {"action": "store_true"} if positional else {"action": ActionYesNo(no_prefix="no_"), "nargs": "?"}
            )
        elif _is_word_list(kind) and default is not dataclasses.MISSING:
            settings |= {"type": get_args(kind)[0], "nargs": "+"}
        elif one.name in _SHORT and default is not dataclasses.MISSING:
            settings["type"] = whole
        else:
            continue
        found[one.name] = settings
    return found


def _default(one: dataclasses.Field[Any]) -> Any:
    return one.default if one.default_factory is dataclasses.MISSING else one.default_factory()


def _without_none(kind: Any) -> Any:
    """T for `T | None`; any other type stays."""
    if get_origin(kind) not in (Union, UnionType):
        return kind
    others = [one for one in get_args(kind) if one is not NoneType]
    return others[0] if len(others) == 1 else kind


def _is_word_list(kind: Any) -> bool:
    return get_origin(kind) is list and _is_plain(get_args(kind)[0])


def _is_plain(kind: Any) -> bool:
    """Whether one word on a command line is one element: a number, a text, a path, or a choice of texts."""
    return kind in (int, float, str, Path) or get_origin(kind) is Literal


def _check_lists(options: type[Any], words: Sequence[str]) -> None:
    """Refuse one value where a file of `--config` needs a list, which jsonargparse would take letter by letter."""
    import yaml

    parser = PlainParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", default=[])
    lists = [name for name, kind in get_type_hints(options).items() if _is_word_list(_without_none(kind))]
    for path in parser.parse_known_args(list(words))[0].config:
        content: Any = None
        with suppress(OSError, UnicodeError, yaml.YAMLError):  # the parser's own message is the one to report
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        for name in lists if isinstance(content, dict) else []:
            if not isinstance(content.get(name), list | None):
                raise ValueError(f"{path}: {name} must be a list, [{content[name]}]; got {content[name]!r}")


def _with_underscores(options: type[Any], words: Sequence[str]) -> list[str]:
    """The words, with `--metric-points` as `--metric_points`: both spellings of an option are meant alike."""
    spelt = {f"--{one.name}".replace("_", "-"): f"--{one.name}" for one in dataclasses.fields(options)}
    found = []
    for word in words:
        name, equals, value = word.partition("=")
        found.append(spelt.get(name, name) + equals + value)
    return found


def _with_values(options: type[Any], words: Sequence[str]) -> list[str]:
    """The words, with "=true" after a switch of a part ("--part.tidy") that has no value."""
    switches = {f"--{name}" for name in _nested_switches(options)}
    following = [*words, ""][1:]
    return [
        f"{word}=true" if word in switches and after.lower() not in _BOOLEANS else word
        for word, after in zip(words, following, strict=True)
    ]


def _nested_switches(options: type[Any], prefix: str = "") -> list[str]:
    found = []
    for name, kind in get_type_hints(options).items():
        part = _without_none(kind)
        if kind is bool and prefix:
            found.append(prefix + name)
        elif isinstance(part, type) and dataclasses.is_dataclass(part):
            found += _nested_switches(part, f"{prefix}{name}.")
    return found


def _import_user_modules(arguments: Sequence[str]) -> list[str]:
    """Import what `--import` names, from the current folder or the environment; the other words."""
    parser = PlainParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--import", dest="modules", action="append", default=[])
    known, rest = parser.parse_known_args(list(arguments))
    if known.modules and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    for name in known.modules:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"--import takes the name of a module, my_module for the file my_module.py; got {name!r}")
        try:
            import_module(name)
        except ImportError as error:
            raise ValueError(f"--import {name}: {error}") from error
    return rest


def _resolve(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
