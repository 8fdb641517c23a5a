"""Draw a contact sheet of procedural scenes: pictures beside their depth, one row per kind of scene.

python -m scripts.studies.embedded.contact_sheet --output docs/images/procedural_scenes.png
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from marigold_uq.depth.colors import color_depth
from marigold_uq.depth.scenes import LAYOUTS, ProceduralScenes, SceneSample

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


def sheet(kinds: list[str], columns: int, seed: int, height: int, width: int, scale: float) -> Picture:
    """One labelled row of `columns` scenes per kind."""
    rows = []
    for kind in kinds:
        scenes = ProceduralScenes(columns, seed=seed, height=height, width=width, kinds={kind: 1.0}, split="test")
        row = np.hstack([tile(scenes[i], scale) for i in range(columns)])
        label = np.full((LABEL, row.shape[1], 3), 255, dtype=np.uint8)
        cv2.putText(label, kind, (2, LABEL - 5), cv2.FONT_HERSHEY_SIMPLEX, 0.5, (0, 0, 0), 1, cv2.LINE_AA)
        rows += [label, row]
    return np.vstack(rows)


def save(picture: Picture, path: Path, overwrite: bool) -> None:
    """Write to a temporary name, then rename."""
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists; pass --overwrite to replace it.")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.partial{path.suffix}")
    options = [cv2.IMWRITE_JPEG_QUALITY, 88] if path.suffix in (".jpg", ".jpeg") else []
    if not cv2.imwrite(str(temporary), picture, options):
        raise OSError(f"OpenCV could not write {temporary}; use a .png or .jpg name in a writable folder.")
    os.replace(temporary, path)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, help="picture to write, .png or .jpg")
    parser.add_argument("--kinds", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS), help="rows of the sheet")
    parser.add_argument("--columns", type=int, default=5, help="scenes per row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--height", type=int, default=192)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--scale", type=float, default=0.5, help="reduction of each picture on the sheet")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    return parser.parse_args()


def main() -> None:
    """Render, arrange, save."""
    args = arguments()
    save(sheet(args.kinds, args.columns, args.seed, args.height, args.width, args.scale), args.output, args.overwrite)


if __name__ == "__main__":
    main()
