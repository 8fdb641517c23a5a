"""Diffusion models that predict distributions: monocular depth, forecasts of fields, tables.

Heavy modules load on first use, so `import marigold_uq` is quick.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marigold_uq.calibration import Calibration
    from marigold_uq.depth.scenes import ProceduralScenes
    from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
    from marigold_uq.pipelines.field import FieldForecastPipeline
    from marigold_uq.pipelines.tabular import TabularRegressionPipeline
    from marigold_uq.schedulers.scheduling_distributional_ddim import DistributionalDDIMScheduler
    from marigold_uq.schedulers.scheduling_distributional_edm import DistributionalEDMScheduler
    from marigold_uq.schedulers.scheduling_distributional_flow_match import DistributionalFlowMatchScheduler
    from marigold_uq.schedulers.scheduling_distributional_lcm import DistributionalLCMScheduler
    from marigold_uq.tabular.regressor import DiffusionRegressor

__version__ = "0.1.0"

_HOMES = {
    "Calibration": "marigold_uq.calibration",
    "DiffusionRegressor": "marigold_uq.tabular.regressor",
    "DistributionalDDIMScheduler": "marigold_uq.schedulers.scheduling_distributional_ddim",
    "DistributionalEDMScheduler": "marigold_uq.schedulers.scheduling_distributional_edm",
    "DistributionalFlowMatchScheduler": "marigold_uq.schedulers.scheduling_distributional_flow_match",
    "DistributionalLCMScheduler": "marigold_uq.schedulers.scheduling_distributional_lcm",
    "FieldForecastPipeline": "marigold_uq.pipelines.field",
    "MarigoldUQDepthPipeline": "marigold_uq.pipelines.depth",
    "ProceduralScenes": "marigold_uq.depth.scenes",
    "TabularRegressionPipeline": "marigold_uq.pipelines.tabular",
}
_SUBMODULES = ("alignment", "calibration", "distributions", "metrics", "schedulers", "scores", "uncertainty")

__all__ = [
    "Calibration",
    "DiffusionRegressor",
    "DistributionalDDIMScheduler",
    "DistributionalEDMScheduler",
    "DistributionalFlowMatchScheduler",
    "DistributionalLCMScheduler",
    "FieldForecastPipeline",
    "MarigoldUQDepthPipeline",
    "ProceduralScenes",
    "TabularRegressionPipeline",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _SUBMODULES:
        return import_module(f"marigold_uq.{name}")
    raise AttributeError(f"module 'marigold_uq' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBMODULES])


class _Announced(ModuleType):
    """Stands in `sys.modules` for a module of ours until one of its names is asked for.

    diffusers loads components of a saved pipeline only from modules that are in `sys.modules`; with this,
    `import marigold_uq` is enough for that and still quick. (`importlib.util.LazyLoader` will not do: torch looks at
    all modules while it is being imported, and would set it off.)
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


for _name, _module in _HOMES.items():
    if _name.endswith("Scheduler"):
        sys.modules.setdefault(_module, _Announced(_module))
