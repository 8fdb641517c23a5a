"""The loop: accelerate does devices, precision and processes; order, randomness and rate are functions of the step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from diffusers.training_utils import EMAModel
from torch import Tensor
from tqdm.auto import tqdm

from marigold_uq.randomness import member_generators
from marigold_uq.training.config import TrainingConfig
from marigold_uq.training.interrupt import InterruptGuard
from marigold_uq.training.order import BatchPlan, steps_of_run
from marigold_uq.training.run_folder import CHECKPOINT, RunFolder, checkpoint_step
from marigold_uq.training.schedule import rate_factor
from marigold_uq.training.task import TrainingTask


class NonFiniteLossError(FloatingPointError):
    """The loss became NaN or infinite; the message names the step and the samples."""


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended."""

    step: int
    finished: bool
    folder: Path


def make_accelerator(config: TrainingConfig) -> Accelerator:
    """One per process; gradients are synchronised by hand, so accumulation is ours."""
    return Accelerator(
        mixed_precision=config.mixed_precision,
        cpu=config.cpu,
        log_with=None if config.tracker == "none" else config.tracker,
        project_dir=str(config.output),
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
    )


class Trainer:
    """Trains one task; `run` starts or resumes."""

    def __init__(self, task: TrainingTask, config: TrainingConfig, accelerator: Accelerator | None = None) -> None:
        self.task, self.config = task, config
        self.accelerator = accelerator or make_accelerator(config)
        self.plan = BatchPlan.of(config, self.accelerator.process_index, self.accelerator.num_processes)
        self.folder = RunFolder(config.output)
        set_seed(config.seed, device_specific=True)  # for dropout alone; everything else has generators
        if config.gradient_checkpointing:
            task.network.enable_gradient_checkpointing()  # type: ignore[operator]
        trainable = [p for p in task.network.parameters() if p.requires_grad]
        if not trainable:
            raise ValueError("no parameter of the network requires a gradient: there is nothing to train")
        rate = config.optimizer
        optimizer = torch.optim.AdamW(
            trainable, lr=rate.learning_rate, betas=(rate.beta1, rate.beta2), weight_decay=rate.weight_decay
        )
        self.network, self.optimizer = self.accelerator.prepare(task.network, optimizer)
        self.ema = EMAModel(trainable, decay=config.ema_decay) if config.ema_decay else None
        if self.ema is not None:
            self.ema.to(self.accelerator.device)
        self.accelerator.register_for_checkpointing(*([self.ema] if self.ema else []), *task.states())

    def run(self, description: str = "training", config_text: str = "") -> TrainingResult:
        """Train to max_steps, from the newest checkpoint where there is one."""
        start = self._prepare_folder(config_text)
        step = start
        with InterruptGuard() as guard, self._progress(start, description) as bar:
            steps = steps_of_run(
                self.task.dataset,
                self.plan,
                start_step=start,
                max_steps=self.config.max_steps,
                num_workers=self.config.num_workers,
            )
            for index, batches in steps:
                loss = self._step(index, batches)
                step = index + 1
                bar.update()
                bar.set_postfix(loss=f"{loss:.4f}")
                stop = self._any_process(guard.requested)
                self._after_step(step, loss, force_checkpoint=stop)
                if stop:
                    break
        finished = step >= self.config.max_steps
        if finished:
            self._finish(step)
        self.accelerator.end_training()
        return TrainingResult(step, finished, self.config.output)

    def _prepare_folder(self, config_text: str) -> int:
        """Folders, config, trackers, and the checkpoint to go on from; returns the first step."""
        if self.accelerator.is_main_process:
            self.folder.create(self.config.resume)
            self.folder.write_versions()
            if config_text:
                self.folder.write_text("config.yaml", config_text)
        self.accelerator.wait_for_everyone()
        if self.config.tracker != "none":
            self.accelerator.init_trackers("tracker")
        checkpoint = self.folder.find_checkpoint(self.config.resume)
        if checkpoint is None:
            return 0
        self.accelerator.load_state(str(checkpoint))
        step = checkpoint_step(checkpoint)
        if self.accelerator.is_main_process:
            self.folder.forget_after(step)
        self.accelerator.print(f"resumed from {checkpoint}")
        return step

    def _progress(self, start: int, description: str) -> tqdm[Any]:
        return tqdm(
            total=self.config.max_steps,
            initial=start,
            desc=description,
            unit="step",
            disable=not self.accelerator.is_local_main_process,
        )

    def _step(self, step: int, batches: list[Any]) -> float:
        """One optimiser step over this process's micro batches; the loss averaged over all processes."""
        rate = self.config.optimizer
        for group in self.optimizer.param_groups:
            group["lr"] = rate.learning_rate * rate_factor(step, rate)
        generators = self._generators(step)
        total = torch.zeros((), device=self.accelerator.device)
        for number, batch in enumerate(batches):
            own = generators[number * self.plan.micro : (number + 1) * self.plan.micro]
            last = number == len(batches) - 1
            with self._maybe_no_sync(last):
                losses = self.task.losses(self.network, batch, own)
                self._check_finite(step, losses, batch)
                self.accelerator.backward(losses.mean() / len(batches))
            total += losses.detach().mean() / len(batches)
        if rate.max_grad_norm:
            self.accelerator.clip_grad_norm_(self.network.parameters(), rate.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.step([p for p in self.task.network.parameters() if p.requires_grad])
        self.task.after_step(step + 1)
        return float(self.accelerator.reduce(total, "mean"))

    def _generators(self, step: int) -> list[torch.Generator]:
        """A stream per sample of this process, from its place in the effective batch."""
        share = self.plan.micro * self.plan.accumulation
        everyone = member_generators(self.config.seed, self.plan.size, prefix=(step,))
        return everyone[self.plan.process * share : (self.plan.process + 1) * share]

    @contextmanager
    def _maybe_no_sync(self, last: bool) -> Iterator[None]:
        """Processes exchange gradients at the last micro batch only."""
        if last:
            yield
        else:
            with self.accelerator.no_sync(self.network):
                yield

    def _check_finite(self, step: int, losses: Tensor, batch: Any) -> None:
        """All processes stop together, and the message names the samples of the process that met it."""
        bad = ~torch.isfinite(losses.detach())
        if not self._any_process(bool(bad.any())):
            return
        names = [name for name, flag in zip(self.task.describe(batch), bad.tolist(), strict=True) if flag]
        where = f"samples {', '.join(names)}" if names else "samples of another process"
        raise NonFiniteLossError(
            f"loss is not finite at step {step + 1} for {where}; checkpoints are untouched, the newest is "
            f"{self.folder.find_checkpoint('latest')}. Lower the learning rate, or look at these samples"
        )

    def _any_process(self, flag: bool) -> bool:
        if self.accelerator.num_processes == 1:
            return flag
        votes = torch.tensor(float(flag), device=self.accelerator.device)
        return float(self.accelerator.reduce(votes, "sum")) > 0

    def _after_step(self, step: int, loss: float, *, force_checkpoint: bool) -> None:
        config = self.config
        is_last = step == config.max_steps
        if step % config.log_every == 0 or is_last:
            self._log({"step": step, "loss": loss, "learning_rate": self.optimizer.param_groups[0]["lr"]})
        if force_checkpoint or step % config.checkpoint_every == 0 or is_last:
            self._save_checkpoint(step)
        if config.validate_every and (step % config.validate_every == 0 or is_last):
            with self.averaged_weights():
                network = self.accelerator.unwrap_model(self.network)
                self._log({"step": step, **self.task.validate(network, step, self.folder.pictures)})

    def _log(self, record: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            self.folder.log(record)
        self.accelerator.log({k: v for k, v in record.items() if k != "step"}, step=record["step"])

    def _save_checkpoint(self, step: int) -> None:
        """Under a hidden name first, so that a killed run leaves no half checkpoint."""
        final = self.folder.checkpoints / f"{CHECKPOINT}{step}"
        if final.exists():
            return
        temporary = final.with_name(f".{final.name}")
        self.accelerator.save_state(str(temporary))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            os.replace(temporary, final)
            self.folder.keep_newest(self.config.checkpoint_limit)
        self.accelerator.wait_for_everyone()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Within the block the network has the weights of the moving average."""
        if self.ema is None:
            yield
            return
        trainable = [p for p in self.task.network.parameters() if p.requires_grad]
        self.ema.store(trainable)
        self.ema.copy_to(trainable)
        try:
            yield
        finally:
            self.ema.restore(trainable)

    def _finish(self, step: int) -> None:
        self.accelerator.wait_for_everyone()
        if not self.accelerator.is_main_process:
            return
        with self.averaged_weights():
            self.task.save(self.accelerator.unwrap_model(self.network), self.folder.model)
