"""How a model is trained, whatever it learns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["OptimizerConfig", "TrainingConfig"]


def _at_least(smallest: int, name: str, value: float) -> None:
    if value < smallest:
        raise ValueError(f"{name} must be at least {smallest}; got {value}")


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam and its learning rate over the steps.

    Args:
        learning_rate: Peak rate, reached after the warm-up.
        warmup_steps: Steps over which the rate rises linearly.
        decay: "exponential" reaches final_factor at decay_steps and stays, "cosine" does so along a half wave,
            "constant" does nothing.
        decay_steps: Steps counted from the start of training.
        final_factor: Rate at the end of the decay, relative to the peak.
        weight_decay: Decoupled weight decay (AdamW); 0 is plain Adam.
        beta1: Momentum of the mean.
        beta2: Momentum of the square.
        max_grad_norm: Gradients are clipped to this norm; 0 turns clipping off.
        kind: "adamw", or "adamw8bit", whose two averages take a quarter of the memory (pip install bitsandbytes; needs
            a GPU).
        fused: One kernel for all weights (adamw); None: on GPUs.
    """

    learning_rate: float = 3e-5
    warmup_steps: int = 100
    decay: Literal["exponential", "cosine", "constant"] = "exponential"
    decay_steps: int = 25_000
    final_factor: float = 0.01
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    max_grad_norm: float = 1.0
    kind: Literal["adamw", "adamw8bit"] = "adamw"
    fused: bool | None = None

    def __post_init__(self) -> None:
        if self.fused and self.kind == "adamw8bit":
            raise ValueError("fused is a choice of adamw; adamw8bit has kernels of its own: leave one of them out")
        for name in ("learning_rate", "final_factor"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}")
        for name in ("warmup_steps", "weight_decay", "max_grad_norm"):
            _at_least(0, name, getattr(self, name))
        if self.decay != "constant" and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"decay_steps={self.decay_steps} counts from the start of training and must exceed "
                f"warmup_steps={self.warmup_steps}; or take decay='constant'"
            )

    def at(self, step: int) -> float:
        """The rate of the optimiser step `step`, counted from 0: a function of the step, so nothing is saved.

        With n = step + 1 (n = 0 would be a step of length 0) and W = warmup_steps the peak is multiplied by n / W for
        n < W. Then, with u from 0 at n = W to 1 at decay_steps, by final_factor^u (exponential) or by
        final_factor + (1 - final_factor)(1 + cos(pi u)) / 2 (cosine).
        """
        return self.learning_rate * self._factor(step + 1)

    def _factor(self, number: int) -> float:
        if number < self.warmup_steps:
            return number / self.warmup_steps
        if self.decay == "constant":
            return 1.0
        progress = min(1.0, (number - self.warmup_steps) / (self.decay_steps - self.warmup_steps))
        if self.decay == "exponential":
            return float(self.final_factor**progress)
        return self.final_factor + (1 - self.final_factor) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class TrainingConfig:
    """The loop.

    Args:
        output: Run folder: config, versions, metrics, checkpoints, pictures, and the finished model.
        max_steps: Optimiser steps.
        batch_size: Effective batch, over processes and accumulation.
        micro_batch_size: Samples per process and forward pass; None takes batch_size / processes.
        optimizer: Adam and its schedule.
        ema_decay: Decay of the exponential moving average of the weights; 0 turns it off. diffusers' EMAModel warms it
            up: after n steps the decay is min(ema_decay, n / (n + 9)), and 0 at the first.
        mixed_precision: "no", "fp16" or "bf16".
        gradient_checkpointing: Trade time for memory.
        checkpoint_every: Steps between checkpoints; there is one at the end and at an interruption as well.
        checkpoint_limit: How many to keep, newest first; at least 1.
        validate_every: Steps between validations; 0 turns them off.
        log_every: Steps between entries of metrics.jsonl.
        resume: "latest" resumes from the newest checkpoint where there is one, "never" refuses a used folder, and a
            path names a checkpoint.
        seed: Everything random follows from it.
        num_workers: Processes that read data, for each process that trains; they live as long as the run. None: up to
            8 of the machine's cores where a GPU trains, and none on a CPU, whose cores are busy.
        allow_tf32: Let float32 products of large matrices be rounded to TF32, on GPUs since Ampere.
        compile: "no", or a backend of torch.compile, for instance "inductor". Compiling takes minutes, and again for
            every new size of picture.
        tracker: "tensorboard", "wandb" or "none"; metrics.jsonl is always written.
        cpu: Stay on the CPU even where there is a GPU.
    """

    output: Path = Path("runs/depth")
    max_steps: int = 30_000
    batch_size: int = 32
    micro_batch_size: int | None = None
    optimizer: OptimizerConfig = OptimizerConfig()
    ema_decay: float = 0.999
    mixed_precision: Literal["no", "fp16", "bf16"] = "no"
    gradient_checkpointing: bool = False
    checkpoint_every: int = 1000
    checkpoint_limit: int = 2
    validate_every: int = 1000
    log_every: int = 10
    resume: str = "latest"
    seed: int = 0
    num_workers: int | None = None
    allow_tf32: bool = False
    compile: str = "no"
    tracker: Literal["tensorboard", "wandb", "none"] = "tensorboard"
    cpu: bool = False

    def __post_init__(self) -> None:
        for name in ("max_steps", "batch_size", "checkpoint_every", "checkpoint_limit", "log_every"):
            _at_least(1, name, getattr(self, name))
        for name in ("validate_every", "seed"):
            _at_least(0, name, getattr(self, name))
        if self.num_workers is not None:
            _at_least(0, "num_workers", self.num_workers)
        if self.micro_batch_size is not None:
            _at_least(1, "micro_batch_size", self.micro_batch_size)
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay must lie in [0, 1), where 0 turns it off; got {self.ema_decay}")
