"""Tiny field pipelines with random weights, quick to run."""

from typing import Any

import numpy as np
import torch

from marigold_uq.field.data import Trajectories, WeatherSequences
from marigold_uq.field.encoding import fit_encoder
from marigold_uq.models.field_head import build_network
from marigold_uq.pipelines.field import FieldForecastPipeline
from marigold_uq.schedulers import DistributionalDDIMScheduler, DistributionalScheduler
from support.weather_records import record

NETWORK = {"block_out_channels": (8, 8), "layers_per_block": 1, "embedding_channels": 8, "dropout": 0.0}
SIZES: dict[str, dict[str, int]] = {"mixture": {"num_components": 2}, "low_rank": {"rank": 1}}


def tiny_trajectories(count: int = 12, num_states: int = 8, num_points: int = 16) -> Trajectories:
    """Random walks."""
    steps = torch.randn(count, num_states, num_points, generator=torch.Generator().manual_seed(0))
    return Trajectories(steps.cumsum(1), np.arange(float(num_points)), 0.5 * np.arange(float(num_states)))


def tiny_scheduler(family: str = "gaussian", **options: Any) -> DistributionalDDIMScheduler:
    settings = {
        "num_train_timesteps": 10,
        "beta_start": 0.01,
        "beta_end": 0.5,
        "prediction_type": "v_prediction",
        "eta": 1.0,
        "timestep_spacing": "trailing",
    }
    return DistributionalDDIMScheduler(
        noise_family=family, clip_sample=False, **SIZES.get(family, {}), **{**settings, **options}
    )


def tiny_pipeline(
    family: str = "gaussian", data: Any = None, *, scheduler: DistributionalScheduler | None = None, **encoder: Any
) -> FieldForecastPipeline:
    """A pipeline for trajectories, or for whatever `data` is; `scheduler` takes the place of the family's DDIM."""
    scheduler = tiny_scheduler(family) if scheduler is None else scheduler
    codec = fit_encoder(tiny_trajectories() if data is None else data, **encoder)
    network = build_network(scheduler, codec.event_shape, codec.condition_channels, **NETWORK).eval()
    with torch.no_grad():
        for parameter in network.parameters():  # residual branches start closed: open them
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    pipeline = FieldForecastPipeline(network, scheduler, codec, default_denoising_steps=3)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def tiny_weather(**options: Any) -> FieldForecastPipeline:
    """Two variables on a globe, with the time and a static field."""
    sequences = WeatherSequences(record(), ("2m_temperature", "temperature_850"), ("land_sea_mask",))
    settings: dict[str, Any] = {"grid_channels": True, "time_features": ("hour", "year"), "mean_field": True}
    return tiny_pipeline("gaussian", sequences, **{**settings, "seasonal": True, **options})
