"""A regression with a known answer for the loop: y = 2 x_0 - x_1 + 0.1 noise, learned by a tiny network."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from marigold_uq.training.config import OptimizerConfig, TrainingConfig
from marigold_uq.training.task import TrainingTask

SLOPES = torch.tensor([2.0, -1.0])


class Points(Dataset[dict[str, Any]]):
    """Random points x (2,); sample i is always the same. `broken` names one whose x is NaN."""

    def __init__(self, length: int = 32, broken: int | None = None) -> None:
        self.x = torch.randn(length, 2, generator=torch.Generator().manual_seed(0))
        if broken is not None:
            self.x[broken] = torch.nan

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "name": f"point-{index}"}


class ToyTask(TrainingTask):
    """Notes which samples it saw, and scores its network on points it never saw."""

    def __init__(self, dataset: Any = None, *, hidden: int = 0, dropout: float = 0.0, noise: float = 0.1) -> None:
        self.dataset: Any = Points() if dataset is None else dataset
        self.noise = noise
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.network: nn.Module = nn.Linear(2, 1)
            if hidden:
                self.network = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Dropout(dropout), nn.Linear(hidden, 1))
        self.seen: list[list[str]] = []
        self.validated: list[int] = []

    def losses(self, network: nn.Module, batch: dict[str, Any], generators: list[torch.Generator]) -> Tensor:
        noise = torch.stack([torch.randn((), generator=generator) for generator in generators])
        self.seen.append(list(batch["name"]))
        return (network(batch["x"])[:, 0] - batch["x"] @ SLOPES - self.noise * noise).square()

    def validate(self, network: nn.Module, step: int, pictures: Path) -> dict[str, float]:
        self.validated.append(step)
        torch.rand(3)  # a careless validation that draws from the global stream must not change the training
        x = torch.randn(64, 2, generator=torch.Generator().manual_seed(1))
        was_training = network.training
        network.eval()
        with torch.no_grad():
            error = float((network(x)[:, 0] - x @ SLOPES).square().mean())
        network.train(was_training)
        return {"validation/error": error}

    def save(self, network: nn.Module, folder: Path) -> None:
        torch.save(network.state_dict(), folder / "weights.pt")


def toy_config(output: Path, **changes: Any) -> TrainingConfig:
    """Eight samples per step, no schedule, on the CPU."""
    optimizer = OptimizerConfig(learning_rate=0.05, warmup_steps=0, decay="constant", max_grad_norm=0)
    defaults: dict[str, Any] = {
        "optimizer": optimizer,
        "max_steps": 12,
        "batch_size": 8,
        "checkpoint_every": 4,
        "validate_every": 0,
        "log_every": 1,
        "ema_decay": 0.0,
        "tracker": "none",
        "cpu": True,
    }
    return TrainingConfig(output=output, **{**defaults, **changes})


def weights_of(folder: Path) -> dict[str, Tensor]:
    """The finished model of a run."""
    return torch.load(folder / "model" / "weights.pt")


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same_weights(left: dict[str, Tensor], right: dict[str, Tensor], *, tolerance: float = 0.0) -> None:
    """Bit for bit, or up to a tolerance."""
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=tolerance, atol=tolerance, msg=name)
