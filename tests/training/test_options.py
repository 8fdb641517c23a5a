"""Options of the loop that change how fast it is and not what it learns: workers, compiling, kernels."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toy_task import Points, ToyTask, assert_same_weights, toy_config

from marigold_uq.depth.data.mixture import MixtureDataset
from marigold_uq.training.config import OptimizerConfig, TrainingConfig
from marigold_uq.training.loop import Trainer, make_accelerator, reading_workers
from marigold_uq.training.optimizer import make_optimizer
from marigold_uq.training.order import BatchPlan, steps_of_run


def weights_after(folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    Trainer(ToyTask(hidden=4), toy_config(folder, **changes)).run()
    return torch.load(folder / "model" / "weights.pt", weights_only=True)


def test_compiling_learns_the_same_and_saves_under_the_same_names(tmp_path: Path) -> None:
    plain = weights_after(tmp_path / "plain")
    compiled = weights_after(tmp_path / "compiled", compile="aot_eager")
    assert_same_weights(plain, compiled, tolerance=1e-6)


def test_a_backend_of_compile_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no_such_backend"):
        weights_after(tmp_path, compile="no_such_backend")


def test_the_fused_optimiser_learns_the_same(tmp_path: Path) -> None:
    fused = OptimizerConfig(learning_rate=0.05, warmup_steps=0, decay="constant", max_grad_norm=0, fused=True)
    plain = OptimizerConfig(learning_rate=0.05, warmup_steps=0, decay="constant", max_grad_norm=0)
    one, two = (weights_after(tmp_path / str(one.fused), optimizer=one) for one in (fused, plain))
    assert_same_weights(one, two, tolerance=1e-5)
    optimizer = make_optimizer([torch.nn.Parameter(torch.ones(2))], fused, torch.device("cpu"))
    assert optimizer.defaults["fused"] is True


def test_eight_bit_adam_says_what_it_needs() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match="needs a GPU; this run is on cpu"):
        make_optimizer(parameters, OptimizerConfig(kind="adamw8bit"), torch.device("cpu"))
    with pytest.raises(ValueError, match="leave one of them out"):
        OptimizerConfig(kind="adamw8bit", fused=True)


class _On:
    """As much of an accelerator as `reading_workers` asks for."""

    def __init__(self, kind: str, processes: int) -> None:
        self.device, self.num_processes = torch.device(kind), processes


@pytest.mark.parametrize(
    ("kind", "processes", "cores", "expected"),
    [("cpu", 1, 8, 0), ("cuda", 1, 4, 3), ("cuda", 1, 64, 8), ("cuda", 4, 16, 3), ("cuda", 8, 8, 1)],
)
def test_workers_by_default(monkeypatch, kind: str, processes: int, cores: int, expected: int) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    config = TrainingConfig(output=Path("x"))
    assert reading_workers(config, _On(kind, processes)) == expected  # type: ignore[arg-type]
    assert reading_workers(TrainingConfig(output=Path("x"), num_workers=5), _On(kind, processes)) == 5  # type: ignore[arg-type]


def test_tf32_is_a_switch(tmp_path: Path) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        make_accelerator(toy_config(tmp_path))
        assert torch.get_float32_matmul_precision() == before
        make_accelerator(toy_config(tmp_path, allow_tf32=True))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


class _Named(Points):
    """Points that also say which process read them."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "process": os.getpid()}


def read(dataset: Any, workers: int, steps: int = 9) -> tuple[list[list[str]], set[int]]:
    plan = BatchPlan(micro=2, accumulation=2, process=0, processes=1)
    batches = steps_of_run(dataset, plan, start_step=0, max_steps=steps, num_workers=workers)
    found = [batch for _, parts in batches for batch in parts]
    return [list(batch["name"]) for batch in found], {int(one) for batch in found for one in batch["process"]}


@pytest.mark.parametrize("kind", ["plain", "mixture"])
def test_workers_stay_from_epoch_to_epoch_and_read_the_same(kind: str) -> None:
    """Three epochs of three steps: two processes read them all."""

    def dataset() -> Any:
        return _Named(12) if kind == "plain" else MixtureDataset([_Named(7), _Named(5)], [0.5, 0.5], 12, seed=3)

    alone, own = read(dataset(), 0)
    together, workers = read(dataset(), 2)
    assert together == alone
    assert len(workers) == 2
    assert not workers & own


class _OwnEpoch(_Named):
    """A data set of a user's, whose epoch is a plain number that running workers do not see."""

    def __init__(self) -> None:
        super().__init__(8)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "name": f"{self.epoch}-{index}"}


def test_workers_are_started_anew_for_a_data_set_whose_epoch_would_not_reach_them() -> None:
    names, workers = read(_OwnEpoch(), 1, steps=4)
    assert [name[0] for batch in names for name in batch] == ["0"] * 8 + ["1"] * 8
    assert len(workers) == 2
