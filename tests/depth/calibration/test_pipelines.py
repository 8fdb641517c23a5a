"""The calibration stage: any pipeline folder and data set in, a calibrated copy of the model out."""

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from support.scripts import load_script
from support.tiny_depth import generator, picture, tiny_pipeline

from marigold_uq import MarigoldUQDepthPipeline
from marigold_uq.calibration import Calibration
from marigold_uq.commands.runner import Invocation
from marigold_uq.depth.calibration import (
    DepthCalibration,
    Stated,
    calibrate_depth,
    calibrate_modes,
    run_calibration,
)
from marigold_uq.depth.data import DepthDataError, DepthDataset, DepthSample
from marigold_uq.depth.evaluation import DataOptions, DepthEvaluation, PipelineOptions, evaluate_depth
from marigold_uq.depth.evaluation.predictors import PipelinePredictor
from marigold_uq.randomness import member_seed

ENSEMBLE = 4


class Rooms(DepthDataset):
    """Ramps with noise, as many pictures of each room as asked for."""

    def __init__(self, num_rooms: int, per_room: int = 1) -> None:
        super().__init__(num_rooms * per_room)
        self.groups = {f"{i}": f"room{i // per_room}" for i in range(len(self))} if per_room > 1 else {}

    def name_of(self, index: int) -> str:
        return str(index)

    def read(self, index: int) -> DepthSample:
        random = torch.Generator().manual_seed(index)
        depth = torch.linspace(1, 5, 12)[None, :, None].expand(1, 12, 16) + torch.rand(1, 12, 16, generator=random)
        valid = torch.rand(1, 12, 16, generator=random) > 0.2
        image = torch.from_numpy(picture(12, 16, seed=index)).permute(2, 0, 1)
        return DepthSample(image=image, depth=depth, valid=valid, name=self.name_of(index))


def save(folder: Path, family: str = "gaussian", **config: object) -> Path:
    tiny_pipeline(family, default_processing_resolution=16, default_denoising_steps=1, **config).save_pretrained(folder)
    return folder


def options(model: Path, output: Path, **changes: object) -> DepthCalibration:
    given = {"num_pixels": 60, "num_inference_steps": 1, "batch_size": ENSEMBLE, "device": "cpu", **changes}
    return DepthCalibration(str(model), output, ensemble_size=ENSEMBLE, **given)


@pytest.mark.parametrize("prediction_type", ["depth", "disparity"])
def test_on_the_images_of_its_calibration_an_interval_covers_what_it_promises(
    prediction_type: str, tmp_path: Path
) -> None:
    """Conformal risk control: (sum of misses + 1) / (n + 1) <= 1 - coverage, here with n = 20 images.

    It is no more than a pixel above that. The calibration draws 600 of some 150 pixels, hence the tolerance.
    """
    model = save(tmp_path / "model", prediction_type=prediction_type)
    given = options(model, tmp_path / "out", shuffle=False, modes=("ensemble",), num_pixels=600)
    chosen = calibrate_depth(given, dataset=Rooms(40))
    assert MarigoldUQDepthPipeline.from_pretrained(tmp_path / "out").calibrations == tuple(chosen.values())
    call = PipelineOptions(str(tmp_path / "out"), "ensemble", ENSEMBLE, seed=1, batch_size=ENSEMBLE, device="cpu")
    score = DepthEvaluation(pipeline=call, output=tmp_path / "evaluation", figures=False)
    curves = evaluate_depth(score, dataset=SecondHalf(20)).metrics["curves"]
    levels = np.array(curves["calibrated_levels"])
    assert levels.tolist() == [0.5, 0.8, 0.9, 0.95]
    assert np.allclose(curves["calibrated_reliability"]["value"], 1 - ((1 - levels) * 21 - 1) / 20, atol=0.03)


class SecondHalf(Rooms):
    """The images 20 to 39 of `Rooms(40)`."""

    def name_of(self, index: int) -> str:
        return str(index + 20)

    def read(self, index: int) -> DepthSample:
        return Rooms(40).read(index + 20)


