"""Train a stack: all models take one batched step, yet each has its own rows, order, random numbers and end."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from tqdm.auto import tqdm

from marigold_uq.tabular.objectives import Objective

__all__ = ["OptimizerOptions", "StackedRows", "StackedTrainer"]


@dataclass(frozen=True)
class StackedRows:
    """Columns of S tables; row n of table s is real if n < counts[s]."""

    columns: dict[str, Tensor]  # name -> (S, N, ...)
    weights: Tensor  # (S, N), 0 in the padding
    counts: tuple[int, ...]

    @classmethod
    def stack(cls, tables: Sequence[Mapping[str, Tensor]], weights: Sequence[Tensor] | None = None) -> "StackedRows":
        """Pad tables of one set of columns, each (n_s, ...). Weights are scaled to mean 1 in each table."""
        counts = tuple(len(next(iter(table.values()))) for table in tables)
        for number, (table, count) in enumerate(zip(tables, counts, strict=True)):
            lengths = {name: len(column) for name, column in table.items()}
            if count == 0 or set(lengths.values()) != {count}:
                raise ValueError(f"columns of table {number} have {lengths} rows; expected one length of at least 1")
        columns = {name: _pad([table[name] for table in tables]) for name in tables[0]}
        given = weights if weights is not None else [torch.ones(count) for count in counts]
        return cls(columns, _pad([w / w.mean() for w in given]), counts)

    @property
    def num_models(self) -> int:
        """S."""
        return len(self.counts)


def _pad(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors (n_s, ...) as one (S, max n_s, ...), zeros behind the shorter ones."""
    return torch.nn.utils.rnn.pad_sequence(list(tensors), batch_first=True)


@dataclass(frozen=True)
class OptimizerOptions:
    """Batches, optimiser, averaging and patience of one training."""

    batch_size: int = 32
    learning_rate: float = 1e-3
    amsgrad: bool = False
    ema_decay: float | None = None
    """Moving average of the weights, which is what validation and the result use; None uses the weights themselves."""
    patience: int | None = None
    """Epochs without a better validation score after which a model stops; None trains every model to its end."""
    weight_decay: float = 0.0
    """Of AdamW: each step multiplies the weights by 1 - rate * decay, those of frozen models too."""
    cosine: bool = False
    """Whether the rate rises over the first twentieth of the steps and then falls to 0 like a cosine; needs models of
    (about) equally many steps, because the rate is common."""


