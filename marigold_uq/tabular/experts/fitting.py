"""Fit the experts of one table out-of-fold: no prediction for a training row comes from a model fitted on it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls
from sklearn.model_selection import KFold
from torch import Tensor
from tqdm.auto import tqdm

from marigold_uq.models.mlp import StackedBaseline, StackedLinear
from marigold_uq.randomness import member_seed
from marigold_uq.tabular.experts import EXPERTS, ExpertBaseline, describe_experts, scale_extras
from marigold_uq.tabular.experts.gaussian_process import FittedProcess, fit_process
from marigold_uq.tabular.experts.trees import BoostingOptions, ForestOptions, TreeNodes
from marigold_uq.tabular.objectives import BaselineObjective
from marigold_uq.tabular.trainer import OptimizerOptions, StackedRows, StackedTrainer

Array = NDArray[np.float64]
_Fold = tuple[NDArray[np.int64], NDArray[np.int64]]
_TreeOptions = ForestOptions | BoostingOptions

_TINY_TABLE, _SMALL_TABLE, _LARGE_TABLE = 600, 2000, 20000
_BLOCK = 2**14
_ROWS_OF_TRIAL = 5000
"""Of a large table, about, that a Gaussian process is tried on."""
_SCREENING_FACTOR = 1.5
"""On large tables an expert is dropped if its squared error on the first fold exceeds the best one's by this factor."""


@dataclass(frozen=True)
class ExpertOptions:
    """Which experts a table gets, and their size: a function of its number of rows."""

    num_folds: int
    trees: Mapping[str, _TreeOptions]
    network: OptimizerOptions
    network_epochs: int
    process_steps: int
    """0 for no Gaussian process."""
    process_centres: int
    screening: bool

    @classmethod
    def for_rows(cls, num_rows: int, effort: int, trees_only: bool = False) -> "ExpertOptions":
        """Small tables get every expert, the smallest ten folds; from 2000 rows on poor ones go after one fold.

        `effort` bounds trees, epochs and steps of every expert.
        """
        tiny, small, large = num_rows < _TINY_TABLE, num_rows < _SMALL_TABLE, num_rows >= _LARGE_TABLE
        trees: dict[str, _TreeOptions] = {"forest": ForestOptions(min(effort, 60 if large else 100))}
        if not large:
            trees["deep_boosting"] = BoostingOptions(min(effort, 250), 8, 0.5, 0.35, 3, learning_rate=0.08)
        if small:
            number, rate = (250, 0.1) if tiny else (150, 0.15)
            trees["shallow_boosting"] = BoostingOptions(min(effort, number), 4, 0.7, 0.7, 1, learning_rate=rate)
        batch_size = int(np.clip(2 ** round(math.log2(max(1, num_rows) / 60)), 16, 512))
        steps = 3000 if tiny else 1500 if small else 4000 if large else 6000
        epochs = int(np.clip(steps * batch_size / num_rows, 10, 200))
        network = OptimizerOptions(batch_size, 3e-3, weight_decay=0.1, cosine=True)
        return cls(
            num_folds=10 if 200 <= num_rows < _TINY_TABLE else 4 if large else 5,
            trees=trees,
            network=network,
            network_epochs=0 if trees_only else min(effort, epochs),
            process_steps=0 if trees_only else min(effort, 40),
            process_centres=_SMALL_TABLE if small else 1000,
            screening=not small,
        )

    def num_trees(self, name: str) -> int:
        """Trees of an expert per target; an expert that is not used has one, which predicts 0."""
        return self.trees[name].num_trees if name in self.trees else 1


@dataclass(frozen=True)
class FittedExperts:
    """Experts of one table."""

    options: ExpertOptions
    num_features: int
    trees: Mapping[str, TreeNodes]  # by expert, all targets in turn
    networks: StackedBaseline | None  # one model per fold
    process: FittedProcess | None
    weights: Array  # (L, C)
    extras_scale: Tensor  # (E,)
    predictions: Tensor  # f of the training rows, out-of-fold, (n, C)
    extras: Tensor  # out-of-fold, (n, E), scaled


