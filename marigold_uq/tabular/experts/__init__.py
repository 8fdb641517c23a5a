"""The baseline of the default recipe: forest, boosted trees, networks and a Gaussian process, weighted.

The module path is written into model_index.json of saved pipelines: it is a file format. `ModelMixin` must be
importable from here, or diffusers cannot load the component again.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from diffusers.configuration_utils import register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor
from torch.nn import functional

from marigold_uq.models.mlp import StackedModel
from marigold_uq.tabular.experts.gaussian_process import Kernel
from marigold_uq.tabular.experts.trees import TreeNodes

__all__ = ["EXPERTS", "LEVELS", "ExpertBaseline", "ModelMixin", "describe_experts", "num_extras", "scale_extras"]

EXPERTS = ("forest", "deep_boosting", "shallow_boosting", "networks", "process")
"""Order of the experts in all tensors."""

LEVELS = (0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95)
"""Quantiles over the trees of the forest, which are draws from the neighbourhood of a row."""


def num_extras(num_targets: int) -> int:
    """Columns of `describe_experts`."""
    return (len(EXPERTS) + len(LEVELS) + 1) * num_targets


def describe_experts(experts: Tensor, trees: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted prediction f (R, C), and a description of the rows beyond it, (R, E), in units of the target.

    The description has each expert minus f, quantiles of the forest's trees minus f, and their standard deviation.

    Args:
        experts: Predictions (R, L, C).
        trees: Predictions of the trees of the forest (R, M, C).
        weights: (L, C).
    """
    baseline = (experts * weights).sum(1)  # (R, C)
    others = experts - baseline.unsqueeze(1)
    spread = _quantiles(trees) - baseline.unsqueeze(1)  # (R, Q, C)
    deviation = trees.std(1, correction=0)
    return baseline, torch.cat([others.flatten(1), spread.flatten(1), deviation], 1)


def _quantiles(trees: Tensor) -> Tensor:
    """Linear quantiles of (R, M, C) over M: (R, Q, C); `torch.quantile` refuses more than 16 million numbers."""
    ordered = trees.sort(1).values
    position = torch.tensor(LEVELS, dtype=trees.dtype, device=trees.device) * (trees.shape[1] - 1)
    lower = position.floor().long()
    upper = (lower + 1).clamp(max=trees.shape[1] - 1)
    return torch.lerp(ordered[:, lower], ordered[:, upper], (position - lower).unsqueeze(-1))


