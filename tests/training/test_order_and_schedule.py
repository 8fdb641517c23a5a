"""Learning rate, batches and order are functions of the step."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.toy_task import Points

from marigold_uq.training.config import OptimizerConfig, TrainingConfig
from marigold_uq.training.order import BatchPlan, steps_of_run


@pytest.mark.parametrize(
    ("number", "factor"),
    # Marigold's recipe: n/100 for n < 100, then exp((n-100)/(25000-100) ln 0.01), then 0.01
    [
        (1, 0.01),
        (50, 0.5),
        (99, 0.99),
        (100, 1.0),
        (101, math.exp(1 / 24900 * math.log(0.01))),
        (12550, 0.1),  # half way between 100 and 25000: the square root of 0.01
        (25000, 0.01),
        (30000, 0.01),
    ],
)
def test_the_default_rate_is_marigolds_at_the_nth_step(number: int, factor: float) -> None:
    assert OptimizerConfig(learning_rate=2.0).at(number - 1) == pytest.approx(2 * factor, rel=1e-12)


def test_cosine_falls_along_half_a_wave_and_stays_at_its_end() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=10, decay="cosine", decay_steps=110, final_factor=0.2)
    assert config.at(9) == 1.0
    assert config.at(59) == pytest.approx(0.6, abs=1e-12)  # half way: the mean of 1 and 0.2
    assert config.at(34) == pytest.approx(0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2, abs=1e-12)
    assert config.at(109) == pytest.approx(0.2, abs=1e-12)
    assert config.at(500) == pytest.approx(0.2, abs=1e-12)


def test_constant_stays_at_the_peak_and_no_warm_up_starts_there() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=0, decay="constant")
    assert [config.at(step) for step in (0, 10**6)] == [1.0, 1.0]


def test_a_decay_that_ends_within_the_warm_up_is_refused() -> None:
    with pytest.raises(ValueError, match=r"decay_steps=50.*warmup_steps=100"):
        OptimizerConfig(decay_steps=50)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"micro_batch_size": 0}, "micro_batch_size must be at least 1"),
        ({"checkpoint_limit": 0}, "checkpoint_limit must be at least 1"),
        ({"ema_decay": 1.0}, "ema_decay"),
        ({"seed": -1}, "seed must be at least 0"),
    ],
)
def test_a_config_that_cannot_mean_anything_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingConfig(output=Path("x"), **settings)


@pytest.mark.parametrize(("micro", "processes"), [(3, 1), (4, 4), (16, 1), (None, 3)])
def test_a_batch_that_does_not_divide_is_refused_with_all_numbers(micro: int | None, processes: int) -> None:
    config = TrainingConfig(output=Path("x"), batch_size=8, micro_batch_size=micro)
    with pytest.raises(ValueError, match=rf"batch_size=8.*micro_batch_size=\d+ x {processes} processes"):
        BatchPlan.of(config, 0, processes)


@pytest.mark.parametrize(("micro", "processes"), [(1, 1), (2, 1), (8, 1), (2, 2), (1, 4), (None, 2)])
def test_processes_and_micro_batches_share_out_the_same_batch_in_the_same_order(
    micro: int | None, processes: int
) -> None:
    config = TrainingConfig(output=Path("x"), batch_size=8, micro_batch_size=micro)
    plans = [BatchPlan.of(config, process, processes) for process in range(processes)]
    flat = [position for plan in plans for part in plan.positions(3) for position in part]
    assert flat == list(range(24, 32))
    assert all(plan.size == 8 for plan in plans)


def names_of_steps(dataset: Any, *, start: int = 0, stop: int, workers: int = 0, seed: int = 0) -> list[list[str]]:
    plan = BatchPlan(micro=2, accumulation=2, process=0, processes=1)
    steps = steps_of_run(dataset, plan, start_step=start, max_steps=stop, num_workers=workers, seed=seed)
    return [[name for batch in batches for name in batch["name"]] for _, batches in steps]


def test_every_sample_of_an_epoch_is_visited_once_in_an_order_of_its_own() -> None:
    steps = names_of_steps(Points(12), stop=6)  # 3 steps of 4 are an epoch
    first, second = ([name for step in part for name in step] for part in (steps[:3], steps[3:]))
    everyone = Counter(f"point-{i}" for i in range(12))
    assert Counter(first) == Counter(second) == everyone
    assert first != second
    assert first != [f"point-{i}" for i in range(12)]


def test_the_order_depends_on_the_seed_alone() -> None:
    assert names_of_steps(Points(12), stop=6) == names_of_steps(Points(12), stop=6)
    assert names_of_steps(Points(12), stop=6) != names_of_steps(Points(12), stop=6, seed=1)


@pytest.mark.parametrize("workers", [0, 2])
def test_reading_from_the_middle_of_an_epoch_goes_on_where_the_whole_run_was(workers: int) -> None:
    whole = names_of_steps(Points(14), stop=8)
    assert names_of_steps(Points(14), start=4, stop=8, workers=workers) == whole[4:]


class SelfOrdered(Points):
    """A data set that draws its own order: position i of epoch e is sample i + e."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__((index + self.epoch) % len(self))


def test_a_data_set_with_set_epoch_is_read_from_front_to_back() -> None:
    steps = names_of_steps(SelfOrdered(8), stop=4)
    assert [*steps[0], *steps[1]] == [f"point-{i}" for i in range(8)]
    assert [*steps[2], *steps[3]] == [f"point-{(i + 1) % 8}" for i in range(8)]


def test_fewer_samples_than_a_batch_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3 samples per epoch, fewer than one batch of 4"):
        names_of_steps(Points(3), stop=1)