def fit_experts(
    features: Array, targets: Array, weights: Array, options: ExpertOptions, seed: int, *, verbose: bool = False
) -> FittedExperts:
    """Fit on standardised features (n, F) and targets (n, C); f is the non-negative combination of least error."""
    fitting = _Fitting(features, targets, weights, options, seed)
    with tqdm(total=fitting.num_fits, desc="baseline", unit="fit", disable=not verbose) as fitting.bar:
        fitting.run()
    combination = _combine(fitting.out_of_fold, targets, weights)
    experts = np.stack([fitting.out_of_fold.get(name, np.zeros_like(targets)) for name in EXPERTS], 1)
    parts = [torch.from_numpy(part).split(_BLOCK) for part in (experts, fitting.trees_out_of_fold)]
    weight = torch.from_numpy(combination)
    described = [describe_experts(rows, trees.double(), weight) for rows, trees in zip(*parts, strict=True)]
    baseline, extras = (torch.cat(part) for part in zip(*described, strict=True))
    scale = extras.std(0, correction=0)
    scale = torch.where(scale > 1e-9, scale, 1.0)
    return FittedExperts(
        options,
        features.shape[1],
        fitting.trees,
        fitting.networks,
        fitting.process,
        combination,
        scale,
        baseline,
        scale_extras(extras, scale),
    )


