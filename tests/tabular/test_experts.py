"""The experts of the default baseline: trees as tensors, the Gaussian process, and how they are combined."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.ensemble import ExtraTreesRegressor, GradientBoostingRegressor
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, Matern, WhiteKernel

from marigold_uq.tabular.experts import EXPERTS, ExpertBaseline, fitting, gaussian_process
from marigold_uq.tabular.experts.fitting import ExpertOptions, FittedExperts, fit_experts, stack_experts
from marigold_uq.tabular.experts.gaussian_process import JITTER, FittedProcess, Kernel, fit_process
from marigold_uq.tabular.experts.trees import BoostingOptions, ForestOptions, TreeNodes
from marigold_uq.tabular.recipe import known_values


def data(rows: int, seed: int = 0, targets: int = 1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3))
    y = np.stack([np.sin(2 * x[:, 0]) + x[:, k % 3] + 0.1 * rng.normal(size=rows) for k in range(targets)], 1)
    return x, y


def fitted(rows: int = 90, targets: int = 1, seed: int = 0) -> FittedExperts:
    x, y = data(rows, seed, targets)
    return fit_experts(x, y, np.ones(rows), ExpertOptions.for_rows(rows, effort=12), seed)


def test_a_forest_in_tensors_predicts_as_sklearns() -> None:
    """Values are kept in float32, so six digits; a wrong turn at one node would be a difference of the order of 1."""
    (x, y), (new, _) = data(300), data(200, 1)
    model = ExtraTreesRegressor(20, random_state=3).fit(x, y[:, 0])
    table = ForestOptions(20).fit(x, y[:, 0], np.ones(300), 3)
    np.testing.assert_allclose(table.leaves(torch.from_numpy(new)).mean(1), model.predict(new), atol=1e-6)
    for rows in (x, x.astype(np.float32).astype(np.float64)):  # training rows lie closest to the thresholds
        np.testing.assert_allclose(table.leaves(torch.from_numpy(rows)).mean(1), model.predict(rows), atol=1e-6)


def test_boosted_trees_in_tensors_predict_as_sklearns() -> None:
    (x, y), (new, _) = data(200), data(50, 1)
    table = BoostingOptions(num_trees=30).fit(x, y[:, 0] + 7, np.ones(200), 3)
    options = {"n_estimators": 30, "learning_rate": 0.05, "max_depth": 4, "subsample": 0.7, "max_features": 0.7}
    model = GradientBoostingRegressor(**options, random_state=3).fit(x, y[:, 0] + 7)
    np.testing.assert_allclose(table.leaves(torch.from_numpy(new)).double().sum(1), model.predict(new), atol=1e-5)


def test_joined_tables_keep_every_tree() -> None:
    (x, y), (new, _) = data(60), data(20, 1)
    tables = [ForestOptions(4).fit(x, y[:, 0], np.ones(60), seed) for seed in (0, 1)]
    rows = torch.from_numpy(new)
    joined = TreeNodes.join([tables[0], TreeNodes.zeros(3), tables[1]]).leaves(rows)
    want = torch.cat([tables[0].leaves(rows), torch.zeros(20, 3), tables[1].leaves(rows)], 1)
    assert torch.equal(joined, want)


def _noise(misfit: torch.Tensor, process: FittedProcess) -> torch.Tensor:
    """The exact solution leaves y - K a = noise variance * a; centres come in another order than rows."""
    return misfit.norm() / process.coefficients.norm()


def test_leaving_one_row_out_is_refitting_without_it() -> None:
    (x, y), g = data(25), torch.Generator().manual_seed(0)
    rows, targets = torch.from_numpy(x), torch.from_numpy(y)
    process = fit_process(rows, targets, torch.ones(25).double(), generator=g, num_steps=5)
    own = process.kernel(rows, process.rows) @ process.coefficients  # = y - noise variance * coefficients
    noise = _noise(targets - own, process)
    keep = torch.arange(25) != 7
    covariance = process.kernel(rows[keep], rows[keep]) + noise * torch.eye(24)
    want = process.kernel(rows[7:8], rows[keep]) @ torch.linalg.solve(covariance, targets[keep])
    torch.testing.assert_close(process.left_out[7:8], want, rtol=1e-6, atol=1e-8)


def test_centres_of_a_large_table_predict_nearly_as_all_rows_do() -> None:
    """A smooth function of three features needs few centres: the error stays that of the noise, 0.1."""
    (x, y), (new, want) = data(400), data(100, 1)
    arrays = [torch.from_numpy(x), torch.from_numpy(y), torch.ones(400).double()]
    for centres in (2000, 100):
        g = torch.Generator().manual_seed(0)
        process = fit_process(*arrays, generator=g, num_steps=30, num_centres=centres)
        assert len(process.rows) == min(400, centres)
        ours = process.kernel(torch.from_numpy(new), process.rows) @ process.coefficients
        assert np.sqrt(np.mean((ours.numpy() - want) ** 2)) < 0.15
        assert np.sqrt(np.mean((process.left_out.numpy() - y) ** 2)) < 0.15


def test_the_gaussian_process_is_the_same_in_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [torch.from_numpy(data(60)[0]), torch.from_numpy(data(60)[1]), torch.linspace(0.5, 2, 60).double()]
    fits = []
    for block in (1000, 7):
        monkeypatch.setattr(gaussian_process, "_BLOCK", block)
        g = torch.Generator().manual_seed(0)
        fits.append(fit_process(*arrays, generator=g, num_steps=3, num_centres=30))
    torch.testing.assert_close(fits[1].left_out, fits[0].left_out)
    new = arrays[0][:5] + 0.1
    ours = [one.kernel(new, one.rows) @ one.coefficients for one in fits]
    torch.testing.assert_close(ours[1], ours[0])


def test_a_large_table_tries_the_process_on_some_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that no smooth function follows: after a trial on some rows the process is never fitted to all of them."""
    for name, value in (("_TINY_TABLE", 20), ("_SMALL_TABLE", 40), ("_LARGE_TABLE", 300), ("_ROWS_OF_TRIAL", 100)):
        monkeypatch.setattr(fitting, name, value)
    rng, sizes = np.random.default_rng(0), list[int]()
    x = rng.uniform(size=(400, 2))
    y = np.where(np.floor(25 * x[:, :1]) % 2 > 0, 5.0, -5.0)

    def watched(rows: torch.Tensor, *others: Any, **options: Any) -> FittedProcess:
        sizes.append(len(rows))
        return fit_process(rows, *others, **options)

    monkeypatch.setattr(fitting, "fit_process", watched)
    experts = fit_experts(x, y, np.ones(400), ExpertOptions.for_rows(400, effort=40), 0)
    assert sizes == [100]
    assert experts.process is None
    assert experts.weights[EXPERTS.index("forest"), 0] > 0.5


