"""Trees as tensors say what sklearn's say."""

import numpy as np
import torch
from sklearn.ensemble import HistGradientBoostingRegressor

from marigold_uq.tabular.boosted_trees import FittedTree, OutOfFold, fit_out_of_fold, stack_trees


def test_trees_in_tensors_predict_as_sklearn() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 3))
    model = HistGradientBoostingRegressor(max_iter=15, min_samples_leaf=2).fit(x, x[:, 0] ** 2 + x[:, 1])
    trees = [FittedTree(tree.nodes, 0, 1.0) for (tree,) in model._predictors]
    ours = stack_trees([OutOfFold(trees, np.ravel(model._baseline_prediction), np.zeros((0, 1)))])
    new = rng.normal(size=(50, 3))
    np.testing.assert_allclose(ours(torch.from_numpy(new)[None])[0, :, 0], model.predict(new), atol=1e-10)


def test_out_of_fold_predictions_do_not_know_their_own_row() -> None:
    """Targets are pure noise: a prediction that had seen its row would correlate with it (sd of r: 1/sqrt(300))."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(300, 3)), rng.normal(size=(300, 1))
    fitted = fit_out_of_fold(x, y, np.ones(300), num_rounds=30, seed=0)
    assert np.corrcoef(fitted.predictions[:, 0], y[:, 0])[0, 1] < 4 / np.sqrt(300)
    seen = stack_trees([fitted])(torch.from_numpy(x)[None])[0, :, 0].numpy()
    assert np.corrcoef(seen, y[:, 0])[0, 1] > 0.5
