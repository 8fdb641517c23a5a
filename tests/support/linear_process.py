"""A linear stochastic process whose forecast law is exact, and the network that has learned it perfectly."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from marigold_uq.models.field_encoder import FieldEncoder
from marigold_uq.pipelines.field import FieldForecastPipeline
from marigold_uq.schedulers import DistributionalDDIMScheduler

POINTS = 5
STATISTICS = {"mean": 0.4, "std": 1.7, "increment_mean": -0.1, "increment_std": 0.8}


class LinearProcess:
    """u_s = G u_{s-1} + H u_{s-2} + b + N(0, Q), Q = diag(d) + f f^T: correlated, and two states deep."""

    def __init__(self) -> None:
        ring = torch.roll(torch.eye(POINTS, dtype=torch.float64), 1, 0)
        self.first = 0.6 * torch.eye(POINTS, dtype=torch.float64) + 0.3 * ring
        self.second = -0.25 * ring.T
        self.shift = torch.linspace(-0.2, 0.3, POINTS, dtype=torch.float64)
        self.diag = torch.linspace(0.05, 0.4, POINTS, dtype=torch.float64)
        self.factor = torch.tensor([0.5, -0.4, 0.3, 0.2, -0.6], dtype=torch.float64)

    def mean_step(self, before: Tensor, last: Tensor) -> Tensor:
        """E[u_s | u_{s-2}, u_{s-1}], rows are states."""
        return last @ self.first.T + before @ self.second.T + self.shift

    def forecast(self, before: Tensor, last: Tensor, num_leads: int) -> list[tuple[Tensor, Tensor]]:
        """Exact mean (D,) and covariance (D, D) at every lead time: moments of the pair (u_{s-1}, u_s)."""
        zero, eye = torch.zeros(POINTS, POINTS, dtype=torch.float64), torch.eye(POINTS, dtype=torch.float64)
        move = torch.cat([torch.cat([zero, eye], 1), torch.cat([self.second, self.first], 1)])
        noise = torch.zeros_like(move)
        noise[POINTS:, POINTS:] = torch.diag(self.diag) + torch.outer(self.factor, self.factor)
        mean, cov = torch.cat([before, last]), torch.zeros_like(move)
        found = []
        for _ in range(num_leads):
            mean = move @ mean + torch.cat([torch.zeros_like(self.shift), self.shift])
            cov = move @ cov @ move.T + noise
            found.append((mean[POINTS:], cov[POINTS:, POINTS:]))
        return found


class PerfectNetwork(nn.Module):
    """Raw low_rank output [loc, rho, factor] of v given x_t, from the posterior of a Gaussian increment.

    For x_0 ~ N(m, C), V = abar C + (1 - abar) I: v has mean sqrt(abar (1-abar)) (I - C) V^-1 (x_t - sqrt(abar) m) -
    sqrt(1-abar) m and covariance C V^-1 (METHOD: oracle), and C V^-1 = diag + rank one when C is.
    """

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, process: LinearProcess, alphas_cumprod: Tensor) -> None:
        super().__init__()
        self.process, self.alphas = process, alphas_cumprod.double()

    def forward(self, x: Tensor, timestep: Tensor | int) -> Tensor:
        """x is [u_{s-2}, u_{s-1}, x_t] with scaled states, (B, 3, D)."""
        before, last, x_t = x.double().unbind(1)
        s, p = STATISTICS, self.process
        before, last = (state * s["std"] + s["mean"] for state in (before, last))
        mean = (p.mean_step(before, last) - last - s["increment_mean"]) / s["increment_std"]
        diag, factor = p.diag / s["increment_std"] ** 2, p.factor / s["increment_std"]
        alpha_bar = self.alphas[int(timestep)]
        cov = torch.diag(diag) + torch.outer(factor, factor)
        inverse = torch.linalg.inv(alpha_bar * cov + (1 - alpha_bar) * torch.eye(POINTS, dtype=torch.float64))
        residual = x_t - alpha_bar.sqrt() * mean
        loc = (alpha_bar * (1 - alpha_bar)).sqrt() * residual @ (torch.eye(POINTS) - cov) @ inverse
        loc = loc - (1 - alpha_bar).sqrt() * mean
        # C V^-1 = diag(d/t) + w w^T (1 - abar) / (1 + abar f.w), with t = abar d + 1 - abar and w = f/t
        total = alpha_bar * diag + 1 - alpha_bar
        w = factor / total
        shared = w * ((1 - alpha_bar) / (1 + alpha_bar * (factor * w).sum())).sqrt()
        rho = torch.log(torch.expm1(diag / total - 1e-12))
        raw = torch.stack([loc, rho.expand_as(loc), shared.expand_as(loc)], 1)
        return raw.float()


def perfect_pipeline(**schedule: Any) -> FieldForecastPipeline:
    """Zero terminal SNR, so that x_T = N(0, I) is the exact marginal."""
    options = {"num_train_timesteps": 50, "beta_start": 0.001, "beta_end": 0.2, "eta": 1.0, **schedule}
    scheduler = DistributionalDDIMScheduler(
        noise_family="low_rank",
        rank=1,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        **options,
    )
    encoder = FieldEncoder(statistics={"u": STATISTICS}, coordinates={"x": np.arange(float(POINTS)).tolist()})
    network: Any = PerfectNetwork(LinearProcess(), scheduler.alphas_cumprod)
    return FieldForecastPipeline(network, scheduler, encoder)
