"""Choosing a family on problems whose answer is known, at less cost than training all, and resumed where it stopped."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn

from marigold_uq.distributions import HeadOptions, family_class
from marigold_uq.models.widen import widen
from marigold_uq.randomness import member_seed
from marigold_uq.sampling import one_step_distribution
from marigold_uq.schedulers import DistributionalDDIMScheduler
from marigold_uq.scores import mean_score
from marigold_uq.training.config import OptimizerConfig, TrainingConfig
from marigold_uq.training.family_runs import choose_family
from marigold_uq.training.objective import Objective, ObjectiveConfig
from marigold_uq.training.selection import (
    FamilyCandidate,
    FamilyScore,
    Selection,
    SelectionConfig,
    round_steps,
    sample_unit_scores,
    select_family,
)
from marigold_uq.training.task import TrainingTask

POINT, GAUSSIAN = FamilyCandidate("point"), FamilyCandidate("gaussian")
MIXTURE, LOW_RANK = FamilyCandidate("mixture", 3), FamilyCandidate("low_rank", rank=1)


class Net(ModelMixin, ConfigMixin):
    """Features of x_t (B, C, 2), a convolution that `widen` knows; no condition is needed."""

    @register_to_config
    def __init__(self, in_channels: int = 1, out_channels: int = 1) -> None:
        super().__init__()
        self.conv_in = nn.Conv1d(in_channels, 16, 1)
        self.conv_out = nn.Conv1d(16, out_channels, 1)

    def forward(self, x_t: Tensor) -> Tensor:
        return self.conv_out(self.conv_in(x_t).tanh())


def bimodal(count: int, seed: int) -> Tensor:
    """Two narrow modes in each of two independent coordinates, (count, 1, 2)."""
    generator = torch.Generator().manual_seed(seed)
    sides = torch.randint(2, (count, 1, 2), generator=generator) * 2.0 - 1
    return sides + 0.1 * torch.randn(count, 1, 2, generator=generator)


def normal(count: int, seed: int) -> Tensor:
    """One spread for all."""
    return torch.randn(count, 1, 2, generator=torch.Generator().manual_seed(seed))


def correlated(count: int, seed: int) -> Tensor:
    """Two coordinates that move together."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(count, 1, 1, generator=generator)
    return common + 0.1 * torch.randn(count, 1, 2, generator=generator)


class Fits:
    """Distributions of y without any condition: the raw numbers are what is trained, each family by its own score."""

    def __init__(self, train: Tensor, held_out: Tensor, score: FamilyScore) -> None:
        self.train, self.held_out, self.score = train, held_out, score
        self.fits: dict[FamilyCandidate, tuple[Tensor, torch.optim.Optimizer, int]] = {}

    def __call__(self, candidate: FamilyCandidate, steps: int) -> Tensor:
        family, head = family_class(candidate.noise_family), HeadOptions(candidate.num_components, candidate.rank)
        if candidate not in self.fits:
            blocks = family.initial_blocks(head, 1.0)
            raw = (
                torch.tensor([block.bias + 0.1 * block.is_factor for block in blocks]).reshape(1, -1, 1).repeat(1, 1, 2)
            )
            raw.requires_grad_()
            self.fits[candidate] = raw, torch.optim.Adam([raw], lr=0.1), 0
        raw, optimizer, done = self.fits[candidate]
        for _ in range(done, steps):
            optimizer.zero_grad()
            mean_score(family.from_raw(raw.expand(len(self.train), -1, -1), head), self.train).backward()
            optimizer.step()
        self.fits[candidate] = raw, optimizer, steps
        law = family.from_raw(raw.detach().expand(len(self.held_out), -1, -1), head)
        draws = law.rsample((30,), generator=torch.Generator().manual_seed(5))
        return sample_unit_scores(draws, self.held_out, self.score)


class KnownTask(TrainingTask):
    """The distribution of y, unconditionally, at the last timestep, where x_t is pure noise."""

    def __init__(self, candidate: FamilyCandidate, trunk: Path | None, data: Tensor) -> None:
        self.scheduler = scheduler_of(candidate)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            network = Net() if trunk is None else Net.from_pretrained(trunk)
        head = {"num_components": candidate.num_components, "rank": candidate.rank}
        if candidate.noise_family != "point":
            widen(network, candidate.noise_family, **head, initial_scale=1.0)
        self.network = network
        # the score is that of the marginals, or for joint families of whole events
        self.objective = Objective(ObjectiveConfig(uniform_timesteps=False), self.scheduler)
        self.dataset: Any = [{"name": str(i), "y": row} for i, row in enumerate(data)]

    def losses(self, network: nn.Module, batch: Any, generators: list[torch.Generator]) -> Tensor:
        losses, residuals = self.objective.losses(lambda x_t, t: network(x_t), batch["y"], generators)
        self.objective.note(residuals)
        return losses

    def states(self) -> list[Any]:
        return [self.objective.scale]

    def after_step(self, step: int) -> None:
        self.objective.update()

    def save(self, network: nn.Module, folder: Path) -> None:
        network.save_pretrained(folder)
        self.scheduler.save_pretrained(folder / "scheduler")


