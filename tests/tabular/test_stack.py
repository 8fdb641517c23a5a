"""Training many models at once gives what training them one by one gives."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from marigold_uq.schedulers.scheduling_distributional_ddim import DistributionalDDIMScheduler
from marigold_uq.tabular.recipe import Recipe, paper_recipe
from marigold_uq.tabular.stack import FittedStack, Standardised, TrainingRows, build_denoiser, fit_stack

RECIPE = Recipe(max_epochs=6, baseline_epochs=8, batch_size=16, num_timesteps=10, patience=2)


def table(rows: int, seed: int) -> TrainingRows:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3))
    return TrainingRows(x, (x[:, :1] + 0.3 * rng.normal(size=(rows, 1))), np.ones(rows))


def weights(stack: FittedStack, s: int) -> list[torch.Tensor]:
    assert stack.baseline is not None
    return [w[s] for model in (stack.network, stack.baseline) for w in model.state_dict().values()]


@pytest.mark.parametrize("family", ["point", "gaussian", "mixture", "sample"])
def test_models_of_different_lengths_and_ends_train_as_if_alone(family: str) -> None:
    tables = [table(40, 0), table(57, 1), table(33, 2)]
    recipe = replace(RECIPE, noise_family=family)
    together = fit_stack(tables, recipe, [5, 6, 7])
    for s in range(3):
        alone = fit_stack([tables[s]], recipe, [5 + s])
        assert alone.epochs == [together.epochs[s]]
        for one, many in zip(weights(alone, 0), weights(together, s), strict=True):
            torch.testing.assert_close(many, one, rtol=1e-3, atol=1e-4)  # rounding, grown over the steps of Adam


def test_the_baseline_of_a_table_is_not_changed_by_one_too_small_to_split() -> None:
    recipe = replace(RECIPE, patience=None)
    alone, beside = fit_stack([table(60, 0)], recipe, [5]), fit_stack([table(60, 0), table(4, 1)], recipe, [5, 6])
    for one, many in zip(weights(alone, 0), weights(beside, 0), strict=True):
        torch.testing.assert_close(many, one, rtol=1e-3, atol=1e-4)


def test_a_frozen_model_keeps_its_weights_while_others_train() -> None:
    models = [Standardised.of(table(32, s), s) for s in range(2)]
    predictions = [torch.zeros(32, 1)] * 2
    _, trainer = build_denoiser(models, predictions, Recipe(max_epochs=9, batch_size=16), Recipe().scheduler())
    for _ in range(3):
        trainer.step()
    trainer._freeze(0)
    before = [[w.detach().clone() for w in group] for group in (trainer.weights, trainer.averaged)]
    for _ in range(5):
        trainer.step()
    for old, new in zip(before, (trainer.weights, trainer.averaged), strict=True):
        assert all(torch.equal(a[0], b[0]) for a, b in zip(old, new, strict=True))
        assert not any(torch.equal(a[1], b[1]) for a, b in zip(old, new, strict=True))


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_diffusing_the_residual_is_cards_forward_and_corrected_reverse_process(eta: float) -> None:
    """CARD: y_t = sqrt(abar) y_0 + (1 - sqrt(abar)) f + sqrt(1 - abar) eps; reverse with (1 - sqrt(abar_prev)) f."""
    scheduler = DistributionalDDIMScheduler(50, 0.001, 0.35, clip_sample=False, eta=eta)
    scheduler.set_timesteps(50)
    g = torch.Generator().manual_seed(0)
    y_0, f, eps = (torch.randn(8, 1, generator=g, dtype=torch.float64) for _ in range(3))
    for t in (49, 20, 1, 0):
        abar, prev = scheduler.alpha_bar(t), scheduler.alpha_bar(t - 1)
        y_t = abar**0.5 * y_0 + (1 - abar**0.5) * f + (1 - abar) ** 0.5 * eps
        c = scheduler.step_coefficients(t)
        direction = max(0.0, 1 - prev - c.std_dev**2) ** 0.5
        card = prev**0.5 * y_0 + (1 - prev**0.5) * f + direction * eps
        ours = c.sample * (y_t - f) + c.output * eps + f
        torch.testing.assert_close(ours, card, rtol=1e-9, atol=1e-9)


def test_the_paper_preset_has_the_published_numbers() -> None:
    """The paper and its code: batch sizes and epochs per set, T = 50, betas 0.001..0.35, eta = 1, EMA 0.995."""
    recipe = paper_recipe(308, "yacht")
    assert (recipe.batch_size, recipe.max_epochs, recipe.dropout, recipe.ema_decay) == (32, 10000, 0.2, 0.995)
    config = recipe.scheduler().config
    assert (config.num_train_timesteps, config.beta_start, config.beta_end, config.eta) == (50, 0.001, 0.35, 1.0)
    assert (recipe.num_components, recipe.baseline, recipe.num_models) == (3, "mlp", 1)
