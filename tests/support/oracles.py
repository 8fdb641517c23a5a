"""Exact posteriors: what a perfect network would put out for targets whose law is known.

For x_0 ~ sum_k w_k N(m_k, C_k) and x_t = sqrt(abar) x_0 + sqrt(1 - abar) eps, the law of x_0 given x_t is again a
mixture of Gaussians, and eps, v and x_0 are affine in one another given x_t. `perfect_network` puts that law into the
raw channels of a family, so that `from_raw`, `predict_noise` and `step` are all in the chain. Nothing here calls the
library's distributions or coefficients: the raw layouts and activations are written out a second time.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

MIN_SCALE, MIN_VARIANCE = 1e-6, 1e-12  # what the activation adds to softplus: part of the file format

Moments = tuple[Tensor, Tensor]
Network = Callable[[Tensor, Tensor | int], Tensor]


@dataclass(frozen=True)
class JointMixture:
    """x_0 ~ sum_k weights_k N(means_k, diag(diag_k) + U_k U_k^T) on events flattened to D coordinates."""

    event_shape: tuple[int, ...]
    weights: Tensor  # (K,)
    means: Tensor  # (K, D)
    diag: Tensor  # (K, D), variances
    factor: Tensor  # (K, R, D)

    @property
    def covs(self) -> Tensor:
        """C_k, (K, D, D)."""
        return torch.diag_embed(self.diag) + self.factor.mT @ self.factor

    def moments(self) -> Moments:
        """Mean (D,) and covariance (D, D) of x_0."""
        mean = self.weights @ self.means
        spread = self.means - mean
        return mean, torch.einsum("k,kij->ij", self.weights, self.covs + spread[:, :, None] * spread[:, None, :])

    def cdf(self, points: Tensor) -> Tensor:
        """P(x_0 <= points) of each coordinate's marginal, (Q, D)."""
        scale = self.covs.diagonal(dim1=-2, dim2=-1).sqrt()  # (K, D)
        return torch.einsum("k,qkd->qd", self.weights, torch.special.ndtr((points[:, None] - self.means) / scale))

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """(count, *event) draws of x_0."""
        component = torch.multinomial(self.weights, count, replacement=True, generator=generator)
        z = torch.randn(count, self.means.shape[1], 1, generator=generator, dtype=self.means.dtype)
        white = (torch.linalg.cholesky(self.covs)[component] @ z).squeeze(-1)
        return (self.means[component] + white).reshape(count, *self.event_shape)

    def posterior(self, x_t: Tensor, alpha_bar: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x_0 given x_t (B, D): loc (B, K, D), diag (K, D), factor (K, R, D), logits (B, K).

        With n = 1 - abar, t = abar d_k + n and V_k = diag(t) + abar U_k U_k^T = abar C_k + n I, the mean is
        m_k + sqrt(abar) C_k V_k^-1 (x_t - sqrt(abar) m_k), and by Woodbury the covariance is
        n C_k V_k^-1 = diag(n d_k / t) + n^2 W W^T with W = diag(t)^-1 U_k chol(I + abar U_k^T diag(t)^-1 U_k)^-T:
        it keeps the rank of U_k, and nothing is divided by abar, so that zero SNR needs no special case.
        """
        noise = 1 - alpha_bar
        total = alpha_bar * self.diag + noise  # (K, D)
        scaled = self.factor / total.unsqueeze(1)  # (K, R, D)
        inner = torch.eye(self.factor.shape[1], dtype=total.dtype) + alpha_bar * scaled @ self.factor.mT
        root = torch.linalg.cholesky(inner)
        factor = noise * torch.linalg.solve_triangular(root, scaled, upper=False)  # (K, R, D)
        v = alpha_bar * self.covs + noise * torch.eye(total.shape[1], dtype=total.dtype)  # (K, D, D)
        residual = x_t.unsqueeze(1) - alpha_bar**0.5 * self.means  # (B, K, D)
        white = torch.einsum("kij,bkj->bki", torch.linalg.inv(v), residual)
        loc = self.means + alpha_bar**0.5 * torch.einsum("kij,bkj->bki", self.covs, white)
        logits = self.weights.log() - 0.5 * ((residual * white).sum(-1) + torch.logdet(v))
        return loc, noise * self.diag / total, factor, logits


@dataclass(frozen=True)
class IndependentMixtures:
    """Every coordinate its own mixture: x_0d ~ sum_k weights_kd N(means_kd, scales_kd^2)."""

    event_shape: tuple[int, ...]
    weights: Tensor  # (K, D)
    means: Tensor  # (K, D)
    scales: Tensor  # (K, D)

    def moments(self) -> Moments:
        """Mean (D,) and covariance (D, D) of x_0."""
        mean = (self.weights * self.means).sum(0)
        return mean, torch.diag((self.weights * (self.scales**2 + (self.means - mean) ** 2)).sum(0))

    def cdf(self, points: Tensor) -> Tensor:
        """P(x_0 <= points) of each coordinate, (Q, D)."""
        return (self.weights * torch.special.ndtr((points[:, None] - self.means) / self.scales)).sum(1)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """(count, *event) draws of x_0."""
        component = torch.multinomial(self.weights.T, count, replacement=True, generator=generator).T  # (count, D)
        z = torch.randn(component.shape, generator=generator, dtype=self.means.dtype)
        return (self.means.gather(0, component) + self.scales.gather(0, component) * z).reshape(
            count, *self.event_shape
        )

    def posterior(self, x_t: Tensor, alpha_bar: float) -> tuple[Tensor, Tensor, Tensor]:
        """x_0 given x_t (B, D): loc (B, K, D), scale (K, D), logits (B, K, D)."""
        noise, variance = 1 - alpha_bar, self.scales**2
        total = alpha_bar * variance + noise
        residual = x_t.unsqueeze(1) - alpha_bar**0.5 * self.means
        loc = self.means + alpha_bar**0.5 * variance / total * residual
        logits = self.weights.log() - 0.5 * (residual**2 / total + total.log())
        return loc, (noise * variance / total).sqrt(), logits


Target = JointMixture | IndependentMixtures


def output_of_original(prediction_type: str, alpha_bar: float) -> tuple[float, float]:
    """(a, b) with o = a x_t + b x_0, from x_t = sqrt(abar) x_0 + sqrt(n) eps, v = sqrt(abar) eps - sqrt(n) x_0."""
    signal, noise = alpha_bar**0.5, (1 - alpha_bar) ** 0.5
    return {
        "epsilon": (1 / noise, -signal / noise),
        "v_prediction": (signal / noise, -1 / noise),
        "sample": (0.0, 1.0),
    }[prediction_type]


def _tensor(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def gaussian_target(
    event_shape: tuple[int, ...], means: list[float], variances: list[float], factors: list[list[float]] | None = None
) -> JointMixture:
    """x_0 ~ N(means, diag(variances) + sum of the outer products of `factors`)."""
    factor = _tensor([factors]) if factors else torch.zeros(1, 0, len(means), dtype=torch.float64)
    return JointMixture(event_shape, _tensor([1.0]), _tensor([means]), _tensor([variances]), factor)


_MEANS = [0.7, -0.4, 0.0, 1.0]
_FACTORS = [[0.8, -0.5, 0.3, 0.6], [0.0, 0.6, -0.4, 0.2], [0.5, 0.1, 0.7, -0.3]]
TARGETS: dict[str, Target] = {
    "gaussian": gaussian_target((2, 2), _MEANS, [0.09, 0.64, 1.0, 0.0025]),
    "mixture": IndependentMixtures(
        (2, 2),
        weights=_tensor([[0.3, 0.5, 0.9, 0.2], [0.7, 0.5, 0.1, 0.8]]),
        means=_tensor([[-1.0, -0.5, 0.2, -0.3], [0.8, 0.5, -2.0, 0.4]]),
        scales=_tensor([[0.2, 0.1, 1.0, 0.3], [0.4, 0.3, 0.2, 0.05]]),
    ),
    "low_rank": gaussian_target((2, 2), _MEANS, [0.1, 0.3, 0.05, 0.2], _FACTORS[:2]),
    "cholesky": gaussian_target((2, 2), _MEANS, [0.1, 0.3, 0.05, 0.2], _FACTORS),
    "sample": gaussian_target((1, 4), _MEANS, [0.1, 0.3, 0.05, 0.2], _FACTORS),
    "low_rank_mixture": JointMixture(
        (2, 2),
        weights=_tensor([0.35, 0.65]),
        means=_tensor([_MEANS, [-0.6, 0.5, 0.9, -0.8]]),
        diag=_tensor([[0.1, 0.3, 0.05, 0.2], [0.02, 0.1, 0.2, 0.05]]),
        factor=_tensor([_FACTORS[:1], _FACTORS[2:]]),
    ),
}
"""For each family a law of x_0 whose posterior it can state exactly."""

SIZES: dict[str, dict[str, int]] = {
    "point": {},
    "gaussian": {},
    "mixture": {"num_components": 2},
    "low_rank": {"rank": 2},
    "cholesky": {},
    "sample": {},
    "low_rank_mixture": {"num_components": 2, "rank": 1},
}
"""The scheduler's arguments that go with `TARGETS`."""


def in_dtype(target: Target, dtype: torch.dtype) -> Target:
    """The same target in another floating-point type."""
    tensors = {name: value.to(dtype) for name, value in vars(target).items() if isinstance(value, Tensor)}
    return replace(target, **tensors)


def noisy(target: Target, alpha_bar: float, count: int, generator: torch.Generator) -> Tensor:
    """Draws of x_t from its exact marginal law."""
    x_0 = target.draw(count, generator)
    eps = torch.randn(x_0.shape, generator=generator, dtype=x_0.dtype)
    return alpha_bar**0.5 * x_0 + (1 - alpha_bar) ** 0.5 * eps


def perfect_network(family: str, target: Target, alphas_cumprod: Tensor, prediction_type: str) -> Network:
    """Raw output (B, channels, ...) of a network that has learned the exact law of its output for `family`."""

    def network(x: Tensor, timestep: Tensor | int) -> Tensor:
        alpha_bar = float(alphas_cumprod[int(timestep)])
        a, b = output_of_original(prediction_type, alpha_bar)
        return _encoders()[family](target, x, alpha_bar, a, b)

    return network


@dataclass(frozen=True)
class Framework:
    """One timestep of another framework: x_t = signal x_0 + noise eps, network(input_scale x_t) = a x_t + b x_0."""

    signal: float
    noise: float
    input_scale: float
    a: float
    b: float

    @property
    def size(self) -> float:
        """x_t / size is x_t of a variance-preserving chain."""
        return (self.signal**2 + self.noise**2) ** 0.5

    @property
    def alpha_bar(self) -> float:
        """Of that chain."""
        return (self.signal / self.size) ** 2


def edm_framework(timestep: float, sigma_data: float = 0.5, sign: float = 1.0) -> Framework:
    """x_0 = c_skip x_t + c_out F (Karras et al. 2022, Table 1), sigma = exp(4 c_noise)."""
    sigma = float(torch.tensor(4 * timestep, dtype=torch.float64).exp())
    total = sigma**2 + sigma_data**2
    c_skip, c_out = sigma_data**2 / total, sign * sigma * sigma_data / total**0.5
    return Framework(1.0, sigma, 1 / total**0.5, -c_skip / c_out, 1 / c_out)


def flow_framework(timestep: float) -> Framework:
    """x_t = (1 - s) x_0 + s eps; eps - x_0 = (x_t - x_0) / s."""
    s = timestep / 1000
    return Framework(1 - s, s, 1.0, 1 / s, -1 / s)


def perfect_network_of(family: str, target: Target, framework: Callable[[float], Framework]) -> Network:
    """The same in another framework; channels of fresh noise after those of x_t are never scaled."""

    def network(x: Tensor, timestep: Tensor | int) -> Tensor:
        at, channels = framework(float(timestep)), target.event_shape[0]
        x_t = x[:, :channels] / at.input_scale
        preserved = torch.cat([x_t / at.size, x[:, channels:]], 1)
        return _encoders()[family](target, preserved, at.alpha_bar, at.a * at.size, at.b)

    return network


def _encoders() -> dict[str, Callable[..., Tensor]]:
    return {
        "point": _raw_point,
        "gaussian": _raw_gaussian,
        "mixture": _raw_mixture,
        "low_rank": _raw_low_rank,
        "cholesky": _raw_cholesky,
        "low_rank_mixture": _raw_low_rank_mixture,
        "sample": _raw_sample,
    }


def _raw_point(target: Target, x: Tensor, alpha_bar: float, a: float, b: float) -> Tensor:
    """[mean], the mean of all components."""
    loc, *_, logits = target.posterior(x.flatten(1), alpha_bar)
    weights = logits.softmax(1) if logits.ndim == 3 else logits.softmax(1).unsqueeze(-1)
    return a * x + b * (weights * loc).sum(1).reshape(x.shape)


def _raw_gaussian(target: JointMixture, x: Tensor, alpha_bar: float, a: float, b: float) -> Tensor:
    """[loc, rho], rho for a standard deviation: the marginals, the whole law when coordinates are independent."""
    loc, diag, factor, _ = target.posterior(x.flatten(1), alpha_bar)
    scale = abs(b) * (diag + factor.square().sum(1)).sqrt()
    return _blocks(x, a * x.flatten(1).unsqueeze(1) + b * loc, inverse_softplus(scale).unsqueeze(0))


def _raw_mixture(target: IndependentMixtures, x: Tensor, alpha_bar: float, a: float, b: float) -> Tensor:
    """[loc_1..loc_K, rho_1..rho_K, logit_1..logit_K]."""
    loc, scale, logits = target.posterior(x.flatten(1), alpha_bar)
    rho = inverse_softplus(abs(b) * scale).unsqueeze(0)
    return _blocks(x, a * x.flatten(1).unsqueeze(1) + b * loc, rho, logits)


def _raw_low_rank(target: JointMixture, x: Tensor, alpha_bar: float, a: float, b: float) -> Tensor:
    """[loc, rho, factor_1..factor_r], rho for a variance."""
    loc, diag, factor, _ = target.posterior(x.flatten(1), alpha_bar)
    rho = inverse_softplus(b * b * diag, MIN_VARIANCE).unsqueeze(0)
    return _blocks(x, a * x.flatten(1).unsqueeze(1) + b * loc, rho, b * factor)


def _raw_low_rank_mixture(target: JointMixture, x: Tensor, alpha_bar: float, a: float, b: float) -> Tensor:
    """[loc_1.., rho_1.., logit_1.., factor_11..factor_1r, .., factor_K1..factor_Kr]; the reader averages the logits."""
    loc, diag, factor, logits = target.posterior(x.flatten(1), alpha_bar)
    rho = inverse_softplus(b * b * diag, MIN_VARIANCE).unsqueeze(0)
    everywhere = logits.unsqueeze(-1).expand_as(loc)
    return _blocks(x, a * x.flatten(1).unsqueeze(1) + b * loc, rho, everywhere, (b * factor).flatten(0, 1).unsqueeze(0))


def _raw_cholesky(target: JointMixture, x: Tensor, alpha_bar: float, a: float, b: float) -> Tensor:
    """[loc, lower triangle row by row]: diagonal rho for the marginal deviation, below it L_ij / L_ii."""
    loc, diag, factor, _ = target.posterior(x.flatten(1), alpha_bar)
    root = torch.linalg.cholesky(b * b * (torch.diag_embed(diag) + factor.mT @ factor))[0]  # (D, D)
    raw = root / root.diagonal().unsqueeze(-1)
    raw = raw.tril(-1) + torch.diag(inverse_softplus(root.norm(dim=-1)))
    rows, columns = torch.tril_indices(*raw.shape)
    mean = a * x.flatten(1) + b * loc[:, 0]
    return torch.cat([mean, raw[rows, columns].expand(len(mean), -1)], 1)


def _raw_sample(target: JointMixture, x: Tensor, alpha_bar: float, a: float, b: float) -> Tensor:
    """One draw, made from the noise channel that comes after the single channel of x_t: loc + L z."""
    x_t, z = x[:, :1], x[:, 1:].flatten(1)
    loc, diag, factor, _ = target.posterior(x_t.flatten(1), alpha_bar)
    root = torch.linalg.cholesky(torch.diag_embed(diag) + factor.mT @ factor)[0]
    return a * x_t + b * (loc[:, 0] + z @ root.T).reshape(x_t.shape)


def _blocks(x: Tensor, *parts: Tensor) -> Tensor:
    """Parts (B or 1, P, D) -> raw channels (B, (P + ...) C, *space), whole blocks of C one after the other."""
    wide = torch.cat([part.expand(len(x), -1, -1) for part in parts], 1)
    return wide.reshape(len(x), wide.shape[1], *x.shape[1:]).flatten(1, 2)


def inverse_softplus(value: Tensor, floor: float = MIN_SCALE) -> Tensor:
    """The rho with softplus(rho) + floor = value."""
    return torch.log(torch.expm1(value - floor))
