"""The loop: accelerate does devices, precision and processes; order, randomness and rate are functions of the step."""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, gather_object, set_seed
from diffusers.training_utils import EMAModel
from torch import Tensor
from tqdm.auto import tqdm

from marigold_uq.randomness import member_seed
from marigold_uq.training.checkpoint import load_accelerator, load_states, write_average, write_task_states
from marigold_uq.training.config import TrainingConfig
from marigold_uq.training.estimate import Estimate, memory_of, peak_memory, rehearse
from marigold_uq.training.interrupt import InterruptGuard
from marigold_uq.training.optimizer import make_optimizer
from marigold_uq.training.order import BatchPlan, steps_of_run
from marigold_uq.training.run_folder import CHECKPOINT, RunFolder, checkpoint_step
from marigold_uq.training.sharding import gathered, prepare_sharding, whole_copy, whole_number
from marigold_uq.training.task import TrainingTask
from marigold_uq.training.tracking import installed_tracker, log_numbers, log_pictures, start_trackers

__all__ = ["NonFiniteLossError", "Trainer", "TrainingResult", "make_accelerator", "reading_workers"]


class NonFiniteLossError(FloatingPointError):
    """The loss or its gradient became NaN or infinite; the message names the step and the samples."""


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended."""

    step: int
    finished: bool
    folder: Path


def make_accelerator(config: TrainingConfig) -> Accelerator:
    """One per process; gradients are synchronised by hand, so accumulation is ours.

    Buffers are not exchanged: that would be one more exchange per forward pass, and processes may differ in their
    number (pictures of several sizes).
    """
    if config.allow_tf32:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != config.mixed_precision:
        AcceleratorState._reset_state()  # of an earlier run in this process: accelerate would keep its precision
    accelerator = Accelerator(
        mixed_precision=config.mixed_precision,
        cpu=config.cpu or not torch.accelerator.is_available(),  # else accelerate forgets the other processes
        log_with=installed_tracker(config.tracker),
        project_dir=str(config.output),
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
    )
    prepare_sharding(accelerator, config)
    return accelerator


def reading_workers(config: TrainingConfig, accelerator: Accelerator) -> int:
    """Processes that read data for this one; by default none on a CPU, and a fair share of the cores on a GPU."""
    if config.num_workers is not None:
        return config.num_workers
    if accelerator.device.type == "cpu":
        return 0
    local = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
    return max(1, min(8, (os.cpu_count() or 1) // local - 1))


class Trainer:
    """Trains one task; `run` starts or resumes."""

    def __init__(self, task: TrainingTask, config: TrainingConfig, accelerator: Accelerator | None = None) -> None:
        self.task, self.config = task, config
        self.accelerator = accelerator or make_accelerator(config)
        self.plan = BatchPlan.of(config, self.accelerator.process_index, self.accelerator.num_processes)
        self.folder = RunFolder(config.output)
        set_seed(config.seed, device_specific=True)  # for dropout alone; everything else has generators
        self.trainable = _prepare_network(task, config)
        self._whole = whole_copy(self.accelerator, task.network)
        optimizer = make_optimizer(self.trainable, config.optimizer, self.accelerator.device)
        with warnings.catch_warnings():  # torch renames the option, accelerate passes it by its old name
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            self.network, self.optimizer = self.accelerator.prepare(task.network, optimizer)
        self.trainable = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        self.ema = EMAModel(self.trainable, decay=config.ema_decay) if config.ema_decay else None
        self._states = task.states()
        self._validated = 0  # the last validation that the states have taken in

    def run(self, description: str = "training", config_text: str = "") -> TrainingResult:
        """Train to max_steps, from the newest checkpoint where there is one, and save the model.

        Raises:
            FolderInUseError: Another training works in the output folder.
        """
        with self.folder.lock() if self.accelerator.is_main_process else nullcontext():
            return self._run(description, config_text)

    def _run(self, description: str, config_text: str) -> TrainingResult:
        start = self._prepare_run(config_text)
        if start < self.config.max_steps:
            estimate = self.estimate(start)
            self.accelerator.print("\n".join(estimate.lines()))
        self._catch_up_validation(start)
        try:
            step = start if self._ends_early() else self._train(start, description)
        except NonFiniteLossError:  # which all processes raise together
            self._close()
            raise
        finished = step >= self.config.max_steps or self._ends_early()
        if finished:
            self._save_model(step)
        else:
            self.accelerator.print(f"stopped after step {step}, with a checkpoint; the same command resumes")
        self._report_problems()
        self._close()
        return TrainingResult(step, finished, self.config.output)

    def estimate(self, start: int = 0) -> Estimate:
        """What the rest of the run needs, from one micro batch that changes nothing; all processes together."""
        task, config = self.task, self.config
        rehearsal = rehearse(task, self.network, self.plan, self.accelerator, config.seed)
        return Estimate(
            memory_of(self.accelerator.unwrap_model(self.network), config, task.frozen_networks()),
            peak_memory(self.accelerator.device),
            rehearsal,
            self.plan,
            config.max_steps - start,
            reading_workers(config, self.accelerator),
            config,
        )

    def _train(self, start: int, description: str) -> int:
        """All steps from `start` to the end or to an interruption; the number of steps done."""
        step = start
        with InterruptGuard() as guard, self._progress(start, description) as bar, closing(self._steps(start)) as steps:
            for index, batches in steps:
                record, stop = self._step(index, batches, guard)
                step = record["step"]
                bar.update()
                bar.set_postfix(loss=f"{record['loss']:.4f}")
                if self._after_step(record, stop):
                    break
        return step

    def _close(self) -> None:
        """End trackers and process group, after DDP's reducer is gone.

        As the last to hold the group the reducer would destroy it with Python's lock in its hands, and wait for threads
        that need the lock to end their last exchange.
        """
        self.network = self.accelerator.unwrap_model(self.network)
        self.accelerator.free_memory()
        self.accelerator.end_training()

    def _prepare_run(self, config_text: str) -> int:
        """Folders, the checkpoint to resume from, files about the run, trackers; returns the first step."""
        accelerator = self.accelerator
        if accelerator.is_main_process:
            self.folder.create(self.config.resume)
        accelerator.wait_for_everyone()
        step = self._load_checkpoint(self.folder.find_checkpoint(self.config.resume))
        if accelerator.is_main_process:
            self.folder.forget_after(step)
            self.folder.keep_newest(self.config.checkpoint_limit)  # where a run was killed before it did
            facts = {"num_processes": accelerator.num_processes, "device": accelerator.device.type}
            self.folder.write_versions(**facts, mixed_precision=self.config.mixed_precision)
            if config_text:
                self.folder.write_config(config_text, step)
        start_trackers(accelerator, self.config.output, step + 1)
        return step

    def _load_checkpoint(self, checkpoint: Path | None) -> int:
        """Weights, optimiser, average, task and random states; the number of steps done."""
        if checkpoint is not None:
            load_accelerator(self.accelerator, checkpoint)
            self._validated = load_states(checkpoint, self.ema, self._states)
            self.accelerator.print(f"resumed from {checkpoint}")
        if self.ema is not None:
            self.ema.to(self.accelerator.device)  # a checkpoint is read to the CPU
        return 0 if checkpoint is None else checkpoint_step(checkpoint)

    def _progress(self, start: int, description: str) -> tqdm[Any]:
        hidden = not self.accelerator.is_local_main_process
        return tqdm(total=self.config.max_steps, initial=start, desc=description, unit="step", disable=hidden)

    def _steps(self, start: int) -> Generator[tuple[int, list[Any]], None, None]:
        config = self.config
        return steps_of_run(
            self.task.dataset,
            self.plan,
            start_step=start,
            max_steps=config.max_steps,
            num_workers=reading_workers(config, self.accelerator),
            pin_memory=self.accelerator.device.type == "cuda",
            seed=config.seed,
            collate=self.task.collate,
        )

    def _step(self, step: int, batches: list[Any], guard: InterruptGuard) -> tuple[dict[str, Any], bool]:
        """One optimiser step over this process's micro batches; what to log, and whether any process shall stop."""
        rate = self.config.optimizer
        learning_rate = rate.at(step) * self.task.rate_factor()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        losses = self._backward(step, batches)
        loss, num_bad, stop = self._mean_over_processes(losses.mean(), (~losses.isfinite()).any(), guard.requested)
        if num_bad:
            self._stop_at_non_finite(step, batches, ~losses.isfinite(), "loss")
        norm = whole_number(self.accelerator.clip_grad_norm_(self.trainable, rate.max_grad_norm or float("inf")))
        if self.accelerator.scaler is None and not norm < float("inf"):  # a scaler leaves such steps out itself
            self._stop_at_non_finite(step, batches, torch.ones_like(losses, dtype=torch.bool), "gradient")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.step(self.trainable)
        self.task.after_step(step + 1)
        return {"step": step + 1, "loss": loss, "learning_rate": learning_rate, "gradient_norm": norm}, stop > 0

    def _backward(self, step: int, batches: list[Any]) -> Tensor:
        """Gradient of the mean over the effective batch; this process's losses."""
        generators = [torch.Generator().manual_seed(member_seed(self.config.seed, step, m)) for m in self.plan.share]
        parts = []
        for number, batch in enumerate(batches):
            own = generators[number * self.plan.micro : (number + 1) * self.plan.micro]
            last = number == len(batches) - 1  # processes exchange gradients at the last micro batch only
            with nullcontext() if last else self.accelerator.no_sync(self.network):
                losses = self.task.losses(self.network, batch, own)
                self.accelerator.backward(losses.mean() / len(batches))
            parts.append(losses.detach())
        return torch.cat(parts)

    def _mean_over_processes(self, *values: Tensor | bool) -> list[float]:
        """One exchange for everything that all processes must know."""
        own = torch.stack([torch.as_tensor(value, device=self.accelerator.device).float() for value in values])
        return self.accelerator.reduce(own, "mean").tolist()

    def _stop_at_non_finite(self, step: int, batches: list[Any], bad: Tensor, what: str) -> None:
        """All processes stop together, each with the names of all samples concerned."""
        names = [name for batch in batches for name in self.task.describe(batch)]
        concerned = gather_object([name for name, flag in zip(names, bad.tolist(), strict=True) if flag])
        newest = self.folder.find_checkpoint("latest")
        raise NonFiniteLossError(
            f"{what} is not finite at step {step + 1} for samples {', '.join(concerned)}; nothing was changed, "
            f"{'there is no checkpoint yet' if newest is None else f'the newest checkpoint is {newest}'}. "
            "Lower the learning rate, or look at these samples"
        )

    def _after_step(self, record: dict[str, Any], stop: bool) -> bool:
        """Records, checkpoint, validation; whether training ends here."""
        config, step = self.config, record["step"]
        is_last = step == config.max_steps
        if step % config.log_every == 0 or is_last:
            self._log(record)
        saved = stop or step % config.checkpoint_every == 0 or is_last
        if saved:
            self._save_checkpoint(step)
        if not self._validation_due(step) or (stop and not is_last):  # an interrupted run validates when it resumes
            return stop
        self._validate(step)
        if self._ends_early():
            if not saved:
                self._save_checkpoint(step)
            return True
        return stop

    def _ends_early(self) -> bool:
        """Whether the task has nothing left to learn, on any process."""
        return self._mean_over_processes(self.task.finished())[0] > 0

    def _validation_due(self, step: int) -> bool:
        config = self.config
        return bool(config.validate_every and step and (step % config.validate_every == 0 or step == config.max_steps))

    def _catch_up_validation(self, step: int) -> None:
        """The validation of the checkpoint's step, where the run ended before metrics or states knew of it."""
        if not self._validation_due(step):
            return
        unlogged = self.accelerator.is_main_process and not self.folder.validated_at(step)
        is_new = self._mean_over_processes(unlogged)[0] > 0
        if is_new or self._validated < step:
            self._validate(step, log=is_new)

    def _validate(self, step: int, *, log: bool = True) -> None:
        """Scores and pictures with the averaged weights; the training's random stream is left alone."""
        pictures = self.folder.pictures / f"step-{step:07d}"
        device = self.accelerator.device
        network = self.accelerator.unwrap_model(self.network)
        with self.averaged_weights(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            scores = self.task.validate(network, step, pictures)
            if self._validated < step:
                self.task.after_validation(step, scores, network)
                self._validated = step
        checkpoint = self.folder.checkpoints / f"{CHECKPOINT}{step}"
        if self._states and self.accelerator.is_main_process and checkpoint.exists():
            write_task_states(checkpoint, self._states, self._validated)
        if log:
            if scores:
                self._log({"step": step, **scores})
            log_pictures(self.accelerator, pictures, step)

    def _log(self, record: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            self.folder.log(record)
        log_numbers(self.accelerator, record)

    def _save_checkpoint(self, step: int) -> None:
        """Under a hidden name first, so that a killed run leaves no half checkpoint; all processes write to it."""
        temporary = self.folder.unfinished_checkpoint(step)
        self.accelerator.save_state(str(temporary))
        if self.accelerator.is_main_process:
            write_average(temporary, self.ema)
            write_task_states(temporary, self._states, self._validated)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            self.folder.finish_checkpoint(step, self.config.checkpoint_limit)
        self.accelerator.wait_for_everyone()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Within the block the network has the weights of the moving average."""
        if self.ema is None:
            yield
            return
        self.ema.store(self.trainable)
        self.ema.copy_to(self.trainable)
        try:
            yield
        finally:
            self.ema.restore(self.trainable)

    def _save_model(self, step: int) -> None:
        """The finished model and the step it is from; one that is there already, of the same step, stays."""
        is_new = self.accelerator.is_main_process and self.folder.model_step() != step
        with self.averaged_weights():
            network = gathered(self.accelerator, self.network, self._whole)
            if is_new:
                with self.folder.new_model(step) as folder:
                    self.task.save(network, folder)
        self.accelerator.wait_for_everyone()

    def _report_problems(self) -> None:
        """data_problems.json: the broken samples that a data set with `problems` met and skipped."""
        problems = gather_object(list(getattr(self.task.dataset, "problems", [])))
        if problems and self.accelerator.is_main_process:
            self.accelerator.print(f"unusable samples were skipped, see {self.folder.add_problems(problems)}")


def _prepare_network(task: TrainingTask, config: TrainingConfig) -> list[torch.nn.Parameter]:
    """Training mode (a loaded network is in evaluation mode), checkpointing, compiling; the parameters that learn."""
    task.network.train()
    if config.gradient_checkpointing:
        if not hasattr(task.network, "enable_gradient_checkpointing"):
            raise ValueError(
                f"{type(task.network).__name__} cannot checkpoint gradients: set gradient_checkpointing off"
            )
        task.network.enable_gradient_checkpointing()  # type: ignore[operator]
    if config.compile != "no":
        task.network.compile(backend=config.compile)  # in place: weights keep their names
    trainable = [parameter for parameter in task.network.parameters() if parameter.requires_grad]
    if not trainable:
        raise ValueError("no parameter of the network requires a gradient: there is nothing to train")
    return trainable