@dataclass
class _Progress:
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
        validation: Rows of each model as `objective.examples` makes them, to judge an epoch.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        rows: StackedRows,
        generators: Sequence[torch.Generator],
        options: OptimizerOptions,
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
        self.flat = _flatten(self.weights)
        averaging = options.ema_decay is not None
        self.average = self.flat.detach().clone() if averaging else self.flat.detach()
        self.averaged = _views(self.average, self.weights)
        self.best = [w.clone() for w in self.averaged] if validation is not None else []
        self.optimizer = torch.optim.AdamW(
            [self.flat],
            lr=options.learning_rate,
            weight_decay=options.weight_decay,
            amsgrad=options.amsgrad,
            fused=True,
        )
        self.progress = _Progress(
            [0] * num_models,
            [0] * num_models,
            [epochs > 0 for epochs in max_epochs],
            [math.inf] * num_models,
            [0] * num_models,
        )
        self.steps_per_epoch = [math.ceil(count / options.batch_size) for count in rows.counts]
        self.num_steps = 0
        self.buffers: dict[str, Tensor] = {}
        for s, epochs in enumerate(max_epochs):
            self._refill(s)
            if epochs <= 0:
                self.buffers["weights"][s] = 0

    @property
    def best_epochs(self) -> list[int]:
        """Epochs after which each model's validation score was best (its last epoch without validation)."""
        return self.progress.best_epoch if self.validation is not None else self.progress.epoch

    @property
    def has_ended(self) -> bool:
        """Whether every model has reached its end."""
        return not any(self.progress.active)

    def train(self, *, verbose: bool = False, description: str = "training") -> nn.Module:
        """Train every model to its end and put the results into `model`, which is returned."""
        with tqdm(total=max(self.max_epochs), desc=description, unit="epoch", disable=not verbose) as bar:
            while not self.has_ended:
                self.step()
                bar.update(max(self.progress.epoch) - bar.n)
        return self.finish()

    @torch.no_grad()
    def finish(self) -> nn.Module:
        """Copy the result of every model into `model`, in memory of its own."""
        for weight, result in zip(self.weights, self.results(), strict=True):
            weight.data = result.clone()
        return self.model

    def results(self) -> list[Tensor]:
        """Best, averaged or last weights of all models; an error if they are not finite."""
        results = self.best or self.averaged
        trained = [s for s, epochs in enumerate(self.max_epochs) if epochs > 0]
        unjudged = self.validation is not None and any(math.isinf(self.progress.best_score[s]) for s in trained)
        if unjudged or not all(result.isfinite().all() for result in results):
            raise FloatingPointError(
                f"training with rate {self.options.learning_rate:g} diverged: scores or weights are not finite; lower "
                "learning_rate, or look for extreme values in the table"
            )
        return results

    def step(self) -> None:
        """One step of all active models, and the end of an epoch for those that reach it."""
        size, cursor = self.options.batch_size, self.progress.cursor
        if min(cursor) == max(cursor):
            batch = {name: buffer[:, cursor[0] : cursor[0] + size] for name, buffer in self.buffers.items()}
        else:
            slots = torch.tensor(cursor).unsqueeze(1) + torch.arange(size)  # (S, B)
            batch = {name: _gather_rows(buffer, slots) for name, buffer in self.buffers.items()}
        self._update(batch)
        self.progress.cursor = [start + size for start in cursor]
        ended = [s for s, steps in enumerate(self.steps_per_epoch) if self.progress.cursor[s] >= steps * size]
        if ended:
            self._end_epochs(ended)

    def _update(self, batch: Mapping[str, Tensor]) -> None:
        """Each model's loss is the mean over its live rows; their sum has each model's own gradient."""
        loss = (self.objective.scores(self.model, batch) * batch["weights"]).sum()
        gradients = torch.autograd.grad(loss, self.weights)
        assert self.flat.grad is not None
        torch.cat([gradient.reshape(-1) for gradient in gradients], out=self.flat.grad)
        if self.options.cosine:
            self.optimizer.param_groups[0]["lr"] = self._learning_rate()
        self.optimizer.step()
        self.num_steps += 1
        if self.options.ema_decay is not None:
            warm = (1 + self.num_steps) / (10 + self.num_steps)  # the first averages must forget the initial weights
            self._average(1 - min(self.options.ema_decay, warm))

    def _learning_rate(self) -> float:
        total = max(epochs * steps for epochs, steps in zip(self.max_epochs, self.steps_per_epoch, strict=True))
        rise = min(1.0, (self.num_steps + 1) / (0.05 * total))
        return self.options.learning_rate * rise * 0.5 * (1 + math.cos(math.pi * self.num_steps / total))

    @torch.no_grad()
    def _average(self, rate: float) -> None:
        if all(self.progress.active):
            self.average.lerp_(self.flat, rate)
            return
        active = torch.tensor(self.progress.active, dtype=self.flat.dtype)
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
        averaged = dict(zip(self.names, self.averaged, strict=True))
        scores = self.objective.scores(_Bound(self.model, averaged), self.validation.columns)  # (S, N)
        return ((scores * self.validation.weights).sum(1) / self.validation.weights.sum(1)).tolist()

    @torch.no_grad()
    def _keep_best(self, s: int, score: float) -> None:
        self.progress.best_score[s], self.progress.best_epoch[s] = score, self.progress.epoch[s]
        for best, average in zip(self.best, self.averaged, strict=True):
            best[s].copy_(average[s])

    @torch.no_grad()
    def _freeze(self, s: int) -> None:
        self.progress.active[s] = False
        self.buffers["weights"][s] = 0
        for state in self.optimizer.state.values():
            for momentum in _views(state["exp_avg"], self.weights):
                momentum[s] = 0

    @torch.no_grad()
    def _refill(self, s: int) -> None:
        """The rows of model s for one epoch, in a new order, with what is drawn for each; slots behind weigh 0.

        A row's weight is divided by the rows in its batch, so that the sum over a batch is a mean.
        """
        count, generator, size = self.rows.counts[s], self.generators[s], self.options.batch_size
        order = torch.randperm(count, generator=generator)
        rows = {name: column[s, order] for name, column in self.rows.columns.items()}
        filled = self.objective.examples({**rows, **self.objective.draw(count, generator)})
        start = torch.arange(count) // size * size  # of the row's batch
        filled["weights"] = self.rows.weights[s, order] / (count - start).clamp(max=size)
        length = max(self.steps_per_epoch) * size
        for name, values in filled.items():
            if name not in self.buffers:
                self.buffers[name] = values.new_zeros(self.rows.num_models, length, *values.shape[1:])
            self.buffers[name][s, :count] = values

    def state_dict(self) -> dict[str, Any]:
        """All that `load_state_dict` needs to resume as if nothing had happened."""
        return {
            "weights": self.flat.detach().clone(),
            "average": self.average.clone(),
            "best": [w.clone() for w in self.best],
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "progress": copy.deepcopy(vars(self.progress)),
            "num_steps": self.num_steps,
            "buffers": {name: buffer.clone() for name, buffer in self.buffers.items()},
            "generators": [generator.get_state() for generator in self.generators],
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict` of a trainer that was built with the same arguments."""
        self.flat.copy_(state["weights"])
        self.average.copy_(state["average"])
        for tensor, saved in zip(self.best, state["best"], strict=True):
            tensor.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = _Progress(**copy.deepcopy(state["progress"]))
        self.num_steps = state["num_steps"]
        self.buffers = {name: buffer.clone() for name, buffer in state["buffers"].items()}
        for generator, saved in zip(self.generators, state["generators"], strict=True):
            generator.set_state(saved)


def _flatten(parameters: Sequence[nn.Parameter]) -> nn.Parameter:
    """All parameters as one vector that they become views of: Adam and averaging are then one call each."""
    flat = nn.Parameter(torch.cat([parameter.detach().reshape(-1) for parameter in parameters]))
    flat.grad = torch.zeros_like(flat)
    for parameter, view in zip(parameters, _views(flat.detach(), parameters), strict=True):
        parameter.data = view
    return flat


def _views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Parts of a vector in the shapes of `like`."""
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _gather_rows(column: Tensor, index: Tensor) -> Tensor:
    """Entry [s, index[s, b]] of a column (S, N, ...): (S, B, ...)."""
    num_models, length = column.shape[:2]
    flat = index + length * torch.arange(num_models, device=index.device).unsqueeze(1)
    return column.flatten(0, 1).index_select(0, flat.reshape(-1)).unflatten(0, tuple(index.shape))


class _Bound(nn.Module):
    """A module called with other weights."""

    def __init__(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.call = (model, weights)  # in a tuple, so that the model is not registered as a part

    def forward(self, *inputs: Tensor) -> Tensor:
        model, weights = self.call
        return functional_call(model, weights, inputs)
