"""Train a stack: all models take one batched step, yet each has its own rows, order, random numbers and end."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from tqdm.auto import tqdm

from marigold_uq.tabular.objectives import Objective
from marigold_uq.tabular.rows import StackedRows, gather_rows


@dataclass(frozen=True)
class TrainingOptions:
    """How a stack is trained."""

    batch_size: int = 32
    learning_rate: float = 1e-3
    amsgrad: bool = False
    ema_decay: float | None = None
    """Moving average of the weights, which is what validation and the result use; None uses the weights themselves."""
    patience: int | None = None
    """Epochs without a better validation score after which a model stops; None trains every model to its end."""


@dataclass
class Progress:
    """Where each of the S models stands."""

    epoch: list[int]
    cursor: list[int]  # next slot within the epoch
    active: list[bool]
    best_score: list[float]
    best_epoch: list[int]


class StackedTrainer:
    """Trains `model`, whose parameters carry the model axis first.

    A model that reaches its `max_epochs` or runs out of patience is frozen: its rows weigh 0, its momentum is zeroed,
    so Adam's update is exactly 0, and its average stays. The others do not notice. Models share no number, so what a
    model becomes is what it becomes alone, up to the rounding of batched products.

    Args:
        model: The stack, already initialised.
        objective: What is drawn and scored.
        rows: Training rows of each model.
        generators: One per model: order of the rows and what the objective draws.
        options: Batch size, optimiser, averaging, patience.
        max_epochs: For each model.
        validation: Rows of each model with everything the objective needs (fixed draws included) to judge an epoch.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        rows: StackedRows,
        generators: Sequence[torch.Generator],
        options: TrainingOptions,
        max_epochs: Sequence[int],
        validation: StackedRows | None = None,
    ) -> None:
        num_models = rows.num_models
        if not len(generators) == len(max_epochs) == num_models:
            raise ValueError(
                f"{num_models} tables need {num_models} generators and max_epochs; got {len(generators)} and "
                f"{len(max_epochs)}"
            )
        if options.patience is not None and validation is None:
            raise ValueError("early stopping needs validation rows: pass them, or patience=None")
        self.model, self.objective, self.rows, self.options = model, objective, rows, options
        self.generators, self.max_epochs, self.validation = list(generators), list(max_epochs), validation
        self.names = [name for name, _ in model.named_parameters()]
        self.weights = [parameter for _, parameter in model.named_parameters()]
        averaging = options.ema_decay is not None
        self.averaged = [w.detach().clone() for w in self.weights] if averaging else [w.detach() for w in self.weights]
        self.best = [w.clone() for w in self.averaged] if validation is not None else []
        self.optimizer = torch.optim.Adam(self.weights, lr=options.learning_rate, amsgrad=options.amsgrad, fused=True)
        self.progress = Progress(
            [0] * num_models,
            [0] * num_models,
            [epochs > 0 for epochs in max_epochs],
            [math.inf] * num_models,
            [0] * num_models,
        )
        self.steps_per_epoch = [math.ceil(count / options.batch_size) for count in rows.counts]
        self.num_steps = 0
        self.buffers: dict[str, Tensor] = {}
        for model_index in range(num_models):
            self._refill(model_index)

    @property
    def best_epochs(self) -> list[int]:
        """Epochs after which each model's validation score was best (its last epoch without validation)."""
        return self.progress.best_epoch if self.validation is not None else self.progress.epoch

    def train(self, *, verbose: bool = False, description: str = "training") -> nn.Module:
        """Train every model to its end and put the results into `model`, which is returned."""
        total = max(self.max_epochs)
        with tqdm(total=total, desc=description, unit="epoch", disable=not verbose) as bar:
            while any(self.progress.active):
                self.step()
                bar.update(max(self.progress.epoch) - bar.n)
        return self.finish()

    @torch.no_grad()
    def finish(self) -> nn.Module:
        """Copy the result of every model (best, averaged or last weights) into `model`."""
        for weight, result in zip(self.weights, self.best or self.averaged, strict=True):
            weight.copy_(result)
        return self.model

    def step(self) -> None:
        """One step of all active models, and the end of an epoch for those that reach it."""
        size = self.options.batch_size
        start = torch.tensor(self.progress.cursor)
        slots = start.unsqueeze(1) + torch.arange(size)  # (S, B)
        drawn = {name: gather_rows(buffer, slots) for name, buffer in self.buffers.items()}
        batch = {**self.rows.gather(drawn.pop("row")), **drawn}
        self._update(batch, drawn["live"])
        self.progress.cursor = [cursor + size for cursor in self.progress.cursor]
        ended = [s for s, steps in enumerate(self.steps_per_epoch) if self.progress.cursor[s] >= steps * size]
        if ended:
            self._end_epochs(ended)

    def _update(self, batch: Mapping[str, Tensor], live: Tensor) -> None:
        """Each model's loss is the mean over its live rows; their sum has each model's own gradient."""
        active = torch.tensor(self.progress.active, dtype=live.dtype).unsqueeze(1)  # (S, 1)
        weight = batch["weights"] * live * active / live.sum(1, keepdim=True).clamp(min=1)
        loss = (self.objective.scores(self.model, batch) * weight).sum()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        if self.options.ema_decay is not None:
            self.num_steps += 1
            warm = (1 + self.num_steps) / (10 + self.num_steps)  # the first averages must forget the initial weights
            self._average(active, 1 - min(self.options.ema_decay, warm))

    @torch.no_grad()
    def _average(self, active: Tensor, rate: float) -> None:
        if all(self.progress.active):
            torch._foreach_lerp_(self.averaged, [w.detach() for w in self.weights], rate)
            return
        for average, weight in zip(self.averaged, self.weights, strict=True):
            average.lerp_(weight, rate * active.reshape(-1, *[1] * (weight.ndim - 1)))

    def _end_epochs(self, ended: Sequence[int]) -> None:
        progress, patience = self.progress, self.options.patience
        running = [s for s in ended if progress.active[s]]
        scores = self.validation_scores() if running and self.validation is not None else None
        for s in running:
            progress.epoch[s] += 1
            if scores is not None and scores[s] < progress.best_score[s]:
                self._keep_best(s, scores[s])
            stale = patience is not None and progress.epoch[s] - progress.best_epoch[s] >= patience
            if stale or progress.epoch[s] >= self.max_epochs[s]:
                self._freeze(s)
        for s in ended:
            progress.cursor[s] = 0
            if progress.active[s]:
                self._refill(s)

    @torch.no_grad()
    def validation_scores(self) -> list[float]:
        """Weighted mean score of each model's validation rows, with the weights that would be kept."""
        assert self.validation is not None
        batch = {**self.validation.columns}
        averaged = dict(zip(self.names, self.averaged, strict=True))
        scores = self.objective.scores(_Bound(self.model, averaged), batch)  # (S, N)
        return ((scores * self.validation.weights).sum(1) / self.validation.weights.sum(1)).tolist()

    @torch.no_grad()
    def _keep_best(self, s: int, score: float) -> None:
        self.progress.best_score[s], self.progress.best_epoch[s] = score, self.progress.epoch[s]
        for best, average in zip(self.best, self.averaged, strict=True):
            best[s].copy_(average[s])

    @torch.no_grad()
    def _freeze(self, s: int) -> None:
        self.progress.active[s] = False
        for state in self.optimizer.state.values():
            state["exp_avg"][s] = 0

    def _refill(self, s: int) -> None:
        """The order and the random numbers of model s for one epoch, one slot per row; slots behind are not live."""
        count, generator = self.rows.counts[s], self.generators[s]
        filled = {
            "row": torch.randperm(count, generator=generator),
            "live": torch.ones(count),
            **self.objective.draw(count, generator),
        }
        length = max(self.steps_per_epoch) * self.options.batch_size
        for name, values in filled.items():
            if name not in self.buffers:
                self.buffers[name] = values.new_zeros(self.rows.num_models, length, *values.shape[1:])
            self.buffers[name][s, :count] = values

    def state_dict(self) -> dict[str, Any]:
        """All that `load_state_dict` needs to go on as if nothing had happened."""
        return {
            "weights": [w.detach().clone() for w in self.weights],
            "averaged": [w.clone() for w in self.averaged],
            "best": [w.clone() for w in self.best],
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "progress": copy.deepcopy(vars(self.progress)),
            "num_steps": self.num_steps,
            "buffers": {name: buffer.clone() for name, buffer in self.buffers.items()},
            "generators": [generator.get_state() for generator in self.generators],
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict` of a trainer that was built with the same arguments."""
        pairs = ((self.weights, "weights"), (self.averaged, "averaged"), (self.best, "best"))
        for tensors, name in pairs:
            for tensor, saved in zip(tensors, state[name], strict=True):
                tensor.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**copy.deepcopy(state["progress"]))
        self.num_steps = state["num_steps"]
        self.buffers = {name: buffer.clone() for name, buffer in state["buffers"].items()}
        for generator, saved in zip(self.generators, state["generators"], strict=True):
            generator.set_state(saved)

    def save(self, path: str | Path) -> None:
        """Write a checkpoint; an interrupted write leaves the old one."""
        path = Path(path)
        temporary = path.with_name(path.name + ".part")
        torch.save(self.state_dict(), temporary)
        temporary.replace(path)

    def load(self, path: str | Path) -> None:
        """Go on from a checkpoint."""
        self.load_state_dict(torch.load(path, weights_only=True))


class _Bound(nn.Module):
    """A module called with other weights."""

    def __init__(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.call = (model, weights)  # in a tuple, so that the model is not registered as a part

    def forward(self, *inputs: Tensor) -> Tensor:
        model, weights = self.call
        return functional_call(model, weights, inputs)
