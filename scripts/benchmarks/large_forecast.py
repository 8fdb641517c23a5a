"""A forecast that does not fit into memory: an ensemble on a global quarter-degree grid, written while it is made.

    python scripts/benchmarks/large_forecast.py --output large_forecast.json

A tiny network with random weights takes the place of a model: time is that of this network, memory and disk are those
of any. The store is deleted afterwards.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from marigold_uq.calibration import Calibration
from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.files import atomic_path
from marigold_uq.models.field_encoder import FieldEncoder
from marigold_uq.models.field_head import build_network
from marigold_uq.pipelines.field import FieldForecastPipeline
from marigold_uq.schedulers import DistributionalDDIMScheduler
from scripts.benchmarks.memory import MemoryWatch, folder_bytes

STATISTICS = {"mean": 280.0, "std": 10.0, "increment_mean": 0.0, "increment_std": 1.0}


@dataclass(frozen=True)
class Options:
    """Time, memory and disk of one large forecast.

    Args:
        members: Samples.
        leads: Lead times.
        latitudes: Points from pole to pole.
        longitudes: Points around the globe.
        folder: Where the store is written; the system's temporary folder by default.
        output: JSON file of the results.
    """

    members: int = 50
    leads: int = 40
    latitudes: int = 721
    longitudes: int = 1440
    folder: Path | None = None
    output: Path = Path("large_forecast.json")


def tiny_model(options: Options) -> FieldForecastPipeline:
    """One variable, one denoising step, seven levels of four channels: the bottleneck is small enough for attention."""
    latitude = np.linspace(90, -90, options.latitudes)
    longitude = np.arange(options.longitudes) * 360 / options.longitudes
    encoder = FieldEncoder(
        variables=["2m_temperature"],
        targets=["2m_temperature"],
        statistics={"2m_temperature": STATISTICS},
        coordinates={"latitude": latitude.tolist(), "longitude": longitude.tolist()},
        calendar=True,
        time_step=21_600.0,
        units={"2m_temperature": "K"},
    )
    scheduler = DistributionalDDIMScheduler(
        noise_family="gaussian",
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        clip_sample=False,
        eta=1.0,
    )
    shape: dict[str, Any] = {
        "block_out_channels": (4,) * 7,
        "layers_per_block": 1,
        "embedding_channels": 8,
        "dropout": 0.0,
    }
    network = build_network(
        scheduler, encoder.event_shape, encoder.condition_channels, periodic=encoder.periodic, **shape
    )
    pipeline = FieldForecastPipeline(network.eval(), scheduler, encoder, default_denoising_steps=1)
    return pipeline.calibrate(Calibration(kappa=tuple(1 + 0.01 * lead for lead in range(options.leads))))


def measure(options: Options) -> dict[str, float]:
    """Write the forecast and delete it."""
    pipeline = tiny_model(options)
    states = 280 + torch.randn(
        1, 2, 1, options.latitudes, options.longitudes, generator=torch.Generator().manual_seed(0)
    )
    values = options.members * options.leads * options.latitudes * options.longitudes * 4
    with TemporaryDirectory(dir=options.folder) as folder, MemoryWatch() as memory:
        store = pipeline.save_forecast(
            Path(folder) / "forecast.zarr",
            states,
            options.leads,
            ensemble_size=options.members,
            time=np.datetime64("2020-01-01"),
            generator=torch.Generator().manual_seed(0),
            batch_size=1,
            coverage=0.9,
        )
        stored = folder_bytes(store)
    return {
        "seconds": memory.seconds,
        "processor_seconds": memory.processor_seconds,
        "sample_gigabytes": values / 1e9,
        "stored_gigabytes": stored / 1e9,
        "peak_memory_gigabytes": memory.peak / 1e9,
        "memory_before_gigabytes": memory.before / 1e9,
    }


def run(options: Options, invocation: Invocation) -> int:
    """Measure, print, write."""
    torch.set_num_threads(1)
    found = {**{key: str(value) for key, value in asdict(options).items()}, **measure(options)}
    with atomic_path(options.output, overwrite=True) as temporary:
        temporary.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the options, run."""
    return run_command("scripts.benchmarks.large_forecast", Options, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
