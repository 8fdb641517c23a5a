"""One call of the depth pipeline, checked and with its defaults filled in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from diffusers.utils import logging

from marigold_uq.alignment.members import Reduction
from marigold_uq.calibration import Calibration
from marigold_uq.images import RESAMPLE_METHODS
from marigold_uq.randomness import Generators
from marigold_uq.sampling import StepCallback
from marigold_uq.schedulers.scheduling_distributional_ddim import DistributionalDDIMScheduler

if TYPE_CHECKING:
    from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline

logger = logging.get_logger(__name__)

MODES = ("ensemble", "trajectory", "marginal")
LAW_MODES = ("trajectory", "marginal")
"""Those that read the law of x_0 at the first timestep and take no steps."""
CALLBACK_INPUTS = ("latents",)
DEFAULT_MEMBERS = 10
SOLVER_OPTIONS = {"regularizer_strength", "max_iter", "tol", "max_res"}
"""Keys of diffusers' iterative alignment: accepted, and without effect on ours, which is solved to the end."""


@dataclass(frozen=True)
class DepthCall:
    """Checked arguments; `num_chains` are reverse chains (or starts) per image, `num_members` the maps decoded."""

    num_images: int
    num_steps: int
    mode: str | None
    num_members: int
    num_chains: int
    resolution: int
    match_input_resolution: bool
    method_input: str
    method_output: str
    batch_size: int
    reduction: Reduction
    output_type: str
    levels: tuple[float, ...]
    coverage: float | None
    output_samples: bool
    output_epistemic: bool
    callback: Callable[..., dict[str, torch.Tensor]] | None
    callback_inputs: tuple[str, ...]
    calibration: Calibration

    @property
    def num_maps(self) -> int:
        """Maps decoded per image: the members, and with "marginal" the prediction itself."""
        return self.num_members + (self.mode == "marginal")

    def step_callback(self, pipeline: MarigoldUQDepthPipeline) -> StepCallback | None:
        """The user's callback as the reverse loop calls it; what it returns under "latents" replaces x_prev."""
        user = self.callback
        if user is None:
            return None

        def after_step(index: int, timestep: int, x_prev: torch.Tensor) -> torch.Tensor:
            returned = user(pipeline, index, timestep, {"latents": x_prev} if self.callback_inputs else {})
            return returned.get("latents", x_prev) if returned else x_prev

        return after_step


def resolve_call(
    pipeline: MarigoldUQDepthPipeline,
    *,
    num_images: int,
    num_inference_steps: int | None = None,
    ensemble_size: int | None = None,
    processing_resolution: int | None = None,
    match_input_resolution: bool = True,
    resample_methods: tuple[str, str] = ("bilinear", "bilinear"),
    batch_size: int = 1,
    ensembling_kwargs: dict[str, Any] | None = None,
    generator: Generators = None,
    output_type: str = "np",
    uncertainty: str | None = None,
    quantiles: Sequence[float] | None = None,
    coverage: float | None = None,
    output_samples: bool = False,
    output_epistemic: bool = False,
    callback: Callable[..., dict[str, torch.Tensor]] | None = None,
    callback_inputs: Sequence[str] = CALLBACK_INPUTS,
) -> DepthCall:
    """Fill in the model's defaults; every wrong argument is a ValueError that says what was expected."""
    if uncertainty is None and (quantiles is not None or coverage is not None):
        uncertainty = "ensemble"  # quantiles need members
    steps = _default("num_inference_steps", num_inference_steps, pipeline.config.default_denoising_steps)
    resolution = _default("processing_resolution", processing_resolution, pipeline.config.default_processing_resolution)
    members = ensemble_size if ensemble_size is not None else (DEFAULT_MEMBERS if uncertainty else 1)
    _require(steps >= 1, "num_inference_steps", "at least 1", steps)
    _require(members >= 1, "ensemble_size", "at least 1", members)
    _require(batch_size >= 1, "batch_size", "at least 1", batch_size)
    multiple = pipeline.vae_scale_factor
    _require(
        resolution >= 0 and resolution % multiple == 0,
        "processing_resolution",
        f"0 (the image's own size) or a positive multiple of {multiple}",
        resolution,
    )
    for name, method in zip(("resample_method_input", "resample_method_output"), resample_methods, strict=True):
        _require(method in RESAMPLE_METHODS, name, f"one of {', '.join(RESAMPLE_METHODS)}", method)
    _require(output_type in ("np", "pt"), "output_type", "'np' or 'pt'", output_type)
    _require(
        set(callback_inputs) <= set(CALLBACK_INPUTS),
        "callback_on_step_end_tensor_inputs",
        f"among {list(CALLBACK_INPUTS)}",
        callback_inputs,
    )
    _check_mode(pipeline, uncertainty, members, output_epistemic, callback is not None)
    chains = {"trajectory": min(steps, members), "marginal": 1}.get(uncertainty or "", members)
    _check_generators(generator, num_images * chains)
    _warn_of_extremes(_levels(quantiles), members)
    return DepthCall(
        num_images=num_images,
        num_steps=steps,
        mode=uncertainty,
        num_members=members,
        num_chains=chains,
        resolution=resolution,
        match_input_resolution=match_input_resolution,
        method_input=resample_methods[0],
        method_output=resample_methods[1],
        batch_size=batch_size,
        reduction=_reduction(ensembling_kwargs, uncertainty),
        output_type=output_type,
        levels=_levels(quantiles),
        coverage=_coverage(coverage),
        output_samples=output_samples,
        output_epistemic=output_epistemic,
        callback=callback,
        callback_inputs=tuple(callback_inputs),
        calibration=_calibration(pipeline, uncertainty, steps, members),
    )


