"""A bandwidth that follows the residual: gamma_t = s_t sqrt(D), s_t the running RMS of the residual at timestep t."""

import torch
from torch import Tensor

from marigold_uq.distributions.base import expand_mask


class RunningResidualScale(torch.nn.Module):
    """Running root mean square of (target - mean) per timestep bin, kept in buffers so that it is saved and resumed.

    The kernel score has its best curvature near gamma = s sqrt(D) and is flat far from it. The scale comes from past
    batches only, never from the sample being scored, so the score stays proper.
    """

    mean_square: Tensor  # (bins,)

    def __init__(self, num_train_timesteps: int, num_bins: int = 20, momentum: float = 0.99) -> None:
        super().__init__()
        self.num_train_timesteps = num_train_timesteps
        self.momentum = momentum
        self.register_buffer("mean_square", torch.ones(min(num_bins, num_train_timesteps)))

    def forward(self, timesteps: Tensor) -> Tensor:
        """s_t of each sample, (B,)."""
        return self.mean_square[self._bins(timesteps)].sqrt()

    @torch.no_grad()
    def update(self, timesteps: Tensor, residual: Tensor, mask: Tensor | None = None) -> None:
        """Learn from a batch that has been scored already; residual (B, *event), only where it is finite."""
        residual = residual.to(self.mean_square)
        keep = residual.isfinite() if mask is None else residual.isfinite() & expand_mask(mask, residual)
        self.update_sums(timesteps, torch.where(keep, residual, 0.0).square().flatten(1).sum(1), keep.flatten(1).sum(1))

    @torch.no_grad()
    def update_sums(self, timesteps: Tensor, square: Tensor, count: Tensor) -> None:
        """The same from each sample's sum of squares and number of coordinates, (B,), as processes exchange them."""
        for index, total, size in zip(self._bins(timesteps).tolist(), square, count, strict=True):
            if size > 0:
                self.mean_square[index] = torch.lerp(total / size, self.mean_square[index], self.momentum)

    def _bins(self, timesteps: Tensor) -> Tensor:
        return timesteps.to(self.mean_square.device) * len(self.mean_square) // self.num_train_timesteps
