"""Put a calibrated model into the package as its embedded one: half precision, configs that say nothing of the making.

python -m scripts.studies.embedded.assemble --model runs/embedded/calibrated --output marigold_uq/assets/depth
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline


def drop_entries(config: Path, *names: str) -> None:
    """Take entries out of a JSON file where they are."""
    entries = json.loads(config.read_text(encoding="utf-8"))
    kept = {name: value for name, value in entries.items() if name not in names}
    config.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the folder; it appears when it is complete."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(arguments)
    if args.output.exists():
        parser.error(f"{args.output} exists; remove it to put another model there")
    temporary = args.output.with_name(args.output.name + ".partial")
    shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed
    MarigoldUQDepthPipeline.from_pretrained(args.model).to(torch.float16).save_pretrained(temporary)
    for config in temporary.rglob("*.json"):
        drop_entries(config, "_name_or_path")  # where the model lay while it was made
    # AutoencoderTiny writes this entry and, on loading, warns that it does not know it.
    drop_entries(temporary / "vae" / "config.json", "block_out_channels")
    temporary.rename(args.output)


if __name__ == "__main__":
    main()
