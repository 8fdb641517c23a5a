"""Predictive samples for the rows of a table: `pipeline(features)`."""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol, Self

import numpy as np
import torch
from diffusers.models.modeling_utils import ModelMixin
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.utils import BaseOutput
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from marigold_uq.calibration import Calibration, IntervalGrid, apply_kappa, check_coverage
from marigold_uq.denoising import Denoiser
from marigold_uq.distributions import MixtureDistribution, NoiseDistribution, SampleDistribution
from marigold_uq.metrics import nested_interval
from marigold_uq.metrics import quantiles as quantiles_of
from marigold_uq.models.mlp import StackedMLP, StackedModel
from marigold_uq.novelty import Novelty, novelty_features
from marigold_uq.pipelines.base import UncertaintyPipeline
from marigold_uq.pipelines.tabular.columns import TabularEncoder, is_frame
from marigold_uq.pipelines.tabular.distribution import MassesAndMixture, PredictiveDistribution
from marigold_uq.randomness import base_seed, member_seed
from marigold_uq.sampling import initial_noise, one_step_distribution, reverse_diffusion
from marigold_uq.schedulers.distributional import DistributionalScheduler
from marigold_uq.uncertainty import TrajectoryUncertainty, VarianceDecomposition, decompose_member_samples

Array = NDArray[np.float64]
_NETWORK_ROWS = 2**12
"""Network rows (models x rows x draws) of one chunk by default: activations stay in the cache."""
BaselineOutput = tuple[Tensor, Tensor | None]
"""What a baseline predicts for rows, (rows, C), and what it says beyond, (rows, E)."""
DRAWS_FOR_KAPPA = 20
"""kappa stretches draws around their mean, which needs some draws: each model makes at least this many."""
_ROWS_IN_CLOSED_FORM = 2**11
"""Rows whose distributions are held at once: about 10 MB of components."""


class ResidualModel(Protocol):
    """What is known of a baseline's errors beside the network: `marigold_uq.tabular.experts.residuals`."""

    def pool(self, head: MixtureDistribution, inputs: Tensor, centre: Tensor, unit: Tensor) -> MixtureDistribution:
        """The head's distribution (R, C) pooled with others around `centre` (R, C), residuals in `unit` (C,)."""
        ...


@dataclass
class TabularOutput(BaseOutput):
    """Predictions for the rows of a table, in original units."""

    prediction: Array  # (rows, C), the mean of the predictive distribution
    uncertainty: Array  # (rows, C), its standard deviation
    samples: Array  # (ensemble_size, rows, C), from the models in turn, calibrated
    model_samples: Array  # (S, n, rows, C), before calibration
    interval: Array | None = None  # (2, rows, C), lower and upper ends
    quantiles: Array | None = None  # (Q, rows, C)
    epistemic: Array | None = None  # (rows, C), the head's own estimate, a standard deviation
    novelty: Novelty | None = None  # how unlike held-out rows in distribution each row is

    @property
    def between_models(self) -> Array | None:
        """Standard deviation between the means of the models, without sampling noise, (rows, C); None for one model."""
        parts = self._decomposition
        return None if parts is None else parts.epistemic.numpy()

    @property
    def within_models(self) -> Array | None:
        """Root of the mean variance of the models, (rows, C); None for one model."""
        parts = self._decomposition
        return None if parts is None else parts.aleatoric.numpy()

    @property
    def _decomposition(self) -> VarianceDecomposition | None:
        num_models, num_draws = self.model_samples.shape[:2]
        if min(num_models, num_draws) < 2:
            return None
        return decompose_member_samples(torch.from_numpy(self.model_samples))


