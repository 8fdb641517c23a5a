"""How every command runs: options from flags and YAML, user code on request, one line for an error to mend."""

from __future__ import annotations

import os
import shlex
import sys
from argparse import ArgumentParser as PlainParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

from jsonargparse import ActionConfigFile, ArgumentParser

Options = TypeVar("Options")
INTERRUPTED = 130


@dataclass(frozen=True)
class Invocation:
    """How a command was called, for the records of what it makes."""

    command: str  # as it could be typed again
    config: str  # all options, resolved, as YAML


def run_command(
    program: str,
    options: type[Options],
    run: Callable[[Options, Invocation], int],
    arguments: Sequence[str] | None = None,
    *,
    defaults: dict[str, Any] | None = None,
) -> int:
    """Parse, run, and turn errors into exit codes.

    Every field of the dataclass `options` is a flag and a key of `--config`; an unknown key or a wrong type is an
    error. `--import my_module` runs a module of the user's first, which may register data sets or families.

    Args:
        program: How the command is started, for example "eval/eval_depth.py" or "-m scripts.studies.toy".
        options: A frozen dataclass whose docstring describes the command and its fields.
        run: Does the work; returns the exit code.
        arguments: Words of the command line; by default those of the process.
        defaults: Defaults that a dataclass cannot express, as plain values.

    Returns:
        What `run` returns; 130 if interrupted, 2 for an error that names what to mend.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        rest = import_user_modules(given)
        parser = make_parser(program, options, defaults)
        parsed = parser.parse_args(rest)
        invocation = Invocation(shlex.join(["python", *program.split(), *given]), parser.dump(parsed))
        values = parser.instantiate(parsed)
        values.pop("config", None)
        return run(options(**values), invocation)
    except KeyboardInterrupt:
        print("interrupted; run the same command again to resume", file=sys.stderr)
        return INTERRUPTED
    except (OSError, ValueError) as error:
        if os.environ.get("MARIGOLD_UQ_TRACEBACK"):
            raise
        print(f"{program}: {error}", file=sys.stderr)
        return 2


def make_parser(program: str, options: type[Any], defaults: dict[str, Any] | None = None) -> ArgumentParser:
    """A flag and a YAML key per field."""
    parser = ArgumentParser(prog=program, description=(options.__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file; any field can be overridden by a flag")
    parser.add_class_arguments(options, as_group=False)
    if defaults:
        parser.set_defaults(defaults)
    return parser


def import_user_modules(arguments: Sequence[str]) -> list[str]:
    """Import what `--import` names, from the current folder or the environment; the other words."""
    parser = PlainParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--import", dest="modules", action="append", default=[])
    known, rest = parser.parse_known_args(list(arguments))
    if known.modules and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    for name in known.modules:
        try:
            import_module(name)
        except ImportError as error:
            raise ValueError(f"--import {name}: {error}") from error
    return rest