def quickest_mode(pipeline: MarigoldUQDepthPipeline) -> str | None:
    """The mode that needs the fewest calls and draws; None where one call of the network tells no spread."""
    if not pipeline.scheduler.family.has_spread:
        return None
    return "marginal" if is_monotone(pipeline) else "trajectory"


def is_monotone(pipeline: MarigoldUQDepthPipeline) -> bool:
    """Whether the decoder maps quantiles of the latents to quantiles of the depth map."""
    return bool(getattr(pipeline.vae, "is_monotone", False))


def _require(condition: bool, name: str, expected: str, got: object) -> None:
    if not condition:
        raise ValueError(f"{name} must be {expected}; got {got!r}")


def _default(name: str, given: int | None, default: int | None) -> int:
    value = default if given is None else given
    if value is None:
        raise ValueError(f"{name} is not given, and the model's config has no default for it")
    return value


def _check_mode(
    pipeline: MarigoldUQDepthPipeline, mode: str | None, members: int, epistemic: bool, has_callback: bool
) -> None:
    family = pipeline.scheduler.family
    _require(mode is None or mode in MODES, "uncertainty", "'ensemble', 'trajectory', 'marginal' or None", mode)
    if mode is not None and members < 2:
        raise ValueError(f"uncertainty={mode!r} needs at least 2 members; got ensemble_size={members}")
    if mode in LAW_MODES and not family.has_spread:
        raise ValueError(
            f"uncertainty={mode!r} reads the head's law, but one call of family {family.name!r} tells no "
            "spread; use uncertainty='ensemble', or a model of another family"
        )
    if mode == "marginal" and not is_monotone(pipeline):
        raise ValueError(
            f"uncertainty='marginal' needs a decoder that maps quantiles to quantiles, but the vae is a "
            f"{type(pipeline.vae).__name__}: use uncertainty='trajectory'"
        )
    if has_callback and mode in LAW_MODES:
        raise ValueError(f"callback_on_step_end follows the steps of chains, and uncertainty={mode!r} takes none")
    if epistemic and mode in LAW_MODES:
        raise ValueError("output_epistemic is an average along chains; it goes with uncertainty='ensemble' or None")
    if epistemic and not family.has_spread:
        raise ValueError(f"output_epistemic reads the head's variance, and family {family.name!r} has none")


def _check_generators(generator: Generators, expected: int) -> None:
    if generator is None or isinstance(generator, torch.Generator):
        return
    if not isinstance(generator, list | tuple) or not all(isinstance(one, torch.Generator) for one in generator):
        raise ValueError(f"generator is a torch.Generator, a list of them or None; got {type(generator).__name__}")
    if len(generator) != expected:
        raise ValueError(f"a list of generators has one per chain, images x chains = {expected}; got {len(generator)}")
    if len({one.device.type for one in generator}) > 1:
        raise ValueError("all generators of a list must be on the same device")


