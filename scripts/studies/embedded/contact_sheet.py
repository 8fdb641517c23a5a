"""Draw a contact sheet of procedural scenes: pictures beside their depth, one row per kind of scene.

python -m scripts.studies.embedded.contact_sheet --output docs/images/procedural_scenes.jpg
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.depth.colors import color_depth
from marigold_uq.depth.scenes import LAYOUTS, ProceduralScenes, SceneSample
from marigold_uq.files import atomic_path, make_folder

Picture = NDArray[np.uint8]
GAP = 4  # pixels between tiles
LABEL = 20  # pixels above a row for its name


def depth_picture(sample: SceneSample) -> Picture:
    """Log depth between its 1st and 99th percentile, near is warm, the sky grey; (H, W, 3) RGB."""
    depth, valid = sample["depth"][0].numpy(), sample["valid"][0].numpy()
    low, high = np.percentile(np.log(depth[valid]), [1, 99])
    return color_depth(np.where(valid, np.log(depth), np.nan), value_range=(float(low), float(high)))


def tile(sample: SceneSample, scale: float) -> Picture:
    """Picture and depth side by side, framed in white."""
    image = np.rint(255 * sample["image"].permute(1, 2, 0).numpy()).astype(np.uint8)
    pair = np.hstack([image, depth_picture(sample)])[..., ::-1]  # OpenCV wants BGR
    pair = cv2.resize(pair, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
    return cv2.copyMakeBorder(pair, 0, GAP, 0, GAP, cv2.BORDER_CONSTANT, value=(255, 255, 255))


def sheet(kinds: Sequence[str], columns: int, seed: int, height: int, width: int, scale: float) -> Picture:
    """One labelled row of `columns` scenes per kind."""
    rows = []
    for kind in kinds:
        scenes = ProceduralScenes(columns, seed=seed, height=height, width=width, kinds={kind: 1.0}, split="test")
        row = np.hstack([tile(scenes.read(i), scale) for i in range(columns)])
        label = np.full((LABEL, row.shape[1], 3), 255, dtype=np.uint8)
        cv2.putText(label, kind, (2, LABEL - 5), cv2.FONT_HERSHEY_SIMPLEX, 0.5, (0, 0, 0), 1, cv2.LINE_AA)
        rows += [label, row]
    return np.vstack(rows)


def save(picture: Picture, path: Path, overwrite: bool) -> None:
    """Write a .png or .jpg file."""
    make_folder(path.parent)
    quality = [cv2.IMWRITE_JPEG_QUALITY, 88] if path.suffix in (".jpg", ".jpeg") else []
    with atomic_path(path, overwrite=overwrite) as temporary:
        if not cv2.imwrite(str(temporary), picture, quality):
            raise OSError(f"OpenCV could not write {path}; use a .png or .jpg name in a writable folder")


@dataclass(frozen=True)
class SheetOptions:
    """Draw procedural scenes beside their depth, one row per kind.

    Args:
        output: Picture to write, .png or .jpg.
        kinds: Rows of the sheet; default: all kinds.
        columns: Scenes per row.
        seed: Other scenes.
        height: Of each picture, in pixels.
        width: Of each picture, in pixels.
        scale: Reduction of each picture on the sheet.
        overwrite: Replace an existing file.
    """

    output: Path
    kinds: list[str] = field(default_factory=lambda: list(LAYOUTS))
    columns: int = 5
    seed: int = 0
    height: int = 192
    width: int = 256
    scale: float = 0.5
    overwrite: bool = False


def draw(options: SheetOptions, invocation: Invocation) -> int:
    """Render, arrange, save."""
    size = (options.height, options.width)
    save(sheet(options.kinds, options.columns, options.seed, *size, options.scale), options.output, options.overwrite)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 2 for an error that names what to mend."""
    return run_command("scripts.studies.embedded.contact_sheet", SheetOptions, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
