"""Predictive samples for the rows of a table: `pipeline(features)`."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Self

import numpy as np
import torch
from diffusers.utils import BaseOutput
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from marigold_uq.calibration import apply_kappa
from marigold_uq.denoising import Denoiser
from marigold_uq.models.mlp import StackedMLP, StackedModel
from marigold_uq.pipelines.base import PublishablePipeline
from marigold_uq.pipelines.tabular.columns import TabularEncoder, is_frame
from marigold_uq.randomness import member_seed
from marigold_uq.sampling import initial_noise, reverse_diffusion
from marigold_uq.schedulers.scheduling_distributional_ddim import DistributionalDDIMScheduler
from marigold_uq.uncertainty import TrajectoryUncertainty, decompose_member_samples

NETWORK_ROWS = 2**12
"""Network rows (models x rows x draws) of one chunk: activations stay in the cache; results do not depend on it."""
BaselineOutput = tuple[Tensor, Tensor | None]
"""What a baseline says about rows, (rows, C), and beyond, (rows, E)."""
DRAWS_FOR_KAPPA = 20
"""kappa stretches draws around their mean, which a few of them do not know: each model makes at least so many."""


@dataclass
class TabularOutput(BaseOutput):
    """What a call returns, in original units."""

    member_samples: NDArray[np.float64]  # (S, n, rows, C), before kappa and `values`
    samples: NDArray[np.float64]  # (num_samples, rows, C), members in turn, after kappa and `values`
    head_epistemic: NDArray[np.float64] | None = None  # (rows, C), a standard deviation

    @property
    def mean(self) -> NDArray[np.float64]:
        """(rows, C)."""
        return self.samples.mean(0)

    @property
    def std(self) -> NDArray[np.float64]:
        """Total uncertainty, a standard deviation, (rows, C)."""
        return self.samples.std(0, ddof=1)

    @property
    def ensemble_epistemic(self) -> NDArray[np.float64]:
        """Standard deviation between the members' means, sampling noise taken off, (rows, C); needs two members."""
        if self.member_samples.shape[0] < 2:
            raise ValueError("the spread between members needs an ensemble: train with num_members >= 2")
        return decompose_member_samples(torch.from_numpy(self.member_samples)).epistemic.numpy()


