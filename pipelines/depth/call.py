"""What one call of the depth pipeline asks for, checked, with the model's defaults filled in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from diffusers.utils import logging

from marigold_uq.alignment.members import Reduction
from marigold_uq.calibration import Calibration, check_coverage
from marigold_uq.pipelines.depth.images import RESAMPLE_METHODS
from marigold_uq.sampling import StepCallback

if TYPE_CHECKING:
    from marigold_uq.pipelines.depth.pipeline import MarigoldUQDepthPipeline

__all__ = ["CALLBACK_INPUTS", "MODES", "ONE_STEP_MODES", "DepthCall", "available_modes", "quickest_mode"]

logger = logging.get_logger(__name__)

MODES = ("ensemble", "trajectory", "marginal")
"""Ways to uncertainty."""
ONE_STEP_MODES = ("trajectory", "marginal")
"""Those that read the distribution of x_0 at the first timestep and take no steps."""
CALLBACK_INPUTS = ("latents",)
_DEFAULT_ENSEMBLE = 10
_SOLVER_OPTIONS = {"regularizer_strength", "max_iter", "tol", "max_res"}
"""Keys of diffusers' iterative alignment: accepted, and without effect on ours, which is solved to the end."""


@dataclass(frozen=True)
class DepthCall:
    """The arguments of a call under the pipeline's names, and what follows from them.

    Every wrong argument is a ValueError that says what was expected.

    Attributes:
        mode: One of `MODES`, or None without uncertainty.
        num_steps: Denoising steps.
        num_members: Members per image.
        num_chains: Reverse chains per image that make the prediction.
        beside: Whether the members of an ensemble are further chains: the call named no `ensemble_size`, and its
            prediction is that of one chain, with uncertainty or without.
        resolution: Longer edge for the network, 0 for the image's own.
        levels: Those of `quantiles`.
        reduction: How members become the prediction.
        calibration: What was chosen on held-out data for this mode.
        interval_scale: Half width of the calibrated interval in standard deviations; None without one.
    """

    pipeline: InitVar[MarigoldUQDepthPipeline]
    num_inference_steps: int | None = None
    ensemble_size: int | None = None
    processing_resolution: int | None = None
    match_input_resolution: bool = True
    resample_method_input: str = "bilinear"
    resample_method_output: str = "bilinear"
    batch_size: int = 1
    ensembling_kwargs: dict[str, Any] | None = None
    output_type: str = "np"
    output_latent: bool = False
    uncertainty: str | None = None
    quantiles: Iterable[float] | None = None
    coverage: float | None = None
    output_samples: bool = False
    output_epistemic: bool = False
    output_novelty: bool = False
    callback: Callable[..., dict[str, torch.Tensor]] | None = None
    callback_inputs: Sequence[str] = CALLBACK_INPUTS

    mode: str | None = field(init=False)
    num_steps: int = field(init=False)
    num_members: int = field(init=False)
    num_chains: int = field(init=False)
    beside: bool = field(init=False)
    resolution: int = field(init=False)
    levels: tuple[float, ...] = field(init=False)
    reduction: Reduction = field(init=False)
    calibration: Calibration = field(init=False)
    interval_scale: float | None = field(init=False)

    def __post_init__(self, pipeline: MarigoldUQDepthPipeline) -> None:
        config = pipeline.config
        needs_members = self.quantiles is not None or self.coverage is not None
        mode = "ensemble" if self.uncertainty is None and needs_members else self.uncertainty
        self._set("mode", mode)
        self._set("num_steps", _default(self, "num_inference_steps", config.default_denoising_steps))
        self._set("num_members", _default(self, "ensemble_size", _DEFAULT_ENSEMBLE if mode else 1))
        self._set("beside", mode == "ensemble" and self.ensemble_size is None)
        self._set("num_chains", 1 if self.beside or mode in ONE_STEP_MODES else self.num_members)
        self._set("resolution", _default(self, "processing_resolution", config.default_processing_resolution))
        self._set("levels", _levels(self.quantiles))
        self._check_numbers(pipeline.vae_scale_factor)
        self._check_names()
        self._check_mode(pipeline)
        self._set("reduction", _reduction(self.ensembling_kwargs))
        self._warn_of_extremes()
        conditions = {"num_inference_steps": self.num_steps, "ensemble_size": self.num_members}
        calibration = Calibration() if mode is None else pipeline.calibration_for(mode, **conditions)
        self._set("calibration", calibration)
        grid = None if self.coverage is None else calibration.interval
        self._set("interval_scale", None if grid is None else grid.scale(cast(float, self.coverage))[0])

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_numbers(self, multiple: int) -> None:
        _require(self.num_steps >= 1, "num_inference_steps", "at least 1", self.num_steps)
        _require(self.num_members >= 1, "ensemble_size", "at least 1", self.num_members)
        _require(self.batch_size >= 1, "batch_size", "at least 1", self.batch_size)
        _require(
            self.resolution >= 0 and self.resolution % multiple == 0,
            "processing_resolution",
            f"0 (the image's own size) or a positive multiple of {multiple}",
            self.resolution,
        )
        levels = self.levels
        _require(all(0 < q < 1 for q in levels), "quantiles", "levels strictly between 0 and 1", levels)
        if self.coverage is not None:
            check_coverage(self.coverage)

    def _check_names(self) -> None:
        for name in ("resample_method_input", "resample_method_output"):
            method = getattr(self, name)
            _require(method in RESAMPLE_METHODS, name, f"one of {', '.join(RESAMPLE_METHODS)}", method)
        known = ("np", "pt", "latent")
        _require(self.output_type in known, "output_type", "'np', 'pt' or 'latent'", self.output_type)
        _require(
            set(self.callback_inputs) <= set(CALLBACK_INPUTS),
            "callback_on_step_end_tensor_inputs",
            f"among {list(CALLBACK_INPUTS)}",
            self.callback_inputs,
        )

    def _check_mode(self, pipeline: MarigoldUQDepthPipeline) -> None:
        mode, family = self.mode, pipeline.scheduler.family
        _require(mode is None or mode in MODES, "uncertainty", "'ensemble', 'trajectory', 'marginal' or None", mode)
        if mode is not None and self.num_members < 2:
            raise ValueError(f"uncertainty={mode!r} needs at least 2 members; got ensemble_size={self.num_members}")
        if mode in ONE_STEP_MODES and not family.has_spread:
            raise ValueError(
                f"uncertainty={mode!r} reads the head's distribution, but one call of family {family.name!r} tells no "
                "spread; use uncertainty='ensemble', or a model of another family"
            )
        if mode == "marginal" and not _keeps_order(pipeline):
            raise ValueError(
                "uncertainty='marginal' needs a decoder that maps quantiles to quantiles, but the vae is a "
                f"{type(pipeline.vae).__name__}; use uncertainty='trajectory'"
            )
        for name in ("output_epistemic", "output_novelty"):
            if getattr(self, name) and not family.has_spread:
                raise ValueError(f"{name} reads the head's variance, and family {family.name!r} has none")
        if self.output_novelty and mode is None:
            raise ValueError(f"output_novelty compares members: choose uncertainty, one of {available_modes(pipeline)}")
        if self.output_type == "latent" and (mode or self.output_samples or self.output_epistemic):
            raise ValueError("output_type='latent' ends before the decoder, and uncertainty is that of decoded maps")

    def _warn_of_extremes(self) -> None:
        tail = 1 / (self.num_members + 1)
        if any(not tail <= level <= 1 - tail for level in self.levels):
            logger.warning(
                f"{self.num_members} members tell no quantile outside [{tail:.3f}, {1 - tail:.3f}]: those asked for "
                "are the smallest or largest member; ask for coverage=, or take more members"
            )

    @property
    def follows_mean(self) -> bool:
        """Whether the prediction's chain follows the mean of the distribution: where it is alone, not a draw of many.

        So a checkpoint with a new head gives the prediction that it gave before.
        """
        return self.num_chains == 1

    def step_callback(self, pipeline: MarigoldUQDepthPipeline) -> StepCallback | None:
        """The user's callback as the reverse loop calls it; what it returns under "latents" replaces x_prev."""
        user = self.callback
        if user is None:
            return None

        def after_step(index: int, timestep: int | float, x_prev: torch.Tensor) -> torch.Tensor:
            returned = user(pipeline, index, timestep, {"latents": x_prev} if self.callback_inputs else {})
            return returned.get("latents", x_prev) if returned else x_prev

        return after_step


