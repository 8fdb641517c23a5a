"""Learning rate as a function of the step: nothing to save, nothing to restore."""

import math

from marigold_uq.training.config import OptimizerConfig


def rate_factor(step: int, config: OptimizerConfig) -> float:
    """Factor on the peak learning rate at optimiser step `step`, counted from 0.

    With n = step + 1 (the n-th step; n = 0 would be a step of length 0) and warm-up W: n / W for n < W. Then, with u
    from 0 at n = W to 1 at decay_steps: final_factor^u (exponential) or final_factor + (1 - final_factor)(1 + cos(pi
    u)) / 2 (cosine).
    """
    number = step + 1
    if number < config.warmup_steps:
        return number / config.warmup_steps
    if config.decay == "constant":
        return 1.0
    progress = min(1.0, (number - config.warmup_steps) / (config.decay_steps - config.warmup_steps))
    if config.decay == "exponential":
        return float(config.final_factor**progress)
    return config.final_factor + (1 - config.final_factor) * 0.5 * (1 + math.cos(math.pi * progress))
