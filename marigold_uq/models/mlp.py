"""Many small networks in one: a leading model axis S (splits x members x seeds), one batched product for all.

The module path is written into model_index.json of saved pipelines: it is a file format. `ModelMixin` must be
importable from here, or diffusers cannot load the component again.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Self, cast

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["ModelMixin", "StackedBaseline", "StackedLinear", "StackedMLP", "StackedModel"]


class StackedLinear(nn.Module):
    """S affine maps side by side, x_s W_s + b_s."""

    def __init__(self, num_models: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_models, in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(num_models, 1, out_features))

    @torch.no_grad()
    def reset(self, model: int, generator: torch.Generator) -> None:
        """U(-1/sqrt(in), 1/sqrt(in)) for weights and bias of one model, the default of `torch.nn.Linear`."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        self.weight[model].uniform_(-bound, bound, generator=generator)
        self.bias[model].uniform_(-bound, bound, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """(S, B, in) -> (S, B, out)."""
        return torch.baddbmm(self.bias, x, self.weight)


class StackedModel(ModelMixin, ConfigMixin):
    """Common to all stacks: every parameter and buffer carries the model axis first."""

    def reset(self, generators: Sequence[torch.Generator]) -> Self:
        """Draw the initial weights, each model's from its own generator; a new network is all zeros before that."""
        if len(generators) != self.config.num_models:
            raise ValueError(f"got {len(generators)} generators for {self.config.num_models} models: pass one each")
        for model, generator in enumerate(generators):
            self.reset_model(model, generator)
        return self

    @abstractmethod
    def reset_model(self, model: int, generator: torch.Generator) -> None:
        """Draw the initial weights of one model of the stack."""

    def describe(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """As a baseline: f (S, R, C) of standardised features (S, R, F), and columns (S, R, E) that say more."""
        baseline = self(features.to(next(self.parameters()).dtype))
        return baseline, baseline.new_zeros(*features.shape[:2], 0)

    @torch.no_grad()
    def select(self, model: int) -> Self:
        """Cut one model out, as a stack of one with the same output; it shares no memory with this one."""
        if not 0 <= model < self.config.num_models:
            raise IndexError(f"model index {model} is out of range for a stack of {self.config.num_models}")
        return self._resized(1, {name: value[model : model + 1].clone() for name, value in self.state_dict().items()})

    @classmethod
    def join(cls, stacks: Sequence[Self]) -> Self:
        """Stacks of the same options as one, their models in turn."""
        states = [stack.state_dict() for stack in stacks]
        joined = {name: torch.cat([state[name] for state in states]) for name in states[0]}
        return stacks[0]._resized(sum(stack.config.num_models for stack in stacks), joined)

    def _resized(self, num_models: int, state: dict[str, Tensor]) -> Self:
        """The same options for another number of models, with these weights as they are: dtype and device included."""
        options = {name: value for name, value in self.config.items() if not name.startswith("_")}
        resized = type(self)(**{**options, "num_models": num_models})
        resized.load_state_dict(state, assign=True)
        return resized

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """torch's own `to`: diffusers' (0.42) warns of modules to be kept in float32 where there are none."""
        return nn.Module.to(self, *args, **kwargs)


class StackedMLP(StackedModel):
    """The conditional denoiser: [x_t, c, f] -> num_layers x softplus(gate_t * Linear) -> Linear, for S models at once.

    gate_t is a row of a learned table of `num_timesteps + 1` rows per layer that starts U(0, 1). Positions between two
    rows, which continuous noise levels have (`DistributionalScheduler.table_position`), interpolate linearly.

    The statistics that standardise features and targets, and the scale of the diffused residual, are buffers: they
    belong to a model, are cut out and saved with it. `forward` takes standardised numbers; who calls it standardises.

    Args:
        num_models: S.
        num_features: Columns of the condition c.
        num_extras: Columns that the baseline adds to the condition, already in units of about 1.
        num_targets: Columns of the target, so of x_t and of the baseline f.
        out_channels: Raw channels, `scheduler.num_raw_channels(num_targets)`.
        noise_channels: Columns of fresh noise that follow x_t (family "sample").
        num_timesteps: T, one less than the table has rows.
        width, num_layers: Hidden layers.
    """

    feature_mean: Tensor  # (S, F)
    feature_scale: Tensor  # (S, F)
    target_mean: Tensor  # (S, C)
    target_scale: Tensor  # (S, C)
    residual_scale: Tensor  # (S, C), in units of the standardised target

    @register_to_config
    def __init__(
        self,
        num_models: int = 1,
        num_features: int = 1,
        num_targets: int = 1,
        out_channels: int = 1,
        noise_channels: int = 0,
        num_timesteps: int = 50,
        width: int = 128,
        num_layers: int = 3,
        num_extras: int = 0,
    ) -> None:
        super().__init__()
        inputs = 2 * num_targets + noise_channels + num_features + num_extras
        sizes = [inputs, *[width] * num_layers]
        self.layers = nn.ModuleList(StackedLinear(num_models, a, b) for a, b in pairwise(sizes))
        self.gate = nn.Parameter(torch.zeros(num_models, num_timesteps + 1, num_layers * width))
        self.head = StackedLinear(num_models, width, out_channels)
        for name, size in (("feature", num_features), ("target", num_targets)):
            # float64, because original units may need it: a year and a tolerance of a micron in one table
            self.register_buffer(f"{name}_mean", torch.zeros(num_models, size, dtype=torch.float64))
            self.register_buffer(f"{name}_scale", torch.ones(num_models, size, dtype=torch.float64))
        self.register_buffer("residual_scale", torch.ones(num_models, num_targets))

    @torch.no_grad()
    def reset_model(self, model: int, generator: torch.Generator) -> None:
        """Linear layers as torch's; gates U(0, 1)."""
        for layer in [*self.layers, self.head]:
            layer.reset(model, generator)
        self.gate[model].uniform_(0, 1, generator=generator)

    def forward(self, sample: Tensor, position: Tensor | float, features: Tensor, baseline: Tensor) -> Tensor:
        """Raw output (S, B, channels) for x_t (S, B, C [+ noise]), c (S, B, F) and f (S, B, C).

        The position in the table of gates is a number or (S, B); where M rows in turn have one (draws of one row), it
        may be (S, B / M): gates are looked up once each.
        """
        hidden = torch.cat([sample, features, baseline], -1)
        expected = cast(StackedLinear, self.layers[0]).weight.shape[:2]
        if (hidden.shape[0], hidden.shape[-1]) != tuple(expected):
            raise ValueError(
                f"expected (S, B, inputs) with S, inputs = {tuple(expected)} for [x_t, c, f]; got {tuple(hidden.shape)}"
            )
        gates = self._gates(torch.as_tensor(position)).chunk(len(self.layers), -1)
        for layer, gate in zip(self.layers, gates, strict=True):
            hidden = functional.softplus(_gated(layer(hidden), gate))  # (S, B, width)
        return self.head(hidden)

    def _gates(self, position: Tensor) -> Tensor:
        """The gates of all layers at positions: (S, 1, L W) for one, (S, B, L W) for (S, B)."""
        _check_positions(position, self.gate.shape[1])
        if not position.is_floating_point():
            return self._rows(position)
        lower = position.floor().clamp(max=self.gate.shape[1] - 2)
        share = (position - lower).to(self.gate.dtype).unsqueeze(-1)  # (S, B, 1), or (1,)
        return torch.lerp(self._rows(lower.long()), self._rows(lower.long() + 1), share)

    def _rows(self, row: Tensor) -> Tensor:
        num_models, num_rows, _ = self.gate.shape
        if row.ndim == 0:
            return self.gate[:, int(row)].unsqueeze(1)
        offset = num_rows * torch.arange(num_models, device=row.device).unsqueeze(1)  # (S, 1)
        return functional.embedding(row + offset, self.gate.flatten(0, 1))


def _check_positions(position: Tensor, num_rows: int) -> None:
    """Beyond its own rows a model would read the gates of the next one. On a GPU looking would mean waiting."""
    if position.device.type == "cpu" and position.numel() and not torch.compiler.is_compiling():
        low, high = (float(end) for end in position.aminmax())
        if not (low >= 0 and high <= num_rows - 1):
            raise IndexError(f"positions must be within 0..{num_rows - 1}, the table of gates; got {low:g}..{high:g}")


def _gated(hidden: Tensor, gate: Tensor) -> Tensor:
    """Rows (S, B, W) times gates (S, B / M, W), each for M rows in turn, or (S, 1, W) for all."""
    if gate.shape[1] in (1, hidden.shape[1]):
        return gate * hidden
    return (hidden.unflatten(1, (gate.shape[1], -1)) * gate.unsqueeze(2)).flatten(1, 2)


class StackedBaseline(StackedModel):
    """The baseline predictor f of S models: hidden layers with LeakyReLU(0.01) and dropout, trained with squared error.

    Standardised features in, standardised targets out. Dropout masks are an argument, so that randomness is too.
    With `activation="silu"` the initial weights are N(0, 2 / inputs), the last layer's a twentieth in variance.
    """

    SLOPE = 0.01

    @register_to_config
    def __init__(
        self,
        num_models: int = 1,
        num_features: int = 1,
        num_targets: int = 1,
        hidden: Sequence[int] = (100, 50),
        dropout: float = 0.0,
        activation: str = "leaky_relu",
    ) -> None:
        super().__init__()
        if activation not in ("leaky_relu", "silu"):
            raise ValueError(f"activation must be 'leaky_relu' or 'silu'; got {activation!r}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be a share of the units within [0, 1); got {dropout}")
        sizes = [num_features, *hidden, num_targets]
        self.layers = nn.ModuleList(StackedLinear(num_models, a, b) for a, b in pairwise(sizes))

    @torch.no_grad()
    def reset_model(self, model: int, generator: torch.Generator) -> None:
        """Linear layers as torch's, or He's for "silu"."""
        layers = [cast(StackedLinear, layer) for layer in self.layers]
        for layer in layers:
            if self.config.activation == "leaky_relu":
                layer.reset(model, generator)
                continue
            variance = (0.1 if layer is layers[-1] else 2.0) / layer.weight.shape[1]
            layer.weight[model].normal_(0, math.sqrt(variance), generator=generator)
            layer.bias[model].zero_()

    @property
    def num_hidden_units(self) -> int:
        """How many uniform numbers `forward` wants per row for dropout."""
        return sum(self.config.hidden)

    def forward(self, features: Tensor, uniform: Tensor | None = None) -> Tensor:
        """(S, B, F) -> (S, B, C). In training `uniform` (S, B, hidden units) within [0, 1) says which units drop."""
        hidden, start, keep = features, 0, 1 - self.config.dropout
        layers: list[nn.Module] = list(self.layers)
        for layer in layers[:-1]:
            hidden = layer(hidden)
            silu = self.config.activation == "silu"
            hidden = functional.silu(hidden) if silu else functional.leaky_relu(hidden, self.SLOPE)
            if uniform is not None and keep < 1:
                end = start + hidden.shape[-1]
                hidden = hidden * (uniform[..., start:end] < keep) / keep
                start = end
        return layers[-1](hidden)
