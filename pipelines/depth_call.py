"""One call of the depth pipeline, checked and with its defaults filled in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from marigold_uq.images import RESAMPLE_METHODS
from marigold_uq.randomness import Generators

if TYPE_CHECKING:
    from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline

MODES = ("ensemble", "trajectory")
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
    reduction: str
    output_type: str
    levels: tuple[float, ...]
    coverage: float | None
    output_samples: bool
    output_epistemic: bool
    callback: Callable[..., dict[str, torch.Tensor]] | None


def resolve_call(
    pipeline: MarigoldUQDepthPipeline,
    *,
    num_images: int,
    num_inference_steps: int | None,
    ensemble_size: int | None,
    processing_resolution: int | None,
    match_input_resolution: bool,
    resample_methods: tuple[str, str],
    batch_size: int,
    ensembling_kwargs: dict[str, Any] | None,
    generator: Generators,
    output_type: str,
    uncertainty: str | None,
    quantiles: Sequence[float] | None,
    coverage: float | None,
    output_samples: bool,
    output_epistemic: bool,
    callback: Callable[..., dict[str, torch.Tensor]] | None,
    callback_inputs: Sequence[str],
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
        tuple(callback_inputs) == ("latents",), "callback_on_step_end_tensor_inputs", "['latents']", callback_inputs
    )
    _check_mode(pipeline, uncertainty, members, output_epistemic)
    chains = members if uncertainty != "trajectory" else steps
    _check_generators(generator, num_images * chains)
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
        reduction=_reduction(ensembling_kwargs),
        output_type=output_type,
        levels=_levels(quantiles),
        coverage=_coverage(coverage),
        output_samples=output_samples,
        output_epistemic=output_epistemic,
        callback=callback,
    )


def _require(condition: bool, name: str, expected: str, got: object) -> None:
    if not condition:
        raise ValueError(f"{name} must be {expected}; got {got!r}")


def _default(name: str, given: int | None, default: int | None) -> int:
    value = default if given is None else given
    if value is None:
        raise ValueError(f"{name} is not given, and the model's config has no default for it")
    return value


def _check_mode(pipeline: MarigoldUQDepthPipeline, mode: str | None, members: int, epistemic: bool) -> None:
    family = pipeline.scheduler.family
    _require(mode is None or mode in MODES, "uncertainty", "'ensemble', 'trajectory' or None", mode)
    if mode is not None and members < 2:
        raise ValueError(f"uncertainty={mode!r} needs at least 2 members; got ensemble_size={members}")
    if mode == "trajectory" and not family.has_spread:
        raise ValueError(
            f"uncertainty='trajectory' draws from the head's law, but one call of family {family.name!r} tells no "
            "spread; use uncertainty='ensemble', or a model of another family"
        )
    if epistemic and mode == "trajectory":
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


def _reduction(options: dict[str, Any] | None) -> str:
    options = options or {}
    unknown = set(options) - SOLVER_OPTIONS - {"reduction"}
    if unknown:
        raise ValueError(f"ensembling_kwargs has unknown keys {sorted(unknown)}; known: 'reduction'")
    reduction = options.get("reduction", "median")
    _require(reduction in ("median", "mean"), "ensembling_kwargs['reduction']", "'median' or 'mean'", reduction)
    return str(reduction)


def _levels(quantiles: Sequence[float] | None) -> tuple[float, ...]:
    levels = tuple(float(q) for q in quantiles or ())
    _require(all(0 < q < 1 for q in levels), "quantiles", "levels strictly between 0 and 1", levels)
    return levels


def _coverage(coverage: float | None) -> float | None:
    if coverage is not None:
        _require(0 < coverage < 1, "coverage", "strictly between 0 and 1", coverage)
    return coverage
