"""CARD's reverse mean: where it is wrong, and that our step is the right one."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny_sets import write_set

from marigold_uq.tabular.recipe import Recipe
from marigold_uq.tabular.uci import UCIDataset
from scripts.studies.uci import card
from scripts.studies.uci.card import card_error, sample_as_card
from scripts.studies.uci.stacked import StackedRun, StackedTask

RECIPE = Recipe(baseline_epochs=6, batch_size=16, num_timesteps=8)


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_the_right_step_is_ours_on_the_residual_and_the_published_one_is_off_by_a_multiple_of_f(eta: float) -> None:
    """Both of CARD's formulas, written out in y, against our scheduler's step on y - f with its noise left out."""
    scheduler = replace(RECIPE, noise_family="point").scheduler()
    scheduler.register_to_config(eta=eta)
    scheduler.set_timesteps(8)
    g = torch.Generator().manual_seed(0)
    y_t, eps, f = torch.randn(3, 5, 1, 1, generator=g, dtype=torch.float64)
    wrong_somewhere = False
    for t in range(7, -1, -1):
        abar, abar_prev = scheduler.alpha_bar(t), scheduler.alpha_bar(t - 1)
        sigma = scheduler.step_coefficients(t, eta).std_dev
        y0_hat = (y_t - (1 - math.sqrt(abar)) * f - math.sqrt(1 - abar) * eps) / math.sqrt(abar)
        direction = math.sqrt(max(0.0, 1 - abar_prev - sigma**2))
        right = math.sqrt(abar_prev) * y0_hat + (1 - math.sqrt(abar_prev)) * f + direction * eps
        published = math.sqrt(abar_prev) * y0_hat
        published = published + direction * (eps + (1 - math.sqrt(abar)) / math.sqrt(1 - abar) * f)
        ours = scheduler.reverse_distribution(eps, t, y_t - f, eta=eta).mean + f
        torch.testing.assert_close(ours, right, rtol=0, atol=1e-5)  # alphas_cumprod is float32
        torch.testing.assert_close(ours + card_error(scheduler, t) * f, published, rtol=0, atol=1e-5)
        wrong_somewhere |= abs(card_error(scheduler, t)) > 1e-2
    assert card_error(scheduler, 0) == 0  # lambda = 0 and abar_prev = 1: the last step is right
    assert wrong_somewhere


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> StackedRun:
    """Models of two splits, trained a little, with their states kept."""
    root = tmp_path_factory.mktemp("card")
    dataset = UCIDataset.load(write_set(root / "uci", "yacht"), "yacht")
    trained = StackedRun(StackedTask(dataset, RECIPE), root / "states")
    trained.advance(5)
    return trained


def test_the_right_sampler_is_the_pipeline_and_the_published_one_is_not(run: StackedRun) -> None:
    pipeline, rows = run.pipeline().select(0), run.task.dataset.split(0).test_features

    def draw(published: bool) -> np.ndarray:
        generator = torch.Generator().manual_seed(3)
        return sample_as_card(pipeline, rows, 6, generator=generator, published=published)

    want = pipeline(rows, 6, generator=torch.Generator().manual_seed(3)).samples[..., 0]
    np.testing.assert_allclose(draw(published=False), want, rtol=1e-5, atol=1e-5)
    published = draw(published=True)
    assert np.abs(published - want).max() > 0.01
    with pytest.raises(ValueError, match="one model"):
        sample_as_card(run.pipeline(), rows, 6, generator=torch.Generator(), published=True)


def test_the_command_compares_both_and_needs_trained_models(
    run: StackedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(card, "paper_recipe", lambda rows, name: RECIPE)
    root = run.folder.parent
    arguments = ["--data", str(root / "uci"), "--sets", "yacht", "--ensemble_size", "5", "--output"]
    assert card.main([*arguments, str(tmp_path / "out.json"), "--states", str(run.folder)]) == 0
    printed = capsys.readouterr().out
    assert "| yacht | gaussian | 5 | published |" in printed
    assert "| yacht | gaussian | 5 | right |" in printed
    assert card.main([*arguments, str(tmp_path / "out.json"), "--states", str(run.folder)]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert card.main([*arguments, str(tmp_path / "other.json"), "--states", str(tmp_path)]) == 2
    assert "no trained models" in capsys.readouterr().err
    mistyped = tmp_path / "sttaes"
    assert card.main([*arguments, str(tmp_path / "other.json"), "--states", str(mistyped), "--epochs", "2"]) == 2
    assert "no folder" in capsys.readouterr().err
    assert not mistyped.exists()
