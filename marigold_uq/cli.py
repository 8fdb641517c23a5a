"""The `marigold-uq` command: a table of subcommands, each imported only when it runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import marigold_uq
from marigold_uq.commands.runner import Command
from marigold_uq.terminal import unbreakable_output

__all__ = ["COMMANDS", "Group", "main"]


@dataclass(frozen=True)
class Group:
    """Commands that do the same for different tasks: `marigold-uq train depth`.

    Args:
        summary: One line for the list of commands.
        commands: Task -> command.
    """

    summary: str
    commands: Mapping[str, Command]


COMMANDS: dict[str, Command | Group] = {
    "depth": Command(
        "marigold_uq.commands.depth:DepthOptions",
        "marigold_uq.commands.depth:run_depth",
        "depth and uncertainty of photographs, folders of them, and videos",
        positional="images",
    ),
    "demo": Command(
        "marigold_uq.commands.demo:DemoOptions",
        "marigold_uq.commands.demo:run_demo",
        "a page in the browser: drop a picture, see depth and where it is unsure",
    ),
    "train": Group(
        "train a model: depth, field or tabular",
        {
            "depth": Command(
                "marigold_uq.depth.config:DepthTrainConfig",
                "marigold_uq.depth.run:run_training",
                "finetune a depth model",
                defaults="marigold_uq.depth.config:DEFAULTS",
            ),
            "field": Command(
                "marigold_uq.field.config:FieldTrainConfig",
                "marigold_uq.field.run:run_training",
                "train a forecast model",
            ),
            "tabular": Command(
                "marigold_uq.tabular.run:TrainTabular",
                "marigold_uq.tabular.run:run_training",
                "fit a model to a table",
            ),
        },
    ),
    "eval": Group(
        "score predictions and their uncertainty against the truth",
        {
            "depth": Command(
                "marigold_uq.depth.evaluation:DepthEvaluation",
                "marigold_uq.depth.evaluation:run_evaluation",
                "score depth: our models, or files made by others",
            ),
            "field": Command(
                "marigold_uq.field.evaluate:FieldEvaluation",
                "marigold_uq.field.evaluate:run_evaluation",
                "score forecasts, one step ahead and rolled out",
            ),
            "tabular": Command(
                "marigold_uq.tabular.evaluate:EvaluateTabular",
                "marigold_uq.tabular.evaluate:run_evaluation",
                "score predictions for tables",
            ),
        },
    ),
    "calibrate": Group(
        "calibrate a model, or the predictions of any other, on data of yours",
        {
            "depth": Command(
                "marigold_uq.depth.calibration:DepthCalibration",
                "marigold_uq.depth.calibration:run_calibration",
                "intervals for a depth model, or for maps made by others, with a report",
            ),
            "field": Command(
                "marigold_uq.field.calibrate:FieldCalibration",
                "marigold_uq.field.calibrate:run_calibration",
                "a forecast model on the validation part of its data",
            ),
        },
    ),
    "intervals": Command(
        "marigold_uq.depth.calibration:IntervalOptions",
        "marigold_uq.depth.calibration:run_intervals",
        "intervals for new depth maps made by others, by a stored calibration",
    ),
    "cache": Command(
        "marigold_uq.commands.cache:CacheOptions",
        "marigold_uq.commands.cache:run_cache",
        "keep latents of training data on disk, for a model and its baseline",
    ),
    "card": Command(
        "marigold_uq.commands.card:CardOptions",
        "marigold_uq.commands.card:run_card",
        "write the model card of a finished run, and upload it",
        positional="folder",
    ),
    "export-onnx": Command(
        "marigold_uq.commands.export_onnx:ExportOnnxOptions",
        "marigold_uq.commands.export_onnx:run_export_onnx",
        "write a depth model as one ONNX file",
    ),
    "info": Command(
        "marigold_uq.commands.info:InfoOptions",
        "marigold_uq.commands.info:run_info",
        "show what is installed and which model would be used",
    ),
}
_ABOUT = "Probabilistic regression with diffusion models."


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; an error that the user can fix is one line, not a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    with unbreakable_output():
        if words[:1] == ["--version"]:
            print(f"marigold-uq {marigold_uq.__version__}")
            return 0
        return _dispatch("marigold-uq", _ABOUT, COMMANDS, words, last=arguments is None)


def _dispatch(
    program: str, about: str, commands: Mapping[str, Command | Group], words: list[str], *, last: bool = False
) -> int:
    """Run the command that the first word names, or tell which there are; the process may end with it (`last`)."""
    first = words[0] if words else ""
    if first in commands:
        found = commands[first]
        if isinstance(found, Command):
            return found.main(f"{program} {first}", words[1:], last=last)
        return _dispatch(f"{program} {first}", found.summary, found.commands, words[1:], last=last)
    if first in ("", "-h", "--help"):
        print(_help(program, about, commands), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    print(f"{program}: unknown command {first!r}; choose from {', '.join(commands)}", file=sys.stderr)
    return 2


def _help(program: str, about: str, commands: Mapping[str, Command | Group]) -> str:
    options = "[-h] [--version]" if commands is COMMANDS else "[-h]"
    lines = [f"  {name:<13}{command.summary}" for name, command in commands.items()]
    return "\n".join(
        [
            f"usage: {program} {options} COMMAND ...",
            "",
            about,
            "",
            "commands:",
            *lines,
            "",
            f"`{program} COMMAND --help` lists the options of a command.",
        ]
    )


if __name__ == "__main__":  # `accelerate launch -m marigold_uq.cli depth ...`
    sys.exit(main())
