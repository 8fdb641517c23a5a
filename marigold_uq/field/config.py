"""All options of `train/train_field.py`, as frozen dataclasses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from marigold_uq.commands.runner import parse_options
from marigold_uq.field.rollout import RolloutConfig
from marigold_uq.training.config import OptimizerConfig, TrainingConfig
from marigold_uq.training.objective import ObjectiveConfig
from marigold_uq.training.selection import SelectionConfig, require_plain_head

__all__ = ["FieldData", "FieldModel", "FieldTrainConfig", "PdeData", "PlateauConfig", "WeatherData", "read_config"]


@dataclass(frozen=True)
class PdeData:
    """Trajectories of an equation, from a file of scripts/generate_pde.py or of PDEBench.

    Args:
        path: The HDF5 file.
        num_states: Take the first so many states of the file; None takes all.
        state_stride: Every so many-th of them.
        point_stride: Every so many-th point.
        test: Share of the trajectories for testing.
        validation: Share of the rest for validation.
        split_seed: Of the split; the same for every model that is compared.
        thin_again: Take strides of a file that was thinned when it was written, too.
    """

    path: str = ""
    num_states: int | None = None
    state_stride: int = 1
    point_stride: int = 1
    test: float = 0.1
    validation: float = 0.1
    split_seed: int = 0
    thin_again: bool = False


@dataclass(frozen=True)
class WeatherData:
    """A weather record and its periods.

    Args:
        path: Zarr folder or URL, netCDF file, or air_temperature.
        variables: Variables of the state; name_level for one level.
        static: Fields without time.
        latitude: [south, north].
        longitude: [west, east].
        train: First and last date.
        validation: First and last date; never seen in training.
        test: First and last date.
        target_hours: UTC hours that are forecast; null takes all.
        masked: Variables that may hold NaN, for instance those of the ocean; missing points are left out of the loss,
            the scores and the forecasts.
        in_memory: Read everything once instead of lazily.
        window: Train on windows of so many states, each read once per epoch and while the one before is used; 0 reads
            every sample by itself. Set training.num_workers to 0 or 1: each worker reads for itself.
        open_windows: Windows whose samples are shuffled together; twice as many are in memory.
        storage_options: For fsspec.
    """

    path: str = ""
    variables: list[str] = field(default_factory=list)
    static: list[str] = field(default_factory=list)
    latitude: tuple[float, float] | None = None
    longitude: tuple[float, float] | None = None
    train: tuple[str, str] = ("1900", "2000")
    validation: tuple[str, str] = ("2000", "2001")
    test: tuple[str, str] = ("2001", "2002")
    target_hours: list[int] | None = None
    masked: list[str] = field(default_factory=list)
    in_memory: bool = False
    window: int = 0
    open_windows: int = 4
    storage_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.window < 0 or self.open_windows < 1:
            raise ValueError(
                f"window must be at least 0 and open_windows at least 1; got {self.window} and {self.open_windows}"
            )


@dataclass(frozen=True)
class FieldData:
    """What is learned from: exactly one of the two.

    Args:
        pde: Trajectories.
        weather: A weather record.
    """

    pde: PdeData | None = None
    weather: WeatherData | None = None

    def __post_init__(self) -> None:
        if (self.pde is None) == (self.weather is None):
            raise ValueError("give either data.pde or data.weather")


@dataclass(frozen=True)
class FieldModel:
    """The distribution family, the schedule, the network and what it sees.

    Args:
        noise_family: point, gaussian, mixture, low_rank, low_rank_mixture, cholesky (small grids) or sample; or auto,
            which lets validation data choose (see `selection`).
        num_components: Components of a mixture.
        rank: Rank of the low-rank families.
        eta: Stochasticity of sampling, 0 DDIM .. 1 DDPM.
        framework: "ddim", "edm" or "flow" (matching). The next entries up to timestep_spacing are ddim's.
        schedule: Further arguments of the framework's scheduler, for instance sigma_max of edm or shift of flow.
        prediction_type: epsilon, v_prediction or sample.
        num_train_timesteps: T. With 1, beta_start near 1, prediction_type and family "sample" the model is a one-pass
            ensemble: its only input beside the condition is noise.
        beta_start: First beta.
        beta_end: Last beta (beta_T).
        zero_terminal_snr: Rescale the betas so that x_T is pure noise (not for epsilon).
        timestep_spacing: trailing starts at T for any number of steps.
        default_denoising_steps: Stored with the model; null takes all timesteps.
        initial_scale: Standard deviation the head starts with.
        targets: Predicted variables; null takes all.
        num_history: States the network sees.
        grid_channels: Whether the network sees the coordinates.
        time_features: Of ["hour", "year"], for data with dates.
        mean_field: Whether the network sees the mean state of the training period.
        seasonal: Whether it sees the mean state of the hour and season that are predicted (a few waves per point).
        unet: Arguments of UNet1d or UNet2d.
    """

    noise_family: str = "gaussian"
    num_components: int = 1
    rank: int = 0
    eta: float = 1.0
    framework: Literal["ddim", "edm", "flow"] = "ddim"
    schedule: dict[str, Any] = field(default_factory=dict)
    prediction_type: Literal["epsilon", "v_prediction", "sample"] = "epsilon"
    num_train_timesteps: int = 50
    beta_start: float = 0.001
    beta_end: float = 0.2
    zero_terminal_snr: bool = False
    timestep_spacing: Literal["leading", "trailing", "linspace"] = "trailing"
    default_denoising_steps: int | None = None
    initial_scale: float = 0.5
    targets: list[str] | None = None
    num_history: int = 2
    grid_channels: bool = False
    time_features: list[str] = field(default_factory=list)
    mean_field: bool = False
    seasonal: bool = False
    unet: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        steps, last = self.default_denoising_steps, self.num_train_timesteps
        if steps is not None and steps < 1:
            raise ValueError(f"default_denoising_steps must be at least 1; got {steps}")
        if steps is not None and self.framework == "ddim" and steps > last:
            raise ValueError(f"default_denoising_steps must be between 1 and num_train_timesteps={last}; got {steps}")
        require_plain_head(self.noise_family, self.num_components, self.rank)


@dataclass(frozen=True)
class PlateauConfig:
    """The paper's recipe: halve the rate and stop when the validation loss makes no progress.

    Args:
        halve_after: Validations without progress until the rate is halved; 0 never.
        stop_after: Validations without progress until training ends with the best weights; 0 never.
    """

    halve_after: int = 0
    stop_after: int = 0

    def __post_init__(self) -> None:
        if min(self.halve_after, self.stop_after) < 0:
            raise ValueError(f"halve_after, stop_after must be at least 0; got {self.halve_after}, {self.stop_after}")


def _field_training() -> TrainingConfig:
    optimizer = OptimizerConfig(learning_rate=5e-4, decay="constant")
    return TrainingConfig(output=Path("runs/field"), batch_size=128, optimizer=optimizer, ema_decay=0.995)


@dataclass(frozen=True)
class FieldTrainConfig:
    """Train a probabilistic forecast model.

    Args:
        data: What is learned from.
        model: The distribution family, the schedule, the network.
        objective: What is minimised.
        one_time_per_epoch: An epoch takes one random time of every trajectory (the paper), not all times.
        validation_samples: Held-out samples of the validation loss, always the same; 0 turns it off.
        plateau: Halving and stopping.
        rollout: Training on the model's own states, over several steps.
        selection: How model.noise_family "auto" is chosen.
        training: The loop.
        push_to_hub: Hub repository for the finished model.
    """

    data: FieldData
    model: FieldModel = field(default_factory=FieldModel)
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(num_draws=3))
    one_time_per_epoch: bool = False
    validation_samples: int = 256
    plateau: PlateauConfig = field(default_factory=PlateauConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    training: TrainingConfig = field(default_factory=_field_training)
    push_to_hub: str | None = None

    def __post_init__(self) -> None:
        watched = self.plateau.halve_after or self.plateau.stop_after
        if watched and not (self.validation_samples and self.training.validate_every):
            raise ValueError("plateau looks at the validation loss: set validation_samples and training.validate_every")
        if self.rollout.num_leads > 1 and self.one_time_per_epoch:
            raise ValueError("rollout.num_leads > 1 trains on all times: set one_time_per_epoch to false")


def read_config(arguments: Sequence[str]) -> tuple[FieldTrainConfig, str]:
    """The config that these words of a command line mean, and its complete text; unknown keys are errors."""
    config, invocation = parse_options("train/train_field.py", FieldTrainConfig, arguments)
    return config, invocation.config
