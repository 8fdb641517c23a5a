"""The `marigold-uq` command: one subcommand per file of `marigold_uq.commands`."""

from __future__ import annotations

import dataclasses
import os
import sys
from argparse import SUPPRESS
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, get_args, get_origin, get_type_hints

from docstring_parser import parse as parse_docstring
from jsonargparse import ActionConfigFile, ArgumentParser

import marigold_uq


@dataclass(frozen=True)
class Command:
    """Where a subcommand lives: a frozen dataclass of options and the function that takes it."""

    module: str
    options: str
    run: str
    positional: str | None = None  # the field that is given without a name


COMMANDS = {
    "depth": Command("marigold_uq.commands.depth", "DepthOptions", "run_depth", positional="images"),
    "card": Command("marigold_uq.commands.card", "CardOptions", "run_card", positional="folder"),
    "info": Command("marigold_uq.commands.info", "InfoOptions", "run_info"),
}
SHORT = {"output": ["-o"]}


def build_parser() -> ArgumentParser:
    """All subcommands; every option is a typed, documented field of a frozen dataclass."""
    parser = ArgumentParser(
        prog="marigold-uq",
        description="Depth that says how sure it is.",
        version=f"marigold-uq {marigold_uq.__version__}",
    )
    commands = parser.add_subcommands(dest="command")
    for name, command in COMMANDS.items():
        options = getattr(import_module(command.module), command.options)
        summary = (options.__doc__ or "").splitlines()[0]
        sub = ArgumentParser(description=summary)
        sub.add_argument("--config", action=ActionConfigFile, help="YAML file with any of the options below")
        add_options(sub, options, command.positional)
        commands.add_subcommand(name, sub, help=summary)
    return parser


def add_options(parser: ArgumentParser, options: type[Any], positional: str | None) -> None:
    """An option per field, with its type, default and description; booleans are flags, lists take several words."""
    types, documentation = get_type_hints(options), parse_docstring(options.__doc__ or "")
    descriptions = {entry.arg_name: entry.description for entry in documentation.params}
    defaults = options()
    for field in dataclasses.fields(options):
        kind, is_positional = types[field.name], field.name == positional
        names = [field.name] if is_positional else [*SHORT.get(field.name, ()), f"--{field.name}"]
        settings: dict[str, Any] = {"help": descriptions[field.name], "default": getattr(defaults, field.name)}
        if kind is bool:
            settings["action"] = "store_true"
        elif get_origin(kind) is list:
            settings |= {"type": get_args(kind)[0], "nargs": "*" if is_positional else "+"}
        else:
            settings["type"] = kind
        if is_positional:
            settings["default"] = SUPPRESS  # an empty list would hide what the config file names
        parser.add_argument(*names, **settings)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; an error that the user can mend is one line, not a traceback."""
    arguments = build_parser().parse_args(list(sys.argv[1:] if argv is None else argv))
    command = COMMANDS[arguments.command]
    module = import_module(command.module)
    try:
        return int(getattr(module, command.run)(read_options(module, command, arguments[arguments.command])))
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on where it stopped", file=sys.stderr)
        return 130
    except (OSError, ValueError) as error:
        if os.environ.get("MARIGOLD_UQ_TRACEBACK"):
            raise
        print(f"marigold-uq {arguments.command}: {error}", file=sys.stderr)
        return 2


def read_options(module: Any, command: Command, values: Any) -> Any:
    """Parsed values as the frozen dataclass; what was not given keeps its default."""
    options = getattr(module, command.options)
    names = [field.name for field in dataclasses.fields(options)]
    return options(**{name: values[name] for name in names if name in values})


if __name__ == "__main__":  # `accelerate launch -m marigold_uq.cli depth ...`
    sys.exit(main())
