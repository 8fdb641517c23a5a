"""The toy of scripts/studies/toy learns what is known about it, and its picture is written safely."""

import math
from pathlib import Path

import pytest
import torch

from scripts.studies.toy import toy_regression as toy


@pytest.fixture(scope="module")
def table() -> dict[str, list[float]]:
    fitted = toy.fit_all(["point", "mixture"], num_iterations=300, num_rows=4000, seed=0, progress=False)
    return toy.score_table(fitted, num_conditions=200, num_repeats=32, seed=1, step_counts=(1, 5))


def test_the_exact_posterior_sampled_in_any_number_of_steps_scores_as_the_truth(table):
    # 200 x 32 draws against 200 x 32 observations; the two halves of the score cancel to first order when the laws
    # agree, and over seeds the difference has a standard deviation of .0012 (30 seeds).
    assert table["exact"] == pytest.approx(table["closed form"], abs=5 * 0.0012)


def test_a_learned_mixture_beats_a_learned_mean(table):
    for point, mixture in zip(table["point"], table["mixture"], strict=True):
        assert mixture < 0.95 * point


def test_a_learned_mixture_comes_close_to_the_truth(table):
    # No model can beat the truth on average; 300 iterations are enough for 10 %.
    assert table["mixture"][0] < 1.1 * table["closed form"][0]


def test_one_step_of_the_mean_only_model_has_no_spread():
    """A Dirac at zero SNR puts all mass on E[y | x], whatever the starting noise."""
    x = torch.linspace(0, 1, 200)
    law = toy.truth(x)
    generator = torch.Generator().manual_seed(0)
    y = law.rsample((400,), generator)
    absolute_error = (y - law.mean).abs().mean()
    (fitted,) = toy.fit_all(["point"], num_iterations=300, num_rows=4000, seed=0, progress=False)[1:]
    members = fitted.sample(x.repeat(2), 1, generator).reshape(2, -1)
    # trained on finite data, the mean depends a little on the starting noise that says nothing
    assert (members[0] - members[1]).abs().mean() < 0.2 * absolute_error


def test_the_exact_noise_law_is_a_density_around_the_posterior_mean():
    grid = torch.linspace(-6, 6, 6001).unsqueeze(1)
    x, x_t = torch.full((6001,), toy.PROBE_X), torch.full((6001, 1), toy.PROBE_X_T)
    law = toy.exact_family().noise_law(x, x_t, toy.PROBE_TIMESTEP, torch.Generator())
    density = law.log_prob(grid).exp()
    width = float(grid[1] - grid[0])
    assert float(density.sum()) * width == pytest.approx(1, abs=1e-4)
    assert float((density * grid).sum()) * width == pytest.approx(float(law.mean[0]), abs=1e-4)
    # Brute force by Bayes: p(eps | x_t) ~ N(eps; 0, 1) p(y = (x_t - sqrt(1 - abar) eps)/sqrt(abar)).
    abar = toy.exact_family().scheduler.alpha_bar(toy.PROBE_TIMESTEP)
    y = (x_t - math.sqrt(1 - abar) * grid) / math.sqrt(abar)
    bayes = (toy.truth(x).log_prob(y) - 0.5 * grid.square()).exp()
    torch.testing.assert_close(density, bayes / (bayes.sum() * width), rtol=1e-3, atol=1e-4)


def test_the_script_prints_a_table_and_writes_the_picture_once(tmp_path: Path, capsys):
    picture = tmp_path / "new" / "toy.png"
    tiny = ["--steps", "3", "--rows", "50", "--test_points", "5", "--draws", "20", "--output", str(picture)]
    assert toy.main([*tiny, "--families", "point", "sample", "cholesky"]) == 0
    printed = capsys.readouterr().out
    for name in ("closed form", "exact", "point", "sample", "cholesky"):
        assert f"| {name} |" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in picture.parent.iterdir()] == ["toy.png"]  # no temporary file stays
    assert toy.main(tiny) == 2
    assert "pass --overwrite" in capsys.readouterr().err
