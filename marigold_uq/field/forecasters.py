"""Where forecasts come from: a pipeline, or a baseline that needs no model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from marigold_uq.field.data import FieldDataError, FieldSequences
from marigold_uq.models.field_grid import DAY, YEAR
from marigold_uq.pipelines.field import FieldForecastPipeline
from marigold_uq.randomness import member_seed

__all__ = ["Climatology", "Forecaster", "Persistence", "PipelineForecaster", "Precision", "load_quietly"]


Precision = Literal["no", "bf16", "fp16"]
"""Of the network while it samples, accelerate's names; its weights, and all that is around it, stay as they are."""
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Forecaster(Protocol):
    """Samples for a batch of windows; what a window gets depends on the window alone."""

    name: str

    def forecast(self, batch: dict[str, Any], ids: Sequence[int], num_leads: int) -> Tensor:
        """Samples (M, B, L, C, *space) from `history` (B, H, C, *space) and `time` (B,); `ids` number the windows."""


class PipelineForecaster:
    """A trained model."""

    def __init__(
        self,
        pipeline: FieldForecastPipeline,
        *,
        ensemble_size: int = 40,
        num_inference_steps: int | None = None,
        seed: int = 0,
        batch_size: int = 128,
        mixed_precision: Precision = "no",
        name: str = "pipeline",
    ) -> None:
        self.pipeline, self.name, self.autocast = pipeline, name, AUTOCAST.get(mixed_precision)
        self.ensemble_size, self.num_inference_steps = ensemble_size, num_inference_steps
        self.seed, self.batch_size = seed, batch_size
        pipeline.set_progress_bar_config(disable=True)
        pipeline.unet.eval()

    def interval_scales(self, coverage: float) -> tuple[float, ...] | None:
        """Half widths of the model's calibrated interval.

        None where it was calibrated for other sizes or steps than these, or for lower coverages alone.
        """
        calibration = self.pipeline.calibration_for()
        call = {"ensemble_size": self.ensemble_size, "num_inference_steps": self.num_inference_steps}
        grid = calibration.interval
        if grid is None or coverage > grid.coverages[-1] or calibration.mismatches(**call):
            return None
        return grid.scale(coverage)

    def forecast(self, batch: dict[str, Any], ids: Sequence[int], num_leads: int) -> Tensor:
        """Samples of the model; each window and sample has its own seed."""
        seeds = [member_seed(self.seed, index, m) for index in ids for m in range(self.ensemble_size)]
        with nullcontext() if self.autocast is None else rounded_forward(self.pipeline.unet, self.autocast):
            forecast = self.pipeline(
                batch["history"],
                num_leads,
                ensemble_size=self.ensemble_size,
                time=np.asarray(batch["time"]),
                num_inference_steps=self.num_inference_steps,
                generator=[torch.Generator().manual_seed(seed) for seed in seeds],
                batch_size=self.batch_size,
                output_type="pt",
            )
        return forecast.samples


@contextmanager
def rounded_forward(network: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Within the block the network computes in `dtype` and answers in float32; nothing around it is rounded.

    Autocast around the whole pipeline would also round the season's mean: bfloat16 knows 280 and 282 K only.
    """
    plain = network.forward

    def rounded(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with torch.autocast(x.device.type, dtype):
            return plain(x, *args, **kwargs).float()

    network.forward = rounded
    try:
        yield
    finally:
        del network.forward


def load_quietly(folder: Path) -> FieldForecastPipeline:
    """A pipeline from a folder, without progress bars."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline = FieldForecastPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


class Persistence:
    """The last state, one sample: its CRPS is the absolute error."""

    name = "persistence"

    def forecast(self, batch: dict[str, Any], ids: Sequence[int], num_leads: int) -> Tensor:
        """The last state at every lead time."""
        last = batch["history"][:, -1]
        return last.unsqueeze(1).expand(-1, num_leads, *last.shape[1:]).unsqueeze(0)


class Climatology:
    """Training states of the same time: of the equation's time, or of the same hour within so many days of the year."""

    name = "climatology"

    def __init__(
        self, train: FieldSequences, *, ensemble_size: int = 40, window_days: float = 20.0, seed: int = 0
    ) -> None:
        self.train, self.ensemble_size, self.window, self.seed = train, ensemble_size, window_days * DAY, seed
        places = [(s, i, t) for s in range(train.num_sequences) for i, t in enumerate(train.times(s))]
        self.places = np.array([(s, i) for s, i, _ in places])
        self.times = np.array([t for *_, t in places])

    def forecast(self, batch: dict[str, Any], ids: Sequence[int], num_leads: int) -> Tensor:
        """Random training states for every lead time."""
        rows = []
        for time, index in zip(np.asarray(batch["time"], np.float64), ids, strict=True):
            leads = [self._draw(time + lead * self.train.time_step, index, lead) for lead in range(1, num_leads + 1)]
            rows.append(torch.stack(leads, 1))  # (M, L, C, *space)
        return torch.stack(rows, 1)

    def _draw(self, time: float, index: int, lead: int) -> Tensor:
        """(M, C, *space)."""
        candidates = np.flatnonzero(self._same_time(time))
        if not len(candidates):
            raise FieldDataError(f"{self.train.source}: no training state of the same time of day and year as {time}")
        generator = np.random.default_rng(member_seed(self.seed, index, lead))
        enough = len(candidates) >= self.ensemble_size
        chosen = generator.choice(candidates, self.ensemble_size, replace=not enough)
        return torch.cat([self.train.read(int(s), int(i), int(i) + 1) for s, i in self.places[chosen]])

    def _same_time(self, time: float) -> np.ndarray:
        if not self.train.calendar:
            return np.abs(self.times - time) < 1e-3 * self.train.time_step
        hour = (self.times - time) % DAY
        season = (self.times - time + YEAR / 2) % YEAR - YEAR / 2
        return (np.minimum(hour, DAY - hour) < 1) & (np.abs(season) <= self.window)
