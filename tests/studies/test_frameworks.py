"""The comparison of frameworks: what is paired, what is resumed, and that each framework learns the toy."""

from pathlib import Path

import pytest
import torch

from marigold_uq.field.config import read_config
from scripts.studies.fields import frameworks as fields
from scripts.studies.toy import frameworks as toy
from scripts.studies.toy.toy_regression import truth


def test_a_seed_starts_all_frameworks_alike_and_another_one_does_not() -> None:
    starts = [toy.fit(toy.Cell(0, "gaussian", False, name), num_iterations=0, num_rows=9)[1] for name in toy.FRAMEWORKS]
    other = toy.fit(toy.Cell(1, "gaussian", False, "EDM"), num_iterations=0, num_rows=9)[1]
    for network in starts[1:]:
        assert all(torch.equal(a, b) for a, b in zip(network.parameters(), starts[0].parameters(), strict=True))
    assert not torch.equal(other.head.weight, starts[0].head.weight)


@pytest.mark.parametrize("framework", toy.FRAMEWORKS)
def test_every_framework_learns_the_toy(framework: str) -> None:
    """The truth scores .248; its mean with the average noise around it, no better than .27."""
    cell = toy.Cell(0, "mixture", False, framework)
    scheduler, network = toy.fit(cell, num_iterations=400, num_rows=4000)
    scheduler.set_timesteps(5)
    x = torch.linspace(0.05, 0.95, 100).repeat(32)
    y = truth(x).rsample(generator=torch.Generator().manual_seed(0))
    start = torch.randn(3200, 1, generator=torch.Generator().manual_seed(1))
    denoiser = toy.condition_on(network, scheduler, x)
    draws = toy.reverse_diffusion(denoiser, scheduler, start, generator=torch.Generator().manual_seed(2))
    members, observed = draws.reshape(32, 100), y.reshape(32, 100)
    score = torch.stack([toy.sample_crps(members, row) for row in observed]).mean()
    assert float(score) < 0.27


def test_a_finished_cell_is_read_and_other_settings_are_refused(tmp_path: Path) -> None:
    options = toy.FrameworkOptions(output=tmp_path, steps=2, rows=50, test_points=4)
    cell = toy.Cell(0, "point", False, "flow")
    first = toy.run_cell(cell, options)
    assert sorted(first) == ["1 0", "1 1", "5 0", "5 1", "50 0", "50 1"]
    assert toy.run_cell(cell, options) == first
    with pytest.raises(ValueError, match="steps was 2, now 3"):
        toy.run_cell(cell, toy.FrameworkOptions(output=tmp_path, steps=3, rows=50, test_points=4))


def test_differences_are_those_of_pairs() -> None:
    """A seed that is hard for both frameworks adds to the error of the scores and not to that of the difference."""
    keys = [f"{steps} {eta:g}" for steps in toy.STEP_COUNTS for eta in toy.ETAS]
    found = {
        toy.Cell(seed, "point", False, name): dict.fromkeys(keys, seed + gain)
        for seed in (0, 1)
        for name, gain in (("DDPM", 0.0), ("EDM", -0.25), ("flow", 0.5))
    }
    table = toy.tables(found)
    assert "0.2500 ± 0.5000" in table
    assert "-0.2500 ± 0.0000" in table
    assert "+0.5000 ± 0.0000" in table


def test_field_models_differ_in_nothing_but_the_framework(tmp_path: Path) -> None:
    runs = fields.plan(fields.Options(output=tmp_path, data=tmp_path / "ks.h5", seeds=2, max_steps=200))
    assert [(run.name, run.seed) for run in runs] == [(name, seed) for seed in (0, 1) for name in fields.FRAMEWORKS]
    texts = [read_config(run.arguments)[1].splitlines() for run in runs[:3]]
    for name, text in zip(list(fields.FRAMEWORKS)[1:], texts[1:], strict=True):
        changed = [line.strip() for line, base in zip(text, texts[0], strict=True) if line != base]
        assert changed[0] == f"framework: {fields.FRAMEWORKS[name]}"
        assert len(changed) == 2  # and the folder
