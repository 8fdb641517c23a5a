"""Put a calibrated model into the package as its embedded one: half precision, configs that say nothing of the making.

python -m scripts.studies.embedded.assemble --model runs/embedded/calibrated --output marigold_uq/assets/depth
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.files import atomic_folder
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline


@dataclass(frozen=True)
class AssembleOptions:
    """Write a model in half precision, as the package carries it.

    Args:
        model: Folder of the calibrated model.
        output: Folder to write; it must not exist.
    """

    model: Path
    output: Path


def drop_entries(config: Path, *names: str) -> None:
    """Take entries out of a JSON file where they are."""
    entries = json.loads(config.read_text(encoding="utf-8"))
    kept = {name: value for name, value in entries.items() if name not in names}
    config.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def assemble(options: AssembleOptions, invocation: Invocation) -> int:
    """Write the folder; it appears when it is complete."""
    with atomic_folder(options.output) as temporary:
        MarigoldUQDepthPipeline.from_pretrained(options.model).to(torch.float16).save_pretrained(temporary)
        for config in temporary.rglob("*.json"):
            drop_entries(config, "_name_or_path")  # where the model lay while it was made
        # AutoencoderTiny writes this entry and, on loading, warns that it does not know it.
        drop_entries(temporary / "vae" / "config.json", "block_out_channels")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 2 for an error that names what to mend."""
    return run_command("scripts.studies.embedded.assemble", AssembleOptions, assemble, arguments)


if __name__ == "__main__":
    sys.exit(main())
