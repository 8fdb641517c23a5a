"""Choosing a family: candidates trained a little, compared on held-out units, halved, and trained further.

Nothing here knows a task. Whoever calls says how a candidate is trained to a number of steps and scored; see
`marigold_uq.training.family_runs` for networks that are trained by the common loop.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from marigold_uq.calibration.comparison import Comparison
from marigold_uq.distributions import HeadOptions, family_class
from marigold_uq.files import atomic_path, make_folder, require_same
from marigold_uq.metrics import crps, energy_score
from marigold_uq.results import markdown_table, write_json

__all__ = [
    "AUTO", "FamilyCandidate", "FamilyScore", "Selection", "SelectionConfig", "default_candidates", "read_choice",
    "require_plain_head", "round_steps", "sample_unit_scores", "select_family", "write_selection",
]  # fmt: skip

AUTO = "auto"
"""The noise_family that asks for a choice."""

FamilyScore = Literal["crps", "energy"]
Evaluate = Callable[["FamilyCandidate", int], Tensor | None]
"""Trains a candidate to a number of steps in all and scores it on the held-out units, (U,); None: interrupted."""


@dataclass(frozen=True)
class FamilyCandidate:
    """A family and the sizes of its head.

    Args:
        noise_family: Any family but cholesky, whose head is not had by widening a point network.
        num_components: Components of a mixture.
        rank: Rank of the low-rank families.
    """

    noise_family: str
    num_components: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        family = family_class(self.noise_family)
        family.check_head(self._head)
        family.num_blocks(self._head)  # a cholesky head says why it cannot take part

    @property
    def _head(self) -> HeadOptions:
        return HeadOptions(self.num_components, self.rank)

    @property
    def name(self) -> str:
        """The family, and its sizes where they are not the least: mixture-3, low_rank-4, low_rank_mixture-2-4."""
        sizes = [number for number, least in ((self.num_components, 1), (self.rank, 0)) if number > least]
        return "-".join(map(str, (self.noise_family, *sizes)))

    @property
    def num_outputs(self) -> int:
        """Raw channels per target channel: what "simple" means."""
        return family_class(self.noise_family).num_blocks(self._head)

    @property
    def complexity(self) -> tuple[int, int, str]:
        """Sorts candidates: outputs, then channels of noise at the input, then the name."""
        return self.num_outputs, family_class(self.noise_family).noise_channels, self.name


@dataclass(frozen=True)
class SelectionConfig:
    """How a family is chosen where noise_family is "auto"; the validation data decide.

    Args:
        candidates: Families to compare; None takes point, gaussian and mixture of 3, and with the score "energy" also
            low_rank of rank 4 and low_rank_mixture of 2 x 4.
        score: Of samples at held-out units: "crps" looks at every coordinate by itself, "energy" at all together, so it
            alone can prefer a joint family after one step.
        trunk_steps: Steps of the point model whose trunk all candidates share; None takes an eighth of max_steps.
        final_steps: Steps that the last candidates are trained for; earlier rounds have half of the next one's. None
            takes a quarter of max_steps.
        num_units: Held-out windows or pictures.
        ensemble_size: Samples of each.
        num_inference_steps: Denoising steps of the samples; None takes the model's own.
    """

    candidates: list[FamilyCandidate] | None = None
    score: FamilyScore = "crps"
    trunk_steps: int | None = None
    final_steps: int | None = None
    num_units: int = 64
    ensemble_size: int = 16
    num_inference_steps: int | None = None

    def __post_init__(self) -> None:
        least = {"trunk_steps": 0, "final_steps": 1, "num_units": 2, "ensemble_size": 2, "num_inference_steps": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ValueError(f"selection.{name} must be at least {bound}; got {value}")
        if self.candidates is not None and len(set(self.candidates)) < 2:
            raise ValueError(f"selection.candidates must name at least 2 families; got {len(set(self.candidates))}")


def require_plain_head(noise_family: str, num_components: int, rank: int) -> None:
    """Refuse sizes of a head beside noise_family "auto", whose candidates have sizes of their own."""
    if noise_family == AUTO and (num_components, rank) != (1, 0):
        raise ValueError(
            f"noise_family 'auto' chooses the head: give num_components and rank under selection.candidates; got "
            f"num_components={num_components}, rank={rank} beside it"
        )


def default_candidates(score: FamilyScore) -> list[FamilyCandidate]:
    """One of each kind that needs one network call; joint ones where the score sees correlations."""
    marginal = [FamilyCandidate("point"), FamilyCandidate("gaussian"), FamilyCandidate("mixture", 3)]
    if score == "crps":
        return marginal
    return [*marginal, FamilyCandidate("low_rank", rank=4), FamilyCandidate("low_rank_mixture", 2, 4)]


def sample_unit_scores(samples: Tensor, target: Tensor, score: FamilyScore) -> Tensor:
    """The fair score of samples (M, U, *event) at targets (U, *event), one number per unit, (U,); events may be scalar.

    The same estimator for all families, which makes them comparable: a family's own score is in units of its own. The
    energy score is divided by the root of the number of coordinates, so both scores are of the size of one.
    """
    samples, target = samples.reshape(*samples.shape[:2], -1), target.reshape(len(target), -1)
    if score == "crps":
        return crps(samples, target).mean(1)
    return energy_score(samples, target, 1) / math.sqrt(target.shape[1])


@dataclass(frozen=True)
class _Trial:
    """A candidate after some steps: its held-out scores, None if it diverged, and the seconds since the last trial."""

    candidate: FamilyCandidate
    steps: int
    scores: list[float] | None
    seconds: float


@dataclass(frozen=True)
class _Round:
    """Candidates of as many steps each, simplest first."""

    steps: int
    trials: list[_Trial]
    comparison: Comparison


@dataclass(frozen=True)
class Selection:
    """What was compared, round by round, and what was chosen."""

    chosen: FamilyCandidate
    rounds: list[_Round]

    @property
    def steps_trained(self) -> int:
        """Steps of all candidates together; a shared trunk is not among them."""
        before = [0, *(one.steps for one in self.rounds)]
        return sum(len(one.trials) * (one.steps - start) for one, start in zip(self.rounds, before, strict=False))

    @property
    def seconds(self) -> float:
        """Time of all trials."""
        return sum(trial.seconds for one in self.rounds for trial in one.trials)

    def rows(self) -> list[dict[str, Any]]:
        """One entry per round and candidate, as JSON has it: None where a candidate diverged."""
        found = []
        for number, one in enumerate(self.rounds, 1):
            columns = (one.comparison.scores, one.comparison.differences, one.comparison.standard_errors)
            for place, (trial, *values) in enumerate(zip(one.trials, *columns, strict=True)):
                score, difference, error = (value if math.isfinite(value) else None for value in values)
                found.append(
                    {
                        "round": number,
                        **asdict(trial.candidate),
                        "outputs": trial.candidate.num_outputs,
                        "steps": trial.steps,
                        "score": score,
                        "difference": difference,
                        "standard_error": error,
                        "seconds": trial.seconds,
                        "chosen": one is self.rounds[-1] and place == one.comparison.chosen,
                    }
                )
        return found

    def markdown(self) -> str:
        """The table of `rows`."""
        header = ["round", "family", "outputs", "steps", "score", "to the best", "standard error", "seconds", "chosen"]
        names = [trial.candidate.name for one in self.rounds for trial in one.trials]
        cells = [
            [row["round"], name, row["outputs"], row["steps"],
             *(_cell(row[key]) for key in ("score", "difference", "standard_error")),
             f"{row['seconds']:.1f}", "yes" if row["chosen"] else ""]
            for name, row in zip(names, self.rows(), strict=True)
        ]  # fmt: skip
        return markdown_table(header, cells)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "chosen": asdict(self.chosen),
            "rows": self.rows(),
            "num_units": self.rounds[-1].comparison.num_units,
            "steps_trained": self.steps_trained,
            "seconds": self.seconds,
        }


def _cell(value: float | None) -> str:
    return "diverged" if value is None else f"{value:.4g}"


def round_steps(num_candidates: int, final_steps: int) -> list[int]:
    """Steps after each round, doubling up to `final_steps`, with as many rounds as it takes to come down to two."""
    rounds, left = 1, num_candidates
    while left > 2:
        rounds, left = rounds + 1, (left + 1) // 2
    return sorted({max(1, final_steps >> halvings) for halvings in range(rounds)})


def select_family(
    candidates: Sequence[FamilyCandidate], evaluate: Evaluate, *, final_steps: int, state: Path | None = None
) -> Selection | None:
    """Successive halving by paired held-out scores; the simplest candidate within one standard error of the best wins.

    All candidates are trained for the steps of the first round. The better half stays, and whoever is not more than one
    standard error behind the best: an early round drops nobody by noise. Those are trained twice as long, and so on, up
    to `final_steps`. A candidate that diverges (FloatingPointError) is never chosen.

    Args:
        candidates: At least two.
        evaluate: Trains a candidate to a number of steps in all, resuming from what it trained before, and scores it on
            the same held-out units each time.
        final_steps: Steps of the last round.
        state: JSON file of what was measured, written after every trial. With it a selection that was interrupted
            resumes: trials that are in the file are not repeated.

    Returns:
        None if `evaluate` was interrupted.
    """
    remaining = sorted(set(candidates), key=lambda one: one.complexity)
    if len(remaining) < 2:
        raise ValueError(f"a choice needs at least 2 candidates; got {len(remaining)}")
    known, rounds = _read_trials(state), list[_Round]()
    for steps in round_steps(len(remaining), final_steps):
        trials = []
        for candidate in remaining:
            if (candidate, steps) not in known:
                trial = _measure(candidate, steps, evaluate)
                if trial is None:
                    return None
                known[candidate, steps] = trial
                _write_trials(state, list(known.values()))
            trials.append(known[candidate, steps])
        comparison = Comparison.of(_score_rows(trials))
        rounds.append(_Round(steps, trials, comparison))
        chosen = remaining[comparison.chosen]
        remaining = [remaining[index] for index in comparison.contenders()]
    return Selection(chosen, rounds)


def _measure(candidate: FamilyCandidate, steps: int, evaluate: Evaluate) -> _Trial | None:
    start = time.perf_counter()
    try:
        scores = evaluate(candidate, steps)
    except FloatingPointError:
        return _Trial(candidate, steps, None, time.perf_counter() - start)
    if scores is None:
        return None
    values = scores.tolist() if bool(scores.isfinite().all()) else None
    return _Trial(candidate, steps, values, time.perf_counter() - start)


def _score_rows(trials: Sequence[_Trial]) -> Tensor:
    """(N, U), infinite where a candidate diverged."""
    counts = {len(trial.scores) for trial in trials if trial.scores is not None}
    if len(counts) > 1:
        raise ValueError(f"candidates must be scored on the same units; got {sorted(counts)} of them")
    if not counts:
        names = ", ".join(trial.candidate.name for trial in trials)
        raise FloatingPointError(f"no candidate has finite scores ({names}): lower the learning rate")
    diverged = [math.inf] * counts.pop()
    rows = [diverged if trial.scores is None else trial.scores for trial in trials]
    return torch.tensor(rows, dtype=torch.float64)


def _read_trials(state: Path | None) -> dict[tuple[FamilyCandidate, int], _Trial]:
    if state is None or not state.exists():
        return {}
    trials = [
        _Trial(FamilyCandidate(**entry.pop("candidate")), **entry)
        for entry in json.loads(state.read_text(encoding="utf-8"))
    ]
    return {(trial.candidate, trial.steps): trial for trial in trials}


def _write_trials(state: Path | None, trials: Sequence[_Trial]) -> None:
    if state is not None:
        write_json(state, [asdict(trial) for trial in trials], overwrite=True)


def write_selection(folder: Path, selection: Selection, settings: dict[str, Any]) -> None:
    """selection.md and, last, selection.json, whose presence says that the choice is made; of these settings."""
    make_folder(folder)
    with atomic_path(folder / "selection.md", overwrite=True) as temporary:
        temporary.write_text(selection.markdown() + "\n", encoding="utf-8")
    write_json(folder / "selection.json", {**selection.to_dict(), "settings": settings}, overwrite=True)


def read_choice(folder: Path, settings: dict[str, Any]) -> FamilyCandidate | None:
    """What was chosen in this folder before; None if there is no finished choice, an error for other settings."""
    path = folder / "selection.json"
    if not path.exists():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    require_same(path, content["settings"], settings)
    return FamilyCandidate(**content["chosen"])
