r"""What a learned residual adds to a depth model: beside the model alone, and beside training without it.

for split in "train 480" "validation 60" "test 80"; do set -- $split
    python scripts/render_scenes.py --output runs/baseline/scenes/$1 --split $1 --length $2 --height 96 --width 128 \
        --shard_size 40
done
python -m scripts.studies.baseline.residual --output runs/baseline --scenes runs/baseline/scenes

The baseline is a deliberately imperfect point model of ours: a small U-Net, trained shortly on the same scenes. Around
it, and without it, the same larger U-Net is trained; without it for twice the steps, so that no processor time, caching
of latents included, is saved at its cost.
With --baseline embedded it is the model inside the package: a second stage. Each stage leaves a file, and the same
command goes on after the last one; --stage runs one alone.
"""

import json
import math
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from marigold_uq.commands.cache import CacheOptions, run_cache
from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.depth.cache import folder_of_part
from marigold_uq.depth.calibration.options import DepthCalibration
from marigold_uq.depth.calibration.pipelines import calibrate_depth
from marigold_uq.depth.config import DataPart, DepthTrainConfig, StartConfig
from marigold_uq.depth.data import DepthTransform
from marigold_uq.depth.evaluation.evaluate import evaluate_depth
from marigold_uq.depth.evaluation.options import DataOptions, DepthEvaluation, PipelineOptions, ScoreOptions
from marigold_uq.depth.run import train_depth
from marigold_uq.files import make_folder
from marigold_uq.pipelines.depth import MarigoldUQDepthPipeline
from marigold_uq.pipelines.depth.starting_point import embedded_path
from marigold_uq.results import markdown_table, write_json
from marigold_uq.training.config import OptimizerConfig, TrainingConfig
from marigold_uq.training.objective import ObjectiveConfig

EDGE = 128
"""Longer edge of the scenes."""
BATCH = 8
MEMBERS = 10
"""Of every ensemble, in one network call."""
ADVANTAGE = 2
"""How many times the steps of the residual the network is trained without a baseline."""
MEASURES = (
    "abs_relative_difference",
    "delta1",
    "crps",
    "relative_crps",
    "spearman",
    "calibrated_coverage",
    "calibrated_width",
)


@dataclass(frozen=True)
class Study:
    """Train a residual around a baseline, and the same network without it.

    Args:
        output: Folder for models, records and report.md.
        scenes: Folder with rendered scenes: train, validation and test.
        baseline: "shrunken", a small point model that is trained here, or "embedded".
        seeds: Of the trainings.
        steps: Of the residual.
        baseline_steps: Of the shrunken model.
        stage: One stage alone.
    """

    output: Path
    scenes: Path
    baseline: str = "shrunken"
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    steps: int = 100
    baseline_steps: int = 200
    stage: str | None = None

    @property
    def folder(self) -> Path:
        """Where everything of this baseline lies."""
        return self.output / self.baseline

    @property
    def baseline_name(self) -> str:
        """What `--baseline` is given."""
        return "embedded" if self.baseline == "embedded" else str(self.folder / "point" / "model")


def start(widths: Sequence[int], family: str) -> StartConfig:
    """A new U-Net beside the autoencoder of the embedded model."""
    unet = {
        "sample_size": 16,
        "block_out_channels": list(widths),
        "layers_per_block": 1,
        "down_block_types": ["DownBlock2D", "DownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D", "UpBlock2D"],
        "attention_head_dim": 4,
        "cross_attention_dim": 32,
        "norm_num_groups": 8,
    }
    return StartConfig(
        name=str(embedded_path()),
        kind="components",
        noise_family=family,
        eta=1.0,
        schedule={"set_alpha_to_one": True, "steps_offset": 0},
        unet=unet,
        default_denoising_steps=1,
        default_processing_resolution=EDGE,
    )


SMALL, LARGE = (16, 32, 32), (32, 64, 64)


def training(output: Path, steps: int, seed: int) -> TrainingConfig:
    """Short, with an average of the weights."""
    rate = OptimizerConfig(learning_rate=1e-3, warmup_steps=30, decay="cosine", decay_steps=steps)
    return TrainingConfig(
        output=output, max_steps=steps, batch_size=BATCH, optimizer=rate, ema_decay=0.98, checkpoint_every=100,
        validate_every=0, tracker="none", seed=seed, num_workers=0, cpu=True,
    )  # fmt: skip


def cache(study: Study, folder: Path, baseline: str | None) -> None:
    """Latents of the training scenes."""
    run_cache(
        CacheOptions(
            output=folder,
            start=start(SMALL, "point"),
            baseline=baseline,
            data=[DataPart("scenes", str(study.scenes / "train"))],
            transform=DepthTransform(flip=0.5),
            shard_size=160,
            num_workers=0,
            device="cpu",
        )
    )


def train(
    folder: Path, latents: Path, widths: Sequence[int], family: str, steps: int, seed: int, baseline: str | None
) -> None:
    """A model on cached latents."""
    config = DepthTrainConfig(
        start=start(widths, family),
        baseline=baseline,
        data=[DataPart("latents", str(folder_of_part(latents, 0, "scenes")))],
        objective=ObjectiveConfig(uniform_timesteps=False),
        training=training(folder, steps, seed),
    )
    if not train_depth(config).finished:
        raise KeyboardInterrupt


