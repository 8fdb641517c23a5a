"""Choosing the family of a table: denoisers around one common baseline, compared on rows that none of them has seen."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from marigold_uq.pipelines.tabular.pipeline import TabularRegressionPipeline
from marigold_uq.randomness import member_seed
from marigold_uq.tabular.recipe import Recipe, known_values
from marigold_uq.tabular.stack import Standardised, TrainingRows, build_denoiser, fit_baseline
from marigold_uq.training.selection import FamilyCandidate, Selection, sample_unit_scores, select_family

__all__ = ["select_table_family"]

_HELD_OUT = 0.2
_LEAST_ROWS = 50
_ENSEMBLE_SIZE = 50


def select_table_family(table: TrainingRows, recipe: Recipe, seed: int, *, verbose: bool = False) -> Selection:
    """Compare `recipe.candidates` by the CRPS of a fifth of the rows, in units of each target's standard deviation.

    The baseline, by far the largest part, is fitted once to the other rows. Around it every candidate trains a single
    denoiser for up to half of the epochs, with the recipe's early stopping.
    """
    num_rows = len(table.targets)
    if num_rows < _LEAST_ROWS:
        raise ValueError(f"noise_family='auto' needs at least {_LEAST_ROWS} rows; got {num_rows}. Name a family")
    order = np.random.default_rng(member_seed(seed, 0)).permutation(num_rows)
    held_out, rest = (_rows(table, np.sort(part)) for part in np.split(order, [round(_HELD_OUT * num_rows)]))
    single = replace(recipe, noise_family="point", num_models=1)
    model = Standardised.of(rest, member_seed(seed, 1))
    baseline, predictions, extras = fit_baseline([model], single, verbose)
    values = known_values(rest.targets) if recipe.snap else None
    unit = rest.targets.std(0)
    target = torch.from_numpy(held_out.targets / np.where(unit > 0, unit, 1.0))
    states: dict[FamilyCandidate, dict[str, Any]] = {}

    def evaluate(candidate: FamilyCandidate, epochs: int) -> Tensor:
        own = replace(single, noise_family=candidate.noise_family)
        scheduler = own.scheduler()
        network, trainer = build_denoiser([model], predictions, own, scheduler, extras)
        if candidate in states:
            trainer.load_state_dict(states[candidate])
        while not trainer.has_ended and trainer.progress.epoch[0] < epochs:
            trainer.step()
        states[candidate] = trainer.state_dict()
        trainer.finish()
        pipeline = TabularRegressionPipeline(
            network, scheduler, baseline, default_denoising_steps=own.num_inference_steps, values=values
        )
        pipeline.set_progress_bar_config(disable=True)
        if pipeline.has_closed_form():
            law = pipeline.predictive_distribution(held_out.features)
            return torch.from_numpy((law.crps(held_out.targets) / np.where(unit > 0, unit, 1.0)).mean(1))
        draws = pipeline(held_out.features, _ENSEMBLE_SIZE).samples / np.where(unit > 0, unit, 1.0)
        return sample_unit_scores(torch.from_numpy(draws), target, "crps")

    candidates = [_candidate(family, recipe) for family in recipe.candidates]
    selection = select_family(candidates, evaluate, final_steps=max(1, recipe.max_epochs // 2))
    assert selection is not None  # nothing here is interrupted but by an exception
    return selection


def _candidate(family: str, recipe: Recipe) -> FamilyCandidate:
    return FamilyCandidate(family, recipe.num_components if family == "mixture" else 1)


def _rows(table: TrainingRows, index: np.ndarray) -> TrainingRows:
    return TrainingRows(table.features[index], table.targets[index], table.weights[index])
