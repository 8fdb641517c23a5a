"""Average the weights of two stages of one training: the later one has learnt more, the earlier one is less noisy.

python -m scripts.studies.embedded.average --first runs/embedded/later/model --second runs/embedded/whole/model \
    --output runs/embedded/averaged
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.files import atomic_folder, make_folder
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline

LEARNING = ("unet", "vae", "image_encoder")


@dataclass(frozen=True)
class AverageOptions:
    """Average the weights of two depth models that differ in nothing else.

    Args:
        first: Folder of a model; the rest of it is kept.
        second: Folder of another one with the same components.
        output: Folder to write; it must not exist.
    """

    first: Path
    second: Path
    output: Path


@torch.no_grad()
def move_halfway(network: nn.Module, other: nn.Module) -> None:
    """Every weight to the middle between two networks of one kind."""
    mine, theirs = ({name: own.shape for name, own in one.named_parameters()} for one in (network, other))
    if mine != theirs:
        raise ValueError(f"the two models must have the same weights; their {type(network).__name__} differ")
    for own, their in zip(network.parameters(), other.parameters(), strict=True):
        own.lerp_(their, 0.5)


def average(options: AverageOptions, invocation: Invocation) -> int:
    """Write the folder; it appears when it is complete."""
    first, second = (MarigoldUQDepthPipeline.from_pretrained(path) for path in (options.first, options.second))
    for name in LEARNING:
        move_halfway(getattr(first, name), getattr(second, name))
    make_folder(options.output.parent)
    with atomic_folder(options.output) as temporary:
        first.save_pretrained(temporary)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 2 for an error that names what to mend."""
    return run_command("scripts.studies.embedded.average", AverageOptions, average, arguments)


if __name__ == "__main__":
    sys.exit(main())
