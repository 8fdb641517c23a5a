"""Gaussian process regression with leave-one-out predictions in closed form; exact for small tables."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

JITTER = 1e-6
"""Least variance of the noise, in units of the standardised target: keeps the Cholesky factor real."""


_BLOCK = 2**12
"""Rows at once."""


@dataclass(frozen=True)
class Kernel:
    """amplitude * Matern-5/2 of distances in units of one length per feature + linear * <a, b> + constant."""

    log_length: Tensor  # (F,)
    log_amplitude: Tensor  # ()
    log_linear: Tensor  # ()
    log_constant: Tensor  # ()

    @classmethod
    def initial(cls, num_features: int) -> "Kernel":
        """Lengths sqrt(F): the typical distance of standardised rows is of that order."""
        length = torch.full((num_features,), 0.5 * math.log(num_features), dtype=torch.float64)
        return cls(length, *(torch.tensor(value, dtype=torch.float64) for value in (0.0, -3.0, -2.0)))

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """Covariances (A, B) of rows (A, F) and (B, F)."""
        length = self.log_length.exp()
        squared = _squared_distances(a / length, b / length)
        distance = (5 * squared).sqrt()
        matern = (1 + distance + distance.square() / 3) * torch.exp(-distance)
        return self.log_amplitude.exp() * matern + self.log_linear.exp() * (a @ b.T) + self.log_constant.exp()

    def parameters(self) -> list[Tensor]:
        """All hyper-parameters."""
        return [self.log_length, self.log_amplitude, self.log_linear, self.log_constant]


@dataclass(frozen=True)
class FittedProcess:
    """k(x, rows) @ coefficients is the prediction; `left_out` are those of the training rows without themselves."""

    kernel: Kernel
    rows: Tensor  # the centres, (m, F)
    coefficients: Tensor  # (m, C)
    left_out: Tensor  # (n, C)


def _squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """|a_i - b_j|^2 for rows (A, F) and (B, F), at least 1e-12, where the square root still has a gradient."""
    squared = a.square().sum(1, keepdim=True) + b.square().sum(1) - 2 * a @ b.T
    return squared.clamp(min=1e-12)


def fit_process(
    rows: Tensor,
    targets: Tensor,
    weights: Tensor,
    *,
    generator: torch.Generator,
    num_steps: int,
    num_centres: int = 2000,
    num_rows: int = 300,
) -> FittedProcess:
    """Hyper-parameters by the marginal likelihood of at most `num_rows` rows, then the posterior mean for all rows.

    It is exact for tables of at most `num_centres` rows; larger ones keep so many rows as centres of the kernel (the
    subset of regressors), and all rows are fitted, in blocks: nothing is held for all pairs of rows and centres. rows
    (n, F) and targets (n, C) are standardised, in float64; a row's noise variance is divided by its weight.
    """
    order = torch.randperm(len(rows), generator=generator)
    chosen = order[:num_rows]
    kernel, log_noise = _maximise_likelihood(rows[chosen], targets[chosen], weights[chosen], num_steps)
    centres = rows[order[:num_centres]]
    factor = _cholesky(kernel(centres, centres))  # L L^T
    blocks = torch.arange(len(rows)).split(_BLOCK)

    def basis(block: Tensor) -> Tensor:
        """Phi, (rows of the block, m)."""
        return torch.linalg.solve_triangular(factor, kernel(centres, rows[block]), upper=False).T

    squares = (log_noise.exp() + JITTER) * torch.eye(len(centres), dtype=rows.dtype)
    products = rows.new_zeros(len(centres), targets.shape[1])
    for block in blocks:
        part = basis(block)
        weighted = part * weights[block].unsqueeze(1)
        squares += weighted.T @ part
        products += weighted.T @ targets[block]
    normal = _cholesky(squares)
    solution = torch.cholesky_solve(products, normal)  # ridge regression on Phi
    left_out = [_left_out(basis(block), normal, solution, targets[block], weights[block]) for block in blocks]
    coefficients = torch.linalg.solve_triangular(factor.T, solution, upper=True)
    return FittedProcess(kernel, centres, coefficients, torch.cat(left_out))


def _left_out(basis: Tensor, normal: Tensor, solution: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Predictions of rows by a fit without them, from their leverage, (R, C)."""
    leverage = weights * torch.linalg.solve_triangular(normal, basis.T, upper=False).square().sum(0)
    return targets - (targets - basis @ solution) / (1 - leverage).clamp(min=JITTER).unsqueeze(1)


def _cholesky(matrix: Tensor) -> Tensor:
    """Lower factor; equal rows make a kernel singular, so as little as needed is added to its diagonal."""
    eye, size = torch.eye(len(matrix), dtype=matrix.dtype), float(matrix.diagonal().mean())
    for jitter in (1e-10, 1e-8, 1e-6):
        factor, failed = torch.linalg.cholesky_ex(matrix + jitter * size * eye)
        if not failed:
            return factor
    return torch.linalg.cholesky(matrix + 1e-4 * size * eye)


def _maximise_likelihood(rows: Tensor, targets: Tensor, weights: Tensor, num_steps: int) -> tuple[Kernel, Tensor]:
    """Adam on -log p(targets), with a rate that falls to 0; returns kernel and log of the noise variance."""
    kernel, log_noise = Kernel.initial(rows.shape[1]), torch.tensor(-3.0, dtype=torch.float64)
    parameters = [*kernel.parameters(), log_noise]
    for parameter in parameters:
        parameter.requires_grad_()
    optimizer = torch.optim.Adam(parameters, lr=0.15)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    for _ in range(num_steps):
        covariance = kernel(rows, rows) + torch.diag((log_noise.exp() + JITTER) / weights)
        factor = torch.linalg.cholesky(covariance)
        fit = (targets * torch.cholesky_solve(targets, factor)).sum()
        loss = 0.5 * fit + targets.shape[1] * factor.diagonal().log().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    for parameter in parameters:
        parameter.requires_grad_(False)
    return kernel, log_noise