class TabularRegressionPipeline(PublishablePipeline):
    """Diffusion of the residual around a baseline, for each row of a table; the models of the stack are an ensemble.

    What a row gets depends on its own features and the seed alone: its random stream is seeded with a hash of its
    features. Equal rows get equal samples, in any order, in any company.

    Args:
        network: Stack of denoisers, with their statistics.
        scheduler: Family and schedule.
        baseline: Stack that predicts the standardised target; None means 0, the mean of the training targets. It may
            have fewer models than the network, S / n, each for n models in turn (members that share a baseline).
        columns: Description of the input columns (`TabularEncoder.to_config`), if it was trained on a DataFrame.
        kappa: Stretches the spread around the mean, one number per target; chosen on held-out rows.
        values: For each target the values it takes, rising, if they are few (draws go to the nearest), else None.
        default_num_inference_steps: Steps where a call does not say; None takes all timesteps.
        numbers: The models' numbers, which seed their draws; None counts from 0. `select` keeps them.
    """

    _optional_components = ["baseline"]  # noqa: RUF012, diffusers reads a list
    network: StackedMLP
    scheduler: DistributionalDDIMScheduler
    baseline: StackedModel | None

    def __init__(
        self,
        network: StackedMLP,
        scheduler: DistributionalDDIMScheduler,
        baseline: StackedModel | None = None,
        columns: list[dict[str, Any]] | None = None,
        kappa: list[float] | None = None,
        default_num_inference_steps: int | None = None,
        values: list[list[float] | None] | None = None,
        numbers: list[int] | None = None,
    ) -> None:
        super().__init__()
        self.register_modules(network=network, scheduler=scheduler, baseline=baseline)
        self.register_to_config(
            columns=columns,
            kappa=kappa,
            default_num_inference_steps=default_num_inference_steps,
            values=values,
            numbers=numbers,
        )

    @property
    def model_numbers(self) -> list[int]:
        """One number per model."""
        return list(range(self.network.config.num_models) if self.config.numbers is None else self.config.numbers)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any) -> Self:
        """As in diffusers, but in float64 unless told otherwise: statistics and most of a baseline are stored in it."""
        if "dtype" not in kwargs:
            kwargs.setdefault("torch_dtype", torch.float64)
        return super().from_pretrained(pretrained_model_name_or_path, **kwargs)

    def select(self, models: Sequence[int] | int) -> "TabularRegressionPipeline":
        """A pipeline of some models of the stack, for example the members of one split; their draws stay the same."""
        chosen = [models] if isinstance(models, int) else list(models)
        selected = TabularRegressionPipeline(
            _join([self.network.select(s) for s in chosen]),
            self.scheduler,
            None if self.baseline is None else _join([self.baseline.select(s) for s in self._baselines_of(chosen)]),
            columns=self.config.columns,
            kappa=self.config.kappa,
            default_num_inference_steps=self.config.default_num_inference_steps,
            values=self.config.values,
            numbers=[self.model_numbers[s] for s in chosen],
        )
        selected.set_progress_bar_config(**getattr(self, "_progress_bar_config", {}))
        return selected

    def _baselines_of(self, models: Sequence[int]) -> list[int]:
        """Baselines of these models: one for several in turn where that is possible, else one each."""
        assert self.baseline is not None
        owners = [s // (self.network.config.num_models // self.baseline.config.num_models) for s in models]
        groups = [(owner, len(list(run))) for owner, run in groupby(owners)]
        return [owner for owner, _ in groups] if len({size for _, size in groups}) == 1 else owners

    def encode(self, features: Any) -> NDArray[np.float64]:
        """Rows as a finite matrix (rows, F) of the width that the network knows."""
        if self.config.columns is not None and is_frame(features):
            matrix = TabularEncoder.from_config(self.config.columns).transform(features)
        else:
            matrix = np.asarray(features, dtype=np.float64)
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
        num_samples: int = 100,
        *,
        seed: int = 0,
        num_inference_steps: int | None = None,
        head_epistemic: bool = False,
        baseline_output: BaselineOutput | None = None,
    ) -> TabularOutput:
        """Draw `num_samples` predictions for every row, shared evenly by the models of the stack.

        Args:
            features: (rows, F) in original units, or a DataFrame like the one trained on.
            num_samples: Draws per row over all models in turn; fewer than there are models come from the first ones.
            seed: Of all random streams.
            num_inference_steps: Steps of the sampler, at least 1.
            head_epistemic: Also collect the paper's epistemic estimate along the trajectories
                (`TrajectoryUncertainty.epistemic`); families without a spread of their own have none.
            baseline_output: What to take for the baseline's answer about these rows instead of asking it, (rows, C) in
                standardised units, and beyond, (rows, E) scaled, for all models: one model of what `describe` returns.
                For rows that the baseline was trained on, what it said out-of-fold.
        """
        matrix = self.encode(features)
        if num_samples < 1:
            raise ValueError(f"num_samples is at least 1; got {num_samples}")
        if num_inference_steps is not None and num_inference_steps < 1:
            raise ValueError(f"num_inference_steps is at least 1; got {num_inference_steps}")
        if baseline_output is not None:
            self._check_baseline_output(baseline_output, len(matrix))
        steps = num_inference_steps or self.config.default_num_inference_steps
        self.scheduler.set_timesteps(steps or self.scheduler.config.num_train_timesteps)
        draws = -(-num_samples // self.network.config.num_models)  # per model, rounded up
        draws = draws if self.config.kappa is None else max(draws, DRAWS_FOR_KAPPA)
        size = max(1, NETWORK_ROWS // (draws * self.network.config.num_models))
        starts = range(0, max(1, len(matrix)), size)
        chunks = self.progress_bar(starts) if len(starts) > 1 else starts
        parts = [
            self._sample_rows(matrix[i : i + size], draws, seed, head_epistemic, _rows_of(baseline_output, i, size))
            for i in chunks
        ]
        members = np.concatenate([samples for samples, _ in parts], axis=2)  # (S, n, rows, C)
        head = np.concatenate([spread for _, spread in parts]) if head_epistemic else None
        return TabularOutput(members, self._calibrated(members, num_samples), head)

    def _check_baseline_output(self, given: BaselineOutput, num_rows: int) -> None:
        """Rows as the features, columns as the network expects."""
        sizes = (self.network.config.num_targets, self.network.config.num_extras)
        expected = [(num_rows, size) for size in sizes if size]
        shapes = [tuple(values.shape) for values in given if values is not None]
        if shapes != expected:
            raise ValueError(f"expected a baseline_output of shapes {expected}; got {shapes}")

    def _calibrated(self, members: NDArray[np.float64], num_samples: int) -> NDArray[np.float64]:
        """Members in turn, stretched by kappa, then moved to known values; the first `num_samples` of them."""
        samples = members.swapaxes(0, 1).reshape(-1, *members.shape[2:])
        if self.config.kappa is not None:
            stretched = [apply_kappa(torch.from_numpy(samples[..., c]), k) for c, k in enumerate(self.config.kappa)]
            samples = torch.stack(stretched, -1).numpy()
        known = self.config.values or [None] * samples.shape[-1]
        columns = [samples[..., c] if v is None else nearest_value(samples[..., c], v) for c, v in enumerate(known)]
        return np.stack(columns, -1)[:num_samples]

    def _sample_rows(
        self, matrix: NDArray[np.float64], num_draws: int, seed: int, watch: bool, said: BaselineOutput | None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Samples (S, n, rows, C) of one chunk, and the head's epistemic estimate (rows, C)."""
        net = self.network
        num_models, num_rows, num_targets = net.config.num_models, len(matrix), net.config.num_targets
        rows = torch.tensor(matrix).to(net.feature_mean)  # a copy: the array may be read-only
        standardised = (rows - net.feature_mean.unsqueeze(1)) / net.feature_scale.unsqueeze(1)  # (S, rows, F)
        baseline, features = (values.to(net.gate.dtype) for values in self._condition(standardised, said))
        generators = row_generators(matrix, self.model_numbers, seed)
        x_T = initial_noise((num_models * num_rows, num_targets, num_draws), like=features, generator=generators)
        observer = TrajectoryUncertainty()
        x_0 = reverse_diffusion(
            self.denoiser(features, baseline, num_draws),
            self.scheduler,
            x_T,
            generator=generators,
            observers=[observer] if watch else [],
        )
        scale = (net.residual_scale * net.target_scale)[:, None, :, None]  # (S, 1, C, 1)
        centre = (baseline * net.target_scale.unsqueeze(1) + net.target_mean.unsqueeze(1)).unsqueeze(-1)
        samples = x_0.unflatten(0, (num_models, num_rows)) * scale + centre  # (S, rows, C, n)
        spread = torch.zeros(num_rows, num_targets)
        if watch:
            variance = observer.epistemic.unflatten(0, (num_models, num_rows)).square() * scale.square()
            spread = variance.mean((0, 3)).sqrt()
        return samples.permute(0, 3, 1, 2).double().cpu().numpy(), spread.double().cpu().numpy()

    def _condition(self, features: Tensor, said: BaselineOutput | None = None) -> tuple[Tensor, Tensor]:
        """What the baseline says (S, rows, C), and the features with what it says beyond, (S, rows, F + E)."""
        if said is not None:
            num_models = features.shape[0]
            given = [values.to(features).expand(num_models, -1, -1) for values in said if values is not None]
            return given[0], torch.cat([features, *given[1:]], -1)
        if self.baseline is None:
            return features.new_zeros(*features.shape[:2], self.network.config.num_targets), features
        repeats = features.shape[0] // self.baseline.config.num_models
        baseline, extras = self.baseline.describe(features[::repeats])
        baseline, extras = (values.to(features).repeat_interleave(repeats, 0) for values in (baseline, extras))
        return baseline, torch.cat([features, extras], -1)

    def denoiser(self, features: Tensor, baseline: Tensor, num_draws: int) -> Denoiser:
        """All draws of a row are one event (C, n), so that a row needs one generator; the network sees n rows."""
        num_models = features.shape[0]
        condition = [values.repeat_interleave(num_draws, dim=1) for values in (features, baseline)]  # (S, rows n, .)

        def denoise(x_t: Tensor, timestep: Tensor | int) -> Tensor:
            stacked = x_t.unflatten(0, (num_models, -1)).transpose(2, 3).flatten(1, 2)  # (S, rows n, C)
            raw = self.network(stacked, timestep, *condition)  # (S, rows n, channels)
            return raw.unflatten(1, (-1, num_draws)).transpose(2, 3).flatten(0, 1)  # (S rows, channels, n)

        return denoise


def row_generators(matrix: NDArray[np.float64], models: Sequence[int], seed: int) -> list[torch.Generator]:
    """One generator per model and row, models first, seeded with the run's seed, the model's number and the row."""
    keys = []
    for row in matrix + 0.0:  # -0.0 becomes 0.0: equal rows have equal bytes
        digest = hashlib.blake2b(row.tobytes(), digest_size=8).digest()
        keys.append((int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")))
    return [torch.Generator().manual_seed(member_seed(seed, m, *key)) for m in models for key in keys]


def _rows_of(said: BaselineOutput | None, start: int, size: int) -> BaselineOutput | None:
    if said is None:
        return None
    prediction, extras = said
    return prediction[start : start + size], None if extras is None else extras[start : start + size]


def nearest_value(samples: NDArray[np.float64], values: Sequence[float]) -> NDArray[np.float64]:
    """Each sample moved to the nearest of some rising values."""
    known = np.asarray(values)
    return known[np.searchsorted((known[1:] + known[:-1]) / 2, samples)]


def _join(models: Sequence[Any]) -> Any:
    """Stacks of one model each as one stack."""
    first = models[0]
    options = {name: value for name, value in first.config.items() if not name.startswith("_")}
    joined = type(first)(**{**options, "num_models": len(models)})
    states = [model.state_dict() for model in models]
    joined.load_state_dict({name: torch.cat([state[name] for state in states]) for name in states[0]}, assign=True)
    return joined
