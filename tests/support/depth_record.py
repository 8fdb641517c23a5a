"""A depth map and a whole prediction, to be drawn and written, and a reader of point clouds."""

from pathlib import Path

import numpy as np

from marigold_uq.depth.export import DepthRecord

HEIGHT, WIDTH = 24, 32


def random_depth() -> np.ndarray:
    return np.random.default_rng(0).random((HEIGHT, WIDTH), dtype=np.float32)


def random_record() -> DepthRecord:
    depth, rng = random_depth(), np.random.default_rng(1)
    std = (0.1 * rng.random(depth.shape)).astype(np.float32)
    return DepthRecord(
        image=rng.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8),
        depth=depth,
        uncertainty=std,
        epistemic=std / 2,
        interval=np.stack([depth - std, depth + std]),
        coverage=0.9,
        metadata={"units": "m", "members": 10},
    )


def read_ply(path: Path) -> tuple[np.ndarray, list[str]]:
    """A reader of our own for binary little-endian vertex lists (the PLY format of G. Turk)."""
    header, body = path.read_bytes().split(b"end_header\n", 1)
    lines = header.decode("ascii").splitlines()
    assert lines[:2] == ["ply", "format binary_little_endian 1.0"]
    kinds = {"float": "<f4", "uchar": "u1"}
    properties = [line.split()[1:] for line in lines if line.startswith("property")]
    vertices = np.frombuffer(body, dtype=[(name, kinds[kind]) for kind, name in properties])
    assert f"element vertex {len(vertices)}" in lines
    return vertices, lines
