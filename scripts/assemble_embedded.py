"""Put a calibrated model into the package as its embedded one: half precision, config without what its class ignores.

python scripts/assemble_embedded.py --model runs/embedded/calibrated --output marigold_uq/assets/depth
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline


def drop_derived_entries(config: Path) -> None:
    """AutoencoderTiny writes block_out_channels and, on loading, warns that it does not know it."""
    entries = json.loads(config.read_text(encoding="utf-8"))
    entries.pop("block_out_channels", None)
    config.write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n", encoding="utf-8")


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
    drop_derived_entries(temporary / "vae" / "config.json")
    temporary.rename(args.output)


if __name__ == "__main__":
    main()
