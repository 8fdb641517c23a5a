"""Finetuning a depth pipeline: what is encoded, what is drawn, what is scored, and which parameters learn."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from marigold_uq.component_config import store_in_config
from marigold_uq.depth.encoding import LatentEncoder
from marigold_uq.depth.trainable import choose_trainable, plain_network
from marigold_uq.models.depth_baseline import DepthBaseline
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
from marigold_uq.training.objective import Objective, ObjectiveConfig
from marigold_uq.training.order import Ordered
from marigold_uq.training.task import Stateful, TrainingTask

Validation = Callable[[MarigoldUQDepthPipeline, int, Path], dict[str, float]]
Batch = list[tuple[list[int], dict[str, Any]]]
"""Samples of one size together: their places in the micro batch, and what torch's default collate makes of them."""


class PictureTask(TrainingTask):
    """What tasks on pictures of mixed sizes share: subclasses say the loss of samples of one size."""

    pipeline: MarigoldUQDepthPipeline
    validation: Validation | None
    device: torch.device
    objective: Objective

    def states(self) -> list[Stateful]:
        """The running bandwidth."""
        return [self.objective.scale]

    def collate(self, samples: list[dict[str, Any]]) -> Batch:
        """Group samples by size: data sets that are mixed need not agree on one."""
        groups: dict[tuple[torch.Size, ...], list[int]] = {}
        for place, sample in enumerate(samples):
            size = tuple(value.shape for value in sample.values() if isinstance(value, Tensor))
            groups.setdefault(size, []).append(place)
        return [(places, default_collate([samples[place] for place in places])) for places in groups.values()]

    def describe(self, batch: Batch) -> list[str]:
        """Names of the samples."""
        names = {place: str(name) for places, part in batch for place, name in zip(places, part["name"], strict=True)}
        return [names[place] for place in sorted(names)]

    can_rehearse = True

    def losses(self, network: nn.Module, batch: Batch, generators: list[torch.Generator]) -> Tensor:
        """Score of the predicted distribution against the drawn target, one number per sample."""
        losses, residuals = self._scored(network, batch, generators)
        self.objective.note(residuals)
        return losses

    def rehearse(self, network: nn.Module, batch: Batch, generators: list[torch.Generator]) -> Tensor:
        """The same, without a note of the residuals."""
        return self._scored(network, batch, generators)[0]

    def _scored(self, network: nn.Module, batch: Batch, generators: list[torch.Generator]) -> tuple[Tensor, Tensor]:
        """Losses (B,) and residual rows (B, 3), in the order of the batch."""
        parts = [self._part(network, part, [generators[place] for place in places]) for places, part in batch]
        order = torch.tensor([place for places, _ in batch for place in places], device=self.device).argsort()
        losses, residuals = (torch.cat(columns)[order] for columns in zip(*parts, strict=True))
        return losses, residuals

    @abstractmethod
    def _part(
        self, network: nn.Module, batch: dict[str, Any], generators: list[torch.Generator]
    ) -> tuple[Tensor, Tensor]:
        """Losses (B,) of samples of one size and their residual rows (B, 3)."""

    def after_step(self, step: int) -> None:
        """Update the running residual scale."""
        self.objective.update()

    def validate(self, network: nn.Module, step: int, pictures: Path) -> dict[str, float]:
        """Whatever the validation given at construction measures."""
        if self.validation is None:
            return {}
        was_training = network.training
        network.eval()
        scores = self.validation(self.pipeline, step, pictures)
        network.train(was_training)
        return scores