def scheduler_of(candidate: FamilyCandidate) -> DistributionalDDIMScheduler:
    return DistributionalDDIMScheduler(
        noise_family=candidate.noise_family,
        num_components=candidate.num_components,
        rank=candidate.rank,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        clip_sample=False,
    )


def held_out_scores(model: Path, data: Tensor, score: Any) -> Tensor:
    """Of draws in one step."""
    network = Net.from_pretrained(model)
    scheduler = DistributionalDDIMScheduler.from_pretrained(model / "scheduler")
    scheduler.set_timesteps(1)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        x_T = torch.randn(data.shape, generator=generator)
        law = one_step_distribution(lambda x_t, t: network(x_t), scheduler, x_T)
        return sample_unit_scores(law.rsample((100,), generator=generator), data, score)


def training(output: Path, max_steps: int, **changes: Any) -> TrainingConfig:
    optimizer = OptimizerConfig(learning_rate=0.02, warmup_steps=5, decay="constant")
    options: dict[str, Any] = {"ema_decay": 0.95, "tracker": "none", "cpu": True, **changes}
    return TrainingConfig(output, max_steps, 4, optimizer=optimizer, validate_every=0, log_every=1000, **options)


def choose(output: Path, config: SelectionConfig, task: type[KnownTask] = KnownTask) -> FamilyCandidate | None:
    train, held_out = normal(16, 0), normal(50, 1)
    return choose_family(
        training(output, 16, checkpoint_every=2),
        config,
        lambda candidate, trunk: task(candidate, trunk, train),
        lambda model: held_out_scores(model, held_out, config.score),
    )


@pytest.mark.parametrize(
    ("make", "score", "expected"),
    [(bimodal, "crps", MIXTURE), (normal, "crps", GAUSSIAN), (correlated, "energy", LOW_RANK)],
)
def test_the_family_that_the_data_were_made_with_is_chosen(
    make: Callable[[int, int], Tensor], score: FamilyScore, expected: FamilyCandidate
) -> None:
    evaluate = Fits(make(300, 0), make(300, 1), score)
    found = select_family([POINT, GAUSSIAN, MIXTURE, LOW_RANK], evaluate, final_steps=80)
    assert found is not None
    assert found.chosen == expected


def test_the_table_says_what_was_seen_and_the_working_runs_are_gone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    chosen = choose(run, SelectionConfig(num_units=8))
    assert sorted(path.name for path in run.iterdir()) == ["selection.json", "selection.md"]
    content = json.loads((run / "selection.json").read_text())
    rows = content["rows"]
    assert [(row["round"], row["noise_family"], row["steps"]) for row in rows[:3]] == [
        (1, "point", 2), (1, "gaussian", 2), (1, "mixture", 2)
    ]  # fmt: skip
    assert {row["steps"] for row in rows if row["round"] == 2} == {4}
    assert [row["noise_family"] for row in rows if row["chosen"]] == [chosen.noise_family if chosen else None]
    assert content["num_units"] == 50
    best = min((row for row in rows if row["round"] == 2), key=lambda row: row["score"])
    assert (best["difference"], best["standard_error"]) == (0, 0)
    text = (run / "selection.md").read_text()
    assert "| round | family | outputs | steps | score | to the best | standard error | seconds | chosen |" in text
    assert "mixture-3" in text


