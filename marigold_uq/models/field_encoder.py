"""Physical states <-> what a field network sees and predicts; the module's path is written into checkpoints.

The network predicts the increment u_s - u_{s-1}, the residual around persistence, scaled to mean 0 and variance 1. It
sees the past states in units of their own deviation, and what is known beforehand: fields that never change, where a
point lies, what time it is.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from numpy.typing import ArrayLike
from torch import Tensor

from marigold_uq.distributions import NoiseDistribution
from marigold_uq.models.field_grid import (
    DAY,
    NUM_WAVES,
    YEAR,
    FieldDataError,
    FieldStatistics,
    area_weights,
    harmonic_basis,
    periodic_axes,
    require_statistics,
)
from marigold_uq.models.noise_color import move_only

__all__ = ["FieldEncoder", "ModelMixin"]  # diffusers looks for ModelMixin in the module of a component

TIME_FEATURES = ("hour", "year")
FAR_OFF = 12.0
"""Mean of a whole input state, in standard deviations of the training states, that can only be another unit."""
HOUR = 3600


class FieldEncoder(ModelMixin, ConfigMixin):
    """Scaling and condition of a field model: no weights, only buffers.

    Missing values are NaN, in variables that are `masked`. The network sees them as the mean state; what is predicted
    where the last state is missing, or was missing at all training times, is NaN again.

    Args:
        variables: Names of the state's channels.
        targets: Those that are predicted; a rollout needs all of them.
        statistics: Variable -> `FieldStatistics` as a dict; looked up by name.
        coordinates: Spatial axis -> values, in the order of the axes.
        num_history: States the network sees.
        static_names: Channels of the buffer `static`, (S, *space).
        grid_channels: Whether the network sees each coordinate, from -1 to 1.
        time_features: "hour": sine and cosine of the local solar time (UTC where there is no longitude); "year": of
            the season. Both of the time that is predicted.
        seasonal: Whether the network sees the mean state of the hour and season that are predicted, from the buffer
            `harmonics` (C, waves, *space).
        calendar: Whether times are seconds since 1970.
        time_step: Time between states.
        units: Variable -> its unit, for outputs and reports.
        target_hours: UTC hours that the model was trained to predict; None: any.
        masked: Variables that may hold NaN; the buffer `observed` (C, *space) is the share of training times with a
            value.
    """

    static: Tensor  # (S, *space)
    observed: Tensor  # (C, *space), only where something is `masked`
    harmonics: Tensor  # (C, waves, *space), only where `seasonal`

    @register_to_config
    def __init__(
        self,
        variables: Sequence[str] = ("u",),
        targets: Sequence[str] = ("u",),
        statistics: Mapping[str, Mapping[str, float]] | None = None,
        coordinates: Mapping[str, Sequence[float]] | None = None,
        num_history: int = 2,
        static_names: Sequence[str] = (),
        grid_channels: bool = False,
        time_features: Sequence[str] = (),
        seasonal: bool = False,
        calendar: bool = False,
        time_step: float = 1.0,
        units: Mapping[str, str] | None = None,
        target_hours: Sequence[int] | None = None,
        masked: Sequence[str] = (),
    ) -> None:
        super().__init__()
        _check_names(tuple(variables), tuple(targets), tuple(time_features), calendar)
        if seasonal and not calendar:
            raise ValueError("a seasonal mean needs times that are dates (calendar=True)")
        if target_hours and not calendar:
            raise ValueError("target_hours need times that are dates (calendar=True)")
        if not coordinates:
            raise ValueError("coordinates name at least one spatial axis and its values")
        require_statistics("field encoder", statistics or {}, tuple(variables))
        self.statistics = {name: FieldStatistics(**values) for name, values in (statistics or {}).items()}
        self.coordinates = {name: np.asarray(values, np.float64) for name, values in coordinates.items()}
        self.register_buffer("static", torch.zeros(len(static_names), *self.space))
        if seasonal:
            self.register_buffer("harmonics", torch.zeros(len(variables), NUM_WAVES, *self.space))
        if masked:
            self.register_buffer("observed", torch.ones(len(variables), *self.space))

    @property
    def space(self) -> tuple[int, ...]:
        """Points per spatial axis."""
        return tuple(len(values) for values in self.coordinates.values())

    @property
    def event_shape(self) -> tuple[int, ...]:
        """Shape of what is diffused, (targets, *space)."""
        return (len(self.config.targets), *self.space)

    @property
    def periodic(self) -> tuple[bool, ...]:
        """Whether each spatial axis closes on itself, by its coordinates."""
        return periodic_axes(self.coordinates, bool(self.config.calendar))

    @property
    def units(self) -> Mapping[str, str]:
        """Variable -> unit, of those whose unit is known."""
        return dict(self.config.get("units") or {})

    @property
    def condition_channels(self) -> int:
        """Channels of `condition`."""
        config = self.config
        grid = len(self.space) if config.grid_channels else 0
        states = config.num_history * len(config.variables)
        seasonal = len(config.variables) if config.seasonal else 0
        return states + len(config.static_names) + grid + 2 * len(config.time_features) + seasonal

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move to a device; buffers keep their dtype: in half precision temperatures would lose their tenths."""
        return move_only(self, *args, **kwargs)

    def condition(self, history: Tensor, time: Tensor | None = None) -> Tensor:
        """(B, condition_channels, *space) from states (B, num_history, C, *space) and the times (B,) of the last."""
        batch = history.shape[0]
        states = self._filled((history - self._column("mean", history)) / self._column("std", history))
        parts = [states.flatten(1, 2), *self._fixed(history, batch)]
        if self.needs_time:
            if time is None:
                raise ValueError("this model knows the time: say when the last state was")
            coming = time + self.config.time_step
            parts += [self._clock(name, coming, history) for name in self.config.time_features]
            if self.config.seasonal:
                parts.append(self._season(coming, history))
        return torch.cat(parts, 1)

    @property
    def needs_time(self) -> bool:
        """Whether the network sees anything that depends on the date."""
        return bool(self.config.time_features or self.config.seasonal)

    def check_hours(self, time: ArrayLike | None, num_leads: int) -> None:
        """Refuse forecasts for hours that the model never learned, from times (B,) in seconds since 1970."""
        hours = self.config.get("target_hours")
        if not hours:
            return
        if time is None:
            raise ValueError(
                f"this model predicts the hours {list(hours)} UTC alone: pass `time`, that of the last state"
            )
        coming = np.add.outer(np.asarray(time, np.float64), self.config.time_step * np.arange(1, num_leads + 1))
        asked = sorted({int(hour) for hour in (coming // HOUR % 24).flatten()})
        if not set(asked) <= set(hours):
            raise FieldDataError(
                f"the model was trained to predict the hours {list(hours)} UTC; this call asks for {asked}: choose "
                "another start or number of lead times"
            )

    def _filled(self, states: Tensor) -> Tensor:
        """Scaled states with 0, the mean, where values are missing."""
        return states.nan_to_num(nan=0.0) if self.config.get("masked") else states

    def target_valid(self) -> Tensor | None:
        """(targets, *space): True where a value was ever seen in training; None where none was ever missing."""
        return self.select_targets(self.observed) > 0 if self.config.get("masked") else None

    def _season(self, time: Tensor, like: Tensor) -> Tensor:
        """The mean state of the hour and season, in units of the deviation, (B, C, *space)."""
        mean = self.seasonal_mean(time).to(like)
        return self._filled((mean - self._column("mean", like)) / self._column("std", like))

    def seasonal_mean(self, time: Tensor) -> Tensor:
        """The mean state (B, C, *space) of the hour and season of times (B,), fitted to the training states."""
        if not self.config.seasonal:
            raise ValueError("this model was made without a seasonal mean (seasonal: true in its config)")
        waves = harmonic_basis(time).to(self.harmonics)  # (B, waves)
        return torch.einsum("bw,cw...->bc...", waves, self.harmonics)

    def _fixed(self, like: Tensor, batch: int) -> list[Tensor]:
        """Static fields and grid channels, which all samples share."""
        parts = [self.static.to(like)]
        if self.config.grid_channels:
            axes = [torch.linspace(-1, 1, size) for size in self.space]
            parts.append(torch.stack(torch.meshgrid(*axes, indexing="ij")).to(like))
        return [part.expand(batch, *part.shape) for part in parts]

    def _clock(self, name: str, time: Tensor, like: Tensor) -> Tensor:
        """Sine and cosine of the phase in the day or the year, (B, 2, *space); times in float64."""
        seconds = time.double().reshape(-1, *[1] * len(self.space))
        phase = seconds / (DAY if name == "hour" else YEAR)
        if name == "hour" and "longitude" in self.coordinates:
            shape = [len(values) if axis == "longitude" else 1 for axis, values in self.coordinates.items()]
            phase = phase + torch.from_numpy(self.coordinates["longitude"] / 360).reshape(shape).to(phase.device)
        angle = 2 * torch.pi * (phase % 1).expand(len(seconds), *self.space)
        return torch.stack([angle.sin(), angle.cos()], 1).to(like)

    def encode_target(self, last: Tensor, target: Tensor) -> Tensor:
        """The scaled increment (B, targets, *space) from the last state to the next, both (B, C, *space).

        NaN where either is missing.
        """
        increment = self.select_targets(target - last)
        return (increment - self._target_column("increment_mean", increment)) / self._target_column(
            "increment_std", increment
        )

    def decode(self, last: Tensor, increment: Tensor) -> Tensor:
        """Undo `encode_target`: the targets (B, targets, *space) at the next time."""
        restored = increment * self._target_column("increment_std", increment) + self._target_column(
            "increment_mean", increment
        )
        return self.select_targets(last) + restored

    def decode_distribution(self, last: Tensor, increment: NoiseDistribution) -> NoiseDistribution:
        """The distribution of the targets at the next time, given that of the scaled increment."""
        shift = self.select_targets(last) + self._target_column("increment_mean", last)
        return increment.affine(self._target_column("increment_std", last), shift)

    def scale_target(self, target: Tensor) -> Tensor:
        """Targets (..., C, *space) in units in which all variables and areas weigh alike in a mean CRPS.

        These are the increment's deviation divided by the area of the point, because the score of scaled values is the
        scaled score. Missing values become 0, in forecast and truth alike.
        """
        scaled = self._filled(target / self._target_column("increment_std", target))
        area = area_weights(self.coordinates)
        return scaled if area is None else scaled * area.to(scaled)

    def scale_spread(self, spread: Tensor) -> Tensor:
        """A standard deviation of the scaled increment in the units of the targets."""
        return spread * self._target_column("increment_std", spread)

    def select_targets(self, state: Tensor) -> Tensor:
        """The target channels of states (..., C, *space)."""
        indices = torch.tensor([list(self.config.variables).index(name) for name in self.config.targets])
        return state.index_select(state.ndim - 1 - len(self.space), indices.to(state.device))

    def check_history(self, history: Tensor) -> None:
        """Refuse states of another shape, with NaN, or in units that are not those of the statistics."""
        expected = (self.config.num_history, len(self.config.variables), *self.space)
        if tuple(history.shape[1:]) != expected:
            raise FieldDataError(
                f"states are (batch, history, variables, {', '.join(self.coordinates)}) = (B, "
                f"{', '.join(map(str, expected))}); got {tuple(history.shape)}: wrong grid, variables or history"
            )
        for channel, name in enumerate(self.config.variables):
            values = history[:, :, channel]
            bad = int((~(values.isfinite() | self._may_lack(channel, values))).sum())
            if bad:
                raise FieldDataError(f"{name} holds NaN or infinity at {bad} places of the initial states; fill them")
            off = float((self.statistics[name].normalize_state(values).flatten(1).nanmean(1)).abs().max())
            if off > FAR_OFF:
                one = self.statistics[name]
                raise FieldDataError(
                    f"mismatched statistics: a state of {name} has a mean {off:.0f} deviations away from that of the "
                    f"training states ({one.mean:.4g} +- {one.std:.4g}); is it in other units?"
                )

    def _may_lack(self, channel: int, values: Tensor) -> Tensor:
        """Where values (B, history, *space) of a variable are NaN and were so at some training time."""
        if self.config.variables[channel] not in self.config.get("masked", ()):
            return torch.zeros((), dtype=torch.bool)
        return values.isnan() & (self.observed[channel] < 1).to(values.device)

    def _column(self, name: str, like: Tensor) -> Tensor:
        """A statistic of every variable, shaped for (B, history, C, *space)."""
        values = [getattr(self.statistics[variable], name) for variable in self.config.variables]
        return like.new_tensor(values).reshape(-1, *[1] * len(self.space))

    def _target_column(self, name: str, like: Tensor) -> Tensor:
        values = [getattr(self.statistics[variable], name) for variable in self.config.targets]
        return like.new_tensor(values).reshape(-1, *[1] * len(self.space))


def _check_names(
    variables: tuple[str, ...], targets: tuple[str, ...], features: tuple[str, ...], calendar: bool
) -> None:
    unknown = [name for name in targets if name not in variables]
    if unknown or not targets:
        raise ValueError(f"targets are some of the variables {list(variables)}; got {list(targets)}")
    strange = [name for name in features if name not in TIME_FEATURES]
    if strange:
        raise ValueError(f"time_features are among {list(TIME_FEATURES)}; got {strange}")
    if features and not calendar:
        raise ValueError(f"time_features {list(features)} need times that are dates (calendar=True)")
