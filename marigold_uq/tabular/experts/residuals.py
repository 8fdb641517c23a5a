"""What trees say of a table's distribution beside the learned head: the residuals, and values that many rows share.

The module path is written into model_index.json of saved pipelines: it is a file format. `ModelMixin` must be
importable from here, or diffusers cannot load the component again.
"""

from typing import Any, Self, cast

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn
from torch.nn import functional

from marigold_uq.distributions import MixtureDistribution
from marigold_uq.tabular.experts.trees import TreeNodes

__all__ = ["MEMBERS", "ModelMixin", "ResidualPool", "ValueForest"]

MEMBERS = ("head", "leaves", "kernel")
"""The distributions that are pooled, in the order of their weights."""


class _Trees(ModelMixin, ConfigMixin):
    """A module that keeps decision trees in its buffers."""

    def _register_trees(self, num_trees: int, num_nodes: int) -> None:
        for name in ("value", "threshold"):
            self.register_buffer(f"tree_{name}", torch.zeros(num_nodes))
        for name in ("feature", "left", "right"):
            self.register_buffer(f"tree_{name}", torch.zeros(num_nodes, dtype=torch.int32))
        self.register_buffer("tree_root", torch.zeros(num_trees, dtype=torch.int64))

    @property
    def trees(self) -> TreeNodes:
        """As they were kept."""
        columns = {name: cast(Tensor, getattr(self, f"tree_{name}")) for name in TreeNodes.COLUMNS}
        return TreeNodes(**columns, depth=self.config.depth)

    def keep(self, trees: TreeNodes) -> None:
        """Replace the trees by others of as many nodes."""
        for name in TreeNodes.COLUMNS:
            setattr(self, f"tree_{name}", getattr(trees, name))

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """torch's own `to`: diffusers' (0.42) warns of modules to be kept in float32 where there are none."""
        return nn.Module.to(self, *args, **kwargs)


class ValueForest(_Trees):
    """The probability of single values that many rows share, for example of 0: shares of leaves, mean over trees.

    Args:
        num_values: V.
        num_trees: Of each value.
        num_nodes, depth: Of all trees.
    """

    @register_to_config
    def __init__(self, num_values: int = 1, num_trees: int = 1, num_nodes: int = 1, depth: int = 0) -> None:
        super().__init__()
        self._register_trees(num_values * num_trees, num_nodes)

    def forward(self, features: Tensor) -> Tensor:
        """(R, F) -> (R, V), which sum to 1 at most."""
        shares = self.trees.leaves(features).double().unflatten(1, (self.config.num_values, -1)).mean(-1)
        return shares.clamp(min=0) / shares.sum(1, keepdim=True).clamp(min=1)


class ResidualPool(_Trees):
    """A linear pool, sum_m weight_m F_m, of a head's mixture and two mixtures of the same Gaussians, called atoms.

    An atom stands for training rows with about the same out-of-fold residual. The leaves weigh atoms by how often they
    are found in the leaves of trees that a row falls into (a quantile forest); the kernel by how often they are found
    at all. So the pool is an explicit mixture, whose atoms are the same for every row up to the baseline.

    Args:
        num_inputs: Columns that the trees see.
        num_targets: C.
        num_atoms: B.
        num_trees, num_nodes, num_leaves, depth: Of all trees.
    """

    leaves: Tensor  # (leaves, C B), each row's shares of the atoms
    loc: Tensor  # (B, C)
    scale: Tensor  # (B, C)
    kernel: Tensor  # (B, C), sums to 1
    weights: Tensor  # (3, C), in the order of MEMBERS

    @register_to_config
    def __init__(
        self,
        num_inputs: int = 1,
        num_targets: int = 1,
        num_atoms: int = 1,
        num_trees: int = 1,
        num_nodes: int = 1,
        num_leaves: int = 1,
        depth: int = 0,
    ) -> None:
        super().__init__()
        self._register_trees(num_trees, num_nodes)
        self.register_buffer("leaves", torch.zeros(num_leaves, num_targets * num_atoms))
        for name in ("loc", "scale", "kernel"):
            self.register_buffer(name, torch.zeros(num_atoms, num_targets, dtype=torch.float64))
        self.register_buffer("weights", torch.zeros(len(MEMBERS), num_targets, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        """Weights (R, B, C) of the atoms for rows (R, num_inputs); they leave the head's share to 1."""
        numbers = self.trees.leaves(inputs).long()  # (R, trees), rows of `leaves`
        shares = functional.embedding_bag(numbers, self.leaves, mode="mean")
        shares = shares.to(self.weights).unflatten(1, (self.config.num_targets, -1)).transpose(1, 2)
        return self.weights[1] * shares + self.weights[2] * self.kernel

    def pool(self, head: MixtureDistribution, inputs: Tensor, centre: Tensor, unit: Tensor) -> MixtureDistribution:
        """The pool for rows whose baseline is `centre` (R, C), with residuals in `unit` (C,), like the head's."""
        atoms = self(inputs).to(head.loc)
        shares = torch.cat([self.weights[0].to(head.loc) * head.weights, atoms], 1)
        loc = centre.unsqueeze(1) + unit * self.loc.to(head.loc)
        scale = (unit * self.scale.to(head.loc)).expand_as(loc)
        tiny = torch.finfo(shares.dtype).tiny
        return MixtureDistribution(
            torch.cat([head.loc, loc], 1), torch.cat([head.scale, scale], 1), shares.clamp(min=tiny).log()
        )