def available_modes(pipeline: MarigoldUQDepthPipeline) -> list[str]:
    """The modes that the model has, the quickest first."""
    if not pipeline.scheduler.family.has_spread:
        return ["ensemble"]
    return ["marginal", "trajectory", "ensemble"] if _keeps_order(pipeline) else ["trajectory", "ensemble"]


def quickest_mode(pipeline: MarigoldUQDepthPipeline) -> str | None:
    """The mode with the fewest calls and draws; None where one call of the network tells no spread."""
    quickest = available_modes(pipeline)[0]
    return quickest if quickest in ONE_STEP_MODES else None


def _keeps_order(pipeline: MarigoldUQDepthPipeline) -> bool:
    """Whether the decoder maps quantiles of the latents to quantiles of the depth map."""
    return bool(getattr(pipeline.vae, "is_monotone", False))


def _require(condition: bool, name: str, expected: str, got: object) -> None:
    if not condition:
        raise ValueError(f"{name} must be {expected}; got {got!r}")


def _default(call: DepthCall, name: str, default: int | None) -> int:
    given = getattr(call, name)
    value = default if given is None else given
    if value is None:
        raise ValueError(f"{name} is not given, and the model's config has no default for it")
    return int(value)


def _levels(quantiles: Iterable[float] | None) -> tuple[float, ...]:
    """Plain numbers from a list, tuple, array or tensor."""
    if quantiles is None:
        return ()
    try:
        return tuple(float(level) for level in quantiles)
    except (TypeError, ValueError) as error:
        raise ValueError(f"quantiles must be levels between 0 and 1 in a row; got {quantiles!r}") from error


def _reduction(options: dict[str, Any] | None) -> Reduction:
    """diffusers' default is the median, robust to outliers."""
    options = options or {}
    unknown = set(options) - _SOLVER_OPTIONS - {"reduction"}
    if unknown:
        raise ValueError(f"ensembling_kwargs has unknown keys {sorted(unknown)}; known: 'reduction'")
    reduction = options.get("reduction", "median")
    _require(reduction in ("median", "mean"), "ensembling_kwargs['reduction']", "'median' or 'mean'", reduction)
    return cast(Reduction, reduction)
