"""Does `auto` choose well, and at what cost? Its choice beside every candidate, trained fully and scored on test data.

    python -m scripts.studies.selection.compare --output runs/selection --problems toy concrete energy \
        --uci data/uci
    python -m scripts.studies.selection.compare --output runs/selection --problems ks --ks data/ks_tiny.h5

Each fit leaves a file in OUTPUT/<problem>-<seed>; the same command resumes after the last one. The report is of all
files that are there. Costs are processor seconds, which other work on the machine hardly changes; a field run that was
interrupted counts what it took after it resumed.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from marigold_uq.calibration import Comparison, unit_means
from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.field.config import FieldTrainConfig, read_config
from marigold_uq.field.data import Transitions
from marigold_uq.field.forecasters import PipelineForecaster, load_quietly
from marigold_uq.field.run import choose_field_family, train_field
from marigold_uq.field.scores import independent_groups
from marigold_uq.field.splits import open_split
from marigold_uq.files import make_folder
from marigold_uq.results import markdown_table, number, write_json
from marigold_uq.tabular import DiffusionRegressor
from marigold_uq.tabular.uci import UCIDataset
from marigold_uq.training.selection import FamilyCandidate, sample_unit_scores, select_family
from scripts.studies.toy.toy_regression import NUM_COMPONENTS, RANK, fit, truth

AUTO_FILE = "auto"
TOY_ROWS, TOY_STEPS, TOY_UNITS, TOY_DRAWS = 20_000, 1000, 2000, 32
KS_UNET = '{"block_out_channels": [12, 24], "layers_per_block": 1, "embedding_channels": 32, "dropout": 0.0}'


@dataclass(frozen=True)
class Compare:
    """Compare the choice of `auto` with every candidate trained fully.

    Args:
        output: Folder for records and report.md.
        problems: Of toy, concrete, energy (or another UCI set) and ks.
        seeds: Seeds of the toy and of ks, splits of a UCI set.
        uci: Folder with the UCI sets.
        ks: File of scripts/generate_pde.py.
        ks_steps: Optimiser steps of ks.
        epochs: Of a table's denoiser.
        baseline: Of a table.
    """

    output: Path
    problems: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=lambda: [0])
    uci: Path = Path("data/uci")
    ks: Path = Path("data/ks_tiny.h5")
    ks_steps: int = 400
    epochs: int = 100
    baseline: str = "trees"


@dataclass(frozen=True)
class Problem:
    """How `auto` chooses (the candidate's name), and how a candidate is trained fully and scored on test units."""

    candidates: list[FamilyCandidate]
    choose: Callable[[], str]
    score: Callable[[FamilyCandidate], Tensor]


def toy(options: Compare, seed: int, folder: Path) -> Problem:
    """The toy of the README, sampled in one step; every candidate is trained from nothing."""
    candidates = [
        *(FamilyCandidate(name) for name in ("point", "sample", "gaussian")),
        FamilyCandidate("mixture", NUM_COMPONENTS),
        FamilyCandidate("low_rank", rank=RANK),
        FamilyCandidate("low_rank_mixture", NUM_COMPONENTS, RANK),
    ]
    x, y = _toy_rows(TOY_ROWS, seed)

    def score(candidate: FamilyCandidate, steps: int, held_out: tuple[Tensor, Tensor]) -> Tensor:
        generator = torch.Generator().manual_seed(seed + 1)
        fitted = fit(candidate.noise_family, x, y, num_iterations=steps, generator=generator)
        inputs, target = held_out
        draws = fitted.sample(inputs.repeat(TOY_DRAWS), 1, torch.Generator().manual_seed(seed + 2))
        return sample_unit_scores(draws.reshape(TOY_DRAWS, -1), target, "crps")

    def choose() -> str:
        validation = _toy_rows(TOY_UNITS, seed + 1000)
        found = select_family(
            candidates, lambda candidate, steps: score(candidate, steps, validation), final_steps=TOY_STEPS // 4
        )
        assert found is not None
        _write_table(folder, found.markdown())
        return found.chosen.name

    return Problem(candidates, choose, lambda one: score(one, TOY_STEPS, _toy_rows(TOY_UNITS, seed + 2000)))


def _toy_rows(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, generator=generator)
    return x, truth(x).rsample(generator=generator)[:, 0]


def table(options: Compare, name: str, split_number: int, folder: Path) -> Problem:
    """A UCI set: the estimator with one model; its test rows take no part in the choice."""
    split = UCIDataset.load(options.uci, name).split(split_number)
    candidates = [FamilyCandidate("point"), FamilyCandidate("gaussian"), FamilyCandidate("mixture", 3)]

    def model(family: str) -> DiffusionRegressor:
        settings: dict[str, Any] = {"num_models": 1, "baseline": options.baseline, "max_epochs": options.epochs}
        return DiffusionRegressor(noise_family=family, random_state=split_number, **settings)

    def choose() -> str:
        fitted = model("auto").fit(split.train_features, split.train_targets)
        assert fitted.selection_ is not None
        _write_table(folder, fitted.selection_.markdown())
        return fitted.selection_.chosen.name

    def score(candidate: FamilyCandidate) -> Tensor:
        fitted = model(candidate.noise_family).fit(split.train_features, split.train_targets)
        draws = torch.from_numpy(fitted.sample(split.test_features, 100))
        return sample_unit_scores(draws, torch.from_numpy(split.test_targets), "crps")

    return Problem(candidates, choose, score)


def ks(options: Compare, seed: int, folder: Path) -> Problem:
    """Kuramoto-Sivashinsky one step ahead in one denoising step; the unit is the test trajectory."""
    steps = str(options.ks_steps)
    words = ["--config", "configs/field/ks_small.yaml", "--data.pde.path", str(options.ks), "--model.unet", KS_UNET]
    words += ["--training.max_steps", steps, "--training.optimizer.decay_steps", steps, "--training.batch_size", "16"]
    words += ["--training.seed", str(seed), "--training.validate_every", "0", "--training.cpu", "true"]
    config, _ = read_config(words)
    split = open_split(config.data)
    candidates = [FamilyCandidate("point"), FamilyCandidate("gaussian"), FamilyCandidate("mixture", 3)]

    def run(name: str, **model: Any) -> FieldTrainConfig:
        training = replace(config.training, output=folder / name)
        return replace(config, training=training, model=replace(config.model, **model))

    def choose() -> str:
        chosen = choose_field_family(run("auto", noise_family="auto"), split)
        if chosen is None:
            raise KeyboardInterrupt
        return chosen.name

    def score(candidate: FamilyCandidate) -> Tensor:
        own = run(candidate.name, **asdict(candidate))
        if not train_field(own).finished:
            raise KeyboardInterrupt
        windows = Transitions(split.test, num_history=config.model.num_history)
        ids = list(range(0, len(windows), max(1, len(windows) // 256)))
        pipeline = load_quietly(own.training.output / "model")
        batch = default_collate([windows[index] for index in ids])
        samples = PipelineForecaster(pipeline, ensemble_size=16, seed=seed).forecast(batch, ids, 1)[:, :, 0]
        target = pipeline.encoder.select_targets(batch["future"][:, 0])
        return unit_means(sample_unit_scores(samples, target, "crps"), independent_groups(windows, ids))

    return Problem(candidates, choose, score)


def _write_table(folder: Path, text: str) -> None:
    (folder / "selection.md").write_text(text + "\n", encoding="utf-8")


def compare(problem: Problem, folder: Path) -> None:
    """Every record that is not there yet."""
    if not (folder / f"{AUTO_FILE}.json").exists():
        start = time.process_time()
        chosen = problem.choose()
        write_json(folder / f"{AUTO_FILE}.json", {"chosen": chosen, "cpu_seconds": time.process_time() - start})
    for candidate in sorted(problem.candidates, key=lambda one: one.complexity):
        path = folder / f"{candidate.name}.json"
        if not path.exists():
            start = time.process_time()
            scores = problem.score(candidate)
            record = {"scores": scores.tolist(), "cpu_seconds": time.process_time() - start}
            write_json(path, {**record, "complexity": candidate.complexity})


def report(output: Path) -> str:
    """A table of every problem that is complete, and whether `auto` was within one standard error of the best."""
    parts = []
    for folder in sorted(path for path in output.iterdir() if (path / f"{AUTO_FILE}.json").exists()):
        auto = json.loads((folder / f"{AUTO_FILE}.json").read_text())
        records = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json") if path.stem != AUTO_FILE}
        if auto["chosen"] not in records:
            continue
        names = sorted(records, key=lambda name: records[name]["complexity"])
        found = Comparison.of(torch.tensor([records[name]["scores"] for name in names], dtype=torch.float64))
        rows = [
            [name, found.scores[i], number(found.differences[i], found.standard_errors[i] or None),
             f"{records[name]['cpu_seconds']:.1f}", "auto" if name == auto["chosen"] else ""]
            for i, name in enumerate(names)
        ]  # fmt: skip
        place = names.index(auto["chosen"])
        within = found.differences[place] <= found.standard_errors[place]
        everything = sum(record["cpu_seconds"] for record in records.values())
        parts += [
            f"### {folder.name}, {found.num_units} test units",
            markdown_table(["family", "test CRPS", "to the best", "CPU s", "chosen by"], rows),
            f"`auto` is {'within' if within else 'NOT within'} one standard error of the best. Its choice took "
            f"{auto['cpu_seconds']:.1f} s, all candidates {everything:.1f} s.",
        ]
    return "\n\n".join(parts) + "\n"


def run_study(options: Compare, invocation: Invocation) -> int:
    """Fill in what is missing, and report."""
    torch.set_num_threads(1)
    for seed in options.seeds:
        for name in options.problems:
            folder = options.output / f"{name}-{seed}"
            make_folder(folder)
            if name in ("toy", "ks"):
                compare((toy if name == "toy" else ks)(options, seed, folder), folder)
            else:
                compare(table(options, name, seed, folder), folder)
    make_folder(options.output)
    text = report(options.output)
    (options.output / "report.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return run_command("scripts.studies.selection.compare", Compare, run_study, arguments)


if __name__ == "__main__":
    sys.exit(main())
