"""The distribution of a table's residuals beside the learned head: leaves of trees, and a kernel for all rows alike.

The module path is written into model_index.json of saved pipelines: it is a file format. `ModelMixin` must be
importable from here, or diffusers cannot load the component again.
"""

from typing import cast

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn
from torch.nn import functional

from marigold_uq.distributions import MixtureDistribution
from marigold_uq.tabular.experts.trees import TreeNodes

__all__ = ["MEMBERS", "ModelMixin", "ResidualPool"]

MEMBERS = ("head", "leaves", "kernel")
"""The distributions that are pooled, in the order of their weights."""


class ResidualPool(ModelMixin, ConfigMixin):
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
        for name in ("value", "threshold"):
            self.register_buffer(f"tree_{name}", torch.zeros(num_nodes))
        for name in ("feature", "left", "right"):
            self.register_buffer(f"tree_{name}", torch.zeros(num_nodes, dtype=torch.int32))
        self.register_buffer("tree_root", torch.zeros(num_trees, dtype=torch.int64))
        self.register_buffer("leaves", torch.zeros(num_leaves, num_targets * num_atoms))
        for name in ("loc", "scale", "kernel"):
            self.register_buffer(name, torch.zeros(num_atoms, num_targets, dtype=torch.float64))
        self.register_buffer("weights", torch.zeros(len(MEMBERS), num_targets, dtype=torch.float64))

    @property
    def trees(self) -> TreeNodes:
        """Trees whose leaves hold the numbers of rows of `leaves`."""
        columns = {name: cast(Tensor, getattr(self, f"tree_{name}")) for name in TreeNodes.COLUMNS}
        return TreeNodes(**columns, depth=self.config.depth)

    def forward(self, inputs: Tensor) -> Tensor:
        """Weights (R, B, C) of the atoms for rows (R, num_inputs); they leave the head's share to 1."""
        numbers = self.trees.leaves(inputs).long()  # (R, trees)
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

    def to(self, *args: object, **kwargs: object) -> "ResidualPool":
        """torch's own `to`: diffusers' (0.42) warns of modules to be kept in float32 where there are none."""
        return cast("ResidualPool", nn.Module.to(self, *args, **kwargs))  # type: ignore[arg-type]
