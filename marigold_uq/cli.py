"""The `marigold-uq` command: a table of subcommands, each imported only when it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import marigold_uq
from marigold_uq.commands.runner import Command

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "depth": Command(
        "marigold_uq.commands.depth:DepthOptions",
        "marigold_uq.commands.depth:run_depth",
        "depth and uncertainty of photographs, folders of them, and videos",
        positional="images",
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; an error that the user can fix is one line, not a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        print(_help(), file=sys.stderr)
        return 2
    first = words[0]
    if first in COMMANDS:
        return COMMANDS[first].main(f"marigold-uq {first}", words[1:])
    if first in ("-h", "--help"):
        print(_help())
        return 0
    if first == "--version":
        print(f"marigold-uq {marigold_uq.__version__}")
        return 0
    print(f"marigold-uq: unknown command {first!r}; choose from {', '.join(COMMANDS)}", file=sys.stderr)
    return 2


def _help() -> str:
    lines = [f"  {name:<13}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: marigold-uq [-h] [--version] COMMAND ...",
            "",
            "Probabilistic regression with diffusion models.",
            "",
            "commands:",
            *lines,
            "",
            "`marigold-uq COMMAND --help` lists the options of a command.",
        ]
    )


if __name__ == "__main__":  # `accelerate launch -m marigold_uq.cli depth ...`
    sys.exit(main())