def _reduction(options: dict[str, Any] | None, mode: str | None) -> Reduction:
    """The mean for draws of one law, which is known to be their centre; else the median, which outliers do not move."""
    options = options or {}
    unknown = set(options) - SOLVER_OPTIONS - {"reduction"}
    if unknown:
        raise ValueError(f"ensembling_kwargs has unknown keys {sorted(unknown)}; known: 'reduction'")
    reduction = options.get("reduction", "mean" if mode in LAW_MODES else "median")
    _require(reduction in ("median", "mean"), "ensembling_kwargs['reduction']", "'median' or 'mean'", reduction)
    return cast(Reduction, reduction)


def warn_of_late_start(scheduler: DistributionalDDIMScheduler) -> None:
    """The chain starts from pure noise; a schedule whose first timestep expects a picture has too few steps."""
    first = int(scheduler.timesteps[0])
    if scheduler.alpha_bar(first) > 0.5:
        logger.warning(
            f"the chain starts from pure noise, but the schedule's first timestep is {first}, where x_t is mostly "
            "signal: take more steps, or timestep_spacing='trailing'"
        )


def _warn_of_extremes(levels: tuple[float, ...], members: int) -> None:
    if any(not 1 / (members + 1) <= level <= members / (members + 1) for level in levels):
        logger.warning(
            f"{members} members tell no quantile outside [{1 / (members + 1):.3f}, {members / (members + 1):.3f}]: "
            "those asked for are the smallest or largest member; ask for coverage=, or take more members"
        )


def _levels(quantiles: Sequence[float] | None) -> tuple[float, ...]:
    levels = tuple(float(q) for q in quantiles or ())
    _require(all(0 < q < 1 for q in levels), "quantiles", "levels strictly between 0 and 1", levels)
    return levels


def _coverage(coverage: float | None) -> float | None:
    if coverage is not None:
        _require(0 < coverage < 1, "coverage", "strictly between 0 and 1", coverage)
    return coverage


def stored_calibrations(stored: dict[str, Any] | None) -> dict[str, Calibration]:
    """The pipeline's config entry as a calibration per mode."""
    unknown = set(stored or {}) - set(MODES)
    if unknown:
        raise ValueError(
            f"the pipeline's calibration has one entry per way to uncertainty, {' and '.join(MODES)}; got the keys "
            f"{sorted(unknown)}: store it with pipeline.calibrate(mode, calibration)"
        )
    return {mode: Calibration.from_dict(values) for mode, values in (stored or {}).items()}


def add_calibration(stored: dict[str, Any] | None, mode: str, calibration: Calibration) -> dict[str, Any]:
    """The config entry with the calibration of one mode put in."""
    _require(mode in MODES, "mode", f"one of {', '.join(MODES)}", mode)
    calibrations = {**stored_calibrations(stored), mode: calibration}
    taus = {name: one.tau for name, one in calibrations.items()}
    _require(len(set(taus.values())) == 1, "tau", "the same for all modes: it lives in the one scheduler", taus)
    return {name: one.to_dict() for name, one in calibrations.items()}


def _calibration(pipeline: MarigoldUQDepthPipeline, mode: str | None, steps: int, members: int) -> Calibration:
    """What was chosen on held-out data for this mode; a call under other conditions is warned, another tau refused."""
    calibration = stored_calibrations(pipeline.config.calibration).get(mode or "")
    if calibration is None:
        return Calibration()
    if calibration.tau != pipeline.scheduler.config.tau:
        raise ValueError(
            f"the calibration of uncertainty={mode!r} was made with tau = {calibration.tau}, but the scheduler has "
            f"tau = {pipeline.scheduler.config.tau}: set it back with scheduler.calibrate(...), or calibrate anew"
        )
    for name, chosen, used in (
        ("num_inference_steps", calibration.num_steps, steps),
        ("ensemble_size", calibration.num_members, members),
    ):
        if chosen is not None and chosen != used:
            logger.warning(f"calibrated with {name}={chosen}, called with {used}: kappa and intervals may not hold")
    return calibration
