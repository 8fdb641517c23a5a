"""Fixed and adaptive conformal intervals of air temperature forecasts, while the season changes under them.

python -m scripts.studies.fields.adaptive --output runs/adaptive --air ../data/air_temperature.nc

Every six hours of the test months persistence forecasts the next states; its standard deviation at each place and lead
time is that of the validation months. Half widths come from the validation months too: fixed ones stay, adaptive ones
follow their misses. No network is trained, so what is compared is the intervals alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.field.adaptive import RolloutIntervals
from marigold_uq.field.config import read_config
from marigold_uq.field.data import FieldSequences
from marigold_uq.field.splits import open_split
from marigold_uq.files import atomic_path
from marigold_uq.models.field_grid import DAY
from marigold_uq.results import markdown_table

__all__ = ["Options", "compare", "main", "table"]


CONFIG = Path(__file__).parents[3] / "configs" / "field" / "air_small.yaml"
STRETCH_DAYS = 30


@dataclass(frozen=True)
class Options:
    """Compare fixed and adaptive intervals.

    Args:
        output: Folder of the table.
        air: The weather record's netCDF file; by default it is downloaded.
        coverage: Of the intervals.
        num_leads: Lead times of six hours.
        spacing: Takes every so many-th point of both axes.
        step: Of the adaptive intervals.
        window: Their scores.
    """

    output: Path
    air: str = "air_temperature"
    coverage: float = 0.9
    num_leads: int = 4
    spacing: int = 5
    step: float = 0.02
    window: int = 200


def errors_of(part: FieldSequences, num_leads: int, spacing: int) -> tuple[Tensor, Tensor]:
    """|u_{s+l} - u_s| (T, L, C, Y, X) of persistence from every state, and the states (T + L, C, Y, X)."""
    states = part.read(0, 0, len(part.times(0)))[..., ::spacing, ::spacing].double()
    count = len(states) - num_leads
    errors = [(states[lead : lead + count] - states[:count]).abs() for lead in range(1, num_leads + 1)]
    return torch.stack(errors, 1), states


def compare(validation: Tensor, states: Tensor, args: Options) -> dict[str, Tensor]:
    """Fixed and adaptive -> misses (L, T, C, Y, X) of the states after the first, NaN where no truth came.

    `validation` are errors of persistence (n, L, C, Y, X).
    """
    std = validation.square().mean(0).sqrt()  # (L, C, Y, X)
    scores = validation / std
    rank = int(np.ceil((len(scores) + 1) * args.coverage))
    fixed = scores.sort(0).values[min(rank, len(scores)) - 1]
    intervals = RolloutIntervals(args.coverage, args.num_leads, step=args.step, window=args.window, scores=scores)
    shape = (args.num_leads, len(states) - 1, *states.shape[1:])
    misses = {name: torch.full(shape, torch.nan) for name in ("fixed", "adaptive")}
    for time in tqdm(range(len(states) - 1), desc="forecasts"):
        intervals.issue(states[time].expand_as(std), std)
        for lead, missed in intervals.observe(states[time + 1]).items():
            start = time + 1 - lead
            misses["adaptive"][lead - 1, time] = missed.float()
            missed_fixed = (states[time + 1] - states[start]).abs() > fixed[lead - 1] * std[lead - 1]
            misses["fixed"][lead - 1, time] = missed_fixed.float()
    return misses


def table(misses: dict[str, Tensor], steps_per_stretch: int) -> str:
    """Share inside by lead time: over everything, and in the worst 30 days."""
    rows = []
    for name, values in misses.items():
        inside = 1 - values.flatten(2).mean(2)  # (L, T)
        for lead, row in enumerate(inside, 1):
            stretches = [part.nanmean() for part in row.split(steps_per_stretch) if len(part) >= steps_per_stretch // 2]
            rows.append([name, str(lead), f"{float(row.nanmean()):.3f}", f"{min(map(float, stretches)):.3f}"])
    return markdown_table(["intervals", "lead", "inside", "worst 30 days"], rows)


def run(args: Options, invocation: Invocation) -> int:
    """Read, compare, write the table."""
    config = read_config(["--config", str(CONFIG), "--data.weather.path", args.air])[0]
    split = open_split(config.data)
    validation, _ = errors_of(split.validation, args.num_leads, args.spacing)
    _, states = errors_of(split.test, args.num_leads, args.spacing)
    misses = compare(validation, states, args)
    text = table(misses, round(STRETCH_DAYS * DAY / split.test.time_step))
    args.output.mkdir(parents=True, exist_ok=True)
    with atomic_path(args.output / "adaptive.md", overwrite=True) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the options, run."""
    return run_command("scripts.studies.fields.adaptive", Options, run, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
