"""Calls at once: one pipeline, many threads, mixed options; every result is that of the same call alone."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_depth, tiny_field
from support.tiny_conditioned import conditioned_pipeline
from support.tiny_sets import quick_model

NUM_THREADS = 16
NUM_CALLS = 200

Call = Callable[[int], np.ndarray]


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def depth_calls() -> tuple[Any, Call]:
    pipeline = tiny_depth.tiny_pipeline("gaussian")
    pictures = [tiny_depth.picture(16, 16, seed) for seed in range(3)]

    def call(number: int) -> np.ndarray:
        options: dict[str, Any] = {"num_inference_steps": 1 + number % 4, "generator": seeded(number)}
        mode = (None, "ensemble", "trajectory")[number % 3]
        output = pipeline(pictures[number % 3], uncertainty=mode, ensemble_size=2 if mode else 1, **options)
        return np.asarray(output.prediction if mode is None else output.uncertainty)

    return pipeline, call


def conditioned_calls() -> tuple[Any, Call]:
    """What the commands do by default where a model has an image encoder."""
    pipeline = conditioned_pipeline("low_rank")
    pictures = [tiny_depth.picture(32, 16 * (1 + seed), seed) for seed in range(3)]

    def call(number: int) -> np.ndarray:
        mode = (None, "marginal", "ensemble", "trajectory")[number % 4]
        options: dict[str, Any] = {"num_inference_steps": 1 + number % 3, "ensemble_size": 2 if mode else 1}
        picture, options["processing_resolution"] = pictures[number % 3], 32 * (1 + number % 2)
        output = pipeline(picture, uncertainty=mode, generator=seeded(number), **options)
        return np.asarray(output.prediction if mode is None else output.uncertainty)

    return pipeline, call


def field_calls() -> tuple[Any, Call]:
    pipeline = tiny_field.tiny_pipeline("gaussian")
    states = torch.stack([tiny_field.tiny_trajectories().read(i, 0, 2) for i in range(2)])

    def call(number: int) -> np.ndarray:
        options = {"num_inference_steps": 1 + number % 5, "ensemble_size": 2, "output_epistemic": bool(number % 2)}
        return pipeline(states, 1 + number % 2, generator=seeded(number), **options).samples.numpy()

    return pipeline, call


def table_calls() -> tuple[Any, Call]:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (60, 2))
    pipeline = quick_model().fit(x, x.sum(1) + 0.1 * rng.normal(size=60)).pipeline_

    def call(number: int) -> np.ndarray:
        options: dict[str, Any] = {"num_inference_steps": 1 + number % 5, "coverage": (None, 0.8)[number % 2]}
        return pipeline(x[: 1 + number % 7], 4 + number % 3, generator=seeded(number), **options).samples

    return pipeline, call


@pytest.mark.parametrize("make", [depth_calls, conditioned_calls, field_calls, table_calls])
def test_calls_from_many_threads_equal_the_same_calls_one_after_the_other(
    make: Callable[[], tuple[Any, Call]],
) -> None:
    pipeline, call = make()
    before = pipeline.scheduler.num_inference_steps
    alone = [call(number) for number in range(NUM_CALLS)]
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        together = list(threads.map(call, range(NUM_CALLS)))
    assert different(alone, together) == []
    assert pipeline.scheduler.num_inference_steps == before, "a call must leave the scheduler as it was"


def different(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> list[int]:
    return [index for index, pair in enumerate(zip(first, second, strict=True)) if not np.array_equal(*pair)]
