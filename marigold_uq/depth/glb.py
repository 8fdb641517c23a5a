"""Point clouds as binary glTF, which browsers show."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

_JSON, _BINARY = 0x4E4F534A, 0x004E4942  # chunk types of GLB
_FLOAT, _SHORT = 5126, 5123
_POINTS = 0


def glb_bytes(points: np.ndarray, colors: np.ndarray) -> bytes:
    """Points (N, 3) and their colours (N, 4) uint8, sRGB and opacity, as a GLB file.

    Axes are glTF's: x right, y up, z backward. Colours are shown as they are, without lights; the file holds them
    linear, as glTF wants them, in 16 bits, so that dark ones stay apart.
    """
    if points.ndim != 2 or points.shape[1] != 3 or colors.shape != (len(points), 4) or colors.dtype != np.uint8:
        raise ValueError(
            f"expected points (N, 3) and colours (N, 4) uint8; got {points.shape} and {colors.shape} {colors.dtype}"
        )
    if not len(points) or not np.isfinite(points).all():
        raise ValueError(f"a point cloud needs at least one point, all finite; got {len(points)} points")
    places = np.ascontiguousarray(points, dtype="<f4")
    binary = places.tobytes() + _linear(colors).tobytes()  # both are multiples of four bytes
    return _container(_description(places, len(binary)), binary)


def _linear(colors: np.ndarray) -> np.ndarray:
    """From sRGB (IEC 61966-2-1) to linear light, (N, 4) uint16; opacity is linear already."""
    unit = colors / 255
    light = np.where(unit <= 0.04045, unit / 12.92, ((unit + 0.055) / 1.055) ** 2.4)
    light[:, 3] = unit[:, 3]
    return np.rint(65535 * light).astype("<u2")


def _description(points: np.ndarray, size: int) -> dict[str, Any]:
    """The scene: one cloud of unlit points."""
    count, split = len(points), points.nbytes
    low, high = points.min(0).tolist(), points.max(0).tolist()
    return {
        "asset": {"version": "2.0", "generator": "marigold_uq"},
        "extensionsUsed": ["KHR_materials_unlit"],
        "scene": 0,
        "scenes": [{"nodes": [0]}],
        "nodes": [{"mesh": 0}],
        "meshes": [{"primitives": [{"attributes": {"POSITION": 0, "COLOR_0": 1}, "mode": _POINTS, "material": 0}]}],
        "materials": [{"alphaMode": "BLEND", "extensions": {"KHR_materials_unlit": {}}}],
        "accessors": [
            {"bufferView": 0, "componentType": _FLOAT, "count": count, "type": "VEC3", "min": low, "max": high},
            {"bufferView": 1, "componentType": _SHORT, "normalized": True, "count": count, "type": "VEC4"},
        ],
        "bufferViews": [
            {"buffer": 0, "byteOffset": 0, "byteLength": split},
            {"buffer": 0, "byteOffset": split, "byteLength": size - split},
        ],
        "buffers": [{"byteLength": size}],
    }


def _container(description: dict[str, Any], binary: bytes) -> bytes:
    """Header, JSON chunk, binary chunk; each chunk is a multiple of four bytes."""
    text = json.dumps(description, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)
    chunks = struct.pack("<II", len(text), _JSON) + text + struct.pack("<II", len(binary), _BINARY) + binary
    return struct.pack("<4sII", b"glTF", 2, 12 + len(chunks)) + chunks
