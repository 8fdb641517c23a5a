"""Finetuning a depth pipeline: what is encoded, what is drawn, what is scored, and which parameters learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from marigold_uq.data.depth.normalization import latent_mask, normalize_depth
from marigold_uq.denoising import predict_noise
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
from marigold_uq.scores import SCORES
from marigold_uq.training.law_scores import LawScores, residual_rows
from marigold_uq.training.noise import training_noise, training_timesteps
from marigold_uq.training.order import Ordered
from marigold_uq.training.task import Stateful
from marigold_uq.training.trainable import choose_trainable, plain_network

Validation = Callable[[MarigoldUQDepthPipeline, int, Path], dict[str, float]]
Batch = list[tuple[list[int], dict[str, Any]]]
"""Samples of one size together: their places in the micro batch, and what torch's default collate makes of them."""


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is minimised.

    Args:
        score: "crps", "energy", "kernel", "log", "projected" or "squared_error"; None takes the family's own.
        score_options: Arguments of the score, for instance patch_size of "projected".
        adaptive_bandwidth: Kernel score: the bandwidth follows the running RMS of the residual at each timestep, and
            the score is multiplied by it. With False give score_options bandwidth.
        num_draws: Draws of the network per sample, for the family "sample".
        noise_strength: Annealed multi-resolution noise (Marigold: 0.9); 0 is white noise.
        uniform_timesteps: False gives half of the samples the last timestep, where few-step sampling starts.
    """

    score: str | None = None
    score_options: dict[str, Any] = field(default_factory=dict)
    adaptive_bandwidth: bool = True
    num_draws: int = 4
    noise_strength: float = 0.9
    uniform_timesteps: bool = True

    def __post_init__(self) -> None:
        if self.score is not None and self.score not in SCORES:
            raise ValueError(f"unknown score {self.score!r}; choose one of {', '.join(sorted(SCORES))}")
        if self.num_draws < 2:
            raise ValueError(
                f"num_draws is at least 2, a fair score compares draws with each other; got {self.num_draws}"
            )
        if not self.noise_strength >= 0:
            raise ValueError(f"noise_strength is at least 0; got {self.noise_strength}")


class DepthTask:
    """A `TrainingTask`: the U-Net of a depth pipeline on image and depth pairs."""

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
    ) -> None:
        if not (pipeline.config.scale_invariant and pipeline.config.shift_invariant):
            raise ValueError("training normalises each depth map by itself, but the pipeline promises absolute depth")
        if pipeline.image_encoder is not None:
            raise ValueError(
                "this pipeline sees its pictures through an image encoder: train it with "
                "marigold_uq.training.condition_run (scripts/studies/embedded/train.py)"
            )
        self.pipeline, self.dataset, self.objective, self.validation = pipeline, dataset, objective, validation
        self.device = torch.device(device)
        pipeline.encode_prompt()  # stored from now on: text encoder and tokenizer are not needed any more
        pipeline.register_modules(text_encoder=None, tokenizer=None)
        pipeline.to(self.device)
        pipeline.vae.requires_grad_(False).eval()
        self.network: nn.Module = pipeline.unet
        choose_trainable(pipeline, trainable, lora_rank=lora_rank, seed=seed)
        self.scores = LawScores(
            objective.score or pipeline.scheduler.family.default_score,
            objective.score_options,
            adaptive_bandwidth=objective.adaptive_bandwidth,
            num_train_timesteps=pipeline.scheduler.config.num_train_timesteps,
        )
        self.scores.scale.to(self.device)

    def states(self) -> list[Stateful]:
        """The running bandwidth."""
        return [self.scores.scale]

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

    def losses(self, network: nn.Module, batch: Batch, generators: list[torch.Generator]) -> Tensor:
        """Score of the law against the drawn target, one number per sample."""
        parts = [self._part(network, part, [generators[place] for place in places]) for places, part in batch]
        order = torch.tensor([place for places, _ in batch for place in places], device=self.device).argsort()
        self.scores.note(torch.cat([residuals for _, residuals in parts])[order])
        return torch.cat([losses for losses, _ in parts])[order]

    def _part(
        self, network: nn.Module, batch: dict[str, Any], generators: list[torch.Generator]
    ) -> tuple[Tensor, Tensor]:
        """Losses (B,) of samples of one size and their rows (timestep, sum of squared residuals, coordinates)."""
        image, x_0, mask = self.encode(batch)
        scheduler = self.pipeline.scheduler
        steps = scheduler.config.num_train_timesteps
        timesteps = training_timesteps(steps, generators, uniform=self.objective.uniform_timesteps)
        noise = training_noise(x_0.shape[1:], timesteps, steps, self.objective.noise_strength, generators).to(x_0)
        timesteps = timesteps.to(self.device)
        x_t = scheduler.add_noise(x_0, noise, timesteps)
        target = scheduler.training_target(x_0, noise, timesteps)
        text = self.pipeline.prompt_embedding(len(x_0)).to(x_0)

        def denoiser(x: Tensor, t: Tensor | int) -> Tensor:
            return network(torch.cat([image, x], 1), t, encoder_hidden_states=text, return_dict=False)[0]

        draws = self.objective.num_draws
        law = predict_noise(denoiser, scheduler, x_t, timesteps, num_draws=draws, generator=generators)
        losses = self.scores(law, target, timesteps, generators, mask)
        return losses, residual_rows(law, target, timesteps, mask)

    @torch.no_grad()
    def encode(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Image latent, depth latent and mask (B, 1, h, w); a batch may bring them ready made."""
        if "image_latent" in batch:
            keys = ("image_latent", "depth_latent", "latent_valid")
            image, depth, valid = (batch[key].to(self.device) for key in keys)
            return image.float(), depth.float(), valid
        factor = self.pipeline.vae_scale_factor
        maps = [self._normalized(d, v) for d, v in zip(batch["depth"], batch["valid"], strict=True)]
        picture = (2 * batch["image"] - 1).to(self.device)
        depth = torch.stack(maps).expand(-1, 3, -1, -1).to(self.device)
        valid = latent_mask(batch["valid"], factor).to(self.device)
        return self.encode_pixels(picture), self.encode_pixels(depth), valid

    def _normalized(self, depth: Tensor, valid: Tensor) -> Tensor:
        """What the pipeline predicts, depth or disparity, in [-1, 1]."""
        if self.pipeline.config.prediction_type == "disparity":
            depth = torch.where(valid, depth, 1.0).reciprocal()
        return normalize_depth(depth, valid)[0]

    def encode_pixels(self, pixels: Tensor) -> Tensor:
        """Latents of pictures or depth maps (B, 3, H, W) in [-1, 1]."""
        vae = self.pipeline.vae
        output = vae.encode(pixels.to(vae.dtype))
        mode = output.latent_dist.mode() if hasattr(output, "latent_dist") else output.latents
        return (mode * vae.config.scaling_factor).float()

    def after_step(self, step: int) -> None:
        """Update the running residual scale."""
        self.scores.update()

    def validate(self, network: nn.Module, step: int, pictures: Path) -> dict[str, float]:
        """Whatever the validation given at construction measures."""
        if self.validation is None:
            return {}
        was_training = network.training
        network.eval()
        scores = self.validation(self.pipeline, step, pictures)
        network.train(was_training)
        return scores

    def save(self, network: nn.Module, folder: Path) -> None:
        """A pipeline folder that `from_pretrained` loads; adapters are folded into the weights."""
        trained = self.pipeline.unet
        try:
            self.pipeline.register_modules(unet=plain_network(trained))
            self.pipeline.save_pretrained(folder)
        finally:
            self.pipeline.register_modules(unet=trained)