def evaluate(study: Study, model: Path, output: Path, uncertainty: Literal["trajectory", "none"]) -> None:
    """Scores of the test scenes, after calibration on the validation scenes where there is an uncertainty."""
    if uncertainty != "none":
        shutil.rmtree(output.with_name(output.name + "-calibrated"), ignore_errors=True)
        calibrate_depth(
            DepthCalibration(
                model=str(model),
                output=output.with_name(output.name + "-calibrated"),
                data=DataOptions("scenes", str(study.scenes / "validation"), limit=32),
                modes=["trajectory"],
                batch_size=MEMBERS,
                device="cpu",
            )
        )
        model = output.with_name(output.name + "-calibrated")
    evaluate_depth(
        DepthEvaluation(
            pipeline=PipelineOptions(str(model), uncertainty, batch_size=MEMBERS, device="cpu"),
            data=DataOptions("scenes", str(study.scenes / "test")),
            score=ScoreOptions(metrics=("depth", "probabilistic", "calibrated", "ranking"), level=0.9),
            output=output,
            figures=False,
            overwrite=True,
        )
    )


def stages(study: Study) -> dict[str, Callable[[], None]]:
    """Name -> what it does, in order."""
    root, name = study.folder, study.baseline_name
    found: dict[str, Callable[[], None]] = {"cache": lambda: cache(study, root / "latents", None)}
    if study.baseline != "embedded":
        found["point"] = lambda: train(root / "point", root / "latents", SMALL, "point", study.baseline_steps, 9, None)
    found["point-alone"] = lambda: alone(study)
    found["cache-residual"] = lambda: cache(study, root / "residual-latents", name)
    for seed in study.seeds:
        found[f"residual-{seed}"] = partial(
            train, root / f"residual-{seed}", root / "residual-latents", LARGE, "gaussian", study.steps, seed, name
        )
        found[f"without-{seed}"] = partial(
            train, root / f"without-{seed}", root / "latents", LARGE, "gaussian", ADVANTAGE * study.steps, seed, None
        )
        for arm in ("residual", "without"):
            found[f"score-{arm}-{seed}"] = partial(
                evaluate, study, root / f"{arm}-{seed}" / "model", root / f"scores-{arm}-{seed}", "trajectory"
            )
    return found


def alone(study: Study) -> None:
    """The baseline without anything learnt."""
    folder = study.folder / "alone"
    pipeline = MarigoldUQDepthPipeline.from_baseline(study.baseline_name, noise_family="point")
    pipeline.register_to_config(default_processing_resolution=EDGE)
    shutil.rmtree(folder, ignore_errors=True)
    pipeline.save_pretrained(folder)
    evaluate(study, folder, study.folder / "scores-alone", "none")


def _record(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def per_scene(folder: Path) -> dict[str, dict[str, float]]:
    """Scene -> its statistics."""
    records = [_record(path) for path in sorted((folder / "images").glob("*.json"))]
    return {one["name"]: one["statistics"] for one in records}


def report(study: Study) -> str:
    """Means over test scenes, seeds averaged first; paired differences with standard errors over scenes."""
    arms = {"baseline alone": [per_scene(study.folder / "scores-alone")]}
    for arm, title in (("without", "trained without it"), ("residual", "residual around it")):
        arms[title] = [per_scene(study.folder / f"scores-{arm}-{seed}") for seed in study.seeds]
    names = sorted(arms["baseline alone"][0])
    means = {title: {m: _by_scene(runs, names, m) for m in MEASURES} for title, runs in arms.items()}
    rows = [[title, *(_mean(found[m]) for m in MEASURES)] for title, found in means.items()]
    residual = means["residual around it"]
    differences = [
        [f"residual - {title}", *(_difference(residual[m], means[title][m]) for m in MEASURES[:4])]
        for title in ("baseline alone", "trained without it")
    ]
    seeds = [
        [f"residual - trained without it, seed {seed}"]
        + [
            _difference(*(_by_scene([arms[t][i]], names, m) for t in ("residual around it", "trained without it")))
            for m in MEASURES[:4]
        ]
        for i, seed in enumerate(study.seeds)
    ]
    times = [[p.stem, f"{_record(p)['seconds']:.0f}"] for p in sorted(study.folder.glob("*.json"))]
    parts = [
        markdown_table(["", *MEASURES], rows),
        markdown_table(["difference +- standard error", *MEASURES[:4]], [*differences, *seeds]),
        markdown_table(["stage", "processor seconds"], times),
    ]
    return "\n\n".join(parts) + "\n"


def _by_scene(runs: list[dict[str, dict[str, float]]], names: list[str], measure: str) -> list[float]:
    return [statistics.fmean(run[name].get(measure, math.nan) for run in runs) for name in names]


def _mean(values: list[float]) -> str:
    mean = statistics.fmean(values)
    return "" if math.isnan(mean) else f"{mean:.4f}"


def _difference(one: list[float], other: list[float]) -> str:
    paired = [a - b for a, b in zip(one, other, strict=True)]
    return f"{statistics.fmean(paired):+.4f} +- {statistics.stdev(paired) / math.sqrt(len(paired)):.4f}"


def run(study: Study, invocation: Invocation) -> int:
    """All stages that have not left their file, and the report."""
    torch.set_num_threads(1)
    make_folder(study.folder)
    todo = stages(study)
    if study.stage is not None and study.stage not in todo:
        raise ValueError(f"unknown stage {study.stage!r}; choose from {', '.join(todo)}")
    for stage, do in todo.items():
        done = study.folder / f"{stage}.json"
        if done.exists() or study.stage not in (None, stage):
            continue
        started = time.process_time()
        do()
        write_json(done, {"seconds": time.process_time() - started})
    if all((study.folder / f"{stage}.json").exists() for stage in todo):
        text = report(study)
        (study.folder / "report.md").write_text(text, encoding="utf-8")
        print(text)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 2 for an error that names what to mend."""
    return run_command("scripts.studies.baseline.residual", Study, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
