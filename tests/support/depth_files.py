"""Small files in the published depth formats, written with other libraries' encoders (PIL, numpy, tarfile)."""

import tarfile
from pathlib import Path

import numpy as np
from PIL import Image


def write_image(path: Path, height: int, width: int, *, seed: int = 0) -> np.ndarray:
    """A random RGB picture, PNG or JPEG by ending; the (H, W, 3) uint8 pixels that a reader must see."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    with Image.open(path) as picture:
        return np.asarray(picture)


def write_png16(path: Path, values: np.ndarray) -> None:
    """(H, W) integers as a 16-bit PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values.astype(np.uint16)).save(path)


def write_array(path: Path, values: np.ndarray) -> None:
    """An npy file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, values)


def write_list(path: Path, *lines: str) -> Path:
    """A filename list."""
    path.write_text("\n".join(lines) + "\n")
    return path


def pack(folder: Path, target: Path) -> Path:
    """`tar -cf target -C folder .`: members begin with `./`."""
    with tarfile.open(target, "w") as archive:
        archive.add(folder, arcname=".")
    return target


def write_scannet(root: Path, count: int, *, size: tuple[int, int] = (6, 8), start: int = 0) -> list[str]:
    """`count` ScanNet samples of a few pixels; depth of sample i is i + 1 metres everywhere. The list's lines."""
    lines = []
    for i in range(start, start + count):
        image, depth = f"scene0406_02/color/{i:06d}.jpg", f"scene0406_02/depth/{i:06d}.png"
        write_image(root / image, *size, seed=i)
        write_png16(root / depth, np.full(size, 1000 * (i + 1 - start)))
        lines.append(f"{image} {depth}")
    return lines