class TabularRegressionPipeline(UncertaintyPipeline):
    """Diffusion of the residual around a baseline, for each row of a table; the models of the stack form an ensemble.

    The samples of a row depend on its own features and the generator's seed alone: its random stream is seeded with a
    hash of its features. Equal rows get equal samples, in any order and in any batch.

    Args:
        network: Stack of denoisers, with their statistics.
        scheduler: Family and schedule.
        baseline: Stack that predicts the standardised target; None means 0, the mean of the training targets. It may
            have fewer models than the network, S / n, each for n models in turn.
        columns: Description of the input columns (`TabularEncoder.to_config`), if it was trained on a DataFrame.
        default_denoising_steps: Steps where a call does not say; None takes all timesteps.
        values: For each target its values in rising order if there are few (draws move to the nearest), else None.
        numbers: The models' numbers, which seed their draws; None counts from 0. `select` keeps them.
        shared: Gives single values that many rows share, `shared_values`, their probabilities in one denoising step.
        shared_values: These values, rising; the rest of the pipeline describes the other rows.
        residuals: Further distributions of the baseline's errors, pooled with the models' in one denoising step.
        only_one_step: Whether the network knows no other timestep than that of one denoising step.
        calibration: Stored records; see `calibrate`. kappa and half widths of intervals have one entry per target.
    """

    _optional_components = ["baseline", "residuals", "shared"]  # noqa: RUF012, diffusers reads a list
    network: StackedMLP
    scheduler: DistributionalScheduler
    baseline: StackedModel | None
    residuals: ResidualModel | None
    shared: Callable[[Tensor], Tensor] | None

    def __init__(
        self,
        network: StackedMLP,
        scheduler: DistributionalScheduler,
        baseline: StackedModel | None = None,
        columns: list[dict[str, Any]] | None = None,
        default_denoising_steps: int | None = None,
        values: list[list[float] | None] | None = None,
        numbers: list[int] | None = None,
        calibration: list[dict[str, Any]] | None = None,
        residuals: ModelMixin | None = None,
        shared: ModelMixin | None = None,
        shared_values: list[float] | None = None,
        only_one_step: bool = False,
    ) -> None:
        super().__init__()
        if scheduler.config.num_train_timesteps != network.config.num_timesteps:
            raise ValueError(
                f"the network has gates for {network.config.num_timesteps} noise levels, but the scheduler has "
                f"num_train_timesteps = {scheduler.config.num_train_timesteps}"
            )
        self.register_modules(
            network=network, scheduler=scheduler, baseline=baseline, residuals=residuals, shared=shared
        )
        self.register_to_config(
            columns=columns,
            default_denoising_steps=default_denoising_steps,
            values=values,
            numbers=numbers,
            calibration=calibration,
            shared_values=shared_values,
            only_one_step=only_one_step,
        )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any) -> Self:
        """As in diffusers, but in float64 by default: statistics and most of a baseline are stored in it."""
        if "dtype" not in kwargs:
            kwargs.setdefault("torch_dtype", torch.float64)
        return super().from_pretrained(pretrained_model_name_or_path, **kwargs)

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, **kwargs: Any) -> Self:
        """As in diffusers, but the baseline may be any `StackedModel`, and the default is float64 here too."""
        for name in cls._optional_components:
            kwargs.setdefault(name, pipeline.components.get(name))
        if "dtype" not in kwargs:
            kwargs.setdefault("torch_dtype", torch.float64)
        return super().from_pipe(pipeline, **kwargs)

    @classmethod
    def upgrade_config(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Before the first release, kappa and the default number of steps had entries of their own."""
        config = super().upgrade_config(config)
        if "default_num_inference_steps" in config:
            config["default_denoising_steps"] = config.pop("default_num_inference_steps")
        kappa = config.pop("kappa", None)
        if kappa is not None:
            config["calibration"] = [{"kappa": list(kappa)}]
        return config

    @property
    def num_calibrated_outputs(self) -> int:
        """One per target."""
        return int(self.network.config.num_targets)

    @property
    def model_numbers(self) -> list[int]:
        """One number per model."""
        return list(range(self.network.config.num_models) if self.config.numbers is None else self.config.numbers)

    def select(self, models: Sequence[int] | int) -> "TabularRegressionPipeline":
        """A pipeline of some models of the stack, for example those of one split; their draws stay the same.

        What is pooled with the whole stack, `residuals` and `shared`, stays behind.
        """
        chosen = [models] if isinstance(models, int) else list(models)
        selected = TabularRegressionPipeline(
            StackedMLP.join([self.network.select(s) for s in chosen]),
            self.scheduler,
            self._select_baseline(chosen),
            columns=self.config.columns,
            default_denoising_steps=self.config.default_denoising_steps,
            values=self.config.values,
            numbers=[self.model_numbers[s] for s in chosen],
            calibration=self.config.calibration,
            only_one_step=self.config.only_one_step,
        )
        selected.set_progress_bar_config(**getattr(self, "_progress_bar_config", {}))
        return selected

    def _select_baseline(self, models: Sequence[int]) -> StackedModel | None:
        """Baselines of these models: one for several in turn where that is possible, else one each.

        A single one is shared, not copied: its trees may be large.
        """
        if self.baseline is None or self.baseline.config.num_models == 1:
            return self.baseline
        owners = [s // (self.network.config.num_models // self.baseline.config.num_models) for s in models]
        groups = [(owner, len(list(run))) for owner, run in groupby(owners)]
        chosen = [owner for owner, _ in groups] if len({size for _, size in groups}) == 1 else owners
        return self.baseline.join([self.baseline.select(s) for s in chosen])

    def encode(self, features: Any) -> Array:
        """Rows as a finite matrix (rows, F) of the width that the network knows."""
        if self.config.columns is not None and is_frame(features):
            matrix = TabularEncoder.from_config(self.config.columns).transform(features)
        else:
            matrix = _as_numbers(features)
        expected = self.network.config.num_features
        if matrix.ndim != 2 or matrix.shape[1] != expected:
            raise ValueError(f"expected features (rows, {expected}); got shape {matrix.shape}")
        if not np.isfinite(matrix).all():
            raise ValueError("features contain NaN or infinity; fill or drop such rows first")
        return matrix

    @torch.no_grad()
    def __call__(
        self,
        features: ArrayLike,
        ensemble_size: int = 100,
        *,
        coverage: float | None = None,
        quantiles: Sequence[float] | None = None,
        output_epistemic: bool = False,
        output_novelty: bool = False,
        num_inference_steps: int | None = None,
        generator: torch.Generator | None = None,
        batch_size: int | None = None,
        baseline_output: BaselineOutput | None = None,
    ) -> TabularOutput:
        """Draw `ensemble_size` predictions for every row, shared evenly by the models of the stack.

        In one denoising step of a family with a density the predictive distribution is known in closed form
        (`predictive_distribution`). Then only the samples are drawn; all else is exact.

        Args:
            features: (rows, F) in original units, or a DataFrame like the one trained on.
            ensemble_size: Draws per row; fewer than there are models come from the first ones.
            coverage: Also return the central interval with this coverage. With a calibrated interval it is
                prediction -+ scale x uncertainty, otherwise it lies between quantiles of the draws. Both are nested.
            quantiles: Also return quantiles at these levels.
            output_epistemic: Also return the head's own epistemic estimate, collected along the trajectories; families
                without a spread of their own have none.
            output_novelty: Also compare the rows with those that `fit_novelty` saw, for the same families. `members` is
                the spread between the models' first steps; with a single model that of its draws.
            num_inference_steps: Denoising steps; by default `default_denoising_steps` of the config.
            generator: Seeds all random streams. None always takes the same seed, so that predictions are repeatable.
            batch_size: Rows at once; the results do not depend on it.
            baseline_output: Replaces what the baseline says about these rows, for all models: (rows, C) in standardised
                units, and beyond, (rows, E) scaled, as one model of `describe` returns them. For rows that the baseline
                was trained on, its out-of-fold predictions.
        """
        matrix = self.encode(features)
        counts = {"ensemble_size": ensemble_size, "num_inference_steps": num_inference_steps, "batch_size": batch_size}
        for name, count in counts.items():
            if count is not None and count < 1:
                raise ValueError(f"{name} must be at least 1; got {count}")
        if coverage is not None:
            check_coverage(coverage)
        if baseline_output is not None:
            self._check_baseline_output(baseline_output, len(matrix))
        num_models = self.network.config.num_models
        if output_novelty and num_models == 1 and ensemble_size < 2:
            raise ValueError("output_novelty needs the spread of at least 2 draws where there is one model; got 1")
        steps = num_inference_steps or self.default_steps
        self._check_steps(steps)
        record = self.calibration_for(
            num_inference_steps=steps, ensemble_size=None if coverage is None else ensemble_size
        )
        scheduler = self.scheduler.for_chain(steps)
        draws = -(-ensemble_size // num_models)  # per model, rounded up
        draws = draws if set(record.kappas) == {1.0} else max(draws, DRAWS_FOR_KAPPA)
        size = batch_size or max(1, _NETWORK_ROWS // (draws * num_models))
        seed = 0 if generator is None else base_seed(generator)
        starts = range(0, max(1, len(matrix)), size)
        parts = [
            self._sample_rows(
                matrix[i : i + size],
                draws,
                scheduler,
                seed,
                output_epistemic or output_novelty,
                _rows_of(baseline_output, i, size),
            )
            for i in (self.progress_bar(starts) if len(starts) > 1 else starts)
        ]
        model_samples = np.concatenate([part.samples for part in parts], axis=2)  # (S, n, rows, C)
        if self.has_closed_form(steps):
            exact = self._in_closed_form(matrix, ensemble_size, seed, coverage, quantiles, baseline_output)
            output = replace(exact, model_samples=model_samples)
        else:
            samples = self._calibrated(model_samples, record)[:ensemble_size]
            output = TabularOutput(samples.mean(0), _std(samples), samples, model_samples)
            output.quantiles = _quantiles(samples, quantiles)
            output.interval = None if coverage is None else nested_ends(samples, coverage)
        _check_finite(output.samples)
        if output_epistemic:
            output.epistemic = np.concatenate([part.epistemic for part in parts if part.epistemic is not None])
        if output_novelty:
            features = torch.cat([part.novelty for part in parts if part.novelty is not None])
            output.novelty = self._novelty(
                features, record, num_inference_steps=steps, ensemble_size=ensemble_size, num_models=num_models
            )
        if coverage is not None and record.interval is not None:
            output.interval = calibrated_ends(output.prediction, output.uncertainty, record.interval, coverage)
        return output

    @property
    def default_steps(self) -> int:
        """Denoising steps of a call that does not say."""
        return int(self.config.default_denoising_steps or self.scheduler.config.num_train_timesteps)

    def has_closed_form(self, num_inference_steps: int | None = None) -> bool:
        """Whether the predictive distribution of so many steps is known without draws."""
        return (num_inference_steps or self.default_steps) == 1 and self.scheduler.family.has_density

    def _check_steps(self, steps: int) -> None:
        if self.config.only_one_step and steps != 1:
            raise ValueError(
                f"the model was trained for one denoising step; got num_inference_steps={steps}. Fit it with "
                "num_inference_steps=10, say, to take more"
            )

    @torch.no_grad()
    def predictive_distribution(
        self, features: ArrayLike, *, baseline_output: BaselineOutput | None = None, is_flat: bool = False
    ) -> PredictiveDistribution:
        """The predictive distribution of one denoising step, exactly: calibrated, and with known values as masses.

        Args:
            features: As in a call. About 5 kB per row are held.
            baseline_output: As in a call.
            is_flat: Whether results come without the axis of outputs.
        """
        if not self.scheduler.family.has_density:
            raise TypeError(f"family {self.scheduler.family.name!r} is known through draws only: use `sample`")
        law = self.one_step_distribution(features, baseline_output=baseline_output)
        assert isinstance(law, MixtureDistribution)
        law, outputs = law.to(torch.float64), list[MassesAndMixture]()
        for c, values in enumerate(self.config.values or [None] * law.loc.shape[2]):
            one = MixtureDistribution(law.loc[..., c], law.scale[..., c], law.logits[..., c])
            outputs.append(
                MassesAndMixture.continuous(one) if values is None else MassesAndMixture.nearest(one, values)
            )
        if self.shared is not None and outputs[0].mixture is not None:
            masses = self._shared_masses(self.encode(features)).to(torch.float64)
            values = masses.new_tensor(self.config.shared_values)
            outputs = [MassesAndMixture(values, masses, outputs[0].mixture)]
        return PredictiveDistribution(tuple(outputs), is_flat)

    def _shared_masses(self, matrix: Array) -> Tensor:
        """Probabilities of the shared values, (rows, V)."""
        assert self.shared is not None
        rows = torch.tensor(matrix).to(self.network.feature_mean)
        return self.shared((rows - self.network.feature_mean[0]) / self.network.feature_scale[0])

    def _in_closed_form(
        self,
        matrix: Array,
        ensemble_size: int,
        seed: int,
        coverage: float | None,
        quantiles: Sequence[float] | None,
        given: BaselineOutput | None,
    ) -> "TabularOutput":
        """All that a call returns but what is known of single models."""
        parts, size = [], _ROWS_IN_CLOSED_FORM
        for start in range(0, max(1, len(matrix)), size):
            rows = matrix[start : start + size]
            law = self.predictive_distribution(rows, baseline_output=_rows_of(given, start, size))
            draws = law.sample(ensemble_size, row_generators(rows, [0], seed))
            part = TabularOutput(law.mean, law.std, draws, draws[None])
            part.interval = None if coverage is None else law.interval(coverage).swapaxes(0, 1)
            part.quantiles = None if quantiles is None else law.quantile(quantiles).swapaxes(0, 1)
            parts.append(part)
        samples = np.concatenate([part.samples for part in parts], 1)
        prediction, uncertainty = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("prediction", "uncertainty")
        )
        ends = None if coverage is None else _joined([part.interval for part in parts])
        levels = None if quantiles is None else _joined([part.quantiles for part in parts])
        return TabularOutput(prediction, uncertainty, samples, samples[None], ends, levels)

    @torch.no_grad()
    def one_step_distribution(
        self,
        features: ArrayLike,
        *,
        generator: torch.Generator | None = None,
        num_draws: int = 1,
        baseline_output: BaselineOutput | None = None,
    ) -> NoiseDistribution:
        """The predictive distribution (rows, C) by one network call, in original units: moments, quantiles, density.

        The models in equal parts, pooled with `residuals`, with kappa, but without moving to known values. The network
        starts at x_T = 0, the middle of all starts, so nothing is drawn; x_T says nothing about the target.

        Args:
            features: As in a call.
            baseline_output: As in a call.
            generator: Of the draws of family "sample", which also start from noise.
            num_draws: Network calls of the family "sample". Family "point" says nothing of the spread and is refused.
        """
        if not (self.scheduler.family.has_density or self.scheduler.family.noise_channels):
            raise TypeError(f"one step of family {self.scheduler.family.name!r} has no spread; draw in several steps")
        matrix, num_models = self.encode(features), self.network.config.num_models
        rows = self._prepare(matrix, baseline_output)
        law = self._head(matrix, rows, 0 if generator is None else base_seed(generator), num_draws)
        pooled = _pool([law[s * len(matrix) : (s + 1) * len(matrix)] for s in range(num_models)])
        if self.residuals is not None and isinstance(pooled, MixtureDistribution):
            inputs = torch.cat([rows.features[0], rows.baseline[0]], -1)
            pooled = self.residuals.pool(pooled, inputs, rows.centre[0, :, :, 0], self.network.target_scale[0])
        kappa = pooled.mean.new_tensor(self._kappas(self.calibration_for(num_inference_steps=1)))
        return pooled if bool((kappa == 1).all()) else pooled.affine(kappa, (1 - kappa) * pooled.mean)

    def _head(self, matrix: Array, rows: "_Prepared", seed: int, num_draws: int) -> NoiseDistribution:
        """What each model says of each row in one step, (S rows, C), in original units."""
        num_models, num_rows, num_targets = len(rows.features), len(matrix), self.network.config.num_targets
        shape, implicit = (num_models * num_rows, num_targets), bool(self.scheduler.family.noise_channels)
        generators = row_generators(matrix, self.model_numbers, seed) if implicit else None
        start = rows.features.new_zeros(shape)
        draws = self.denoiser(rows.features, rows.baseline, 1)  # one of each row
        law = one_step_distribution(
            lambda x_t, timestep: draws(x_t.unsqueeze(-1), timestep).squeeze(-1),
            self.scheduler.for_chain(1),
            initial_noise(shape, like=rows.features, generator=generators) if implicit else start,
            num_draws=num_draws,
            generator=generators,
        )
        scale, centre = (part[..., 0].expand(-1, num_rows, -1).flatten(0, 1) for part in (rows.scale, rows.centre))
        return law.affine(scale, centre)

    def _kappas(self, record: Calibration) -> tuple[float, ...]:
        """One per target."""
        num_targets = self.network.config.num_targets
        return record.kappas if len(record.kappas) == num_targets else record.kappas * num_targets

    def _check_baseline_output(self, given: BaselineOutput, num_rows: int) -> None:
        """Rows as the features, columns as the network expects."""
        sizes = (self.network.config.num_targets, self.network.config.num_extras)
        expected = [(num_rows, size) for size in sizes if size]
        shapes = [tuple(values.shape) for values in given if values is not None]
        if shapes != expected:
            raise ValueError(f"expected a baseline_output of shapes {expected}; got {shapes}")

    def _calibrated(self, model_samples: Array, record: Calibration) -> Array:
        """Draws of the models in turn, stretched by kappa, then moved to known values."""
        num_models, draws, *rest = model_samples.shape
        samples = model_samples.swapaxes(0, 1).reshape(num_models * draws, *rest)
        num_targets = samples.shape[-1]
        known = self.config.values or [None] * num_targets
        columns = [samples[..., c] for c in range(num_targets)]
        for c, (kappa, values) in enumerate(zip(self._kappas(record), known, strict=True)):
            if kappa != 1:
                columns[c] = apply_kappa(torch.from_numpy(columns[c]), kappa).numpy()
            if values is not None:
                columns[c] = _nearest_value(columns[c], values)
        return np.stack(columns, -1)

    def _sample_rows(
        self,
        matrix: Array,
        num_draws: int,
        scheduler: DistributionalScheduler,
        seed: int,
        watch: bool,
        given: BaselineOutput | None,
    ) -> "_Rows":
        """One chunk of rows."""
        net = self.network
        num_models, num_rows, num_targets = net.config.num_models, len(matrix), net.config.num_targets
        rows = self._prepare(matrix, given)
        generators = row_generators(matrix, self.model_numbers, seed)
        x_T = initial_noise((num_models * num_rows, num_targets, num_draws), like=rows.features, generator=generators)
        observer = TrajectoryUncertainty()
        x_0 = reverse_diffusion(
            self.denoiser(rows.features, rows.baseline, num_draws),
            scheduler,
            x_T,
            generator=generators,
            observers=[observer] if watch else [],
        )
        scale, centre = rows.scale, rows.centre
        samples = x_0.unflatten(0, (num_models, num_rows)) * scale + centre  # (S, rows, C, n)
        rows_first = samples.permute(0, 3, 1, 2).double().cpu()
        if not watch:
            return _Rows(rows_first.numpy())
        by_model = (num_models, num_rows)
        variance = observer.epistemic.unflatten(0, by_model).square() * scale.square()
        mean = (observer.initial_mean.unflatten(0, by_model) * scale + centre).mean(3)  # (S, rows, C)
        std = (observer.initial_std.unflatten(0, by_model) * scale).square().mean((0, 3)).sqrt()
        between = mean.std(0) if num_models > 1 else samples[0].std(2)
        return _Rows(
            rows_first.numpy(),
            variance.mean((0, 3)).sqrt().double().cpu().numpy(),
            novelty_features(mean.mean(0), std, between).cpu(),
        )

    def _prepare(self, matrix: Array, given: BaselineOutput | None = None) -> "_Prepared":
        """What the network sees of a chunk of rows, and how its output becomes predictions."""
        net = self.network
        rows = torch.tensor(matrix).to(net.feature_mean)  # a copy: the array may be read-only
        standardised = (rows - net.feature_mean.unsqueeze(1)) / net.feature_scale.unsqueeze(1)  # (S, rows, F)
        baseline, features = (values.to(net.gate.dtype) for values in self._condition(standardised, given))
        scale = (net.residual_scale * net.target_scale)[:, None, :, None]
        centre = (baseline * net.target_scale.unsqueeze(1) + net.target_mean.unsqueeze(1)).unsqueeze(-1)
        return _Prepared(features, baseline, scale, centre)

    def _condition(self, features: Tensor, given: BaselineOutput | None = None) -> tuple[Tensor, Tensor]:
        """The baseline's prediction (S, rows, C), and the features with what it says beyond, (S, rows, F + E)."""
        if given is not None:
            num_models = features.shape[0]
            parts = [values.to(features).expand(num_models, -1, -1) for values in given if values is not None]
            return parts[0], torch.cat([features, *parts[1:]], -1)
        if self.baseline is None:
            return features.new_zeros(*features.shape[:2], self.network.config.num_targets), features
        repeats = features.shape[0] // self.baseline.config.num_models
        baseline, extras = self.baseline.describe(features[::repeats])
        baseline, extras = (values.to(features).repeat_interleave(repeats, 0) for values in (baseline, extras))
        return baseline, torch.cat([features, extras], -1)

    def denoiser(self, features: Tensor, baseline: Tensor, num_draws: int) -> Denoiser:
        """All draws of a row are one event (C, n), so that a row needs one generator; the network sees n rows."""
        num_models, position = features.shape[0], self.scheduler.table_position
        condition = [values.repeat_interleave(num_draws, dim=1) for values in (features, baseline)]  # (S, rows n, .)

        def denoise(x_t: Tensor, timestep: Tensor | int) -> Tensor:
            stacked = x_t.unflatten(0, (num_models, -1)).transpose(2, 3).flatten(1, 2)  # (S, rows n, C)
            raw = self.network(stacked, position(torch.as_tensor(timestep)), *condition)  # (S, rows n, channels)
            return raw.unflatten(1, (-1, num_draws)).transpose(2, 3).flatten(0, 1)  # (S rows, channels, n)

        return denoise


@dataclass(frozen=True)
class _Prepared:
    """Rows for the network; predictions are scale x_0 + centre."""

    features: Tensor  # (S, rows, F + E)
    baseline: Tensor  # (S, rows, C)
    scale: Tensor  # (S, 1, C, 1)
    centre: Tensor  # (S, rows, C, 1)


@dataclass(frozen=True)
class _Rows:
    """What is known of a chunk of rows; the last two where the chains were watched."""

    samples: Array  # (S, n, rows, C)
    epistemic: Array | None = None  # (rows, C)
    novelty: Tensor | None = None  # (rows, D)


def _pool(parts: Sequence[NoiseDistribution]) -> NoiseDistribution:
    """The distributions of the models in equal parts."""
    draws = [part for part in parts if isinstance(part, SampleDistribution)]
    return SampleDistribution.stack(draws) if draws else MixtureDistribution.pool(parts)


def row_generators(matrix: Array, models: Sequence[int], seed: int) -> list[torch.Generator]:
    """One generator per model and row, models first, seeded with the run's seed, the model's number and the row."""
    keys = []
    for row in matrix + 0.0:  # -0.0 becomes 0.0: equal rows have equal bytes
        digest = hashlib.blake2b(row.tobytes(), digest_size=8).digest()
        keys.append((int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")))
    return [torch.Generator().manual_seed(member_seed(seed, m, *key)) for m in models for key in keys]


def _as_numbers(features: ArrayLike) -> Array:
    """Real numbers as float64; anything else is refused, where numpy would drop imaginary parts."""
    given = np.asarray(features)
    if given.dtype.kind in "cmMV":
        raise ValueError(f"features must be real numbers; got {given.dtype}")
    try:
        return given.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"features must be real numbers; {error}") from error


def _check_finite(samples: Array) -> None:
    """Refuse draws (n, rows, C) that overflowed, and name their rows."""
    rows = np.flatnonzero(~np.isfinite(samples).all(axis=(0, 2)))
    if len(rows):
        shown = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
        raise ValueError(
            f"the predictions of {len(rows)} rows ({shown}) are not finite: their features lie too far outside the "
            "range of the training rows"
        )


def _nearest_value(samples: Array, values: Sequence[float]) -> Array:
    """Each sample moved to the nearest of some rising values."""
    known = np.asarray(values)
    return known[np.searchsorted((known[1:] + known[:-1]) / 2, samples)]


def _std(samples: Array) -> Array:
    """Standard deviation over draws (n, rows, C); that of a single draw is unknown, NaN."""
    return samples.std(0, ddof=1) if len(samples) > 1 else np.full(samples.shape[1:], np.nan)


def nested_ends(samples: Array, coverage: float) -> Array:
    """Ends (2, rows, C) between quantiles of draws (n, rows, C)."""
    return torch.stack(nested_interval(torch.from_numpy(samples), coverage)).numpy()


def calibrated_ends(prediction: Array, uncertainty: Array, grid: IntervalGrid, coverage: float) -> Array:
    """Ends (2, rows, C): prediction -+ scale x uncertainty."""
    reach = np.array(grid.scale(coverage)) * uncertainty
    return np.stack([prediction - reach, prediction + reach])


def _quantiles(samples: Array, levels: Sequence[float] | None) -> Array | None:
    """(Q, rows, C) of draws (n, rows, C)."""
    return None if levels is None else quantiles_of(torch.from_numpy(samples), list(levels)).numpy()


def _joined(parts: Sequence[Array | None]) -> Array:
    """Blocks of rows, on axis 1, as one."""
    return np.concatenate([part for part in parts if part is not None], 1)


def _rows_of(given: BaselineOutput | None, start: int, size: int) -> BaselineOutput | None:
    if given is None:
        return None
    prediction, extras = given
    return prediction[start : start + size], None if extras is None else extras[start : start + size]