def test_the_gaussian_process_predicts_as_sklearns_with_its_kernel() -> None:
    (x, y), (new, _) = data(40), data(10, 1)
    rows, g = torch.from_numpy(x), torch.Generator().manual_seed(0)
    process = fit_process(rows, torch.from_numpy(y), torch.ones(40).double(), generator=g, num_steps=20)
    noise = float(_noise(torch.from_numpy(y) - process.kernel(rows, process.rows) @ process.coefficients, process))
    amplitude, linear, constant = (float(v.exp()) for v in process.kernel.parameters()[1:])
    kernel = ConstantKernel(amplitude) * Matern(process.kernel.log_length.exp().numpy(), nu=2.5)
    kernel += ConstantKernel(linear) * DotProduct(1e-9) + ConstantKernel(constant) + WhiteKernel(noise)
    want = GaussianProcessRegressor(kernel, alpha=0.0, optimizer=None).fit(x, y[:, 0]).predict(new)
    ours = process.kernel(torch.from_numpy(new), process.rows) @ process.coefficients
    np.testing.assert_allclose(ours[:, 0], want, atol=1e-5)  # distances of equal rows are 1e-6 here and 0 there
    assert noise > JITTER


def test_out_of_fold_predictions_do_not_know_their_own_row() -> None:
    """Targets are pure noise: a prediction that had seen its row would correlate with it (sd of r: 1/sqrt(300))."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(300, 3)), rng.normal(size=(300, 1))
    experts = fit_experts(x, y, np.ones(300), ExpertOptions.for_rows(300, effort=10), 0)
    assert abs(np.corrcoef(experts.predictions[:, 0], y[:, 0])[0, 1]) < 4 / np.sqrt(300)
    levels = experts.extras[:, len(EXPERTS) + 3]  # the median of the trees, minus f
    assert abs(np.corrcoef(levels, y[:, 0])[0, 1]) < 4 / np.sqrt(300)


@pytest.mark.parametrize("targets", [1, 2])
def test_the_module_predicts_as_the_fitted_experts(targets: int, tmp_path: Path) -> None:
    """A forest alone reproduces its training rows; the weighted sum of all experts must come near them, and reload."""
    experts = [fitted(targets=targets, seed=seed) for seed in (0, 1)]
    module = stack_experts(experts)
    x, y = data(90, 1, targets)
    rows = torch.from_numpy(np.stack([x, x]))
    baseline, extras = module.describe(rows)
    assert baseline.shape == (2, 90, targets)
    assert extras.shape == (2, 90, experts[0].extras.shape[1])
    assert np.corrcoef(baseline[1, :, 0], y[:, 0])[0, 1] > 0.97  # table 1 was trained on these rows
    alone, extras_alone = module.select(1).describe(rows[1:])
    torch.testing.assert_close(alone, baseline[1:])
    torch.testing.assert_close(extras_alone, extras[1:])
    module.save_pretrained(tmp_path)
    loaded = ExpertBaseline.from_pretrained(tmp_path, torch_dtype=torch.float64)
    torch.testing.assert_close(loaded.describe(rows)[0], baseline)


def test_each_expert_of_the_module_is_the_one_that_was_fitted() -> None:
    one = fitted()
    module, rows = stack_experts([one]), torch.from_numpy(data(20, 5)[0])
    assert one.networks is not None
    assert one.process is not None
    want = {name: one.trees[name].leaves(rows).double() for name in EXPERTS[:3]}
    predicted = [want["forest"].mean(1), want["deep_boosting"].sum(1), want["shallow_boosting"].sum(1)]
    predicted.append(one.networks.double()(rows.expand(5, -1, -1)).mean(0)[:, 0].detach())
    predicted.append((one.process.kernel(rows, one.process.rows) @ one.process.coefficients)[:, 0])
    for number in range(len(EXPERTS)):
        module.weights.zero_()
        module.weights[0, number] = 1.0
        torch.testing.assert_close(module(rows.unsqueeze(0))[0, :, 0], predicted[number], rtol=1e-6, atol=1e-6)


def test_poor_experts_of_large_tables_are_dropped() -> None:
    """A plane is easy for a Gaussian process and hard for three trees and three epochs: they go after one fold."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2100, 6))
    y = x.sum(1, keepdims=True)
    experts = fit_experts(x, y, np.ones(2100), ExpertOptions.for_rows(2100, effort=3), 0)
    assert experts.networks is None
    assert not experts.trees
    assert np.nonzero(experts.weights[:, 0])[0].tolist() == [EXPERTS.index("process")]
    baseline, _ = stack_experts([experts]).describe(torch.from_numpy(x[None, :50]))
    assert torch.isfinite(baseline).all()


def test_values_are_known_only_where_they_repeat() -> None:
    rng = np.random.default_rng(0)
    marks, sizes = rng.integers(3, 9, 200), rng.normal(size=200)
    assert known_values(np.stack([marks, sizes], 1).astype(float)) == [[3.0, 4.0, 5.0, 6.0, 7.0, 8.0], None]
    assert known_values(sizes[:, None]) is None
    assert known_values(marks[:60, None].astype(float)) is None  # 10 rows per value: too few to be sure


def test_the_kernel_is_that_of_its_formula() -> None:
    kernel, a, b = Kernel.initial(2), torch.tensor([[0.0, 0.0]]).double(), torch.tensor([[1.0, 2.0]]).double()
    d = np.sqrt(5 * (1 + 4) / 2)
    want = (1 + d + d**2 / 3) * np.exp(-d) + np.exp(-2.0)  # amplitude 1, linear term 0 at the origin, constant e^-2
    assert float(kernel(a, b)) == pytest.approx(want, rel=1e-9)
