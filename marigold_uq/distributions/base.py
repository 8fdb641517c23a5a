"""What a network's raw output means: a distribution of the model output given x_t (table in docs/method.md)."""

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from marigold_uq.precision import at_least_float32
from marigold_uq.randomness import Generators

if TYPE_CHECKING:
    from marigold_uq.distributions.low_rank_mixture import LowRankMixtureDistribution

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
class HeadOptions:
    """Sizes of a head; a family ignores what it has no use for.

    Args:
        num_components: Components K of a mixture.
        rank: Rank r of a low-rank covariance.
        pooled_weights: Mixture weights shared by all positions of a channel.
    """

    num_components: int = 1
    rank: int = 0
    pooled_weights: bool = False

    def __post_init__(self) -> None:
        if self.num_components < 1 or self.rank < 0:
            raise ValueError(
                f"num_components must be at least 1 and rank at least 0; got {self.num_components} and {self.rank}"
            )


ONE_OF_EACH = HeadOptions()


@dataclass(frozen=True)
class InitialBlock:
    """How one block of raw channels starts when a point predictor is widened (see `marigold_uq.models.widen`)."""

    copies_mean: bool = False  # weights and bias of the pretrained head, plus `bias`
    bias: float = 0.0
    is_factor: bool = False  # small random weights
    is_logit: bool = False  # weighs components, and so moves the mean

    @property
    def moves_mean(self) -> bool:
        """Whether training this block would change the mean of the distribution."""
        return self.copies_mean or self.is_logit


