"""Ensemble forecasts of a field on a grid: `pipeline(states, num_leads)`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from marigold_uq.calibration import Calibration, IntervalGrid, check_coverage
from marigold_uq.denoising import Denoiser
from marigold_uq.distributions import NoiseDistribution
from marigold_uq.models.field_encoder import FieldEncoder
from marigold_uq.models.field_head import raw_output
from marigold_uq.models.noise_color import NoiseColor
from marigold_uq.models.season import Season
from marigold_uq.models.unet_1d import UNet1d
from marigold_uq.models.unet_2d import UNet2d
from marigold_uq.novelty import novelty_features
from marigold_uq.pipelines.base import UncertaintyPipeline, logger
from marigold_uq.pipelines.field.colored_steps import ColoredSteps
from marigold_uq.pipelines.field.conventions import Convention
from marigold_uq.pipelines.field.output import FieldForecast, blend, damp, stretch
from marigold_uq.pipelines.field.states import InitialStates, as_seconds, read_states
from marigold_uq.pipelines.field.streaming import ForecastWriter, write_stream
from marigold_uq.pipelines.field.variable_taus import VariableTaus
from marigold_uq.randomness import Generators, base_seed, member_generators
from marigold_uq.sampling import StepObserver, initial_noise, one_step_distribution, reverse_diffusion
from marigold_uq.schedulers.distributional import DistributionalScheduler
from marigold_uq.uncertainty import TrajectoryUncertainty

__all__ = ["FieldForecastPipeline"]


DEFAULT_ENSEMBLE_SIZE = 20


class FieldForecastPipeline(UncertaintyPipeline):
    """Diffusion of the increment around persistence; each sample continues from its own state.

    What sample m of forecast i gets depends on the seed, i and m alone: not on the batch size, not on how many others
    there are.

    Args:
        unet: Input [condition, x_t (, noise)], output the raw channels of the scheduler's family.
        scheduler: Family, schedule, tau.
        encoder: Statistics, grid, condition.
        noise_color: Spectrum of the noise (family "gaussian" only); None draws white noise.
        season: What is usual at a time of the year, for `lead_dampings` and `lead_season_shares`; without it dampings
            take the encoder's seasonal mean.
        default_denoising_steps: Steps where neither the call nor the calibration says; None takes all timesteps.
        calibration: Records that `calibrate` keeps; kappa and the interval have one entry per lead time.
        calibrated_by_variable: Whether these entries, and those of the next two, are of each target and lead time, all
            of the first target first. Otherwise they hold for all targets.
        target_taus: A tau for each target, beside that of the scheduler.
        lead_dampings: One per lead time: the share of the mean forecast's distance from the season's mean that is kept
            (encoders with `seasonal` only); the last holds for later ones, None keeps all of it.
        lead_season_shares: One per lead time: the share of the season's standard deviation that is added, in squares,
            to the stretched spread; the last holds for later ones.
    """

    model_cpu_offload_seq = "encoder->unet"
    _optional_components = ["noise_color", "season"]  # noqa: RUF012, diffusers reads a list
    unet: UNet1d | UNet2d
    scheduler: DistributionalScheduler
    encoder: FieldEncoder
    noise_color: NoiseColor | None
    season: Season | None

    def __init__(
        self,
        unet: UNet1d | UNet2d,
        scheduler: DistributionalScheduler,
        encoder: FieldEncoder,
        noise_color: NoiseColor | None = None,
        season: Season | None = None,
        default_denoising_steps: int | None = None,
        calibration: list[dict[str, Any]] | None = None,
        lead_dampings: list[float] | None = None,
        lead_season_shares: list[float] | None = None,
        calibrated_by_variable: bool = False,
        target_taus: list[float] | None = None,
    ) -> None:
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler, encoder=encoder, noise_color=noise_color, season=season)
        self.register_to_config(
            default_denoising_steps=default_denoising_steps,
            calibration=calibration,
            lead_dampings=lead_dampings,
            lead_season_shares=lead_season_shares,
            calibrated_by_variable=calibrated_by_variable,
            target_taus=target_taus,
        )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any) -> Self:
        """As in diffusers, a folder or a name on the Hub; `dtype` is the network's, other parts keep float32."""
        for name in ("dtype", "torch_dtype"):
            if isinstance(kwargs.get(name), torch.dtype):
                kwargs[name] = {"default": torch.float32, "unet": kwargs[name]}
        return super().from_pretrained(pretrained_model_name_or_path, **kwargs)

    @classmethod
    def upgrade_config(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Names of versions before the first release; one kappa per lead time was an entry of its own."""
        new = super().upgrade_config(config)
        if "default_num_inference_steps" in new:
            new["default_denoising_steps"] = new.pop("default_num_inference_steps")
        kappas = new.pop("lead_kappas", None)
        if kappas:
            first = new["calibration"][0] if new.get("calibration") else {}
            new["calibration"] = [{**first, "kappa": list(kappas)}]
        return new

    def calibrate(
        self,
        calibration: Calibration,
        *,
        lead_dampings: Sequence[float] | None = None,
        lead_season_shares: Sequence[float] | None = None,
        target_taus: Sequence[float] | None = None,
        by_variable: bool = False,
    ) -> Self:
        """Keep what was chosen on held-out data, with one number per lead time; saving and loading keep it too.

        With `by_variable` there is one per target and lead time, all of the first target first. Dampings, shares and
        taus belong to the calibration: a call without them removes those that were stored.
        """
        dampings = _numbers("lead_dampings", lead_dampings, 1.0)
        shares = _numbers("lead_season_shares", lead_season_shares, math.inf)
        if dampings is not None and not self.encoder.config.seasonal:
            raise ValueError("lead_dampings pull towards the season's mean, which this model's encoder does not have")
        if shares is not None and self.season is None:
            raise ValueError("lead_season_shares need the module season, which this pipeline does not have")
        taus = _numbers("target_taus", target_taus, math.inf)
        if taus is not None and len(taus) != len(self.encoder.config.targets):
            raise ValueError(f"target_taus must be one for each of {list(self.encoder.config.targets)}; got {taus}")
        super().calibrate(calibration)
        self.register_to_config(
            lead_dampings=dampings,
            lead_season_shares=shares,
            target_taus=taus,
            calibrated_by_variable=bool(by_variable),
        )
        return self

    def by_variable(self, values: Sequence[float]) -> list[list[float]]:
        """Numbers of a calibration as a row per target, one per lead time; those that hold for all are repeated."""
        count = len(self.encoder.config.targets)
        numbers = list(values)
        if not self.config.get("calibrated_by_variable") or len(numbers) % count:
            return [numbers] * count
        return np.reshape(numbers, (count, -1)).tolist()

    def fit_novelty(self, inputs: Any, *, false_alarm_rate: float = 0.05, **call: Any) -> Self:
        """As for all pipelines; `inputs` are initial states, xarray's too."""
        return super().fit_novelty(inputs, false_alarm_rate=false_alarm_rate, **{**call, "output_type": "pt"})

    def _interval_grid(self, calibration: Calibration, num_leads: int) -> IntervalGrid | None:
        grid = calibration.interval
        if grid is None:
            return None
        known = len(self.by_variable(grid.scales[0])[0])
        if num_leads > known > 1:
            logger.warning(
                f"intervals were calibrated for {known} lead times, called with {num_leads}: later ones "
                "take the half width of the last, which promises nothing"
            )
        rows = (self.by_variable(row) for row in grid.scales)
        return IntervalGrid(grid.coverages, tuple(tuple(chain.from_iterable(row)) for row in rows))

    @torch.no_grad()
    def __call__(
        self,
        state: Any,
        num_leads: int = 1,
        *,
        ensemble_size: int | None = None,
        time: ArrayLike | None = None,
        num_inference_steps: int | None = None,
        generator: Generators = None,
        batch_size: int = 128,
        quantiles: Sequence[float] = (),
        coverage: float | None = None,
        output_epistemic: bool = False,
        output_novelty: bool = False,
        output_type: Literal["pt", "xarray"] | None = None,
    ) -> FieldForecast | Any:
        """Forecast `num_leads` steps from each initial state.

        Args:
            state: The last `num_history` states, oldest first: (B, num_history, C, *space) (without B for one forecast,
                without C for one variable), or an xarray Dataset with time and the model's grid.
            num_leads: Lead times, each one time step of the model after the other.
            ensemble_size: Samples of each forecast; None takes the number that the model was calibrated with, or 20.
            time: When the last state was, one or B of them: dates, or seconds since 1970; xarray brings its own.
            num_inference_steps: Denoising steps per lead time; None takes the calibrated number, the default, or all.
            generator: One generator, a list with one for each of the B x ensemble_size chains (all samples of the first
                forecast first), or None. Each chain draws from a stream of its own.
            batch_size: Chains that the network sees at once; it never changes the random numbers.
            quantiles: Levels kept with the output.
            coverage: Of `forecast.interval`, 0.95 for 95 %; `forecast.interval_at` gives any other afterwards.
            output_epistemic: Also collect the head's own estimate; see `FieldForecast.epistemic`.
            output_novelty: Also compare the first lead time with those that `fit_novelty` saw; see
                `FieldForecast.novelty`. Families without a spread of their own have none.
            output_type: "pt" is a `FieldForecast`, "xarray" a Dataset with WeatherBench-X's names; by default as the
                input.
        """
        if coverage is not None:
            check_coverage(coverage)
        start = read_states(state, time, self.encoder)
        if ensemble_size is None:
            ensemble_size = self.calibration_for().ensemble_size or DEFAULT_ENSEMBLE_SIZE
        self._check_call(start, num_leads, ensemble_size, batch_size)
        if output_novelty and ensemble_size < 2:
            raise ValueError("output_novelty needs the spread of at least 2 members; got ensemble_size=1")
        if output_novelty and self.encoder.config.get("masked"):
            raise ValueError(
                "output_novelty needs fields without missing values; this model has variables that lack some"
            )
        scheduler = self.chain_scheduler(num_inference_steps)
        calibration = self.calibration_for(num_inference_steps=len(scheduler.timesteps), ensemble_size=ensemble_size)
        streams = self._streams(generator, len(start.history), ensemble_size)
        parts = [
            self._roll_out(start, range(first, min(first + batch_size, len(streams))), streams, ensemble_size,
                           num_leads, scheduler, output_epistemic, output_novelty)
            for first in range(0, len(streams), batch_size)
        ]  # fmt: skip
        states = torch.cat([part.states for part in parts]).unflatten(0, (-1, ensemble_size))  # (B, M, L, C, *space)
        _warn_of_overflow(states, self._missing(start))
        epistemic = novelty = None
        if output_epistemic:
            epistemic = _over_members([part.epistemic for part in parts], ensemble_size).sqrt()
            missing = self._missing(start)
            epistemic = epistemic if missing is None else epistemic.masked_fill(missing.unsqueeze(1), math.nan)
        if output_novelty:
            mean = _over_members([part.first_mean for part in parts], ensemble_size)
            std = _over_members([part.first_variance for part in parts], ensemble_size).sqrt()
            novelty = self._novelty(
                novelty_features(mean, std, states[:, :, 0].std(1)),
                calibration,
                num_inference_steps=len(scheduler.timesteps),
                ensemble_size=ensemble_size,
            )
        forecast = self._forecast(
            self.calibrate_samples(states.transpose(0, 1), start.time),
            start,
            calibration,
            scheduler,
            generator,
            coverage,
            epistemic=epistemic,
            novelty=novelty,
            quantile_levels=tuple(quantiles),
        )
        wanted = output_type or ("xarray" if start.from_xarray else "pt")
        return forecast.to_xarray() if wanted == "xarray" else forecast

    @torch.no_grad()
    def save_forecast(
        self,
        path: str | Path,
        state: Any,
        num_leads: int = 1,
        *,
        ensemble_size: int | None = None,
        time: ArrayLike | None = None,
        num_inference_steps: int | None = None,
        generator: Generators = None,
        batch_size: int = 8,
        coverage: float | None = None,
        convention: Convention = "weatherbenchx",
    ) -> Path:
        """Forecast into a zarr store that need not fit into memory, with the numbers of a call.

        In memory are `batch_size` chains, and then all samples of one forecast at one lead time. The store has the
        samples, their mean and standard deviation, and the interval where `coverage` asks for one; it appears when it
        is complete.

        Args:
            path: The store, which ends in .zarr and must not exist.
            state: As in a call; the other arguments too.
            num_leads: Lead times.
            ensemble_size: Samples of each forecast.
            time: When the last state was.
            num_inference_steps: Denoising steps per lead time.
            generator: Of the chains.
            batch_size: Chains that the network sees at once.
            coverage: Of the interval.
            convention: Names of the dimensions; see `FieldForecast.to_xarray`.
        """
        if coverage is not None:
            check_coverage(coverage)
        start = read_states(state, time, self.encoder)
        size = ensemble_size or self.calibration_for().ensemble_size or DEFAULT_ENSEMBLE_SIZE
        self._check_call(start, num_leads, size, batch_size)
        scheduler = self.chain_scheduler(num_inference_steps)
        calibration = self.calibration_for(num_inference_steps=len(scheduler.timesteps), ensemble_size=size)
        streams = self._streams(generator, len(start.history), size)
        shape = (size, len(start.history), num_leads, *self.encoder.event_shape)
        shell = self._forecast(torch.zeros(()).expand(shape), start, calibration, scheduler, generator, coverage)
        parts = (range(first, min(first + batch_size, len(streams))) for first in range(0, len(streams), batch_size))
        chains = ((part, self._lead_states(start, part, streams, size, num_leads, scheduler)) for part in parts)
        return write_stream(self, Path(path), ForecastWriter(shell, convention), chains)

    def _forecast(
        self,
        samples: Tensor,
        start: InitialStates,
        calibration: Calibration,
        scheduler: DistributionalScheduler,
        generator: Generators,
        coverage: float | None,
        **more: Any,
    ) -> FieldForecast:
        """The forecast of samples (M, B, L, C, *space), with all that describes it."""
        num_leads, config = samples.shape[2], self.encoder.config
        return FieldForecast(
            samples=samples,
            lead_times=config.time_step * np.arange(1, num_leads + 1),
            variables=tuple(config.targets),
            coordinates=self.encoder.coordinates,
            calendar=bool(config.calendar),
            init_times=start.time,
            coverage=coverage,
            interval_grid=self._interval_grid(calibration, num_leads),
            units=self.encoder.units,
            provenance=self.provenance(generator, len(scheduler.timesteps)),
            **more,
        )

    @torch.no_grad()
    def one_step_distribution(
        self, state: Any, *, time: ArrayLike | None = None, generator: Generators = None, num_draws: int = 1
    ) -> NoiseDistribution:
        """The distribution (B, C, *space) of the next state by one network call: moments, quantiles, density, draws.

        Members of a forecast in one denoising step are drawn from it, each from a start of its own, before dampings and
        kappa. Coloured noise has its marginals.

        Args:
            state: As in a call; xarray's too.
            time: As in a call.
            generator: Of the starts: one for all, or one for each of the B states. After zero terminal SNR, and in flow
                matching, a trained network hardly looks at them.
            num_draws: Network calls of the family "sample".
        """
        start = read_states(state, time, self.encoder)
        history = start.history.to(self._execution_device)  # (B, history, C, *space)
        when = None if start.time is None else torch.from_numpy(np.array(start.time))
        condition = self.encoder.condition(history, when).to(self.unet.dtype)
        increment = one_step_distribution(
            self.denoiser(condition),
            self.scheduler.for_chain(1, self._execution_device),
            initial_noise((len(history), *self.encoder.event_shape), like=condition, generator=generator),
            num_draws=num_draws,
            generator=generator,
        )
        return self.encoder.decode_distribution(history[:, -1], increment)

    def calibrate_samples(self, samples: Tensor, time: ArrayLike | None, *, first_lead: int = 0) -> Tensor:
        """Samples (M, B, L, C, *space) of B forecasts with the calibrated mean and spread.

        `__call__` has done it; this is for ensembles that were made sample by sample. The first of the L lead times is
        `first_lead` + 1 steps after `time` (B,), dates or seconds since 1970: the initial state is not among them.
        """
        leads = range(first_lead, first_lead + samples.shape[2])
        kappas = self._of_leads(self.calibration_for().kappas, leads)
        if self.config.lead_dampings:
            expected = self.expected_states(time, leads.stop)[:, leads.start :]
            samples = damp(samples, self._of_leads(self.config.lead_dampings, leads), expected.to(samples))
        if not self.config.lead_season_shares:
            return stretch(samples, kappas)
        season = self.season_deviations(time, leads.stop)[:, leads.start :].to(samples)
        return blend(samples, kappas, self._of_leads(self.config.lead_season_shares, leads), season)

    def _of_leads(self, values: Sequence[float], leads: range) -> list[list[float]]:
        """A row per target for some lead times; the last number holds for later ones."""
        return [[row[min(lead, len(row) - 1)] for lead in leads] for row in self.by_variable(values)]

    def provenance(self, generator: Generators, num_inference_steps: int) -> dict[str, Any]:
        """What made a forecast, for its file: the model's name, the version of this package, seed and steps."""
        name = str(self.config.get("_name_or_path") or "")
        return {
            "source": f"marigold_uq {version('marigold_uq')}",
            "model": "/".join(Path(name).parts[-2:]) or "not saved",
            "noise_family": str(self.scheduler.config.noise_family),
            "num_inference_steps": int(num_inference_steps),
            "seed": str(generator.initial_seed()) if isinstance(generator, torch.Generator) else "not given",
        }

    def expected_states(self, time: ArrayLike | None, num_leads: int) -> Tensor:
        """The targets' seasonal means (B, L, C, *space) at the lead times after times (B,), on the CPU."""
        coming = self._coming_times(time, num_leads)
        if self.season is None:
            means = self.encoder.select_targets(self.encoder.seasonal_mean(coming))
        else:
            means = self.season.mean(coming)
        return means.unflatten(0, (-1, num_leads)).cpu()

    def season_deviations(self, time: ArrayLike | None, num_leads: int) -> Tensor:
        """The targets' standard deviations around those means, (B, L, C, *space), on the CPU."""
        if self.season is None:
            raise ValueError("this pipeline has no module season")
        return self.season.deviation(self._coming_times(time, num_leads)).unflatten(0, (-1, num_leads)).cpu()

    def _coming_times(self, time: ArrayLike | None, num_leads: int) -> Tensor:
        """(B x L,), all lead times of the first forecast first."""
        if time is None:
            raise ValueError("the season's mean and spread need the time of the last state")
        lead_times = self.encoder.config.time_step * np.arange(1, num_leads + 1)
        return torch.from_numpy(np.add.outer(as_seconds(time), lead_times)).flatten()

    def _check_call(self, start: InitialStates, num_leads: int, ensemble_size: int, batch_size: int) -> None:
        if num_leads < 1 or ensemble_size < 1 or batch_size < 1:
            raise ValueError(
                "num_leads, ensemble_size and batch_size must be at least 1; got "
                f"{num_leads}, {ensemble_size}, {batch_size}"
            )
        config = self.encoder.config
        if num_leads > 1 and list(config.targets) != list(config.variables):
            raise ValueError(
                f"the model predicts {list(config.targets)} of {list(config.variables)}: what it does not predict "
                "cannot be fed back, so only num_leads=1 is possible"
            )
        self.encoder.check_hours(start.time, num_leads)

    def _missing(self, start: InitialStates) -> Tensor | None:
        """Where the last states lack a target, (B, C, *space); None where the model knows no missing values."""
        return self.encoder.select_targets(start.history[:, -1]).isnan() if self.encoder.config.get("masked") else None

    def chain_scheduler(self, num_inference_steps: int | None = None) -> DistributionalScheduler:
        """A scheduler for one call, with the steps that are given, or calibrated, or the default, or all of them."""
        stored = self.calibration_for().num_inference_steps or self.config.default_denoising_steps
        steps = num_inference_steps or stored
        return self.scheduler.for_chain(steps or self.scheduler.config.num_train_timesteps, self._execution_device)

    def _streams(self, generator: Generators, batch: int, ensemble_size: int) -> list[torch.Generator]:
        """One stream per chain, all samples of the first forecast first."""
        if generator is not None and not isinstance(generator, torch.Generator):
            if len(generator) != batch * ensemble_size:
                raise ValueError(
                    f"pass one generator, or one for each of the {batch} x {ensemble_size} chains; got {len(generator)}"
                )
            return list(generator)
        base = base_seed(generator)
        return [one for i in range(batch) for one in member_generators(base, ensemble_size, prefix=(i,))]

    def _roll_out(
        self,
        start: InitialStates,
        chains: range,
        streams: list[torch.Generator],
        ensemble_size: int,
        num_leads: int,
        scheduler: DistributionalScheduler,
        output_epistemic: bool,
        output_novelty: bool,
    ) -> _RollOut:
        """All lead times of some chains, and what the head says on the way."""
        watched: list[TrajectoryUncertainty] = []

        def observer(lead: int) -> TrajectoryUncertainty | None:
            if not (output_epistemic or (output_novelty and lead == 0)):
                return None
            watched.append(TrajectoryUncertainty())
            return watched[-1]

        states = list(self._lead_states(start, chains, streams, ensemble_size, num_leads, scheduler, observer))
        result = _RollOut(torch.stack(states, 1))
        if output_epistemic:
            spreads = [self.encoder.scale_spread(one.epistemic).cpu() for one in watched]
            result.epistemic = torch.stack(spreads, 1).square()
        if output_novelty:
            result.first_mean = watched[0].initial_mean.cpu()
            result.first_variance = watched[0].initial_std.square().cpu()
        return result

    def _lead_states(
        self,
        start: InitialStates,
        chains: range,
        streams: list[torch.Generator],
        ensemble_size: int,
        num_leads: int,
        scheduler: DistributionalScheduler,
        observer: Callable[[int], TrajectoryUncertainty | None] = lambda lead: None,
    ) -> Iterator[Tensor]:
        """The states (n, C, *space) of some chains, on the CPU, one lead time after the other."""
        inputs = torch.tensor([chain // ensemble_size for chain in chains])
        history = start.history[inputs].to(self._execution_device)  # (n, history, C, *space)
        time = None if start.time is None else torch.from_numpy(np.array(start.time))[inputs]
        own = streams[chains.start : chains.stop]
        for lead in range(num_leads):
            new = self.advance(history, time, own, scheduler, observer=observer(lead))
            yield new.cpu()
            if num_leads > 1:
                history = torch.cat([history[:, 1:], new.unsqueeze(1)], 1)  # each sample continues from its own state
            time = None if time is None else time + self.encoder.config.time_step

    @torch.no_grad()
    def advance(
        self,
        history: Tensor,
        time: Tensor | None,
        generators: list[torch.Generator],
        scheduler: DistributionalScheduler,
        *,
        observer: TrajectoryUncertainty | None = None,
    ) -> Tensor:
        """One step of n chains: a draw of the targets (n, C, *space).

        Args:
            history: (n, num_history, variables, *space), oldest first.
            time: (n,) of the last states, for models that know the time.
            generators: One per chain.
            scheduler: Of `chain_scheduler`.
            observer: Collects what the head says of the scaled increment.
        """
        condition = self.encoder.condition(history, time)
        increment = self._draw_increment(condition, generators, scheduler, observer)
        return self.encoder.decode(history[:, -1], increment.float())

    def _draw_increment(
        self,
        condition: Tensor,
        own: list[torch.Generator],
        scheduler: DistributionalScheduler,
        observer: TrajectoryUncertainty | None,
    ) -> Tensor:
        """x_0 of every chain, (n, C, *space)."""
        condition = condition.to(self.unet.dtype)
        x_T = initial_noise((len(own), *self.encoder.event_shape), like=condition, generator=own)
        observers: list[StepObserver] = [] if observer is None else [observer]
        redraws: list[ColoredSteps | VariableTaus] = []
        if self.noise_color is not None:
            redraws.append(ColoredSteps(self.noise_color, own))
        if self.config.get("target_taus"):
            redraws.append(VariableTaus(self.config.target_taus))

        def redraw(index: int, timestep: int | float, x_prev: Tensor) -> Tensor:
            for one in redraws:
                x_prev = one.redraw(index, timestep, x_prev)
            return x_prev

        return reverse_diffusion(
            self.denoiser(condition),
            scheduler,
            x_T,
            generator=own,
            observers=[*observers, *(one.observe for one in redraws)],
            callback=redraw if redraws else None,
        )

    def denoiser(self, condition: Tensor, network: nn.Module | None = None) -> Denoiser:
        """The network (or another in its place) with its condition (B, channels, *space) bound.

        Where targets are always missing it does not see x_t, which nothing is learned from.
        """
        unet, valid = self.unet if network is None else network, self.encoder.target_valid()
        valid = None if valid is None else valid.to(condition)

        def denoise(x_t: Tensor, timestep: Tensor | int) -> Tensor:
            x_t = x_t if valid is None else x_t * valid
            return raw_output(self.scheduler, unet(torch.cat([condition, x_t], 1), timestep), self.encoder.event_shape)

        return denoise


@dataclass
class _RollOut:
    """Some chains; what the head says is there where a call asks for it."""

    states: Tensor  # (n, L, C, *space)
    epistemic: Tensor | None = None  # (n, L, C, *space), a variance
    first_mean: Tensor | None = None  # (n, C, *space), of the first increment
    first_variance: Tensor | None = None  # (n, C, *space)


def _over_members(parts: Sequence[Tensor | None], ensemble_size: int) -> Tensor:
    """The mean over members, (B, ...), of parts that hold all B x ensemble_size chains together."""
    return torch.cat([part for part in parts if part is not None]).unflatten(0, (-1, ensemble_size)).mean(1)


def _warn_of_overflow(states: Tensor, missing: Tensor | None) -> None:
    """Name forecasts (B, M, L, C, *space) that left the range of numbers where nothing is `missing`, (B, C, *space)."""
    fine = states.isfinite() if missing is None else states.isfinite() | missing[:, None, None]
    lost = (~fine.flatten(1).all(1)).nonzero().flatten().tolist()
    if lost:
        logger.warning(
            f"{len(lost)} of {len(states)} forecasts are not finite (the first is number {lost[0]}): their initial "
            "states, or what the model made of them, lie too far from the training states"
        )


def _numbers(name: str, values: Sequence[float] | None, most: float) -> list[float] | None:
    """One number per lead time, from 0 to `most`."""
    if values is None:
        return None
    numbers = [float(value) for value in values]
    if not numbers or not all(0 <= number <= most for number in numbers):
        bounds = f"between 0 and {most:g}" if math.isfinite(most) else "at least 0"
        raise ValueError(f"{name} must be {bounds}, one per lead time; got {list(values)}")
    return numbers
