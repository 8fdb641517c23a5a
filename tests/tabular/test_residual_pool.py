"""The pool around the experts: its weights, what leaves and kernel say of unseen rows, and the module that is saved."""

from pathlib import Path

import numpy as np
import pytest
import torch

from marigold_uq.distributions import MixtureDistribution
from marigold_uq.metrics import crps as fair_crps
from marigold_uq.tabular.experts.pooling import ForestSize, OutOfFold, best_weights, fit_pool
from marigold_uq.tabular.experts.residuals import ResidualPool


def gaussians(loc: torch.Tensor, scale: torch.Tensor) -> MixtureDistribution:
    """Heads of one component, (n, 1, C)."""
    return MixtureDistribution(loc.unsqueeze(1), scale.unsqueeze(1), torch.zeros_like(loc).unsqueeze(1))


def rows(count: int = 600, head_scale: float = 1.0, seed: int = 0) -> tuple[OutOfFold, torch.Tensor]:
    """Residuals N(0, s^2) with s = .2 or 2 by the sign of the first input; the head knows s up to a factor."""
    rng = np.random.default_rng(seed)
    inputs = torch.from_numpy(rng.normal(size=(count, 3)))
    true = torch.where(inputs[:, :1] > 0, 2.0, 0.2).double()
    residuals = true * torch.from_numpy(rng.normal(size=(count, 1)))
    head = gaussians(torch.zeros_like(residuals), head_scale * true)
    return OutOfFold(inputs, residuals, torch.ones(count, dtype=torch.float64), head), true


def test_the_best_weights_have_the_least_score_of_a_grid() -> None:
    rng = np.random.default_rng(0)
    points = rng.normal(size=(3, 400)) * np.array([[0.5], [1.0], [2.0]]) + np.array([[0.3], [0.0], [-0.4]])
    y = rng.normal(size=500)
    a = np.abs(points[:, None] - y[:, None]).mean((1, 2))
    d = np.abs(points[:, None, :, None] - points[None, :, None, :]).mean((2, 3))
    grid = [np.array([i, j, 20 - i - j]) / 20 for i in range(21) for j in range(21 - i)]
    best = min(float(w @ a - 0.5 * w @ d @ w) for w in grid)
    found = best_weights(a, d)
    assert found.sum() == pytest.approx(1)
    assert (found >= 0).all()
    assert best - 0.002 < found @ a - 0.5 * found @ d @ found <= best + 1e-9


def test_a_head_that_knows_the_truth_gets_most_of_the_weight_and_a_wrong_one_none() -> None:
    right, wrong = (fit_pool(rows(head_scale=scale)[0], 0).weights[:, 0] for scale in (1.0, 20.0))
    assert right[0] > 0.5
    assert wrong[0] < 0.05
    assert wrong[1] > 0.8  # the leaves know where residuals are large, the kernel does not


def test_the_pool_is_better_on_new_rows_than_the_kernel_and_near_the_truth() -> None:
    """The CRPS of the true distribution is E s / sqrt(pi)."""
    pool, (new, true) = fit_pool(rows(head_scale=5.0)[0], 0), rows(400, 5.0, seed=1)

    def score() -> float:
        law = pool.pool(new.head, new.inputs, torch.zeros(400, 1), torch.ones(1, dtype=torch.float64))
        draws = law.rsample((400,), torch.Generator().manual_seed(0))
        return float(fair_crps(draws, new.residuals).mean())

    pooled = score()
    pool.weights.copy_(torch.tensor([[0.0], [0.0], [1.0]]))
    assert pooled < 0.9 * score()
    assert pooled < 1.15 * float(true.mean()) / np.sqrt(np.pi)


def test_leaves_say_nothing_of_rows_that_they_have_not_seen_where_there_is_nothing_to_say() -> None:
    """Residuals are noise of one width: leaves that remembered a row would beat the head, which is the truth."""
    rng = np.random.default_rng(0)
    residuals = torch.from_numpy(rng.normal(size=(400, 1)))
    head = gaussians(torch.zeros_like(residuals), torch.ones_like(residuals))
    known = OutOfFold(torch.from_numpy(rng.normal(size=(400, 3))), residuals, torch.ones(400).double(), head)
    weights = fit_pool(known, 0, ForestSize(rows_per_leaf=1)).weights[:, 0]
    assert weights[1] < 0.3


def test_weights_of_rows_count_in_atoms_and_weights() -> None:
    known, _ = rows(400)
    heavy = torch.where(known.inputs[:, 0] > 0, 1e-9, 1.0).double()
    pool = fit_pool(OutOfFold(known.inputs, known.residuals, heavy, known.head), 0)
    variance = (pool.kernel * (pool.scale.square() + pool.loc.square())).sum()
    assert float(variance.sqrt()) == pytest.approx(0.2, rel=0.15)


def test_the_module_is_a_mixture_that_sums_to_one_and_reloads(tmp_path: Path) -> None:
    known, _ = rows(200)
    two = OutOfFold(
        known.inputs,
        torch.cat([known.residuals, 10 * known.residuals], 1),
        known.weights,
        gaussians(torch.zeros(200, 2).double(), torch.ones(200, 2).double()),
    )
    pool = fit_pool(two, 0, ForestSize(num_trees=10))
    centre, unit = torch.full((200, 2), 7.0).double(), torch.tensor([1.0, 3.0]).double()
    law = pool.pool(two.head, two.inputs, centre, unit)
    torch.testing.assert_close(law.weights.sum(1), torch.ones(200, 2).double())
    torch.testing.assert_close(pool(two.inputs).sum(1) + pool.weights[0], torch.ones(200, 2).double())
    pool.save_pretrained(tmp_path)
    again = ResidualPool.from_pretrained(tmp_path, torch_dtype=torch.float64)
    torch.testing.assert_close(again.pool(two.head, two.inputs, centre, unit).loc, law.loc)
    torch.testing.assert_close(again(two.inputs), pool(two.inputs))