@dataclass(frozen=True, eq=False)
class NoiseDistribution(ABC):
    """A batch of distributions on events of any shape: tensors are (B, *event), with channels first in the event.

    Frozen and valid by construction: shapes are checked, activations live in `from_raw` and nowhere else. Every
    operation returns a new distribution. A *joint* family is one distribution on all coordinates of a sample; in the
    others the coordinates are independent.
    """

    name: ClassVar[str]
    layout: ClassVar[str]
    """The blocks of raw channels, mean first; a file format."""
    joint: ClassVar[bool] = False
    has_spread: ClassVar[bool] = True
    """Whether one network call tells the spread; a Dirac distribution or a single implicit draw does not."""
    has_density: ClassVar[bool] = True
    noise_channels: ClassVar[int] = 0
    """Channels of fresh noise that the network expects after x_t."""
    default_score: ClassVar[str] = "crps"
    smallest_head: ClassVar[HeadOptions] = ONE_OF_EACH
    """With less than this a simpler family is meant."""
    batch_axis: ClassVar[int] = 0

    def __post_init__(self) -> None:
        for name, expected in self._expected_shapes().items():
            found = getattr(self, name).shape
            if found != expected:
                raise ValueError(
                    f"parameters of a {type(self).__name__} do not fit: {name} must be {tuple(expected)} beside "
                    f"{fields(self)[0].name} {tuple(getattr(self, fields(self)[0].name).shape)}; got {tuple(found)}"
                )

    def _expected_shapes(self) -> dict[str, Sequence[int]]:
        """Shape that each parameter must have, given the first one."""
        return {}

    @classmethod
    @abstractmethod
    def num_blocks(cls, head: HeadOptions = ONE_OF_EACH) -> int:
        """Raw channels per target channel."""

    @classmethod
    def num_raw_channels(cls, target_channels: int, head: HeadOptions = ONE_OF_EACH) -> int:
        """Raw channels of a network for a target of `target_channels` channels."""
        return target_channels * cls.num_blocks(head)

    @classmethod
    def check_head(cls, head: HeadOptions) -> None:
        """Refuse sizes with which the family is another one: rank 0 is diagonal, one component is no mixture."""
        least = cls.smallest_head
        if head.num_components < least.num_components or head.rank < least.rank:
            raise ValueError(
                f"family {cls.name!r} needs num_components of at least {least.num_components} and a rank of at least "
                f"{least.rank}; got {head.num_components} and {head.rank}"
            )

    @classmethod
    @abstractmethod
    def initial_blocks(cls, head: HeadOptions, scale: float) -> list[InitialBlock]:
        """A start for each block, such that the mean is the pretrained output and the spread about `scale`."""

    @classmethod
    @abstractmethod
    def from_raw(
        cls, raw: Tensor, head: HeadOptions = ONE_OF_EACH, *, event_shape: Sequence[int] | None = None
    ) -> Self:
        """Read raw network output, channels on axis 1."""

    @classmethod
    def _split_blocks(cls, raw: Tensor, head: HeadOptions, event_shape: Sequence[int] | None) -> Tensor:
        """(B, P C, *space) -> (B, P, C, *space) in at least float32, with all axes checked."""
        blocks = cls.num_blocks(head)
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
                f"family {cls.name!r} with num_components={head.num_components}, rank={head.rank} reads {blocks} raw "
                f"channels per target channel, {cls.layout}, so it expects {want} channels on axis 1; got {channels} "
                f"in shape {tuple(raw.shape)}. Widen the network's last convolution (marigold_uq.models.widen) or "
                "change the family."
            )
        if event_shape is not None and raw.shape[2:] != tuple(event_shape[1:]):
            raise ValueError(
                f"raw output {tuple(raw.shape)} has other space axes than the event {tuple(event_shape)}: expected "
                f"{(raw.shape[0], channels, *event_shape[1:])}"
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

    def covariance(self) -> Tensor:
        """Covariance of the flattened event, (B, D, D); for small D."""
        return torch.diag_embed(self.variance.flatten(1))

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
        return self._first.dtype

    @property
    def _first(self) -> Tensor:
        return getattr(self, fields(self)[0].name)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same change to every parameter."""
        return type(self)(**{field.name: change(getattr(self, field.name)) for field in fields(self)})

    def __getitem__(self, rows: slice | Sequence[int] | Tensor) -> Self:
        """The distributions of some samples of the batch."""
        if getattr(rows, "ndim", 0 if hasattr(rows, "__index__") else 1) == 0:  # of Python, numpy or torch
            row = operator.index(rows)  # type: ignore[arg-type]
            raise TypeError(f"an index must keep the batch axis: use [{row} : {row + 1}] instead of [{row}]")
        place = (*[slice(None)] * self.batch_axis, rows)
        return self._map(lambda parameter: parameter[place])

    def expand(self, batch: int) -> Self:
        """A batch of one seen as a batch of `batch`, without a copy."""
        before = self.batch_axis
        return self._map(lambda p: p.expand(*p.shape[:before], batch, *p.shape[before + 1 :]))

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Another device or precision; arguments as those of `torch.Tensor.to`."""
        return self._map(lambda parameter: parameter.to(*args, **kwargs))

    def detach(self) -> Self:
        """Cut off from the graph of gradients."""
        return self._map(Tensor.detach)

    @abstractmethod
    def rsample(self, sample_shape: Sequence[int] = (), generator: Generators = None) -> Tensor:
        """Draws of shape (*sample_shape, B, *event), differentiable in the continuous parameters."""

    def log_prob(self, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Log density at (..., B, *event): (..., B) for joint families, (..., B, *event) for the others.

        Where `mask` is False a coordinate leaves the event of a joint family exactly; in the others it counts 0.
        """
        if not self.has_density:
            raise TypeError(f"family {self.name!r} has no density; score it by crps, energy_score or kernel_score")
        value = self._fitting(value)
        if mask is None or self.joint:
            return self._log_density(value, mask)
        keep = expand_mask(mask, value)
        return torch.where(keep, self._log_density(torch.where(keep, value, self.mean.detach()), None), 0.0)

    def _log_density(self, value: Tensor, mask: Tensor | None) -> Tensor:
        """`log_prob` of a target that fits, of families with a density; the mask matters to joint ones only."""
        raise NotImplementedError(f"family {self.name!r} says that it has a density but defines no _log_density")

    def cdf(self, value: Tensor) -> Tensor:
        """P(X <= value) of every coordinate's marginal, for value (..., B, *event)."""
        return self.marginal()._marginal_cdf(self._fitting(value))

    def _fitting(self, value: Tensor) -> Tensor:
        """`value` (..., B, *event) in the precision of the parameters; anything else is refused."""
        shape = self.shape
        if value.shape[max(0, value.ndim - len(shape)) :] != shape:
            raise ValueError(
                f"values of shape {tuple(value.shape)} do not fit a distribution of shape {tuple(shape)}: expected "
                "(..., B, *event)"
            )
        return value.to(self.dtype)

    @abstractmethod
    def affine(self, scale: float | Tensor, shift: float | Tensor) -> Self:
        """The distribution of scale * X + shift; tensors broadcast against (B, *event)."""

    @abstractmethod
    def scaled(self, tau: float) -> Self:
        """Multiply the covariance of each component by tau; the component means stay."""

    def convolved(self, variance: float) -> "NoiseDistribution":
        """The distribution of X + N(0, variance I)."""
        if not (variance >= 0 and math.isfinite(variance)):
            raise ValueError(f"the variance of added noise must be finite and at least 0; got {variance}")
        return self._convolved(variance) if variance else self

    @abstractmethod
    def _convolved(self, variance: float) -> "NoiseDistribution":
        """`convolved` for a positive variance."""

    def components(self) -> "LowRankMixtureDistribution":
        """A joint Gaussian family as diagonal-plus-factor components, the form whose projections are one formula."""
        raise TypeError(f"family {self.name!r} is not a joint Gaussian one: use low_rank, low_rank_mixture or cholesky")

    @abstractmethod
    def marginal(self) -> "NoiseDistribution":
        """The distribution of each coordinate by itself, as a family whose coordinates are independent."""

    def quantile(self, q: float | Sequence[float] | Tensor) -> Tensor:
        """Quantiles of the marginals: (B, *event) for a number, (len(q), B, *event) for several."""
        levels = torch.as_tensor(q, dtype=self.dtype, device=self.mean.device)
        if not bool(((levels > 0) & (levels < 1)).all()):
            raise ValueError(f"quantile levels must lie strictly between 0 and 1; got {levels.tolist()}")
        values = self.marginal()._marginal_quantile(levels.reshape(-1))
        return values.reshape(*levels.shape, *self.shape)

    def _marginal_quantile(self, levels: Tensor) -> Tensor:
        """(Q, B, *event); implemented by the families that `marginal` returns."""
        raise TypeError(f"{type(self).__name__}.marginal() must return a family with quantiles")

    def _marginal_cdf(self, value: Tensor) -> Tensor:
        """(..., B, *event); implemented by the families that `marginal` returns."""
        raise TypeError(f"{type(self).__name__}.marginal() must return a family with a distribution function")


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


def expand_mask(mask: Tensor, like: Tensor) -> Tensor:
    """A boolean mask broadcast to (B, *event); anything else is an error."""
    if mask.dtype != torch.bool:
        raise TypeError(f"a mask must be boolean, True where a coordinate counts; got dtype {mask.dtype}")
    try:
        return mask.expand(like.shape)
    except RuntimeError as error:
        raise ValueError(f"mask of shape {tuple(mask.shape)} does not broadcast to {tuple(like.shape)}") from error


def check_value(dist: NoiseDistribution, value: Tensor) -> Tensor:
    """The target of a score in the distribution's precision: one number per coordinate, nothing that broadcasts."""
    if value.shape != dist.shape:
        raise ValueError(
            f"a target of shape {tuple(value.shape)} does not fit a distribution of shape {tuple(dist.shape)}: a score "
            "compares one value per coordinate, (B, *event); expand or reshape it"
        )
    return value.to(dist.dtype)


def check_tau(tau: float) -> float:
    """tau multiplies a covariance, so it must be positive and finite."""
    if not (tau > 0 and math.isfinite(tau)):
        raise ValueError(f"tau multiplies a covariance and must be positive and finite; got {tau}")
    return float(tau)