class _Fitting:
    """The work of `fit_experts` on one table, with what has been found so far."""

    def __init__(self, features: Array, targets: Array, weights: Array, options: ExpertOptions, seed: int) -> None:
        self.features, self.targets, self.weights = features, targets, weights
        self.options, self.seed = options, seed
        num_folds = min(options.num_folds, len(targets))
        splitter = KFold(num_folds, shuffle=True, random_state=seed % 2**32)
        self.folds: list[_Fold] = list(splitter.split(features))
        self.out_of_fold: dict[str, Array] = {}  # out-of-fold, (n, C)
        self.trees: dict[str, TreeNodes] = {}
        self.networks: StackedBaseline | None = None
        self.process: FittedProcess | None = None
        self.trees_out_of_fold = np.zeros((len(targets), 1, targets.shape[1]))  # (n, M, C)
        self.bar = tqdm(disable=True)

    @property
    def num_fits(self) -> int:
        """Fits at most: trees of every fold and of all rows, networks of every fold, the process."""
        networks = len(self.folds) if self.options.network_epochs else 0
        return len(self.options.trees) * (len(self.folds) + 1) + networks + bool(self.options.process_steps)

    def run(self) -> None:
        """The first fold of every expert, then the other folds of those that pass the screening."""
        first = {name: self._tree_fold(name, self.folds[0]) for name in self.options.trees}
        errors = {name: self._error(_expert_of(name, trees)) for name, trees in first.items()}
        if self.options.process_steps:
            errors["process"] = self._process_error()
        start = self.folds[:1] if self.options.screening else self.folds
        networks = self._train_networks(start) if self.options.network_epochs else None
        if networks is not None:
            errors["networks"] = self._error(self._predict_fold(networks, 0, self.folds[0][1]))
        limit = _SCREENING_FACTOR * min(errors.values()) if self.options.screening else math.inf
        for name, trees in first.items():
            if errors[name] <= limit:
                self._finish_trees(name, trees)
        if networks is not None and errors["networks"] <= limit:
            self._finish_networks(networks)
        if self.process is None and errors.get("process", math.inf) <= limit:
            self._fit_process()

    def _error(self, prediction: Array) -> float:
        rows = self.folds[0][1]
        return float(np.mean(self.weights[rows, None] * (prediction - self.targets[rows]) ** 2))

    def _tree_fold(self, name: str, fold: _Fold) -> Array:
        """Every tree (forest) or their sum (boosting), for the rows left out: (m, M or 1, C)."""
        train, test = fold
        table, rows = self._fit_trees(name, train), torch.from_numpy(self.features[test])
        leaves = table.leaves(rows).double().unflatten(1, (self.targets.shape[1], -1)).transpose(1, 2)  # (m, M, C)
        return (leaves if name == "forest" else leaves.sum(1, keepdim=True)).numpy()

    def _fit_trees(self, name: str, rows: NDArray[np.int64]) -> TreeNodes:
        tables = []
        for output in range(self.targets.shape[1]):
            seed = member_seed(self.seed, EXPERTS.index(name), output) % 2**32
            target = self.targets[rows, output]
            tables.append(self.options.trees[name].fit(self.features[rows], target, self.weights[rows], seed))
        self.bar.update()
        return TreeNodes.join(tables)

    def _finish_trees(self, name: str, first: Array) -> None:
        """The other folds, and a fit on all rows for new ones."""
        predicted = np.zeros((len(self.targets), *first.shape[1:]))
        predicted[self.folds[0][1]] = first
        for fold in self.folds[1:]:
            predicted[fold[1]] = self._tree_fold(name, fold)
        self.out_of_fold[name] = _expert_of(name, predicted)
        if name == "forest":
            self.trees_out_of_fold = predicted
        self.trees[name] = self._fit_trees(name, np.arange(len(self.targets)))

    def _train_networks(self, folds: Sequence[_Fold], first: int = 0) -> StackedBaseline:
        """One network per fold, on the rows that the fold trains on."""
        num_features, num_targets = self.features.shape[1], self.targets.shape[1]
        seeds = [member_seed(self.seed, len(EXPERTS), first + number) for number in range(len(folds))]
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        model = StackedBaseline(len(folds), num_features, num_targets, hidden=[128] * 3, activation="silu")
        model.reset(generators)
        tables = [
            {"features": _float(self.features[train]), "target": _float(self.targets[train])} for train, _ in folds
        ]
        rows = StackedRows.stack(tables, [_float(self.weights[train]) for train, _ in folds])
        epochs = [self.options.network_epochs] * len(folds)
        StackedTrainer(model, BaselineObjective(model), rows, generators, self.options.network, epochs).train()
        self.bar.update(len(folds))
        return model

    def _predict_fold(self, networks: StackedBaseline, model: int, rows: NDArray[np.int64]) -> Array:
        with torch.no_grad():
            return networks.select(model)(_float(self.features[rows]).unsqueeze(0))[0].double().numpy()

    def _finish_networks(self, first: StackedBaseline) -> None:
        """The folds that have no network yet, and the predictions of each network for rows it has not seen."""
        stacks, done = [first], first.config.num_models
        if done < len(self.folds):
            stacks.append(self._train_networks(self.folds[done:], done))
        networks = StackedBaseline.join(stacks)
        predicted = np.zeros_like(self.targets)
        for number, (_, rows) in enumerate(self.folds):
            predicted[rows] = self._predict_fold(networks, number, rows)
        self.out_of_fold["networks"], self.networks = predicted, networks

    def _process_error(self) -> float:
        """On the first fold; a large table is not fitted for it, but some of its rows."""
        train, test = self.folds[0]
        if len(self.targets) < _LARGE_TABLE:
            self._fit_process()
            return self._error(self.out_of_fold["process"][test])
        trial = self._process_of(train[:: max(1, len(train) // _ROWS_OF_TRIAL)], seed=len(EXPERTS) + 2)
        rows = torch.from_numpy(self.features[test]).split(_ROWS_OF_TRIAL)
        predicted = [trial.kernel(part, trial.rows) @ trial.coefficients for part in rows]
        return self._error(torch.cat(predicted).numpy())

    def _fit_process(self) -> None:
        self.process = self._process_of(np.arange(len(self.targets)), seed=len(EXPERTS) + 1)
        self.out_of_fold["process"] = self.process.left_out.numpy()
        self.bar.update()

    def _process_of(self, rows: NDArray[np.int64], seed: int) -> FittedProcess:
        generator = torch.Generator().manual_seed(member_seed(self.seed, seed))
        arrays = [torch.from_numpy(values[rows]) for values in (self.features, self.targets, self.weights)]
        steps, centres = self.options.process_steps, self.options.process_centres
        return fit_process(*arrays, generator=generator, num_steps=steps, num_centres=centres)


def _expert_of(name: str, trees: Array) -> Array:
    """(n, M or 1, C) -> (n, C)."""
    return trees.mean(1) if name == "forest" else trees[:, 0]


def _combine(out_of_fold: Mapping[str, Array], targets: Array, weights: Array) -> Array:
    """Non-negative least squares of each target on the out-of-fold predictions of the experts: (L, C)."""
    combination, root = np.zeros((len(EXPERTS), targets.shape[1])), np.sqrt(weights)
    rows = [EXPERTS.index(name) for name in out_of_fold]
    for output in range(targets.shape[1]):
        columns = np.stack([values[:, output] * root for values in out_of_fold.values()], 1)
        combination[rows, output] = nnls(columns, targets[:, output] * root)[0]
    return combination


def _float(values: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float32))


def stack_experts(fitted: Sequence[FittedExperts]) -> ExpertBaseline:
    """The experts of S tables as one module; the tables must be of one size class (`ExpertOptions.for_rows`)."""
    num_targets = fitted[0].weights.shape[1]
    tables = [_all_trees(one, num_targets) for one in fitted]
    networks = {one.networks.config.num_models for one in fitted if one.networks is not None}
    if len({len(table.root) for table in tables}) != 1 or len(networks) > 1:
        raise ValueError("tables of very different sizes have experts of different sizes: fit them one by one")
    options = fitted[0].options
    module = ExpertBaseline(
        num_models=len(fitted),
        num_features=fitted[0].num_features,
        num_targets=num_targets,
        num_trees=options.num_trees("forest"),
        num_boosted=[options.num_trees(name) for name in EXPERTS[1:3]],
        num_nodes=max(len(table.value) for table in tables),
        depth=max(table.depth for table in tables),
        num_networks=max([1, *networks]),
        num_rows=max([1, *(len(one.process.rows) for one in fitted if one.process is not None)]),
    )
    for s, (one, table) in enumerate(zip(fitted, tables, strict=True)):
        _store(module, s, one, table)
    return module


def _all_trees(fitted: FittedExperts, num_targets: int) -> TreeNodes:
    """Forest and both kinds of boosted trees; those that are not used are filled in with trees that predict 0."""
    none = [TreeNodes.zeros(fitted.options.num_trees(name) * num_targets) for name in EXPERTS[:3]]
    return TreeNodes.join([fitted.trees.get(name, zero) for name, zero in zip(EXPERTS[:3], none, strict=True)])


def _store(module: ExpertBaseline, s: int, fitted: FittedExperts, table: TreeNodes) -> None:
    for name in TreeNodes.COLUMNS:
        column = cast(Tensor, getattr(table, name))
        getattr(module, f"tree_{name}")[s, : len(column)] = column
    module.weights[s] = torch.from_numpy(fitted.weights)
    module.extras_scale[s] = fitted.extras_scale
    if fitted.networks is not None:
        for i, layer in enumerate(fitted.networks.layers):
            linear = cast(StackedLinear, layer)
            getattr(module, f"network_weight_{i}")[s] = linear.weight.detach()
            getattr(module, f"network_bias_{i}")[s] = linear.bias.detach()
    if fitted.process is not None:
        kernel, count = fitted.process.kernel, len(fitted.process.rows)
        module.rows[s, :count], module.coefficients[s, :count] = fitted.process.rows, fitted.process.coefficients
        for name in ("log_length", "log_amplitude", "log_linear", "log_constant"):
            getattr(module, name)[s] = getattr(kernel, name)
