"""Ensemble forecasts of a field on a grid: `pipeline(states, num_leads)`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from marigold_uq.calibration import Calibration, read_calibration, store_calibration
from marigold_uq.denoising import Denoiser
from marigold_uq.models.field_encoder import FieldEncoder
from marigold_uq.models.field_head import raw_output
from marigold_uq.models.noise_color import ColoredSteps, NoiseColor
from marigold_uq.models.season import Season
from marigold_uq.models.unet_1d import UNet1d
from marigold_uq.models.unet_2d import UNet2d
from marigold_uq.pipelines.base import PublishablePipeline
from marigold_uq.pipelines.field.output import FieldForecast, blend, damp, stretch
from marigold_uq.pipelines.field.states import InitialStates, as_seconds, read_states
from marigold_uq.randomness import Generators, base_seed, member_generators
from marigold_uq.sampling import StepObserver, initial_noise, reverse_diffusion
from marigold_uq.schedulers.scheduling_distributional_ddim import DistributionalDDIMScheduler
from marigold_uq.uncertainty import TrajectoryUncertainty


class FieldForecastPipeline(PublishablePipeline):
    """Diffusion of the increment around persistence; each member goes on from its own state.

    What member m of forecast i gets depends on the seed, i and m alone: not on the batch size, not on how many others
    there are.

    Args:
        unet: Input [condition, x_t (, noise)], output the raw channels of the scheduler's family.
        scheduler: Family, schedule, tau.
        encoder: Statistics, grid, condition.
        noise_color: Spectrum of the noise (family "gaussian" only); None draws white noise.
        season: What is usual at a time of the year, for `lead_dampings` and `lead_season_shares`; without it dampings
            take the encoder's seasonal mean.
        default_num_inference_steps: Steps where neither the call nor the calibration says; None takes all timesteps.
        calibration: `marigold_uq.calibration.Calibration` as a dict; its tau lives in the scheduler.
        lead_kappas: Instead of the calibration's one kappa, one per lead time; the last holds for later ones.
        lead_dampings: One per lead time: the share of the mean forecast's distance from the season's mean that is kept
            (encoders with `seasonal` only); the last holds for later ones, None keeps all of it.
        lead_season_shares: One per lead time: the share of the season's standard deviation that is added, in squares,
            to the stretched spread; the last holds for later ones.
    """

    model_cpu_offload_seq = "encoder->unet"
    _optional_components = ["noise_color", "season"]  # noqa: RUF012, diffusers reads a list
    unet: UNet1d | UNet2d
    scheduler: DistributionalDDIMScheduler
    encoder: FieldEncoder
    noise_color: NoiseColor | None
    season: Season | None

    def __init__(
        self,
        unet: UNet1d | UNet2d,
        scheduler: DistributionalDDIMScheduler,
        encoder: FieldEncoder,
        noise_color: NoiseColor | None = None,
        season: Season | None = None,
        default_num_inference_steps: int | None = None,
        calibration: dict[str, Any] | None = None,
        lead_kappas: list[float] | None = None,
        lead_dampings: list[float] | None = None,
        lead_season_shares: list[float] | None = None,
    ) -> None:
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler, encoder=encoder, noise_color=noise_color, season=season)
        self.register_to_config(
            default_num_inference_steps=default_num_inference_steps,
            calibration=calibration,
            lead_kappas=lead_kappas,
            lead_dampings=lead_dampings,
            lead_season_shares=lead_season_shares,
        )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any) -> Self:
        """As in diffusers, a folder or a name on the Hub; `dtype` is the network's, other parts keep float32."""
        for name in ("dtype", "torch_dtype"):
            if isinstance(kwargs.get(name), torch.dtype):
                kwargs[name] = {"default": torch.float32, "unet": kwargs[name]}
        return super().from_pretrained(pretrained_model_name_or_path, **kwargs)

    def set_calibration(
        self,
        calibration: Calibration,
        lead_kappas: Sequence[float] | None = None,
        lead_dampings: Sequence[float] | None = None,
        lead_season_shares: Sequence[float] | None = None,
    ) -> None:
        """Keep what was chosen on held-out data; it survives save and load."""
        if lead_kappas is not None and (not lead_kappas or min(lead_kappas) <= 0):
            raise ValueError(f"lead_kappas are positive, one per lead time; got {list(lead_kappas)}")
        if lead_dampings is not None:
            if not lead_dampings or not all(0 <= damping <= 1 for damping in lead_dampings):
                raise ValueError(f"lead_dampings are between 0 and 1, one per lead time; got {list(lead_dampings)}")
            if not self.encoder.config.seasonal:
                raise ValueError("lead_dampings pull towards the season's mean, which this model's encoder has not")
        if lead_season_shares is not None:
            if not lead_season_shares or not all(share >= 0 for share in lead_season_shares):
                raise ValueError(f"lead_season_shares are not negative, one per lead time; got {lead_season_shares}")
            if self.season is None:
                raise ValueError("lead_season_shares need the module season, which this pipeline has not")
        store_calibration(self, calibration)
        self.register_to_config(
            lead_kappas=None if lead_kappas is None else [float(k) for k in lead_kappas],
            lead_dampings=None if lead_dampings is None else [float(d) for d in lead_dampings],
            lead_season_shares=None if lead_season_shares is None else [float(c) for c in lead_season_shares],
        )

    @property
    def kappas(self) -> list[float]:
        """What the spread is multiplied by at each lead time; the last holds for later ones."""
        return list(self.config.lead_kappas or [read_calibration(self).kappa])

    @property
    def interval_scales(self) -> tuple[float, ...] | None:
        """Half widths of the calibrated interval in spreads, one per lead time; the last holds for later ones."""
        scale = read_calibration(self).conformal_scale
        return (scale,) if isinstance(scale, float) else scale

    def _promise(self, num_members: int, num_leads: int) -> dict[str, Any]:
        """Half widths and coverage of the interval, if this call is like those that it was calibrated with."""
        calibration, scales = read_calibration(self), self.interval_scales
        if scales is None:
            return {}
        alike = len(self.scheduler.timesteps) == (calibration.num_steps or len(self.scheduler.timesteps))
        if not alike or num_members < (calibration.num_members or 2) or num_leads > len(scales):
            return {}
        return {"interval_scales": scales[:num_leads], "interval_coverage": calibration.coverage}

    @torch.no_grad()
    def __call__(
        self,
        state: Any,
        num_leads: int = 1,
        *,
        num_members: int | None = None,
        time: ArrayLike | None = None,
        num_inference_steps: int | None = None,
        generator: Generators = None,
        max_batch_size: int = 128,
        quantiles: Sequence[float] = (),
        output_epistemic: bool = False,
        output_type: Literal["pt", "xarray"] | None = None,
    ) -> FieldForecast | Any:
        """Forecast `num_leads` steps from each initial state.

        Args:
            state: The last `num_history` states, oldest first: (B, num_history, C, *space) (without B for one forecast,
                without C for one variable), or an xarray Dataset with time and the model's grid.
            num_leads: Lead times, each one time step of the model after the other.
            num_members: Members of each forecast; None takes the number that the model was calibrated with, or 20.
            time: When the last state was, one or B of them: dates, or seconds since 1970; xarray brings its own.
            num_inference_steps: Denoising steps per lead time; None takes the calibrated number, the default, or all.
            generator: One generator, a list with one for each of the B x num_members chains (all members of the first
                forecast first), or None. Each chain draws from a stream of its own.
            max_batch_size: Chains that the network sees at once; it never changes the random numbers.
            quantiles: Levels kept with the output.
            output_epistemic: Also collect the head's own estimate; see `FieldForecast.epistemic`.
            output_type: "pt" is a `FieldForecast`, "xarray" a Dataset with WeatherBench-X's names; by default as the
                input.
        """
        start = read_states(state, time, self.encoder)
        num_members = read_calibration(self).num_members or 20 if num_members is None else num_members
        self._check_call(num_leads, num_members, max_batch_size)
        self.prepare_steps(num_inference_steps)
        streams = self._streams(generator, len(start.history), num_members)
        parts = [
            self._roll_out(start, range(first, min(first + max_batch_size, len(streams))), streams, num_members,
                           num_leads, output_epistemic)
            for first in range(0, len(streams), max_batch_size)
        ]  # fmt: skip
        states = torch.cat([members for members, _ in parts]).unflatten(0, (-1, num_members))  # (B, M, L, C, *space)
        epistemic = None
        if output_epistemic:
            variance = torch.cat([spread for _, spread in parts]).square().unflatten(0, (-1, num_members)).mean(1)
            epistemic = variance.sqrt()
        forecast = FieldForecast(
            members=self.calibrate_members(states.transpose(0, 1), start.time),
            lead_times=self.encoder.config.time_step * np.arange(1, num_leads + 1),
            variables=tuple(self.encoder.config.targets),
            coordinates=self.encoder.coordinates,
            calendar=bool(self.encoder.config.calendar),
            init_times=start.time,
            epistemic=epistemic,
            quantile_levels=tuple(quantiles),
            **self._promise(num_members, num_leads),
        )
        wanted = output_type or ("xarray" if start.from_xarray else "pt")
        return forecast.to_xarray() if wanted == "xarray" else forecast

    def calibrate_members(self, members: Tensor, time: ArrayLike | None) -> Tensor:
        """Members (M, B, L, C, *space) of B forecasts with the calibrated mean and spread.

        `__call__` has done it; it is for ensembles that were made member by member. The first of the L lead times is
        one step after `time` (B,), dates or seconds since 1970: the initial state is not among them.
        """
        num_leads = members.shape[2]
        if self.config.lead_dampings:
            expected = self.expected_states(time, num_leads).to(members)
            members = damp(members, self.config.lead_dampings, expected)
        if not self.config.lead_season_shares:
            return stretch(members, self.kappas)
        season = self.season_deviations(time, num_leads).to(members)
        return blend(members, self.kappas, self.config.lead_season_shares, season)

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

    def _check_call(self, num_leads: int, num_members: int, max_batch_size: int) -> None:
        if num_leads < 1 or num_members < 1 or max_batch_size < 1:
            raise ValueError(
                "num_leads, num_members and max_batch_size are at least 1; got "
                f"{num_leads}, {num_members}, {max_batch_size}"
            )
        config = self.encoder.config
        if num_leads > 1 and list(config.targets) != list(config.variables):
            raise ValueError(
                f"the model predicts {list(config.targets)} of {list(config.variables)}: what it does not predict "
                "cannot be fed back, so only num_leads=1 is possible"
            )

    def prepare_steps(self, num_inference_steps: int | None = None) -> None:
        """Set the denoising steps: those given, the calibrated number, the default, or all timesteps."""
        steps = num_inference_steps or read_calibration(self).num_steps or self.config.default_num_inference_steps
        self.scheduler.set_timesteps(steps or self.scheduler.config.num_train_timesteps, device=self._execution_device)

    def _streams(self, generator: Generators, batch: int, num_members: int) -> list[torch.Generator]:
        """One stream per chain, all members of the first forecast first."""
        if generator is not None and not isinstance(generator, torch.Generator):
            if len(generator) != batch * num_members:
                raise ValueError(
                    f"pass one generator, or one for each of the {batch} x {num_members} chains; got {len(generator)}"
                )
            return list(generator)
        base = base_seed(generator)
        return [one for i in range(batch) for one in member_generators(base, num_members, prefix=(i,))]

    def _roll_out(
        self,
        start: InitialStates,
        chains: range,
        streams: list[torch.Generator],
        num_members: int,
        num_leads: int,
        watch: bool,
    ) -> tuple[Tensor, Tensor]:
        """All lead times of some chains: states and the head's spread, both (n, L, C, *space)."""
        inputs = torch.tensor([chain // num_members for chain in chains])
        history = start.history[inputs].to(self._execution_device)  # (n, history, C, *space)
        time = None if start.time is None else torch.from_numpy(np.array(start.time))[inputs]
        own = streams[chains.start : chains.stop]
        states, spreads = [], []
        for _ in range(num_leads):
            new, spread = self.advance(history, time, own, output_epistemic=watch)
            states.append(new.cpu())
            spreads.append(spread.cpu())
            if num_leads > 1:
                history = torch.cat([history[:, 1:], new.unsqueeze(1)], 1)  # each member goes on from its own state
            time = None if time is None else time + self.encoder.config.time_step
        return torch.stack(states, 1), torch.stack(spreads, 1)

    @torch.no_grad()
    def advance(
        self, history: Tensor, time: Tensor | None, generators: list[torch.Generator], *, output_epistemic: bool = False
    ) -> tuple[Tensor, Tensor]:
        """One step of n chains: a draw of the targets (n, C, *space), and the head's spread (zeros unless asked for).

        Args:
            history: (n, num_history, variables, *space), oldest first.
            time: (n,) of the last states, for models that know the time.
            generators: One per chain.
            output_epistemic: Collect the head's estimate.
        """
        condition = self.encoder.condition(history, time)
        increment, spread = self._draw_increment(condition, generators, output_epistemic)
        return self.encoder.decode(history[:, -1], increment.float()), self.encoder.scale_spread(spread)

    def _draw_increment(self, condition: Tensor, own: list[torch.Generator], watch: bool) -> tuple[Tensor, Tensor]:
        """x_0 of every chain, and the head's epistemic estimate (zeros unless watched), both (n, C, *space)."""
        condition = condition.to(self.unet.dtype)
        x_T = initial_noise((len(own), *self.encoder.event_shape), like=condition, generator=own)
        uncertainty = TrajectoryUncertainty()
        observers: list[StepObserver] = [uncertainty] if watch else []
        colored = None if self.noise_color is None else ColoredSteps(self.noise_color, own)
        if colored is not None:
            observers.append(colored.observe)
        x_0 = reverse_diffusion(
            self.denoiser(condition),
            self.scheduler,
            x_T,
            generator=own,
            observers=observers,
            callback=None if colored is None else colored.redraw,
        )
        return x_0, uncertainty.epistemic if watch else torch.zeros_like(x_0)

    def denoiser(self, condition: Tensor, network: nn.Module | None = None) -> Denoiser:
        """The network (or another in its place) with its condition (B, channels, *space) bound."""
        unet = self.unet if network is None else network

        def denoise(x_t: Tensor, timestep: Tensor | int) -> Tensor:
            return raw_output(self.scheduler, unet(torch.cat([condition, x_t], 1), timestep), self.encoder.event_shape)

        return denoise
