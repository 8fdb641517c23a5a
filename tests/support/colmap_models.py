"""A COLMAP model of two pictures, one with points, as text and in binary."""

import struct
from pathlib import Path

import numpy as np

HEIGHT, WIDTH = 24, 32
LENS = (40.0, 42.0, 15.5, 11.5)  # fx, fy, cx, cy with the first pixel's centre at 0
POSE = np.array([0.9, 0.1, -0.2, 0.3])  # a quaternion, not normalised
SHIFT = np.array([0.3, -0.2, 0.5])


def rotate(quaternion: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """By quaternion products, the slow and sure way."""

    def product(p: np.ndarray, q: np.ndarray) -> np.ndarray:
        return np.array([p[0] * q[0] - p[1:] @ q[1:], *(p[0] * q[1:] + q[0] * p[1:] + np.cross(p[1:], q[1:]))])

    unit = quaternion / np.linalg.norm(quaternion)
    return product(product(unit, np.array([0.0, *vector])), unit * [1, -1, -1, -1])[1:]


def known_points(count: int = 30) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pixels (N, 2), distances (N,) and the points in the world (N, 3) that are seen there."""
    rng = np.random.default_rng(0)
    xy = np.stack([rng.uniform(0, WIDTH - 1, count), rng.uniform(0, HEIGHT - 1, count)], 1)
    z = 2 + 3 * xy[:, 1] / HEIGHT
    seen = np.stack([(xy[:, 0] - LENS[2]) / LENS[0] * z, (xy[:, 1] - LENS[3]) / LENS[1] * z, z], 1)
    back = POSE * [1, -1, -1, -1]
    return xy, z, np.array([rotate(back, point - SHIFT) for point in seen])


def write_text_model(folder: Path) -> None:
    xy, _, world = known_points()
    folder.mkdir(parents=True)
    camera = f"1 PINHOLE {WIDTH} {HEIGHT} {LENS[0]} {LENS[1]} {LENS[2] + 0.5} {LENS[3] + 0.5}"
    (folder / "cameras.txt").write_text(f"# cameras\n{camera}\n")
    seen = " ".join(f"{x + 0.5} {y + 0.5} {i}" for i, (x, y) in enumerate(xy.tolist())) + " 3.0 4.0 -1"
    pose = " ".join(map(str, [*POSE.tolist(), *SHIFT.tolist()]))
    (folder / "images.txt").write_text(f"# images\n7 {pose} 1 room/a b.jpg\n{seen}\n8 {pose} 1 empty.jpg\n\n")
    rows = "".join(f"{i} {x} {y} {z} 1 2 3 0.5 7 {i}\n" for i, (x, y, z) in enumerate(world.tolist()))
    (folder / "points3D.txt").write_text(rows)


def write_binary_model(folder: Path) -> None:
    xy, _, world = known_points()
    folder.mkdir(parents=True)
    lens = [LENS[0], LENS[1], LENS[2] + 0.5, LENS[3] + 0.5]
    (folder / "cameras.bin").write_bytes(struct.pack("<QiiQQ4d", 1, 1, 1, WIDTH, HEIGHT, *lens))
    seen = b"".join(struct.pack("<ddq", x + 0.5, y + 0.5, i) for i, (x, y) in enumerate(xy))
    head = struct.pack("<Qi7di", 1, 7, *POSE, *SHIFT, 1) + b"room/a b.jpg\0" + struct.pack("<Q", len(xy))
    (folder / "images.bin").write_bytes(head + seen)
    rows = [struct.pack("<Q3d3BdQii", i, *point, 1, 2, 3, 0.5, 1, 7, i) for i, point in enumerate(world)]
    (folder / "points3D.bin").write_bytes(struct.pack("<Q", len(world)) + b"".join(rows))
