"""What CARD's published reverse mean does to the same trained models.

CARD diffuses y itself, y_t = sqrt(abar_t) y_0 + (1 - sqrt(abar_t)) f + sqrt(1 - abar_t) eps. A step back is

    right:     sqrt(abar_prev) y0_hat + (1 - sqrt(abar_prev)) f + lambda eps + sigma z
    published: sqrt(abar_prev) y0_hat + lambda (eps + (1 - sqrt(abar_t)) / sqrt(1 - abar_t) f) + sigma z

With x = y - f the right one is the ordinary step of our scheduler on the residual, and the published one adds to it
the multiple of f that `card_error` returns; f is the baseline in units of the standardised target.
"""

import math

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from marigold_uq.pipelines.tabular.pipeline import TabularRegressionPipeline, row_generators
from marigold_uq.sampling import initial_noise, reverse_diffusion
from marigold_uq.schedulers.scheduling_distributional_ddim import DistributionalDDIMScheduler


def card_error(scheduler: DistributionalDDIMScheduler, timestep: int) -> float:
    """What the published step adds to the right one, in multiples of f.

    lambda (1 - sqrt(abar)) / sqrt(1 - abar) - (1 - sqrt(abar_prev)).

    It is 0 in the last step, where lambda = 0 and abar_prev = 1; along the way it is not, and the network sees the sum.
    """
    abar, abar_prev = scheduler.alpha_bar(timestep), scheduler.alpha_bar(scheduler.previous_timestep(timestep))
    std_dev = scheduler.step_coefficients(timestep).std_dev
    direction = math.sqrt(max(0.0, 1 - abar_prev - std_dev**2))  # lambda
    return direction * (1 - math.sqrt(abar)) / math.sqrt(1 - abar) - (1 - math.sqrt(abar_prev))


@torch.no_grad()
def sample_as_card(
    pipeline: TabularRegressionPipeline, features: ArrayLike, num_samples: int = 100, *, seed: int = 0, published: bool
) -> NDArray[np.float64]:
    """Draws (num_samples, rows) of a pipeline of one model and one target, by the right or the published step.

    The random numbers are those of `pipeline(...)`, to which the right step is equal.
    """
    network, scheduler = pipeline.network, pipeline.scheduler
    if network.config.num_models != 1 or network.config.num_targets != 1 or pipeline.baseline is None:
        raise ValueError("expected a pipeline of one model with a baseline and one target; use `select`")
    matrix = pipeline.encode(features)
    scheduler.set_timesteps(pipeline.config.default_num_inference_steps or scheduler.config.num_train_timesteps)
    scaled = (torch.tensor(matrix) - network.feature_mean[:, None]) / network.feature_scale[:, None]
    condition = scaled.to(network.gate.dtype)  # (1, rows, F)
    baseline = pipeline.baseline(condition)  # (1, rows, 1)
    shift = baseline[0].unsqueeze(-1) / network.residual_scale[0]  # (rows, 1, 1)

    def add_error(index: int, timestep: int, x_prev: Tensor) -> Tensor:
        return x_prev + card_error(scheduler, timestep) * shift

    generators = row_generators(matrix, pipeline.model_numbers, seed)
    x_0 = reverse_diffusion(
        pipeline.denoiser(condition, baseline, num_samples),
        scheduler,
        initial_noise((len(matrix), 1, num_samples), like=condition, generator=generators),
        generator=generators,
        callback=add_error if published else None,
    )
    standardised = x_0[:, 0] * network.residual_scale[0] + baseline[0]  # (rows, n)
    return (standardised * network.target_scale[0] + network.target_mean[0]).T.double().numpy()