class ExpertBaseline(StackedModel):
    """Experts of S tables: standardised features in, standardised targets and a description of the row out.

    Experts that a table does not use predict 0 and weigh 0.

    Args:
        num_models: S, tables.
        num_features, num_targets: F and C.
        num_trees: Trees of the forest per target, M.
        num_boosted: Boosted trees per target, deep and shallow.
        num_nodes, depth: Nodes of all trees of a table, and steps from root to leaf.
        num_networks, width, num_layers: Networks (one per fold, averaged) and their hidden layers.
        num_rows: Rows that the Gaussian process keeps.
    """

    weights: Tensor  # (S, L, C)
    extras_scale: Tensor  # (S, E)
    rows: Tensor  # (S, N, F)
    coefficients: Tensor  # (S, N, C)

    @register_to_config
    def __init__(
        self,
        num_models: int = 1,
        num_features: int = 1,
        num_targets: int = 1,
        num_trees: int = 1,
        num_boosted: Sequence[int] = (1, 1),
        num_nodes: int = 1,
        depth: int = 0,
        num_networks: int = 1,
        width: int = 128,
        num_layers: int = 3,
        num_rows: int = 1,
    ) -> None:
        super().__init__()
        total = (num_trees + sum(num_boosted)) * num_targets
        for name in ("value", "threshold"):
            self.register_buffer(f"tree_{name}", torch.zeros(num_models, num_nodes))
        for name in ("feature", "left", "right"):
            self.register_buffer(f"tree_{name}", torch.zeros(num_models, num_nodes, dtype=torch.int32))
        self.register_buffer("tree_root", torch.zeros(num_models, total, dtype=torch.int64))
        sizes = [num_features, *[width] * num_layers, num_targets]
        for i, (a, b) in enumerate(pairwise(sizes)):
            self._double(f"network_weight_{i}", num_models, num_networks, a, b)
            self._double(f"network_bias_{i}", num_models, num_networks, 1, b)
        self._double("log_length", num_models, num_features)
        for name in ("log_amplitude", "log_linear", "log_constant"):
            self._double(name, num_models)
        self._double("rows", num_models, num_rows, num_features)
        self._double("coefficients", num_models, num_rows, num_targets)
        self._double("weights", num_models, len(EXPERTS), num_targets)
        self._double("extras_scale", num_models, num_extras(num_targets))

    def _double(self, name: str, *shape: int) -> None:
        self.register_buffer(name, torch.zeros(shape, dtype=torch.float64))

    def reset_model(self, model: int, generator: torch.Generator) -> None:
        """Experts are fitted, not drawn."""
        raise NotImplementedError("experts come from `fit_experts`, not from a random start")

    def forward(self, features: Tensor) -> Tensor:
        """(S, R, F) -> f, (S, R, C)."""
        return self.describe(features)[0]

    def describe(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """(S, R, F) -> f (S, R, C) and the description of each row (S, R, E), in units of about 1."""
        parts = [self._describe(s, rows) for s, rows in enumerate(features.double())]
        baseline, extras = (torch.stack(values) for values in zip(*parts, strict=True))
        return baseline, scale_extras(extras, self.extras_scale.unsqueeze(1))

    def _describe(self, s: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        forest, boosted = self._trees(s, rows)  # (R, M, C), (R, 2, C)
        others = torch.stack([self._networks(s, rows), self._process(s, rows)], 1)
        experts = torch.cat([forest.mean(1, keepdim=True), boosted, others], 1)  # (R, L, C)
        return describe_experts(experts, forest, self.weights[s].double())

    def _trees(self, s: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Each tree of the forest, and the sums of both kinds of boosted trees."""
        c = self.config
        columns = {name: cast(Tensor, getattr(self, f"tree_{name}"))[s] for name in TreeNodes.COLUMNS}
        leaves = TreeNodes(**columns, depth=c.depth).leaves(rows).double()  # (R, all trees)
        forest, *boosted = leaves.split([n * c.num_targets for n in (c.num_trees, *c.num_boosted)], 1)
        sums = [trees.unflatten(1, (c.num_targets, -1)).sum(-1) for trees in boosted]
        return forest.unflatten(1, (c.num_targets, -1)).transpose(1, 2), torch.stack(sums, 1)

    def _networks(self, s: int, rows: Tensor) -> Tensor:
        """Mean of the networks, (R, C)."""
        hidden = rows.expand(self.config.num_networks, -1, -1)
        last = self.config.num_layers
        for i in range(last + 1):
            weight, bias = (getattr(self, f"network_{name}_{i}")[s].double() for name in ("weight", "bias"))
            hidden = torch.baddbmm(bias, hidden, weight)
            hidden = functional.silu(hidden) if i < last else hidden
        return hidden.mean(0)

    def _process(self, s: int, rows: Tensor) -> Tensor:
        """k(x, rows) @ coefficients, (R, C)."""
        names = ("log_length", "log_amplitude", "log_linear", "log_constant")
        kernel = Kernel(*(getattr(self, name)[s].double() for name in names))
        return kernel(rows, self.rows[s].double()) @ self.coefficients[s].double()


def scale_extras(extras: Tensor, scale: Tensor) -> Tensor:
    """Divided by their scale and kept within +-10: far from the training rows experts may disagree by any amount."""
    return (extras / scale).clamp(-10, 10)