def test_an_interrupted_choice_resumes_to_the_same_numbers_and_a_finished_one_is_not_repeated(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    config = SelectionConfig(num_units=8)
    expected = choose(whole, config)

    class Killed(BaseException):
        pass

    found = None
    for allowed in (1, 5, 6, 1000):  # optimiser steps: in the trunk, in the first and in the second round
        steps_left = [allowed]

        class Dying(KnownTask):
            def after_step(self, step: int, left: list[int] = steps_left) -> None:
                super().after_step(step)
                left[0] -= 1
                if left[0] < 0:
                    raise Killed

        with suppress(Killed):
            found = choose(parts, config, Dying)
        assert (found is None) == (allowed < 1000)
    assert found == expected
    rows = [json.loads((run / "selection.json").read_text())["rows"] for run in (whole, parts)]
    for one in (*rows[0], *rows[1]):
        del one["seconds"]
    assert rows[0] == rows[1]

    def refuse(*_: Any) -> Any:
        raise AssertionError("a finished choice was repeated")

    assert choose_family(training(parts, 32), config, refuse, refuse) == expected
    other = SelectionConfig(num_units=9)
    with pytest.raises(ValueError, match="num_units was 8, now 9"):
        choose_family(training(parts, 16), other, refuse, refuse)


@pytest.mark.parametrize("num_candidates", [2, 3, 4, 6, 8])
def test_halving_trains_fewer_steps_than_training_all(num_candidates: int) -> None:
    candidates = [FamilyCandidate("mixture", 2 + number) for number in range(num_candidates)]
    trained: dict[FamilyCandidate, int] = {}

    def evaluate(candidate: FamilyCandidate, steps: int) -> Tensor:
        trained[candidate] = max(steps, trained.get(candidate, 0))
        noise = torch.randn(50, generator=torch.Generator().manual_seed(member_seed(candidate.num_components)))
        return noise - candidate.num_components  # the last is the best, by far

    found = select_family(candidates, evaluate, final_steps=256)
    assert isinstance(found, Selection)
    assert found.chosen == candidates[-1]
    assert found.rounds[-1].steps == 256
    assert found.steps_trained == sum(trained.values())
    share = found.steps_trained / (num_candidates * 256)
    assert share == 1 if num_candidates == 2 else share < 0.84 if num_candidates < 6 else share < 0.6
    assert round_steps(num_candidates, 256)[-1] == 256


def test_a_slow_starter_is_not_dropped_while_it_cannot_be_told_from_the_best() -> None:
    """As mixture on a table: a hair behind gaussian early, clearly ahead late, and the last of three."""
    unit = torch.tensor([-1.0, 1.0]).repeat(50)

    def evaluate(candidate: FamilyCandidate, steps: int) -> Tensor:
        early = {"point": 0.0003 + 0.004 * unit, "gaussian": 0.0 * unit, "mixture": 0.0004 + 0.005 * unit}
        late = {"point": 0.1, "gaussian": 0.05, "mixture": 0.0}
        return early[candidate.noise_family] if steps < 8 else late[candidate.noise_family] + 0.001 * unit

    found = select_family([POINT, GAUSSIAN, MIXTURE], evaluate, final_steps=8)
    assert found is not None
    assert found.chosen == MIXTURE


def test_a_candidate_that_diverges_is_reported_and_not_chosen() -> None:
    def evaluate(candidate: FamilyCandidate, steps: int) -> Tensor:
        if candidate == MIXTURE:
            raise FloatingPointError("the loss is not finite")
        return torch.full((4,), float("nan")) if candidate == POINT else torch.ones(4)

    found = select_family([POINT, GAUSSIAN, MIXTURE], evaluate, final_steps=4)
    assert found is not None
    assert found.chosen == GAUSSIAN
    assert found.markdown().count("diverged") >= 6
    json.dumps(found.to_dict(), allow_nan=False)
    with pytest.raises(FloatingPointError, match="no candidate has finite scores"):
        select_family([POINT, MIXTURE], evaluate, final_steps=4)


def test_simple_means_few_outputs() -> None:
    families = [
        FamilyCandidate("low_rank_mixture", 2, 4),
        MIXTURE,
        FamilyCandidate("sample"),
        LOW_RANK,
        GAUSSIAN,
        POINT,
    ]
    names = [one.name for one in sorted(families, key=lambda one: one.complexity)]
    assert names == ["point", "sample", "gaussian", "low_rank-1", "mixture-3", "low_rank_mixture-2-4"]


def test_candidates_and_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="use 'low_rank'"):
        FamilyCandidate("cholesky")
    with pytest.raises(ValueError, match="unknown noise family"):
        FamilyCandidate("laplace")
    with pytest.raises(ValueError, match="at least 2"):
        FamilyCandidate("mixture")
    with pytest.raises(ValueError, match="must name at least 2 families; got 1"):
        SelectionConfig([POINT, POINT])
    with pytest.raises(ValueError, match=r"selection.ensemble_size must be at least 2; got 1"):
        SelectionConfig(ensemble_size=1)
    with pytest.raises(ValueError, match="at least 2 candidates; got 1"):
        select_family([POINT], lambda candidate, steps: None, final_steps=1)


@pytest.mark.parametrize("event", [(), (25,), (2, 3, 4)])
@pytest.mark.parametrize("score", ["crps", "energy"])
def test_both_scores_are_in_the_units_of_one_coordinate(score: FamilyScore, event: tuple[int, ...]) -> None:
    samples, target = torch.zeros(4, 3, *event), torch.full((3, *event), 2.0)
    assert sample_unit_scores(samples, target, score).tolist() == pytest.approx([2.0] * 3)