def test_the_copy_keeps_the_models_files_to_the_byte(tmp_path: Path) -> None:
    model = save(tmp_path / "model")
    (model / "README.md").write_text("mine")
    calibrate_depth(options(model, tmp_path / "new" / "out", modes=("trajectory",)), dataset=Rooms(40))
    for source in model.rglob("*"):
        copy = tmp_path / "new" / "out" / source.relative_to(model)
        if source.is_file() and source.name != "model_index.json":
            assert copy.read_bytes() == source.read_bytes(), source
    before, after = (json.loads((path / "model_index.json").read_text()) for path in (model, tmp_path / "new" / "out"))
    assert {**before, "calibration": after["calibration"]} == after


def test_earlier_calibrations_of_the_same_mode_are_replaced_and_others_stay(tmp_path: Path) -> None:
    pipeline = tiny_pipeline("gaussian", default_processing_resolution=16, default_denoising_steps=1)
    for mode in ("ensemble", "trajectory"):
        pipeline.calibrate(Calibration(kappa=50.0, uncertainty=mode))
    pipeline.save_pretrained(tmp_path / "model")
    fresh = save(tmp_path / "fresh")
    kwargs = {"modes": ("ensemble",), "note": "rooms"}
    again = calibrate_depth(options(tmp_path / "model", tmp_path / "a", **kwargs), dataset=Rooms(40))["ensemble"]
    first = calibrate_depth(options(fresh, tmp_path / "b", **kwargs), dataset=Rooms(40))["ensemble"]
    assert again == first  # not chosen on members that were stretched already
    records = {one.uncertainty: one for one in MarigoldUQDepthPipeline.from_pretrained(tmp_path / "a").calibrations}
    assert records["trajectory"].kappa == 50.0
    assert records["ensemble"] == again


def test_pictures_of_a_room_are_one_unit_in_one_half(tmp_path: Path) -> None:
    model = save(tmp_path / "model")
    record = calibrate_depth(options(model, tmp_path / "out", modes=("ensemble",)), dataset=Rooms(40, 2))["ensemble"]
    assert record.num_calibration == 20
    assert "40 images for kappa, 40 others" in record.note
    assert record.interval is not None
    assert record.interval.coverages[-1] == 0.95  # 20 rooms promise 1 - 1 / 21


def test_a_model_without_a_variance_head_is_calibrated_for_ensembles_only(tmp_path: Path) -> None:
    model = save(tmp_path / "model", "point")
    assert list(calibrate_depth(options(model, tmp_path / "out"), dataset=Rooms(40))) == ["ensemble"]
    with pytest.raises(ValueError, match="needs a variance head"):
        calibrate_depth(options(model, tmp_path / "no", modes=("trajectory",)), dataset=Rooms(40))


def test_bounds_of_the_evaluation_are_the_pipelines_own_intervals(tmp_path: Path) -> None:
    calibrate_depth(options(save(tmp_path / "model"), tmp_path / "out", modes=("ensemble",)), dataset=Rooms(40))
    call = PipelineOptions(str(tmp_path / "out"), "ensemble", ENSEMBLE, device="cpu")
    predictor = PipelinePredictor(call, (0.5, 0.9))
    sample = Rooms(1)[0]
    bounds = predictor.predict(sample).bounds
    for coverage, found in zip((0.5, 0.9), bounds, strict=True):
        output = predictor.pipeline(
            sample["image"],
            uncertainty="ensemble",
            ensemble_size=ENSEMBLE,
            coverage=coverage,
            output_type="pt",
            generator=generator(member_seed(0, zlib.crc32(b"0"))),  # as the evaluation seeds the sample "0"
        )
        assert torch.allclose(found, output.interval[0], atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "rooms", "message"),
    [
        ({}, 1, "at least 2 images or groups"),
        ({"ensemble_size": 2}, 4, "ensemble_size must be at least 3"),
        ({"modes": ()}, 4, "modes must name at least one"),
        ({"num_pixels": 0}, 4, "num_pixels must be at least 1"),
    ],
)
def test_what_cannot_be_calibrated_is_an_error_that_says_why(
    changes: dict[str, object], rooms: int, message: str, tmp_path: Path
) -> None:
    given = {"ensemble_size": ENSEMBLE, "num_pixels": 60, "device": "cpu", **changes}
    with pytest.raises(ValueError, match=message):
        calibrate_depth(
            DepthCalibration(str(save(tmp_path / "model")), tmp_path / "out", **given), dataset=Rooms(rooms)
        )
    assert not (tmp_path / "out").exists()


def test_the_report_makes_the_maps_again_that_were_calibrated(tmp_path: Path) -> None:
    """The pipeline that now has a calibration would stretch its members a second time."""
    given, data = options(save(tmp_path / "model"), tmp_path / "out", modes=["trajectory"]), Rooms(8)
    found = calibrate_modes(given, data)["trajectory"]
    assert found.record.kappa != pytest.approx(1, abs=0.05)
    for own in found.collected.pixels.values():
        again = Stated.of(found.predictor.predict(data.read(own.index)))
        assert set(own.stated.std.tolist()) <= set(again.std.flatten().tolist())


def test_a_picture_that_cannot_be_read_is_left_out_and_named(tmp_path: Path, capsys) -> None:
    class Damaged(Rooms):
        def read(self, index: int) -> DepthSample:
            if index == 3:
                raise DepthDataError("is damaged", "3.png")
            return super().read(index)

    given = options(save(tmp_path / "model"), tmp_path / "out", modes=["trajectory"])
    assert run_calibration(given, Invocation("marigold-uq calibrate depth", ""), dataset=Damaged(9)) == 1
    told = capsys.readouterr()
    assert "failed: 3: 3.png: is damaged" in told.err
    assert "no 90% interval: it needs 9 units" in told.err
    assert (tmp_path / "out" / "model_index.json").is_file()
    page = (tmp_path / "out_report.html").read_text(encoding="utf-8")
    assert "8 images" in page
    assert "needs 9 units" in page


REGISTERED = """
from marigold_uq.depth.data import register_dataset
from marigold_uq.depth.scenes import ProceduralScenes

@register_dataset("my_rooms")
def my_rooms(root, filenames, **options):
    return ProceduralScenes(24, height=16, width=24)
"""


def test_the_command_knows_a_data_set_of_the_users(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "my_module_of_rooms.py").write_text(REGISTERED)
    monkeypatch.chdir(tmp_path)
    model = save(tmp_path / "model")
    words = ["--model", str(model), "--data.name", "my_rooms", "--output", "out", "--ensemble_size", str(ENSEMBLE)]
    main = load_script("eval/calibrate_depth.py").main
    assert main([*words, "--import", "my_module_of_rooms", "--modes", "ensemble"]) == 0
    assert "ensemble: kappa" in capsys.readouterr().out
    assert main([*words, "--import", "my_module_of_rooms"]) == 2
    assert "out exists" in capsys.readouterr().err
    data = DataOptions("my_rooms", limit=20)
    assert calibrate_depth(options(model, tmp_path / "again", data=data, modes=("ensemble",)))["ensemble"].interval


def test_the_fewest_steps_that_are_as_good_become_the_default_and_the_condition(tmp_path: Path) -> None:
    model = save(tmp_path / "model")
    given = options(model, tmp_path / "out", modes=["ensemble"], num_inference_steps=None, steps=[3, 1])
    data = Rooms(8)
    chosen = calibrate_depth(given, dataset=data)["ensemble"].num_inference_steps
    kept = MarigoldUQDepthPipeline.from_pretrained(tmp_path / "out")
    assert kept.config.default_denoising_steps == chosen == kept.calibrations[0].num_inference_steps
    one = calibrate_depth(
        options(model, tmp_path / "one", modes=["ensemble"], num_inference_steps=chosen), dataset=data
    )
    assert one["ensemble"] == kept.calibrations[0]  # the choice changes nothing else
    with pytest.raises(ValueError, match="not both"):
        options(model, tmp_path / "x", steps=[1, 2])
