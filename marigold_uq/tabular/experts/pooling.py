"""Fit the pool around the experts: everything that is compared was made without the row that it is compared on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from sklearn.ensemble import ExtraTreesRegressor
from torch import Tensor
from torch.nn import functional

from marigold_uq.distributions import MixtureDistribution
from marigold_uq.scores.crps import absolute_moment
from marigold_uq.tabular.experts.residuals import ResidualPool, ValueForest
from marigold_uq.tabular.experts.trees import TreeNodes

__all__ = ["ForestSize", "OutOfFold", "best_weights", "fit_pool", "fit_values"]

Array = NDArray[np.float64]
_ATOMS = 100
_LEAST_SCALE, _TINY = 1e-4, 1e-300
"""Of an atom, in units of the residuals' standard deviation."""
_BLOCK = 2048


@dataclass(frozen=True)
class ForestSize:
    """Trees of the quantile forest."""

    num_trees: int = 100
    rows_per_leaf: int = 5
    rows_per_tree: int = 20_000


@dataclass(frozen=True)
class OutOfFold:
    """What is known of training rows by models that have not seen them; residuals in one unit, that of the head."""

    inputs: Tensor  # (n, I), features, baseline and its description
    residuals: Tensor  # (n, C)
    weights: Tensor  # (n,)
    head: MixtureDistribution  # of the residuals, (n, C)

    @classmethod
    def join(cls, parts: Sequence["OutOfFold"]) -> "OutOfFold":
        """The rows of several models in turn."""
        inputs, residuals, weights = (
            torch.cat([getattr(part, name) for part in parts]) for name in ("inputs", "residuals", "weights")
        )
        names = ("loc", "scale", "logits")
        head = MixtureDistribution(*(torch.cat([getattr(part.head, name) for part in parts]) for name in names))
        return cls(inputs, residuals, weights, head)


def fit_pool(rows: OutOfFold, seed: int, size: ForestSize | None = None) -> ResidualPool:
    """Atoms, leaves and kernel of these rows, and the weights of least CRPS."""
    atoms = [_Atoms.of(column, rows.weights) for column in rows.residuals.double().unbind(1)]
    trees = _Trees.grow(rows, atoms, seed, size or ForestSize())
    pool = _as_module(rows, atoms, trees)
    for c, one in enumerate(atoms):
        shares = [trees.unseen[:, c], one.without_own]
        distances = _mean_distances(rows, c, one, shares)
        pool.weights[:, c] = torch.from_numpy(best_weights(*distances))
    return pool


def fit_values(features: Array, is_value: NDArray[np.bool_], weights: Array, seed: int) -> ValueForest:
    """Trees of how often each row's target is each of V values, (n, V)."""
    size = ForestSize(rows_per_leaf=10)
    rows = min(len(features), size.rows_per_tree)
    forests = []
    for column in is_value.T:
        forest = ExtraTreesRegressor(
            size.num_trees, min_samples_leaf=size.rows_per_leaf, bootstrap=True, max_samples=rows, random_state=seed
        )
        forests.append(TreeNodes.of(forest.fit(features, column.astype(float), sample_weight=weights).estimators_))
    trees = TreeNodes.join(forests)
    module = ValueForest(is_value.shape[1], size.num_trees, len(trees.value), trees.depth)
    module.keep(trees)
    return module


def _as_module(rows: OutOfFold, atoms: Sequence["_Atoms"], trees: "_Trees") -> ResidualPool:
    """All but the weights, which are 0."""
    pool = ResidualPool(
        num_inputs=rows.inputs.shape[1],
        num_targets=len(atoms),
        num_atoms=len(atoms[0].loc),
        num_trees=len(trees.nodes.root),
        num_nodes=len(trees.nodes.value),
        num_leaves=len(trees.leaves),
        depth=trees.nodes.depth,
    )
    pool.keep(trees.nodes)
    pool.leaves = trees.leaves.flatten(1)
    for name in ("loc", "scale", "kernel"):
        setattr(pool, name, torch.stack([getattr(one, name) for one in atoms], 1))
    return pool


