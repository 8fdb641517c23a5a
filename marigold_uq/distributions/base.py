"""What a network's raw output means: a law of the model output given x_t (METHOD table in docs/method.md)."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Self, TypeVar

import torch
from torch import Tensor

from marigold_uq.randomness import Generators

MIN_SCALE = 1e-6
"""Added to the softplus of a standard deviation, so that it is never zero."""

MIN_VARIANCE = 1e-12
"""Added to the softplus of a variance.

In units of x_0 a floor v on the variance of eps is a standard deviation sqrt(v (1 - abar)/abar): at the end of common
schedules, abar = 4e-5, 1.6e-4 for 1e-12, while 1e-6 would hide everything below .16.
"""

FAMILIES: dict[str, type["NoiseDistribution"]] = {}
"""The registry: name in a config -> class."""

Family = TypeVar("Family", bound=type["NoiseDistribution"])


def register(name: str) -> Callable[[Family], Family]:
    """Class decorator: enter a family into `FAMILIES` under its config name."""

    def enter(cls: Family) -> Family:
        cls.name = name
        FAMILIES[name] = cls
        return cls

    return enter


def family_class(name: str) -> type["NoiseDistribution"]:
    """Look a family up; an unknown name is an error that lists the known ones."""
    if name not in FAMILIES:
        raise ValueError(f"unknown noise family {name!r}; choose one of {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]


@dataclass(frozen=True)
class InitialBlock:
    """How one block of raw channels starts when a point predictor is widened (see `marigold_uq.models.widen`)."""

    copies_mean: bool = False  # weights and bias of the pretrained head, plus `bias`
    bias: float = 0.0
    is_factor: bool = False  # small random weights
    is_logit: bool = False  # weighs components, and so moves the mean

    @property
    def moves_mean(self) -> bool:
        """Whether training this block would change the mean of the law."""
        return self.copies_mean or self.is_logit


@dataclass(frozen=True, eq=False)
class NoiseDistribution(ABC):
    """A batch of laws on events of any shape: tensors are (B, *event), with channels first in the event.

    Frozen and valid by construction: activations live in `from_raw`, nowhere else. Every operation returns a new law.
    A *joint* family is one law on all coordinates of a sample; in the others the coordinates are independent.
    """

    name: ClassVar[str]
    layout: ClassVar[str]
    """The blocks of raw channels, mean first; a file format."""
    joint: ClassVar[bool] = False
    has_spread: ClassVar[bool] = True
    """Whether one network call tells the spread; a Dirac law or a single implicit draw does not."""
    symmetric: ClassVar[bool] = False
    """Whether X and 2 E X - X have the same law."""
    noise_channels: ClassVar[int] = 0
    """Channels of fresh noise that the network expects after x_t."""
    default_score: ClassVar[str] = "crps"

    @classmethod
    @abstractmethod
    def num_blocks(cls, num_components: int = 1, rank: int = 0) -> int:
        """Raw channels per target channel."""

    @classmethod
    def num_raw_channels(cls, target_channels: int, num_components: int = 1, rank: int = 0) -> int:
        """Raw channels of a network for a target of `target_channels` channels."""
        return target_channels * cls.num_blocks(num_components, rank)

    @classmethod
    @abstractmethod
    def initial_blocks(cls, num_components: int, rank: int, scale: float) -> list[InitialBlock]:
        """A start for each block, such that the mean is the pretrained output and the spread about `scale`."""

    @classmethod
    @abstractmethod
    def from_raw(
        cls,
        raw: Tensor,
        *,
        num_components: int = 1,
        rank: int = 0,
        event_shape: Sequence[int] | None = None,
        pooled_weights: bool = False,
    ) -> Self:
        """Read raw network output, channels on axis 1. Arguments that a family has no use for are ignored."""

    @classmethod
    def _split_blocks(cls, raw: Tensor, num_components: int, rank: int, event_shape: Sequence[int] | None) -> Tensor:
        """(B, P C, *space) -> (B, P, C, *space) in at least float32, with the channel count checked."""
        blocks = cls.num_blocks(num_components, rank)
        if raw.ndim < 2 or event_shape == ():
            raise ValueError(
                f"raw output is (B, channels, ...) for events (C, ...), a scalar being an event of shape (1,); got raw "
                f"output {tuple(raw.shape)}, event {event_shape}"
            )
        channels = raw.shape[1]
        targets = None if event_shape is None else event_shape[0]
        if channels % blocks or (targets is not None and channels != blocks * targets):
            want = f"a multiple of {blocks}" if targets is None else f"{blocks} x {targets} = {blocks * targets}"
            raise ValueError(
                f"family {cls.name!r} with num_components={num_components}, rank={rank} reads {blocks} raw channels "
                f"per target channel, {cls.layout}, so it expects {want} channels on axis 1; got {channels} in shape "
                f"{tuple(raw.shape)}. Widen the network's last convolution (marigold_uq.models.widen) or change the "
                "family."
            )
        return at_least_float32(raw).unflatten(1, (blocks, channels // blocks))

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """(B, *event)."""

    @property
    @abstractmethod
    def variance(self) -> Tensor:
        """Marginal variance of every coordinate, (B, *event)."""

    @property
    def stddev(self) -> Tensor:
        """Marginal standard deviation, (B, *event)."""
        return self.variance.sqrt()

    @property
    def shape(self) -> torch.Size:
        """(B, *event)."""
        return self.mean.shape

    @property
    def event_shape(self) -> torch.Size:
        """Shape of one sample, without the batch axis."""
        return self.shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the parameters, float32 or float64."""
        return getattr(self, fields(self)[0].name).dtype

    @abstractmethod
    def rsample(self, sample_shape: Sequence[int] = (), generator: Generators = None) -> Tensor:
        """Draws of shape (*sample_shape, B, *event), differentiable in the continuous parameters."""

    @abstractmethod
    def affine(self, scale: float | Tensor, shift: float | Tensor) -> Self:
        """The law of scale * X + shift; tensors broadcast against (B, *event)."""

    @abstractmethod
    def scaled(self, tau: float) -> Self:
        """Multiply the covariance of each component by tau; the component means stay."""

    @abstractmethod
    def convolved(self, variance: float) -> "NoiseDistribution":
        """The law of X + N(0, variance I)."""

    @abstractmethod
    def marginal(self) -> "NoiseDistribution":
        """The law of each coordinate by itself, as a family whose coordinates are independent."""

    def quantile(self, q: float | Sequence[float] | Tensor) -> Tensor:
        """Quantiles of the marginals: (B, *event) for a number, (len(q), B, *event) for several."""
        levels = torch.as_tensor(q, dtype=self.dtype, device=self.mean.device)
        if not bool(((levels > 0) & (levels < 1)).all()):
            raise ValueError(f"quantile levels lie strictly between 0 and 1; got {levels.tolist()}")
        values = self.marginal()._marginal_quantile(levels.reshape(-1))
        return values.reshape(*levels.shape, *self.shape)

    def _marginal_quantile(self, levels: Tensor) -> Tensor:
        """(Q, B, *event); implemented by the families that `marginal` returns."""
        raise TypeError(f"{type(self).__name__}.marginal() must return a family with quantiles")


