"""Probabilistic regression with diffusion models that say how sure they are.

Heavy modules load on first use, so `import marigold_uq` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marigold_uq.data.synthetic import ProceduralScenes
    from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
    from marigold_uq.schedulers.scheduling_distributional_ddim import DistributionalDDIMScheduler

__version__ = "0.1.0"

_HOMES = {
    "DistributionalDDIMScheduler": "marigold_uq.schedulers.scheduling_distributional_ddim",
    "MarigoldUQDepthPipeline": "marigold_uq.pipelines.depth",
    "ProceduralScenes": "marigold_uq.data.synthetic",
}
_SUBMODULES = ("alignment", "calibration", "distributions", "metrics", "schedulers", "scores", "uncertainty")

__all__ = ["DistributionalDDIMScheduler", "MarigoldUQDepthPipeline", "ProceduralScenes", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _SUBMODULES:
        return import_module(f"marigold_uq.{name}")
    raise AttributeError(f"module 'marigold_uq' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBMODULES])