@dataclass(frozen=True)
class _Atoms:
    """Gaussians that stand for the residuals of one target.

    Their edges are quantiles at levels (1 - cos(pi i / B)) / 2, which lie closer together towards both tails. An atom
    is at least half as wide as the way to its neighbours, so that they leave no gaps.
    """

    number: Tensor  # of each row's atom, (n,)
    weights: Tensor  # of the rows, (n,)
    loc: Tensor  # (B,)
    scale: Tensor  # (B,)

    @classmethod
    def of(cls, residuals: Tensor, weights: Tensor) -> "_Atoms":
        count = min(_ATOMS, len(residuals))
        levels = (1 - torch.cos(torch.pi * torch.arange(1, count, dtype=torch.float64) / count)) / 2
        number = torch.bucketize(residuals.contiguous(), torch.quantile(residuals, levels), right=True)
        mass = _sums(number, weights, count)
        loc = _sums(number, weights * residuals, count) / mass.clamp(min=_TINY)
        variance = _sums(number, weights * (residuals - loc[number]).square(), count) / mass.clamp(min=_TINY)
        gaps = torch.zeros(count, dtype=torch.float64)
        gaps[mass > 0] = _half_gaps(loc[mass > 0])
        least = _LEAST_SCALE * float(residuals.std(correction=0).clamp(min=1e-9))
        return cls(number, weights, loc, torch.maximum(variance.sqrt(), gaps).clamp(min=least))

    @property
    def one_hot(self) -> Tensor:
        """Each row's weight at its atom, (n, B)."""
        return functional.one_hot(self.number, len(self.loc)) * self.weights.unsqueeze(1)

    @property
    def kernel(self) -> Tensor:
        """How often each atom is found, (B,), sums to 1."""
        mass = _sums(self.number, self.weights, len(self.loc))
        return mass / mass.sum()

    @property
    def without_own(self) -> Tensor:
        """The kernel of each row, made of all others, (n, B)."""
        mass = _sums(self.number, self.weights, len(self.loc)) - self.one_hot
        return _normalised(mass.clamp(min=0))


def _sums(number: Tensor, values: Tensor, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.float64).index_add_(0, number, values)


def _half_gaps(loc: Tensor) -> Tensor:
    """Half of the mean distance of rising numbers to their neighbours."""
    if len(loc) < 2:
        return torch.zeros_like(loc)
    steps = loc.diff()
    return 0.25 * (torch.cat([steps[:1], steps]) + torch.cat([steps, steps[-1:]]))


def _normalised(mass: Tensor) -> Tensor:
    return mass / mass.sum(-1, keepdim=True).clamp(min=_TINY)


