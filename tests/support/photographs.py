"""A folder of a few tiny pictures with depth, in groups, as a user would have it."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from support.tiny_depth import picture


def write_photographs(root: Path, count: int, per_source: int) -> Path:
    """An index, pictures and depth maps below `root`."""
    rows = []
    for folder in ("rgb", "depth"):
        (root / folder).mkdir(parents=True)
    for index in range(count):
        name = f"p{index}"
        Image.fromarray((255 * picture(12, 16, index)).astype(np.uint8)).save(root / f"rgb/{name}.png")
        depth = np.linspace(1, 5, 12)[:, None] + np.random.default_rng(index).random((12, 16))
        np.save(root / f"depth/{name}.npy", depth.astype(np.float32))
        rows.append({"name": name, "group": f"source{index // per_source}"})
    (root / "index.json").write_text(json.dumps(rows))
    return root