class DepthTask(PictureTask):
    """The U-Net of a depth pipeline on image and depth pairs, or on what a baseline leaves over.

    `encoder_dtype` is the precision of the frozen autoencoder; None keeps its own.
    """

    def __init__(
        self,
        pipeline: MarigoldUQDepthPipeline,
        dataset: Ordered,
        objective: ObjectiveConfig,
        *,
        trainable: Literal["full", "head", "lora"] = "full",
        lora_rank: int = 16,
        seed: int = 0,
        validation: Validation | None = None,
        device: torch.device | str = "cpu",
        encoder_dtype: torch.dtype | None = None,
    ) -> None:
        has_baseline = pipeline.baseline is not None
        if not has_baseline and not (pipeline.config.scale_invariant and pipeline.config.shift_invariant):
            raise ValueError("training normalises each depth map by itself, but the pipeline promises absolute depth")
        if not has_baseline and pipeline.image_encoder is not None:
            raise ValueError(
                "this pipeline sees its pictures through an image encoder: train it with ConditionedTask, as "
                "train/train_depth.py does"
            )
        self.pipeline, self.dataset, self.validation = pipeline, dataset, validation
        self.device = torch.device(device)
        pipeline.encode_prompt()  # stored from now on: text encoder and tokenizer are not needed any more
        pipeline.register_modules(text_encoder=None, tokenizer=None)
        pipeline.to(self.device)
        for frozen in (pipeline.vae, pipeline.image_encoder, pipeline.baseline):
            if frozen is not None:
                frozen.requires_grad_(False).eval()
        self.encoder = LatentEncoder(pipeline, self.device, encoder_dtype)
        self.network: nn.Module = pipeline.unet
        choose_trainable(pipeline, trainable, lora_rank=lora_rank, seed=seed)
        self.objective = Objective(objective, pipeline.scheduler)
        self.objective.scale.to(self.device)

    def _part(
        self, network: nn.Module, batch: dict[str, Any], generators: list[torch.Generator]
    ) -> tuple[Tensor, Tensor]:
        """Losses (B,) of samples of one size and their residual rows (B, 3)."""
        encoded = self.encoder.encode(batch)
        denoiser = self.pipeline.denoiser(encoded.condition, network)
        return self.objective.losses(denoiser, encoded.target, generators, encoded.mask)

    def frozen_networks(self) -> list[nn.Module]:
        """Autoencoder, image encoder and baseline."""
        parts = {self.encoder.vae, self.pipeline.vae, self.pipeline.image_encoder, self.pipeline.baseline}
        return [part for part in parts if part is not None]

    def states(self) -> list[Stateful]:
        """The running bandwidth, and the scale of what the baseline leaves over."""
        own: list[Stateful] = [] if self.pipeline.baseline is None else [_ResidualScale(self.pipeline.baseline)]
        return [*super().states(), *own]

    def save(self, network: nn.Module, folder: Path) -> None:
        """A pipeline folder that `from_pretrained` loads; adapters are folded into the weights."""
        trained = self.pipeline.unet
        self.pipeline.vae.to(memory_format=torch.contiguous_format)  # the only one that safetensors writes
        try:
            self.pipeline.register_modules(unet=plain_network(network))
            self.pipeline.save_pretrained(folder)
        finally:
            self.pipeline.register_modules(unet=trained)


class _ResidualScale:
    """The baseline's `residual_scale`, as checkpoints keep it."""

    def __init__(self, baseline: DepthBaseline) -> None:
        self.baseline = baseline

    def state_dict(self) -> dict[str, Any]:
        """One number."""
        return {"residual_scale": float(self.baseline.config.residual_scale)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse."""
        store_in_config(self.baseline, **state_dict)


def measure_residual(task: DepthTask, num_samples: int = 32) -> float:
    """Set the baseline's residual_scale to the root mean square of what it leaves over in the first samples."""
    baseline = task.pipeline.baseline
    store_in_config(baseline, residual_scale=1.0)
    squares, count = 0.0, 0
    for index in range(min(num_samples, len(task.dataset))):
        for _, batch in task.collate([task.dataset[index]]):
            encoded = task.encoder.encode(batch)
            known = encoded.mask.expand_as(encoded.target)
            squares += float(encoded.target[known].double().square().sum())
            count += int(known.sum())
    scale = max((squares / max(count, 1)) ** 0.5, 1e-3)
    store_in_config(baseline, residual_scale=scale)
    return scale