@dataclass(frozen=True)
class _Trees:
    """Extremely randomised trees on bootstrap samples, that tell rows of different residuals apart."""

    nodes: TreeNodes  # the value of a leaf is its number
    leaf: Tensor  # of each row in each tree, (n, trees)
    is_new: Tensor  # whether the tree has not seen the row, (n, trees)
    leaves: Tensor  # shares of the atoms, (leaves, C, B)

    @classmethod
    def grow(cls, rows: OutOfFold, atoms: Sequence[_Atoms], seed: int, size: ForestSize) -> "_Trees":
        """Trees split by residuals and their sizes: where errors lean to one side, and where they are large."""
        unit = rows.residuals.std(0, correction=0).clamp(min=1e-9)
        residuals = (rows.residuals / unit).numpy()
        forest = ExtraTreesRegressor(
            size.num_trees,
            min_samples_leaf=size.rows_per_leaf,
            bootstrap=True,
            max_samples=min(len(residuals), size.rows_per_tree),
            random_state=seed,
        ).fit(rows.inputs.numpy(), np.c_[residuals, np.abs(residuals)], sample_weight=rows.weights.numpy())
        nodes = TreeNodes.of(forest.estimators_)
        is_leaf = nodes.left == torch.arange(len(nodes.left))
        nodes = replace(nodes, value=(is_leaf.cumsum(0) - 1).float())
        leaf = nodes.leaves(rows.inputs).long()
        drawn = np.stack([np.bincount(own, minlength=len(residuals)) for own in forest.estimators_samples_], 1)
        counts = torch.stack([one.one_hot for one in atoms], 1)  # (n, C, B)
        leaves = torch.zeros(int(is_leaf.sum()), *counts.shape[1:], dtype=torch.float64)
        for tree, times in enumerate(torch.from_numpy(drawn).T):
            leaves.index_add_(0, leaf[:, tree], counts * times.reshape(-1, 1, 1))
        return cls(nodes, leaf, torch.from_numpy(drawn == 0), _normalised(leaves).float())

    @property
    def unseen(self) -> Tensor:
        """Mean shares of the leaves of each row in the trees that have not seen it, (n, C, B)."""
        share = _normalised(self.is_new.float())
        found = functional.embedding_bag(self.leaf, self.leaves.flatten(1), per_sample_weights=share, mode="sum")
        return _normalised(found.double().unflatten(1, self.leaves.shape[1:]))


def _mean_distances(rows: OutOfFold, c: int, atoms: _Atoms, shares: Sequence[Tensor]) -> tuple[Array, Array]:
    """Means over rows of E|X_m - y|, (3,), and of E|X_m - X_n'|, (3, 3): all that the CRPS of a pool depends on."""
    between_atoms = absolute_moment(atoms.loc.unsqueeze(1) - atoms.loc, torch.hypot(atoms.scale[:, None], atoms.scale))
    weight = rows.weights / rows.weights.sum()
    to_target, between = torch.zeros(3, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64)
    for block in torch.arange(len(weight)).split(_BLOCK):
        head, target = rows.head[block], rows.residuals[block, c].unsqueeze(1).double()
        loc, scale, own = (part[:, :, c].double() for part in (head.loc, head.scale, head.weights))  # (R, K)
        atom_shares = torch.stack([share[block] for share in shares])  # (2, R, B)
        to_atoms = absolute_moment(target - atoms.loc, atoms.scale)  # (R, B)
        far = [(own * absolute_moment(target - loc, scale)).sum(1), *(atom_shares * to_atoms).sum(-1)]
        pairs = absolute_moment(loc.unsqueeze(2) - atoms.loc, torch.hypot(scale.unsqueeze(2), atoms.scale))
        to_head = (own.unsqueeze(2) * pairs).sum(1)  # (R, B)
        square = absolute_moment(loc.unsqueeze(2) - loc.unsqueeze(1), torch.hypot(scale[:, :, None], scale[:, None]))
        w = weight[block]
        to_target += torch.stack([w @ one for one in far])
        between[0, 0] += w @ (own.unsqueeze(2) * own.unsqueeze(1) * square).sum((1, 2))
        between[0, 1:] += (atom_shares * to_head).sum(-1) @ w
        between[1:, 1:] += torch.einsum("arb,bd,erd,r->ae", atom_shares, between_atoms, atom_shares, w)
    between[1:, 0] = between[0, 1:]
    return to_target.numpy(), between.numpy()


def best_weights(to_target: Array, between: Array) -> Array:
    """The weights w on the simplex with the least CRPS of the pool, w . a - 1/2 w . D w, a convex problem."""
    scale = max(float(to_target.max()), 1e-300)
    a, distances = to_target / scale, between / scale
    count = len(a)
    found = minimize(
        lambda w: w @ a - 0.5 * w @ distances @ w,
        np.full(count, 1 / count),
        jac=lambda w: a - distances @ w,
        bounds=[(0, 1)] * count,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones(count)},
        method="SLSQP",
    )
    weights = np.clip(found.x, 0, None)
    return np.asarray(weights / weights.sum())
