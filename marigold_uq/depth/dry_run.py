"""`train_depth.py --dry-run`: every stage of a training on the user's data and machine, before days are spent on it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from marigold_uq.depth.config import DepthTrainConfig
from marigold_uq.depth.data import DepthDataError
from marigold_uq.depth.run import make_task, make_validation, open_part
from marigold_uq.depth.task import DepthTask, PictureTask
from marigold_uq.training.estimate import Estimate, free_space, gigabytes
from marigold_uq.training.loop import Trainer, make_accelerator
from marigold_uq.training.selection import AUTO

__all__ = ["DryRun", "dry_run"]

NUM_SAMPLES = 100


@dataclass
class DryRun:
    """What was found.

    Attributes:
        stages: Name -> (seconds, how many samples).
        notes: Worth knowing.
        problems: What would stop the run, or spoil it.
        estimate: Of memory and hours; None where a stage before it failed.
    """

    stages: dict[str, tuple[float, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    estimate: Estimate | None = None

    @contextmanager
    def stage(self, name: str, samples: int) -> Iterator[None]:
        """Time a stage; what it raises is a problem, and the next stage is tried."""
        started = time.perf_counter()
        try:
            yield
            self.stages[name] = (time.perf_counter() - started, samples)
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            self.problems.append(f"{name}: {error}")

    def text(self) -> str:
        """The report."""
        rows = [
            f"  {name:<12}{seconds:8.2f} s  {seconds / max(samples, 1):8.3f} s per sample ({samples})"
            for name, (seconds, samples) in self.stages.items()
        ]
        estimate = [] if self.estimate is None else [*self.estimate.lines(), *_bottleneck(self)]
        verdict = "nothing found that would stop the run" if not self.problems else "the run would fail:"
        return "\n".join(["stages:", *rows, *estimate, *self.notes, verdict, *(f"  - {one}" for one in self.problems)])


def dry_run(config: DepthTrainConfig) -> int:
    """Try everything once, train nothing, leave nothing behind; 1 if something would fail."""
    found = examine(config)
    print(found.text())
    return 1 if found.problems else 0


def examine(config: DepthTrainConfig) -> DryRun:
    """All stages, each as far as those before it allow."""
    found = DryRun()
    if config.start.noise_family == AUTO:
        found.notes.append("start.noise_family is auto: tried as gaussian, before the choice that comes first")
        config = replace(config, start=replace(config.start, noise_family="gaussian"))
    _open_data(found, config)
    accelerator = make_accelerator(config.training)
    task: PictureTask | None = None
    with found.stage("start", 1):
        task = make_task(config, config.start, accelerator.device)
    _check_place(found, config)
    if task is None:
        return found
    samples = _read(found, config, task)
    if isinstance(task, DepthTask):  # an image encoder and its decoder learn, so there is nothing to encode before
        _encode(found, config, task, samples)
    with found.stage("step", 2 * (config.training.micro_batch_size or config.training.batch_size)):
        found.estimate = Trainer(task, config.training, accelerator).estimate()
    _validate(found, config, task, accelerator)
    _save(found, config, task)
    return found


def _open_data(found: DryRun, config: DepthTrainConfig) -> None:
    held_out = [] if config.validation.data is None else [config.validation.data]
    for part in [*config.data, *held_out]:
        with found.stage(f"open {part.name}", 0):
            count = len(open_part(part))
            found.notes.append(f"{part.name} ({part.root}): {count} samples, {100 * part.probability:.0f} %")
    if not held_out:
        found.notes.append("no validation.data: nothing will say whether the model gets better")


def _check_place(found: DryRun, config: DepthTrainConfig) -> None:
    """What a run needs besides data and network."""
    if config.push_to_hub is not None:
        from huggingface_hub import get_token

        if get_token() is None:
            found.problems.append(f"push_to_hub={config.push_to_hub}: no token; run `hf auth login`, or set HF_TOKEN")
    output = config.training.output
    if config.training.resume == "never" and (output / "metrics.jsonl").exists():
        found.problems.append(f"training.output={output} holds a run, and training.resume is 'never'")


def _read(found: DryRun, config: DepthTrainConfig, task: PictureTask) -> list[Any]:
    """Samples as training reads them; broken ones are problems unless they are skipped."""
    samples: list[Any] = []
    started = time.perf_counter()
    for index in range(min(NUM_SAMPLES, len(task.dataset))):
        try:
            samples.append(task.dataset[index])
        except (DepthDataError, OSError, ValueError) as error:
            found.problems.append(f"reading: {error}")
    found.stages["reading"] = (time.perf_counter() - started, len(samples))
    skipped = dict(getattr(task.dataset, "problems", []))
    found.notes += [f"skipped: {name}: {reason}" for name, reason in list(skipped.items())[:10]]
    sizes = Counter(_size(sample) for sample in samples)
    listed = ", ".join(f"{count} of {' x '.join(map(str, size))}" for size, count in sizes.most_common(5))
    found.notes.append(f"sizes: {listed}")
    if len(sizes) > 1 and config.training.micro_batch_size is None:
        found.notes.append("samples differ in size: with training.micro_batch_size set, micro batches share one each")
    return samples


def _size(sample: dict[str, Any]) -> tuple[int, ...]:
    picture: Tensor = sample["image"] if "image" in sample else sample["image_latent"]
    return tuple(picture.shape[-2:])


def _encode(found: DryRun, config: DepthTrainConfig, task: DepthTask, samples: list[Any]) -> None:
    """Latents of all samples; those with no cell of known depth teach nothing, and not finite ones stop the run."""
    micro = config.training.micro_batch_size or 1
    empty: list[str] = []
    with found.stage("encoding", len(samples)):
        for first in range(0, len(samples), micro):
            chosen = samples[first : first + micro]
            for places, batch in task.collate(chosen):
                encoded = task.encoder.encode(batch)
                for place, target, mask in zip(places, encoded.target, encoded.mask, strict=True):
                    name = str(chosen[place]["name"])
                    if not bool(target.isfinite().all()):
                        found.problems.append(f"encoding: the latents of {name} are not finite")
                    if not bool(mask.any()):
                        empty.append(name)
    if empty:
        text = f"{len(empty)} of {len(samples)} samples have no latent cell of known depth, for instance {empty[0]}"
        (found.problems if len(empty) == len(samples) else found.notes).append(text)


def _validate(found: DryRun, config: DepthTrainConfig, task: PictureTask, accelerator: Any) -> None:
    if config.validation.data is None:
        return
    with TemporaryDirectory() as pictures, found.stage("validation", 1):
        validation = make_validation(replace(config.validation, num_samples=1), accelerator)
        assert validation is not None
        validation(task.pipeline, 0, Path(pictures))


def _save(found: DryRun, config: DepthTrainConfig, task: PictureTask) -> None:
    """The model, on the disk where it will lie."""
    output = config.training.output.absolute()
    place = next(path for path in (output, *output.parents) if path.is_dir())
    with found.stage("saving", 1), TemporaryDirectory(dir=place) as folder:
        task.save(task.network, Path(folder) / "model")
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        found.notes.append(f"the model takes {gigabytes(size)}")
    if found.estimate is not None:
        needed = (config.training.checkpoint_limit + 1) * found.estimate.memory.checkpoint
        if needed > free_space(output):
            found.problems.append(
                f"checkpoints take up to {gigabytes(needed)}, and {gigabytes(free_space(output))} are free at {output}"
            )


def _bottleneck(found: DryRun) -> list[str]:
    """Which of reading and the network sets the pace, and what would help."""
    own = found.estimate
    if own is None or own.rehearsal is None or not found.stages.get("encoding", (0, 0))[1]:
        return []
    seconds = {name: found.stages[name][0] / found.stages[name][1] for name in ("reading", "encoding")}
    reading = seconds["reading"] / max(own.workers, 1)
    network = max(own.rehearsal.computing / own.rehearsal.samples - seconds["encoding"], 0.0)
    parts = {"reading": reading, "encoding": seconds["encoding"], "the network": network}
    slowest = max(parts, key=lambda name: parts[name])
    advice = {
        "reading": "more training.num_workers, or `marigold-uq cache`",
        "encoding": "`marigold-uq cache`, or training.mixed_precision bf16",
        "the network": "mixed_precision bf16, allow_tf32, compile, or more GPUs",
    }[slowest]
    shares = ", ".join(f"{name} {value:.3f} s" for name, value in parts.items())
    return [f"bottleneck: {slowest} (per sample: {shares}); what helps: {advice}"]
