"""`TabularRegressionPipeline`: what a call returns, what is saved, and what old files still give."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny_sets import quick_model

from marigold_uq.calibration import Calibration, IntervalGrid
from marigold_uq.pipelines.tabular import TabularRegressionPipeline
from marigold_uq.schedulers import DistributionalEDMScheduler
from marigold_uq.tabular import DiffusionRegressor
from marigold_uq.tabular.evaluate import load_run

FROZEN = Path(__file__).parents[1] / "checkpoints" / "tabular"


def data(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (rows, 2))
    return x, np.sin(2 * x[:, 0]) + (0.1 + 0.5 * np.abs(x[:, 1])) * rng.normal(size=rows)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def fitted() -> DiffusionRegressor:
    return quick_model(calibration_fraction=0.2).fit(*data(200))


def test_a_call_returns_what_was_asked_for(fitted: DiffusionRegressor) -> None:
    x, pipeline = data(5, 1)[0], fitted.pipeline_
    output = pipeline(x, 20, coverage=0.8, quantiles=[0.1, 0.5], output_epistemic=True)
    assert output.samples.shape == (20, 5, 1)
    np.testing.assert_allclose(output.prediction, output.samples.mean(0))
    np.testing.assert_allclose(output.uncertainty, output.samples.std(0, ddof=1))
    grid = pipeline.calibration_for().interval
    assert grid is not None
    reach = grid.scale(0.8)[0] * output.uncertainty
    np.testing.assert_allclose(output.interval, [output.prediction - reach, output.prediction + reach])
    assert output.quantiles is not None
    assert output.quantiles.shape == (2, 5, 1)
    for part in (output.epistemic, output.between_models, output.within_models):
        assert part is not None
        assert part.shape == (5, 1)
    plain = pipeline(x, 20)
    assert plain.interval is plain.quantiles is plain.epistemic is None
    assert pipeline.select(0)(x, 20).between_models is None


def test_the_generator_alone_decides_and_without_one_predictions_repeat(fitted: DiffusionRegressor) -> None:
    x, pipeline = data(7, 1)[0], fitted.pipeline_
    np.testing.assert_array_equal(pipeline(x, 20).samples, pipeline(x, 20).samples)
    want = pipeline(x, 20, generator=seeded(1)).samples
    np.testing.assert_array_equal(pipeline(x, 20, generator=seeded(1)).samples, want)
    np.testing.assert_allclose(pipeline(x, 20, generator=seeded(1), batch_size=2).samples, want, atol=1e-10)
    assert np.abs(pipeline(x, 20, generator=seeded(2)).samples - want).min() > 0


@pytest.mark.parametrize("name", ["ensemble_size", "num_inference_steps", "batch_size"])
def test_counts_must_be_at_least_one(fitted: DiffusionRegressor, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1; got 0"):
        fitted.pipeline_(data(3)[0], **{name: 0})


def test_a_scheduler_of_another_number_of_timesteps_than_the_table_is_refused(fitted: DiffusionRegressor) -> None:
    scheduler = DistributionalEDMScheduler(noise_family="gaussian", num_train_timesteps=1000)
    with pytest.raises(ValueError, match=r"gates for .* noise levels, but the scheduler has .* = 1000"):
        TabularRegressionPipeline(fitted.pipeline_.network, scheduler)


def test_a_calibration_has_one_entry_per_target(fitted: DiffusionRegressor) -> None:
    grid = IntervalGrid((0.5, 0.9), ((1.0, 1.0), (2.0, 2.0)))
    with pytest.raises(ValueError, match="kappa needs 1 entries, one per output; got 2"):
        fitted.pipeline_.calibrate(Calibration(kappa=(1.0, 2.0)))
    with pytest.raises(ValueError, match="intervals need 1 half widths, one per output; got 2"):
        fitted.pipeline_.calibrate(Calibration(interval=grid))


def test_a_calibrated_pipeline_reloads_with_its_intervals_in_a_fresh_process(
    fitted: DiffusionRegressor, tmp_path: Path
) -> None:
    x = data(5, 1)[0]
    fitted.pipeline_.save_pretrained(tmp_path / "model")
    np.save(tmp_path / "rows.npy", x)
    program = (
        "import json, sys, numpy as np\n"
        "from marigold_uq.pipelines.tabular import TabularRegressionPipeline\n"
        "pipeline = TabularRegressionPipeline.from_pretrained(sys.argv[1])\n"
        "print(json.dumps(pipeline(np.load(sys.argv[2]), 20, coverage=0.9).interval.tolist()))\n"
    )
    arguments = [sys.executable, "-c", program, str(tmp_path / "model"), str(tmp_path / "rows.npy")]
    run = subprocess.run(arguments, check=True, capture_output=True, text=True)
    want = fitted.pipeline_(x, 20, coverage=0.9).interval
    np.testing.assert_allclose(json.loads(run.stdout.strip().splitlines()[-1]), want, rtol=1e-9)


def test_a_run_of_the_code_before_the_first_release_gives_the_same_outputs_and_intervals() -> None:
    """The frozen run has two targets with a kappa each, two models, experts, and 24 conformal scores in its own file.

    Made at commit bc558dc from 80 rows: x uniform in [-1, 1]^2 (seed 0), y = sin(2 x_0) + .3 |x_1| e (seed 1) and
    100 - y; 2 members, 4 epochs, 3 baseline epochs, 6 timesteps, 3 steps, calibration_fraction .3, 40 draws, networks
    narrowed to 8 and 4 units. expected.json has the outputs of that code: 6 draws with seed 0, mean and standard
    deviation of 40, and mean -+ q std with its `conformal_rows` at four coverages.
    """
    want = json.loads((FROZEN / "expected.json").read_text())
    pipeline, rows = load_run(FROZEN / "run"), np.array(want["rows"])
    assert pipeline.config.default_denoising_steps == 3
    few = pipeline(rows, 6, output_epistemic=True)
    np.testing.assert_allclose(few.samples, want["samples"], rtol=1e-6)
    np.testing.assert_allclose(few.epistemic, want["epistemic"], rtol=1e-6)
    np.testing.assert_allclose(few.between_models, want["between"], rtol=1e-6, atol=1e-9)
    for coverage, interval in want["intervals"].items():
        full = pipeline(rows, 40, coverage=float(coverage))
        np.testing.assert_allclose(full.prediction, want["prediction"], rtol=1e-6)
        np.testing.assert_allclose(full.uncertainty, want["uncertainty"], rtol=1e-6)
        np.testing.assert_allclose(full.interval, interval, rtol=1e-6)


def test_old_kappas_belong_to_the_tau_of_the_scheduler(tmp_path: Path) -> None:
    shutil.copytree(FROZEN / "run" / "model", tmp_path, dirs_exist_ok=True)
    config = tmp_path / "scheduler" / "scheduler_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tau": 0.5}))
    pipeline = TabularRegressionPipeline.from_pretrained(tmp_path)
    record = pipeline.calibration_for()
    assert record.tau == pipeline.scheduler.config.tau == 0.5
    assert record.kappas == pytest.approx((1.0804539, 1.4025546))
    rows = np.array(json.loads((FROZEN / "expected.json").read_text())["rows"])
    assert np.isfinite(pipeline(rows, 6).samples).all()


def test_an_old_kappa_takes_the_tau_of_its_scheduler(fitted: DiffusionRegressor, tmp_path: Path) -> None:
    pipeline = fitted.pipeline_.select([0, 1])
    pipeline.calibrate(Calibration(tau=0.5, kappa=2.0)).save_pretrained(tmp_path)
    pipeline.scheduler.calibrate(1.0)  # it is shared
    index = json.loads((tmp_path / "model_index.json").read_text())
    del index["calibration"]
    (tmp_path / "model_index.json").write_text(json.dumps({**index, "kappa": [2.0]}))
    loaded = TabularRegressionPipeline.from_pretrained(tmp_path)
    assert loaded.calibration_for() == Calibration(tau=0.5, kappa=(2.0,))
    loaded.save_pretrained(tmp_path / "again")
    again = TabularRegressionPipeline.from_pretrained(tmp_path / "again")
    assert again.calibration_for() == Calibration(tau=0.5, kappa=(2.0,))
    loaded.scheduler.calibrate(0.25)
    with pytest.raises(ValueError, match=r"made with tau = 0\.5, but the scheduler has tau = 0\.25"):
        loaded(data(3)[0])


def test_a_pipeline_from_another_keeps_its_baseline_and_its_numbers(fitted: DiffusionRegressor) -> None:
    x, pipeline = data(5, 1)[0], fitted.pipeline_.select([0, 1])
    want = pipeline(x, 20, coverage=0.9)
    copy = TabularRegressionPipeline.from_pipe(pipeline)
    assert copy.baseline is pipeline.baseline
    assert copy.calibrations == pipeline.calibrations
    found = copy(x, 20, coverage=0.9)
    np.testing.assert_allclose(found.samples, want.samples, rtol=1e-9)
    np.testing.assert_allclose(found.interval, want.interval, rtol=1e-9)


def test_the_pipeline_survives_save_and_load_and_selection(fitted: DiffusionRegressor, tmp_path: Path) -> None:
    x = data(5, 1)[0]
    fitted.pipeline_.save_pretrained(tmp_path)
    loaded = TabularRegressionPipeline.from_pretrained(tmp_path)
    want = fitted.pipeline_(x, 8)
    np.testing.assert_allclose(loaded(x, 8).samples, want.samples, rtol=1e-9, atol=1e-9)
    first = fitted.pipeline_.select(0)(x, 20)
    want = fitted.pipeline_(x, 40)
    np.testing.assert_allclose(first.model_samples[0], want.model_samples[0], rtol=1e-9, atol=1e-9)


def test_models_share_the_experts_of_their_table_and_each_can_be_cut_out(
    fitted: DiffusionRegressor, tmp_path: Path
) -> None:
    x, pipeline = data(5, 1)[0], fitted.pipeline_
    assert pipeline.network.config.num_models == 2
    assert pipeline.baseline is not None
    assert pipeline.baseline.config.num_models == 1
    want = pipeline(x, 8).model_samples
    alone = pipeline.select([1])
    np.testing.assert_allclose(alone(x, 4).model_samples[0], want[1], rtol=1e-9)
    np.testing.assert_allclose(pipeline.select([1, 0]).select(0)(x, 4).model_samples[0], want[1], rtol=1e-9)
    np.testing.assert_allclose(pipeline.select([0, 1])(x, 8).model_samples, want, rtol=1e-9)
    g = torch.Generator().manual_seed(0)
    sizes = (1, pipeline.network.config.num_features + pipeline.network.config.num_extras, 1)
    inputs = [torch.randn(2, 6, size, generator=g, dtype=torch.float64) for size in sizes]
    out = pipeline.network(inputs[0], 3, *inputs[1:])
    torch.testing.assert_close(alone.network(inputs[0][1:], 3, *(part[1:] for part in inputs[1:])), out[1:])
    alone.save_pretrained(tmp_path)
    loaded = TabularRegressionPipeline.from_pretrained(tmp_path)
    np.testing.assert_allclose(loaded(x, 4).model_samples[0], want[1], rtol=1e-9, atol=1e-9)


def test_a_single_draw_is_stretched_by_kappa_like_many(fitted: DiffusionRegressor) -> None:
    """The spread of 80 single draws is known to 8 %; they come from the first member, many from both."""
    x, pipeline = data(5, 1)[0], fitted.pipeline_.select([0, 1])
    pipeline.calibrate(Calibration(kappa=3.0))
    many = pipeline(x, 200).uncertainty[:, 0]
    single = np.stack([pipeline(x, 1, generator=seeded(seed)).samples[0, :, 0] for seed in range(80)])
    assert np.median(single.std(0) / many) > 0.75  # a third without kappa


def test_a_saved_pipeline_keeps_the_names_of_numeric_columns(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    x, y = data(40)
    frame = pandas.DataFrame(x, columns=["size", "width"])
    model = quick_model(baseline="none").fit(frame, y)
    model.pipeline_.save_pretrained(tmp_path)
    loaded = TabularRegressionPipeline.from_pretrained(tmp_path)
    np.testing.assert_allclose(
        loaded(frame, 20, generator=seeded(model.seed_)).prediction[:, 0], model.predict(frame), rtol=1e-9
    )
    np.testing.assert_allclose(
        loaded(x, 20, generator=seeded(model.seed_)).prediction[:, 0], model.predict(frame), rtol=1e-9
    )
    with pytest.raises(ValueError, match=r"\['width', 'size'\]; the model was fitted on \['size', 'width'\]"):
        loaded(frame[["width", "size"]])


@pytest.mark.parametrize("family", ["gaussian", "mixture", "sample"])
def test_draws_in_one_step_come_from_the_distribution_of_one_step(family: str) -> None:
    """Those of a density are drawn from it. Draws of "sample" have starts of their own; five standard errors of 50."""
    model = quick_model(noise_family=family, baseline="none", calibration_fraction=0.2, max_epochs=4)
    pipeline, x = model.fit(*data(200)).pipeline_, data(3, 1)[0]
    assert pipeline.calibration_for().kappa != 1
    draws = pipeline(x, 4000, num_inference_steps=1).samples
    laws = [pipeline.one_step_distribution(x, generator=seeded(i), num_draws=20) for i in range(50)]
    assert laws[0].shape == (3, 1)
    mean = torch.stack([law.mean for law in laws])
    variance = torch.stack([law.variance for law in laws]).mean(0) + mean.var(0)
    np.testing.assert_allclose(mean.mean(0), draws.mean(0), atol=5 * draws.std() * (1 / 63 + 1 / 31))
    np.testing.assert_allclose(variance.sqrt(), draws.std(0), rtol=0.12)


def test_the_distribution_of_one_step_knows_density_and_quantiles_in_original_units(
    fitted: DiffusionRegressor,
) -> None:
    """The mixtures of two models, averaged and stretched by kappa; one row does not depend on the others."""
    x = data(5, 1)[0]
    law = fitted.predict_distribution(x)
    y = law.quantile([0.1, 0.5, 0.9])
    assert (np.diff(y, axis=1) > 0).all()
    np.testing.assert_allclose(law.cdf(y[:, 0]), 0.1)
    mass = np.trapezoid([law.pdf(value) for value in np.linspace(-15, 15, 3001)], dx=0.01, axis=0)
    np.testing.assert_allclose(mass, 1, atol=1e-4)
    np.testing.assert_allclose(fitted.predict_distribution(x[2:3]).mean, law.mean[2:3])
    parts = [fitted.pipeline_.select(s).one_step_distribution(x).mean[:, 0] for s in (0, 1)]
    np.testing.assert_allclose(sum(parts) / 2, law.mean)


def test_a_point_has_no_distribution_of_one_step() -> None:
    model = quick_model(noise_family="point", baseline="none", max_epochs=1).fit(*data(50))
    with pytest.raises(TypeError, match="family 'point' is known through draws only"):
        model.predict_distribution(data(3)[0])
