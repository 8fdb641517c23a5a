"""Learning rate as a function of the step: nothing to save, nothing to restore."""

import math

from marigold_uq.training.config import OptimizerConfig


def rate_factor(step: int, config: OptimizerConfig) -> float:
    """Factor on the peak learning rate at optimiser step `step`, counted from 0.

    Warm-up: n / W for the n-th step. Then, with u from 0 at W to 1 at decay_steps: final_factor^u (exponential) or
    final_factor + (1 - final_factor)(1 + cos(pi u)) / 2 (cosine).
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return 1.0
    length = max(1, config.decay_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / length)
    if config.decay == "exponential":
        return float(config.final_factor**progress)
    return config.final_factor + (1 - config.final_factor) * 0.5 * (1 + math.cos(math.pi * progress))
