"""A depth model as one ONNX graph: picture in, depth, standard deviation and calibrated intervals out, in one step.

The graph is the pipeline's "marginal" call for models with `DepthCells`, and its "trajectory" call of one step for
those with an autoencoder, whose draws it does not align to each other. It draws nothing: start and draws are cut from a
tile of random numbers that is stored with it. It takes pictures of any size; `marigold_uq.depth.onnx_model` resizes
around it.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marigold_uq.calibration import Calibration
from marigold_uq.denoising import predict_output
from marigold_uq.depth.onnx_model import INPUT, METADATA, OUTPUTS, OnnxDepth
from marigold_uq.distributions import GaussianDistribution
from marigold_uq.files import atomic_path
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
from marigold_uq.pipelines.depth.call import available_modes
from marigold_uq.pipelines.depth.latents import decode_maps, encode_conditions

__all__ = ["OneStepDepth", "OnnxExport", "export_onnx"]

TILE = 64
"""Edge of the stored random numbers in latent cells; larger pictures see them again and again."""
OPSET = 18
_LARGEST_GRAPH = 1.9e9  # bytes; a protobuf ends at 2 GB
_TOLERANCE = 2e-3
"""Largest difference from torch that a written graph may have, in units of the depth range."""


class OneStepDepth(nn.Module):
    """A pipeline's call of one step as a module without loops: pictures (1, 3, H, W) in [0, 1] to maps of that size.

    Args:
        pipeline: A model whose one step tells the spread, with Gaussian marginals.
        num_members: Quantiles or draws behind the standard deviation.
        half_widths: Of the intervals, in standard deviations.
        kappa: Stretches the standard deviation.
        seed: Of the stored random numbers.
    """

    start: Tensor  # (1, C, TILE, TILE)
    half_widths: Tensor  # (L, 1, 1, 1)
    deviations: Tensor  # members less their mean, in standard deviations: (E, 1, 1, 1), or (E, C, TILE, TILE)

    def __init__(
        self,
        pipeline: MarigoldUQDepthPipeline,
        *,
        num_members: int = 10,
        half_widths: Sequence[float] = (),
        kappa: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.mode = one_step_mode(pipeline)
        self.networks = nn.ModuleList(
            module for module in (pipeline.unet, pipeline.vae, pipeline.image_encoder) if module is not None
        )
        self.pipeline = pipeline
        kind: Any = type(pipeline.scheduler)
        self.scheduler = kind.from_config(pipeline.scheduler.config)
        self.scheduler.set_timesteps(1)
        channels = pipeline.vae.config.latent_channels
        generator = torch.Generator().manual_seed(seed)
        tile = torch.randn(1 + num_members, channels, TILE, TILE, generator=generator)
        self.register_buffer("start", tile[:1])
        self.register_buffer("deviations", _quantiles(num_members) if self.mode == "marginal" else tile[1:])
        self.register_buffer("half_widths", torch.tensor(list(half_widths)).reshape(-1, 1, 1, 1))
        self.kappa = float(kappa)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Prediction (1, 1, H, W), standard deviation (1, 1, H, W), and (L, 2, H, W) with L half widths."""
        height, width = image.shape[-2:]
        cell = self.pipeline.vae_scale_factor
        pixels = F.pad(image * 2.0 - 1.0, (0, -width % cell, 0, -height % cell), mode="replicate")
        (condition,) = encode_conditions(self.pipeline.vae, self.pipeline.image_encoder, pixels, 1)
        latents = self.latents(condition.channels[None])
        maps = decode_maps(self.pipeline.vae, latents, len(self.deviations) + 1, condition.guide)
        prediction, std = self._moments(maps[:, None, :height, :width])
        if not len(self.half_widths):
            return prediction, std
        reach = self.half_widths * std
        return prediction, std, torch.cat([prediction - reach, prediction + reach], 1)

    def latents(self, condition: Tensor) -> Tensor:
        """Where one step with the mean ends, and members of the distribution of x_0, (1 + E, C, h, w)."""
        size, scheduler = condition.shape[-2:], self.scheduler
        t, x_t = scheduler.timesteps[0], _cut(self.start, size) * scheduler.init_noise_sigma
        output = predict_output(self.pipeline.denoiser(condition), scheduler, x_t, t)
        law = scheduler.original_distribution(output, t, x_t).scaled(scheduler.config.tau).marginal()
        assert isinstance(law, GaussianDistribution)
        deviations = self.deviations
        if self.mode == "trajectory":
            deviations = _cut(deviations, size)
            deviations = deviations - deviations.mean(0, keepdim=True)
        end = scheduler.reverse_distribution(output, t, x_t).mean  # not quite x_0 where the schedule keeps some noise
        return torch.cat([end, law.loc + law.scale * deviations])

    def _moments(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """Prediction and standard deviation of maps (1 + E, 1, H, W), in the pipeline's units."""
        members = maps[1:]
        mean = members.mean(0, keepdim=True)
        std = ((members - mean).square().sum(0, keepdim=True) / (len(self.deviations) - 1)).sqrt()
        return maps[:1], self.kappa * std


def one_step_mode(pipeline: MarigoldUQDepthPipeline) -> str:
    """The mode that the graph computes; a ValueError where one step does not tell what is needed."""
    if pipeline.baseline is not None:
        raise ValueError("an ONNX graph holds no baseline: this model needs another one's depth map")
    family = pipeline.scheduler.family
    mode = available_modes(pipeline)[0]
    known = ("gaussian", "low_rank") if mode == "marginal" else ("gaussian",)
    if mode == "ensemble" or family.name not in known:
        raise ValueError(
            f"an ONNX graph of one step needs a model of family {' or '.join(known)}; this one is {family.name!r}"
        )
    return mode


def _quantiles(num_members: int) -> Tensor:
    """Standard normal quantiles at evenly spread levels, (E, 1, 1, 1)."""
    levels = (torch.arange(num_members) + 0.5) / num_members
    return torch.special.ndtri(levels).reshape(-1, 1, 1, 1)


def _cut(tile: Tensor, size: Sequence[int]) -> Tensor:
    """Random numbers (E, C, *size) out of the tile, which repeats."""
    rows, columns = (torch.arange(edge) % TILE for edge in size)
    return tile.index_select(2, rows).index_select(3, columns)


# ------------------------------------------------------------------------------------------------------------ export


@dataclass(frozen=True)
class OnnxExport:
    """What was written.

    Attributes:
        path: The file.
        num_bytes: Its size.
        difference: Largest difference from torch over all outputs and the sizes that were tried.
        coverages: Of the intervals in the graph.
    """

    path: Path
    num_bytes: int
    difference: float
    coverages: tuple[float, ...]


@torch.inference_mode()
def export_onnx(
    pipeline: MarigoldUQDepthPipeline,
    path: str | Path,
    *,
    coverages: Sequence[float] | None = None,
    ensemble_size: int = 10,
    seed: int = 0,
    model: str = "",
    overwrite: bool = False,
) -> OnnxExport:
    """Write a pipeline as an ONNX graph, run it with onnxruntime beside torch, and keep it if both agree.

    Args:
        pipeline: A model of family "gaussian" (with `DepthCells` also "low_rank"), in float32.
        path: The file to write.
        coverages: Of the intervals in the graph; by default 90 % where the model is calibrated, else none.
        ensemble_size: Quantiles or draws behind the standard deviation.
        seed: Of the stored random numbers.
        model: Where the pipeline came from, for the record in the file.
        overwrite: Replace an existing file.
    """
    _require_packages()
    mode = one_step_mode(pipeline)
    _check_size(pipeline)
    record = pipeline.calibration_for(mode, num_inference_steps=1, ensemble_size=ensemble_size)
    levels, half_widths = _half_widths(record, coverages)
    pipeline.encode_prompt()
    module = OneStepDepth(
        pipeline, num_members=ensemble_size, half_widths=half_widths, kappa=record.kappas[0], seed=seed
    ).eval()
    facts = _facts(pipeline, record, levels, half_widths)
    facts |= {"model": model, "uncertainty": mode, "ensemble_size": ensemble_size, "seed": seed}
    with atomic_path(path, overwrite=overwrite) as temporary:
        _write(module, temporary, facts)
        difference = _largest_difference(module, temporary)
        if not difference <= _TOLERANCE:
            raise RuntimeError(
                f"the graph differs from torch by {difference:.2g} (at most {_TOLERANCE:g} is allowed), so nothing was "
                "written; please report the model and the versions of torch and onnxruntime"
            )
    return OnnxExport(Path(path), Path(path).stat().st_size, difference, levels)


def _require_packages() -> None:
    missing = [name for name in ("onnx", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise ImportError(f"the export needs {' and '.join(missing)}: pip install 'marigold_uq[onnx]'")


def _check_size(pipeline: MarigoldUQDepthPipeline) -> None:
    networks = [pipeline.unet, pipeline.vae, pipeline.image_encoder]
    size = 4 * sum(
        parameter.numel() for network in networks if network is not None for parameter in network.parameters()
    )
    if size > _LARGEST_GRAPH:
        raise ValueError(f"the model has {size / 1e9:.1f} GB in float32; one ONNX file holds at most 2 GB")
    kinds = {str(network.dtype) for network in networks if network is not None}
    if kinds != {"torch.float32"}:
        raise ValueError(
            f"export in float32: load the pipeline with dtype=torch.float32; it is {', '.join(sorted(kinds))}"
        )


def _half_widths(record: Calibration, coverages: Sequence[float] | None) -> tuple[tuple[float, ...], list[float]]:
    """Coverages of the intervals and their half widths in standard deviations."""
    if coverages is None:
        coverages = () if record.interval is None else (0.9,)
    if coverages and record.interval is None:
        raise ValueError(
            f"the model has no calibrated intervals for uncertainty={record.uncertainty!r}; calibrate it first "
            "(marigold-uq calibrate), or export without coverages"
        )
    levels = tuple(sorted(float(coverage) for coverage in coverages))
    return levels, [record.interval.scale(level)[0] for level in levels] if record.interval else []


def _facts(
    pipeline: MarigoldUQDepthPipeline, record: Calibration, levels: Sequence[float], half_widths: Sequence[float]
) -> dict[str, Any]:
    """What a reader of the file needs to know."""
    return {
        "processing_resolution": int(pipeline.config.default_processing_resolution or 0),
        "prediction_type": pipeline.config.prediction_type,
        "metric": not (pipeline.config.scale_invariant or pipeline.config.shift_invariant),
        "noise_family": pipeline.scheduler.config.noise_family,
        "kappa": record.kappas[0],
        "coverages": list(levels),
        "half_widths": list(half_widths),
        "calibration": None if record.interval is None else record.interval.to_dict(),
    }


def _write(module: OneStepDepth, path: Path, facts: dict[str, Any]) -> None:
    import onnx

    names = list(OUTPUTS[: 3 if len(module.half_widths) else 2])
    sizes = {INPUT: {2: "height", 3: "width"}} | {name: {2: "height", 3: "width"} for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a tracer that cannot know which sizes are constants; the result is checked
        torch.onnx.export(
            module, (_example(module),), str(path), input_names=[INPUT], output_names=names, dynamic_axes=sizes,
            opset_version=OPSET, dynamo=False,
        )  # fmt: skip
    graph = onnx.load(str(path))
    onnx.helper.set_model_props(graph, {METADATA: json.dumps(facts)})
    onnx.checker.check_model(graph)
    onnx.save(graph, str(path))


def _example(module: OneStepDepth) -> Tensor:
    """A picture whose latents do not halve evenly: then the U-Net is traced with the sizes it must come back to."""
    factor, cell = 2**module.pipeline.unet.num_upsamplers, module.pipeline.vae_scale_factor
    return _picture((factor + 1) * cell, (2 * factor + 1) * cell)


def _picture(height: int, width: int) -> Tensor:
    rows, columns = torch.linspace(0, 3, height)[:, None], torch.linspace(0, 5, width)
    return torch.stack([rows.sin() * columns.cos(), (rows * columns).sin(), (rows + columns).cos()])[None] / 2 + 0.5


def _largest_difference(module: OneStepDepth, path: Path) -> float:
    """Between torch and onnxruntime, on pictures of even and odd sizes, larger and smaller than the one traced."""
    session = OnnxDepth(path).session
    height, width = _example(module).shape[-2:]
    differences = []
    for size in ((height, width), (height - 3, width + 13), (2 * height, height), (width + 1, 3 * height)):
        picture = _picture(*size)
        found = session.run(None, {INPUT: picture.numpy()})
        differences += [
            float((torch.from_numpy(one) - other).abs().max())
            for one, other in zip(found, module(picture), strict=True)
        ]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf
