"""The model inside the package: it loads offline, is small, calibrated, documented, and draws its first pictures."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from marigold_uq import MarigoldUQDepthPipeline
from marigold_uq.cli import main
from marigold_uq.commands.pictures import sample_pictures
from marigold_uq.depth.evaluation import Members
from marigold_uq.depth.evaluation.options import PipelineOptions
from marigold_uq.depth.evaluation.predictors import PipelinePredictor
from marigold_uq.depth.evaluation.protocol import Aligned, DepthProtocol
from marigold_uq.depth.scenes import ProceduralScenes
from marigold_uq.pipelines.depth.starting_point import embedded_path


def test_it_is_half_precision_and_small_and_has_a_card() -> None:
    files = [path for path in embedded_path().rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 40e6
    card = (embedded_path() / "README.md").read_text(encoding="utf-8")
    assert "license: apache-2.0" in card
    assert "not for" in card.lower()


def test_its_files_say_nothing_of_the_machine_that_made_it() -> None:
    for path in embedded_path().rglob("*.json"):
        assert "_name_or_path" not in path.read_text(encoding="utf-8"), path


def test_it_loads_by_name_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = MarigoldUQDepthPipeline.from_pretrained("embedded")
    assert pipeline.scheduler.family.has_spread
    assert not caplog.records, [record.message for record in caplog.records]


def test_it_is_calibrated_for_its_default_steps_in_all_modes_and_many_coverages() -> None:
    pipeline = MarigoldUQDepthPipeline.from_pretrained("embedded")
    assert sorted(str(record.uncertainty) for record in pipeline.calibrations) == ["ensemble", "marginal", "trajectory"]
    for record in pipeline.calibrations:
        assert record.num_inference_steps == pipeline.config.default_denoising_steps
        assert record.interval is not None
        assert {0.5, 0.8, 0.9, 0.95, 0.99} <= set(record.interval.coverages)
        assert record.num_calibration >= 100


def test_on_scenes_it_never_saw_it_beats_a_ramp_and_its_interval_holds() -> None:
    """16 scenes of another seed than those of training, calibration and the published evaluation.

    Coverage of single scenes varies a lot (its standard deviation is about 0.15), so the mean of 16 is within 0.12 of
    90 % at three standard errors.
    """
    scenes = ProceduralScenes(16, seed=7, height=384, width=512, split="test")
    predictor = PipelinePredictor(PipelineOptions("embedded", "marginal", 10), (0.9,))
    protocol = DepthProtocol("least_squares", "depth", False, None, None)
    errors, ramps, covered = [], [], []
    for scene in scenes:
        aligned = protocol.align(predictor.predict(scene), scene)
        ramp = -torch.arange(384.0)[:, None].expand(384, 512)
        errors.append(relative_error(aligned))
        ramps.append(relative_error(protocol.align(Members.of(ramp[None]), scene)))
        prediction = aligned.prediction
        assert isinstance(prediction, Members)
        assert prediction.bounds is not None
        ((lower, upper),) = prediction.bounds
        covered.append(float(((aligned.target >= lower) & (aligned.target <= upper)).double().mean()))
    assert np.mean(errors) < 0.7 * np.mean(ramps)
    assert 0.78 < np.mean(covered) < 0.99


def relative_error(aligned: Aligned) -> float:
    return float(((aligned.prediction.point - aligned.target).abs() / aligned.target).mean())


def test_the_readme_s_first_command_leaves_depth_uncertainty_and_a_sheet(tmp_path: Path) -> None:
    assert main(["depth", "--sample", "-o", str(tmp_path / "out")]) == 0
    written = {path.name for path in (tmp_path / "out").iterdir()}
    for picture in sample_pictures():
        stem = picture.stem
        sheets = [name for name in written if name.startswith(stem) and "sheet" in name]
        assert len(sheets) == 1, written
        with np.load(tmp_path / "out" / f"{stem}.npz") as maps:
            with Image.open(picture) as image:
                assert maps["depth"].shape == image.size[::-1]
            assert 0 <= maps["depth"].min() <= maps["depth"].max() <= 1
            assert maps["uncertainty"].min() > 0


def test_its_card_names_whose_weights_it_started_from() -> None:
    card = (embedded_path() / "README.md").read_text(encoding="utf-8")
    assert "MobileSAM" in card
    assert "Apache-2.0" in card


def test_asking_for_uncertainty_changes_no_prediction() -> None:
    pipeline = MarigoldUQDepthPipeline.from_pretrained("embedded")
    pipeline.set_progress_bar_config(disable=True)
    picture = sample_pictures()[0]
    plain = pipeline(picture, generator=torch.Generator().manual_seed(0))
    unsure = pipeline(picture, generator=torch.Generator().manual_seed(0), uncertainty="marginal", coverage=0.9)
    np.testing.assert_array_equal(plain.prediction, unsure.prediction)
    lower, upper = unsure.interval[..., 0:1], unsure.interval[..., 1:2]
    assert (lower <= unsure.prediction).all()
    assert (unsure.prediction <= upper).all()
