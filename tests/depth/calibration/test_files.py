"""Maps made by others: intervals for them, by what is learnt on those with a true depth."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cli_runs import read_npz, run
from support.labelled_maps import OVERCONFIDENCE, SCALE, SIZE, LabelledMaps, arrays_of, true_std, write_maps

from marigold_uq.calibration import COVERAGES, IntervalGrid
from marigold_uq.depth.calibration import DepthCalibration, MapCalibration, SpreadRule, Stated, calibrate_files
from marigold_uq.depth.calibration.fitting import leave_out
from marigold_uq.depth.evaluation import FileOptions, MeanStd, PredictionError
from marigold_uq.depth.evaluation.predictors import read_prediction

KINDS = ("samples", "mean", "mean+std", "mean+confidence")
COUNT = 40


def options(maps: Path, output: Path, *, metric: bool = False, **changes: object) -> DepthCalibration:
    return DepthCalibration(output=output, files=FileOptions(maps, metric=metric), num_pixels=150, **changes)


def covered(output: Path, indices: range, level: float, *, metric: bool = False) -> float:
    """Share of true depths inside the intervals written for these maps, after least squares where they are relative."""
    shares = []
    for index in indices:
        found = read_npz(output / f"folder/{index:03d}.npz")
        place = found["coverages"].tolist().index(level)
        sample = LabelledMaps(index + 1).read(index)
        valid = sample["valid"][0].numpy()
        truth = sample["depth"][0].numpy()[valid]
        scale, shift = (1.0, 0.0) if metric else np.polyfit(found["mean"][valid], truth, 1)
        lower, upper = (scale * found[end][place][valid] + shift for end in ("lower", "upper"))
        shares.append(((lower <= truth) & (truth <= upper)).mean())
    return float(np.mean(shares))


@pytest.mark.parametrize("kind", KINDS)
def test_intervals_of_new_maps_cover_what_they_promise(kind: str, tmp_path: Path) -> None:
    """40 maps calibrate; 30 others, that nothing was chosen on, get intervals by the stored record.

    With n = 20 maps behind the intervals, (sum of misses + 1) / (n + 1) <= 1 - coverage is met with equality but for a
    pixel. .03 are more than three standard errors of a share of 20 and of 30 maps with 150 independent pixels.
    """
    found = calibrate_files(options(write_maps(tmp_path / "maps", COUNT, kind), tmp_path / "out"), LabelledMaps(COUNT))
    assert found.num_written == COUNT
    assert found.failures == []
    new = tmp_path / "new"
    for index in range(COUNT, COUNT + 30):
        (new / "folder").mkdir(parents=True, exist_ok=True)
        np.savez(new / f"folder/{index:03d}.npz", **arrays_of(index, kind))
    assert run("intervals", "--calibration", tmp_path / "out", "--folder", new, "-o", tmp_path / "intervals") == 0
    for level in (0.5, 0.8, 0.9):
        share = covered(tmp_path / "intervals", range(COUNT, COUNT + 30), level)
        assert share == pytest.approx(1 - ((1 - level) * 21 - 1) / 20, abs=0.03)


def test_the_stated_deviation_is_stretched_to_the_true_one(tmp_path: Path) -> None:
    maps = write_maps(tmp_path / "maps", COUNT, "mean+std")
    record = calibrate_files(options(maps, tmp_path / "out"), LabelledMaps(COUNT)).record
    assert record.rule == SpreadRule("stated")
    # least squares on maps with errors leaves a slope that is too small, and so errors that nothing stated
    assert 1 < record.kappa * OVERCONFIDENCE < 1.15
    written = read_npz(tmp_path / "out/intervals/folder/003.npz")
    assert np.median(written["std"] / (SCALE * true_std(3))) == pytest.approx(record.kappa * OVERCONFIDENCE, rel=1e-3)
    assert set(written) == {"mean", "std", "lower", "upper", "coverages"}
    assert written["lower"].shape == (4, *SIZE)  # 20 units promise 95 %
    assert np.array_equal(written["mean"], arrays_of(3, "mean+std")["mean"].astype(np.float32))


def test_a_confidence_makes_intervals_narrower_than_no_confidence(tmp_path: Path) -> None:
    """Of 95 %: only the order of the errors is given, and they range over a factor of twelve."""
    widths = {}
    for kind in ("mean", "mean+confidence"):
        calibrate_files(
            options(write_maps(tmp_path / kind, COUNT, kind), tmp_path / f"{kind}-out"), LabelledMaps(COUNT)
        )
        written = [read_npz(path) for path in sorted((tmp_path / f"{kind}-out/intervals").rglob("*.npz"))]
        widths[kind] = np.mean([one["upper"][-1] - one["lower"][-1] for one in written])
    assert widths["mean+confidence"] < 0.8 * widths["mean"]
    rule = MapCalibration.read(tmp_path / "mean+confidence-out").rule
    assert rule.base == "map"
    assert list(rule.errors) == sorted(rule.errors, reverse=True)


def test_metric_maps_are_not_aligned_and_choose_between_a_constant_and_a_share_of_depth(tmp_path: Path) -> None:
    """Errors that grow with depth: a share of the prediction scores better."""
    data, folder = LabelledMaps(COUNT), tmp_path / "maps/folder"
    folder.mkdir(parents=True)
    for index in range(COUNT):
        depth = data.read(index)["depth"][0].numpy()
        noise = np.random.default_rng(index).normal(size=SIZE)
        np.savez(folder / f"{index:03d}.npz", mean=depth * (1 + 0.1 * noise))
    found = calibrate_files(options(tmp_path / "maps", tmp_path / "out", metric=True), data)
    assert found.record.rule == SpreadRule("depth")
    assert found.record.kappa == pytest.approx(0.1, rel=0.05)
    assert 0.87 < covered(tmp_path / "out/intervals", range(COUNT), 0.9, metric=True) < 0.95


def test_what_chooses_kappa_does_not_set_the_intervals(tmp_path: Path) -> None:
    """Maps of the second part are spoilt: kappa stays to the last digit, half widths grow."""
    kept = calibrate_files(
        options(write_maps(tmp_path / "maps", COUNT, "mean+std"), tmp_path / "a", shuffle=False), LabelledMaps(COUNT)
    )
    for index in range(COUNT // 2, COUNT):
        arrays = arrays_of(index, "mean+std")
        np.savez(tmp_path / f"maps/folder/{index:03d}.npz", mean=arrays["mean"], std=arrays["std"] / 5)
    spoilt = calibrate_files(options(tmp_path / "maps", tmp_path / "b", shuffle=False), LabelledMaps(COUNT))
    assert spoilt.record.kappa == kept.record.kappa
    assert np.allclose(np.array(spoilt.record.interval.scales), 5 * np.array(kept.record.interval.scales))


def test_pictures_of_a_group_are_one_unit_unless_images_are_asked_for(tmp_path: Path) -> None:
    maps, data = write_maps(tmp_path / "maps", COUNT, "mean"), LabelledMaps(COUNT, per_group=4)
    by_group = calibrate_files(options(maps, tmp_path / "a"), data).record
    by_image = calibrate_files(options(maps, tmp_path / "b", unit="image"), data).record
    assert (by_group.num_units, by_group.interval.coverages[-1]) == (5, 0.8)
    assert (by_image.num_units, by_image.interval.coverages[-1]) == (20, 0.95)
    quarter = calibrate_files(options(maps, tmp_path / "c", unit="image", kappa_share=0.25), data).record
    assert (quarter.num_units, quarter.interval.coverages[-1]) == (30, 0.96)


def test_left_out_units_are_judged_by_fits_that_have_not_seen_them(tmp_path: Path) -> None:
    """One map has a deviation a hundred times too small: it is not covered, though any fit with it would be wider."""
    maps = write_maps(tmp_path / "maps", 12, "mean+std")
    arrays = arrays_of(5, "mean+std")
    np.savez(maps / "folder/005.npz", mean=arrays["mean"], std=arrays["std"] / 100)
    given = options(maps, tmp_path / "out", kappa_share=0.3)
    found = calibrate_files(given, LabelledMaps(12))
    judged = leave_out(tuple(found.collected.pixels.values()), given)
    place = COVERAGES.index(0.5)
    assert float(judged.covered[5, place]) < 0.1
    assert all(float(one) > 0.4 for i, one in enumerate(judged.covered[:, place]) if i != 5)
    assert {fit.num_units for fit in judged.fits} == {8}  # 11 others, 3 of which choose kappa
    assert bool(judged.covered[:, COVERAGES.index(0.95)].isnan().all())  # needs 19


def test_the_command_says_what_it_refuses_and_leaves_broken_maps_out(tmp_path: Path, capsys) -> None:
    root = write_folder(tmp_path / "photos", 10)
    maps = write_maps(tmp_path / "maps", 10, "mean+std")
    (maps / "folder/003.npz").write_bytes(b"nothing")
    (maps / "folder/004.npz").unlink()
    words = [
        "calibrate",
        "depth",
        "--files.folder",
        maps,
        "--data.root",
        root,
        "--num_pixels",
        60,
        "--shuffle",
        "false",
    ]
    assert run(*words, "-o", tmp_path / "out") == 1
    told = capsys.readouterr()
    assert "no 90% interval: it needs 9 units" in told.err
    assert "only 5 units set the intervals" in told.err
    assert "folder/003" in told.err
    assert "folder/004.npz does not exist" in told.err
    assert len(list((tmp_path / "out/intervals").rglob("*.npz"))) == 8
    coverages = read_npz(tmp_path / "out/intervals/folder/000.npz")["coverages"]
    assert coverages.tolist() == [0.5, 0.8]
    page = (tmp_path / "out_report.html").read_text(encoding="utf-8")
    assert "needs 9 units" in page
    assert "needs 19 units" in page
    assert run(*words, "-o", tmp_path / "out") == 2
    assert "exists; choose another output" in capsys.readouterr().err
    assert run("intervals", "--calibration", tmp_path / "out", "--folder", maps, "--coverages", 0.95) == 2
    assert "promise coverages from 0.1 to 0.8; got 0.95" in capsys.readouterr().err


def write_folder(root: Path, count: int) -> Path:
    """The pictures of `LabelledMaps` as a folder of files."""
    from PIL import Image

    for index in range(count):
        sample = LabelledMaps(count).read(index)
        for name in ("rgb", "depth"):
            (root / name / "folder").mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((*SIZE, 3), 128, np.uint8)).save(root / f"rgb/folder/{index:03d}.png")
        stored = torch.where(sample["valid"], sample["depth"], torch.nan)[0].numpy()
        np.save(root / f"depth/folder/{index:03d}.npy", stored)
    return root


def test_a_record_survives_its_file_and_others_are_refused(tmp_path: Path) -> None:
    record = MapCalibration(
        SpreadRule("map", (1.0, 2.0), (0.5, 0.25)), 1.5, IntervalGrid((0.5, 0.9), ((0.7,), (1.9,))), 12, "mine"
    )
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(record.to_dict()))
    assert MapCalibration.read(tmp_path) == MapCalibration.read(path) == record
    for content, message in (("{}", "expected format"), ("[]", "is no calibration"), ("{", "is no calibration")):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            MapCalibration.read(path)
    with pytest.raises(FileNotFoundError, match="no calibration at"):
        MapCalibration.read(tmp_path / "nowhere")


def test_maps_of_another_kind_than_calibrated_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **arrays_of(0, "mean+std"))
    record = MapCalibration(SpreadRule("map"), 1.0, IntervalGrid((0.5,), ((1.0,),)), 3)
    with pytest.raises(PredictionError, match="maps with 'none' beside the mean; got 'std'"):
        record.arrays(read_prediction(tmp_path / "a.npz"), [0.5])


def test_nan_in_a_map_stays_nan_and_harms_nothing_else() -> None:
    mean = torch.arange(6.0).reshape(2, 3)
    mean[0, 0] = torch.nan
    record = MapCalibration(SpreadRule("stated"), 2.0, IntervalGrid((0.5,), ((3.0,),)), 3)
    found = record.arrays(MeanStd(mean, torch.ones(2, 3)), [0.5])
    assert np.isnan(found["lower"][0, 0, 0])
    assert np.array_equal(found["lower"][0].flatten()[1:], mean.numpy().flatten()[1:] - 6)
    assert Stated.of(MeanStd(mean, torch.ones(2, 3))).map_std == pytest.approx(np.std([1, 2, 3, 4, 5]))


@pytest.mark.parametrize(
    "changes",
    [{"model": "embedded", "files": FileOptions(Path("x"))}, {}],
    ids=["both", "neither"],
)
def test_either_a_model_or_maps_are_calibrated(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="give either model"):
        DepthCalibration(**changes)
