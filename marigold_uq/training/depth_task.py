"""Finetuning a depth pipeline: what is encoded, what is drawn, what is scored, and which parameters learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import gather
from torch import Tensor, nn

from marigold_uq.data.depth.normalization import latent_mask, normalize_depth
from marigold_uq.denoising import predict_noise
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
from marigold_uq.scores import RunningResidualScale, sample_scores
from marigold_uq.training.noise import training_noise
from marigold_uq.training.order import Ordered
from marigold_uq.training.task import Stateful
from marigold_uq.training.trainable import choose_trainable, merge_adapters

Validation = Callable[[MarigoldUQDepthPipeline, int, Path], dict[str, float]]


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
        validation: Validation | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.pipeline, self.dataset, self.objective, self.validation = pipeline, dataset, objective, validation
        self.device = torch.device(device)
        pipeline.vae.requires_grad_(False).eval().to(self.device)
        pipeline.encode_prompt()  # stored from now on; the text encoder is not needed any more
        self.network: nn.Module = pipeline.unet
        choose_trainable(pipeline, trainable, lora_rank=lora_rank)
        self.scale = RunningResidualScale(pipeline.scheduler.config.num_train_timesteps).to(self.device)
        self._residuals: list[tuple[Tensor, Tensor, Tensor]] = []

    def states(self) -> list[Stateful]:
        """The running bandwidth."""
        return [self.scale]

    def describe(self, batch: dict[str, Any]) -> list[str]:
        """Names of the samples."""
        return [str(name) for name in batch["name"]]

    def losses(self, network: nn.Module, batch: dict[str, Any], generators: list[torch.Generator]) -> Tensor:
        """Score of the law against the drawn target, one number per sample."""
        image, x_0, mask = self.encode(batch)
        scheduler = self.pipeline.scheduler
        steps = scheduler.config.num_train_timesteps
        timesteps = torch.cat([self._timestep(steps, generator) for generator in generators])
        noise = training_noise(x_0.shape[1:], timesteps, steps, self.objective.noise_strength, generators).to(x_0)
        timesteps = timesteps.to(self.device)
        x_t = scheduler.add_noise(x_0, noise, timesteps)
        target = scheduler.training_target(x_0, noise, timesteps)
        text = self.pipeline.prompt_embedding.embedding.to(x_0).expand(len(x_0), -1, -1)

        def denoiser(x: Tensor, t: Tensor | int) -> Tensor:
            return network(torch.cat([image, x], 1), t, encoder_hidden_states=text, return_dict=False)[0]

        law = predict_noise(
            denoiser, scheduler, x_t, timesteps, num_draws=self.objective.num_draws, generator=generators
        )
        self._remember(timesteps, target - law.mean.detach(), mask)
        return self._score(law, target, mask, timesteps, generators)

    def _timestep(self, steps: int, generator: torch.Generator) -> Tensor:
        t = torch.randint(steps, (1,), generator=generator)
        last = torch.rand(1, generator=generator) < 0.5
        return t if self.objective.uniform_timesteps else torch.where(last, steps - 1, t)

    def _score(
        self, law: Any, target: Tensor, mask: Tensor, timesteps: Tensor, generators: list[torch.Generator]
    ) -> Tensor:
        name = self.objective.score or law.default_score
        options = dict(self.objective.score_options)
        if name == "kernel" and self.objective.adaptive_bandwidth:
            scale = self.scale(timesteps)
            return scale * sample_scores(law, target, name, mask=mask, bandwidth=scale, **options)
        if name in ("projected", "energy") and law.name != "sample":
            return torch.cat(
                [  # directions of a sample's own, so that they do not depend on the company
                    sample_scores(_one(law, b), target[b : b + 1], name, mask=mask[b : b + 1], generator=own, **options)
                    for b, own in enumerate(generators)
                ]
            )
        return sample_scores(law, target, name, mask=mask, **options)

    def _remember(self, timesteps: Tensor, residual: Tensor, mask: Tensor) -> None:
        keep = mask.expand(residual.shape).flatten(1)
        square = torch.where(keep, residual.flatten(1), 0.0).square().sum(1)
        self._residuals.append((timesteps, square, keep.sum(1)))

    @torch.no_grad()
    def encode(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Image latent, depth latent and mask (B, 1, h, w); a batch may bring them ready made."""
        if "image_latent" in batch:
            keys = ("image_latent", "depth_latent", "latent_valid")
            image, depth, valid = (batch[key].to(self.device) for key in keys)
            return image.float(), depth.float(), valid
        factor = self.pipeline.vae_scale_factor
        maps = [normalize_depth(d, v)[0] for d, v in zip(batch["depth"], batch["valid"], strict=True)]
        picture = (2 * batch["image"] - 1).to(self.device)
        depth = torch.stack(maps).expand(-1, 3, -1, -1).to(self.device)
        valid = latent_mask(batch["valid"], factor).to(self.device)
        return self.encode_pixels(picture), self.encode_pixels(depth), valid

    def encode_pixels(self, pixels: Tensor) -> Tensor:
        """Latents of pictures or depth maps (B, 3, H, W) in [-1, 1]."""
        vae = self.pipeline.vae
        output = vae.encode(pixels.to(vae.dtype))
        mode = output.latent_dist.mode() if hasattr(output, "latent_dist") else output.latents
        return (mode * vae.config.scaling_factor).float()

    def after_step(self, step: int) -> None:
        """Update the running residual scale with the step's samples of all processes."""
        timesteps, square, count = (torch.cat(column) for column in zip(*self._residuals, strict=True))
        self._residuals.clear()
        self.scale.update_sums(*(gather(column) for column in (timesteps, square, count)))

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
        """A pipeline folder that `from_pretrained` loads."""
        merge_adapters(self.pipeline)
        self.pipeline.save_pretrained(folder)


def _one(law: Any, index: int) -> Any:
    """The law of one sample of the batch, batch axis kept."""
    fields = {name: getattr(law, name)[index : index + 1] for name in law.__dataclass_fields__}
    return type(law)(**fields)
