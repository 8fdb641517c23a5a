"""Where the small model that comes with the package lies."""

from pathlib import Path

import marigold_uq


def embedded_path() -> Path:
    """Folder of the embedded depth checkpoint; an error that says what to do where this build carries none."""
    path = Path(marigold_uq.__file__).parent / "assets" / "depth"
    if not (path / "model_index.json").is_file():
        raise FileNotFoundError(
            "this build of marigold_uq carries no embedded depth model; name a checkpoint instead, for instance "
            "'prs-eth/marigold-depth-v1-1' or a folder that train/train_depth.py wrote"
        )
    return path