def at_least_float32(value: Tensor) -> Tensor:
    """Half precision becomes float32; float32 and float64 stay."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def positive(rho: Tensor, floor: float = MIN_SCALE) -> Tensor:
    """softplus(rho) + floor, the one activation for scales (MIN_SCALE) and variances (MIN_VARIANCE)."""
    return torch.nn.functional.softplus(rho) + floor


def inverse_positive(value: float, floor: float = MIN_SCALE) -> float:
    """The rho for which `positive(rho, floor)` is `value`."""
    if not value > floor:
        raise ValueError(f"an initial scale or variance must exceed {floor}; got {value}")
    return value - floor + math.log(-math.expm1(floor - value))


def spread_components(num_components: int, scale: float) -> list[InitialBlock]:
    """Component means evenly over [-scale, scale] around the pretrained output, symmetric, exactly 0 in the middle."""
    steps = max(1, num_components - 1)
    offsets = [scale * (2 * k - (num_components - 1)) / steps for k in range(num_components)]
    return [InitialBlock(copies_mean=True, bias=offset) for offset in offsets]


def per_component(value: float | Tensor, event: int, axes: int = 1) -> float | Tensor:
    """Give a tensor that broadcasts against (B, *event), `event` axes, room for `axes` component axes after the batch.

    What has no batch axis broadcasts from the right as it is.
    """
    if not isinstance(value, Tensor) or value.ndim <= event:
        return value
    for _ in range(axes):
        value = value.unsqueeze(1)
    return value


def check_value(dist: NoiseDistribution, value: Tensor) -> Tensor:
    """The target of a score, in at least float32: one number per coordinate. Anything that broadcasts is refused."""
    if value.shape != dist.shape:
        raise ValueError(
            f"a target of shape {tuple(value.shape)} does not fit a law of shape {tuple(dist.shape)}: a score compares "
            "one value per coordinate, (B, *event); expand or reshape it"
        )
    return at_least_float32(value)


def check_tau(tau: float) -> float:
    """tau multiplies a covariance, so it must be positive."""
    if not tau > 0:
        raise ValueError(f"tau multiplies a covariance and must be positive; got {tau}")
    return float(tau)
