"""The numbers of a depth evaluation: against brute force, an independent reference, and cases whose answer is known."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.depth_brute_force import score_folder
from support.depth_scenes import GROUPS, SIZE, random_members, write_predictions
from support.tiny_depth import tiny_pipeline

from marigold_uq.depth.data import DepthSample
from marigold_uq.depth.evaluation import (
    AlignmentOptions,
    DataOptions,
    DepthEvaluation,
    FileOptions,
    Members,
    PipelineOptions,
    Predictor,
    ScoreOptions,
    evaluate_depth,
)
from marigold_uq.metrics import expected_coverage

# Depth is read and aligned in float32, which moves a number by about 1e-7 of the depth; ranks may swap at near ties.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


class InMemory(Predictor):
    """Members that were never a file."""

    def predict(self, sample: DepthSample) -> Members:
        return Members.of(torch.from_numpy(random_members(sample["name"])))


@pytest.mark.parametrize("kind", ["samples", "mean", "mean+std", "mean+confidence"])
def test_every_kind_of_file_is_scored_as_by_brute_force(kind, options, scenes, tmp_path):
    folder = write_predictions(tmp_path / "predictions", kind)
    result = evaluate_depth(options(folder))
    expected = score_folder(scenes, folder)

    ours = {name: estimate.value.numpy() for name, estimate in result.summary.overall.items()}
    random_or_known = {"pit", "expected_coverage", "expected_reliability"}  # tested below
    assert set(ours) - random_or_known == set(expected["overall"]) - random_or_known
    for name in set(ours) & set(expected["overall"]):
        np.testing.assert_allclose(ours[name], expected["overall"][name], **TOLERANCE, err_msg=name)
    for group, estimates in result.summary.groups.items():
        for name in set(estimates) & set(expected["groups"][group]):
            np.testing.assert_allclose(
                estimates[name].value.numpy(), expected["groups"][group][name], **TOLERANCE, err_msg=f"{group} {name}"
            )
    for record in result.records:
        for name in record.statistics:
            if name not in random_or_known:
                brute = expected["images"][record.name][name]
                np.testing.assert_allclose(record.statistics[name], brute, **TOLERANCE, err_msg=f"{record.name} {name}")


def test_members_in_memory_and_in_files_give_the_same_numbers(options, tmp_path):
    from_files = evaluate_depth(options())
    in_memory = evaluate_depth(options(output=tmp_path / "memory"), predictor=InMemory())
    assert in_memory.metrics["metrics"] == from_files.metrics["metrics"]
    assert in_memory.metrics["curves"] == from_files.metrics["curves"]


def test_a_pipeline_and_its_saved_predictions_give_the_same_numbers(options, tmp_path):
    model = tmp_path / "model"
    tiny_pipeline("gaussian").save_pretrained(model)
    saved = tmp_path / "saved"
    direct = evaluate_depth(
        options(
            predictor="pipeline",
            pipeline=PipelineOptions(model=str(model), ensemble_size=4, device="cpu", batch_size=3),
            save_predictions=saved,
        )
    )
    again = evaluate_depth(options(saved, output=tmp_path / "again"))
    assert direct.metrics["metrics"] == again.metrics["metrics"]
    assert direct.metrics["predictor"]["uncertainty"] == "trajectory"  # what a Gaussian head does by default
    with np.load(saved / "desk" / "a.npz") as archive:
        assert archive["samples"].shape == (4, *SIZE)


def test_a_pipeline_gives_an_image_the_same_members_whatever_the_batch_and_the_company(options, tmp_path):
    model = str(tmp_path / "model")
    tiny_pipeline("gaussian").save_pretrained(model)
    scores = []
    for number, (batch_size, limit) in enumerate([(1, None), (4, 1)]):
        result = evaluate_depth(
            options(
                predictor="pipeline",
                pipeline=PipelineOptions(
                    model=model, uncertainty="ensemble", ensemble_size=3, device="cpu", batch_size=batch_size
                ),
                data=DataOptions(root=options().data.root, limit=limit),
                output=tmp_path / str(number),
            )
        )
        scores.append(result.records[0].statistics["crps"])
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)  # a batch of 4 rounds differently from 4 batches of 1


def test_every_image_of_a_group_counts_once_and_every_group_counts_once(options):
    result = evaluate_depth(options())
    of_image = {record.name: record.statistics["crps"] for record in result.records}
    means = [np.mean([of_image[n] for n, g in GROUPS.items() if g == group]) for group in ("desk", "street")]
    assert float(result.summary.overall["crps"].value) == pytest.approx(np.mean(means), rel=1e-12)
    assert float(result.summary.overall["crps"].standard_error) == pytest.approx(
        np.std(means, ddof=1) / np.sqrt(2), rel=1e-9
    )
    assert result.metrics["average"] == "mean over groups of the mean over images"


def test_expected_coverage_of_a_finite_ensemble_stands_beside_the_observed_one(options):
    metrics = evaluate_depth(options()).metrics
    assert metrics["metrics"]["expected_coverage"]["value"] == pytest.approx(expected_coverage(6, 0.95))
    levels = metrics["curves"]["levels"]
    assert metrics["curves"]["expected_reliability"]["value"] == pytest.approx(
        [expected_coverage(6, c) for c in levels]
    )


class Honest(Predictor):
    """Metric members from the law that the target was drawn from: N(4, 0.5^2) at every pixel."""

    metric = True

    def predict(self, sample: DepthSample) -> Members:
        seed = torch.Generator().manual_seed(int(sample["name"]))
        return Members.of(4 + 0.5 * torch.randn(20, *sample["depth"].shape[1:], generator=seed))


def test_honest_members_are_found_honest(tmp_path):
    size, rows = (60, 80), []
    for number in range(4):
        depth = 4 + 0.5 * np.random.default_rng(50 + number).normal(size=size)
        np.save(_beside(tmp_path / "depth" / f"{number}.npy"), depth.astype(np.float32))
        Image.new("RGB", size[::-1]).save(_beside(tmp_path / "rgb" / f"{number}.png"))
        rows.append({"name": str(number)})
    (tmp_path / "index.json").write_text(json.dumps(rows))
    options = DepthEvaluation(data=DataOptions(root=str(tmp_path)), output=tmp_path / "out", figures=False)
    metrics = evaluate_depth(options, predictor=Honest()).metrics
    value = {name: entry["value"] for name, entry in metrics["metrics"].items()}
    # 19200 independent pixels: the standard error of a share is below .0036, of the ratio about .005; 4 of them
    assert value["coverage"] == pytest.approx(value["expected_coverage"], abs=0.0085)
    assert value["spread_skill_ratio"] == pytest.approx(1, abs=0.02)
    assert value["spearman"] == pytest.approx(0, abs=4 / np.sqrt(19200))  # the spread tells nothing of the error
    assert metrics["curves"]["pit"]["value"] == pytest.approx([1 / 20] * 20, abs=4 * np.sqrt(0.05 / 19200))
    # CRPS of N(m, s^2) at its own draws is s / sqrt(pi); standard error below .0025
    assert value["crps"] == pytest.approx(0.5 / np.sqrt(np.pi), abs=0.01)
    assert metrics["alignment"]["method"] == "none"
    assert metrics["average"] == "mean over images"


def _beside(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def test_disparities_are_aligned_as_disparities(options, scenes, tmp_path):
    """An affine function of 1 / depth must come back as depth, members and all."""
    folder = tmp_path / "disparity"
    for row in json.loads((scenes / "index.json").read_text()):
        stored = np.asarray(Image.open(scenes / "depth" / f"{row['name']}.png")).astype(np.float64) / row["depth_scale"]
        depth = 1 / np.maximum(stored, 0.1) if row["kind"] == "disparity_px" else np.maximum(stored, 0.1)
        np.savez(_beside(folder / f"{row['name']}.npz"), samples=np.stack([0.3 / depth + 0.1] * 3))
    result = evaluate_depth(options(folder, files=FileOptions(folder=folder, space="disparity")))
    # float32 disparities: relative error of depth about 1e-7 * depth * largest disparity
    assert float(result.summary.overall["abs_relative_difference"].value) < 1e-5
    assert float(result.summary.overall["crps"].value) < 1e-5
    assert "in disparity" in result.metrics["alignment"]["text"]


def test_members_that_nobody_aligned_are_aligned_to_each_other_on_request(options, tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    for number, name in enumerate(GROUPS):
        rng = np.random.default_rng(number)
        members = np.linspace(0, 1, SIZE[0])[:, None] + 0.05 * rng.normal(size=(6, *SIZE))
        np.savez(_beside(before / f"{name}.npz"), samples=members)
        scale, shift = rng.uniform(1, 9, (6, 1, 1)), rng.uniform(-5, 5, (6, 1, 1))
        np.savez(_beside(after / f"{name}.npz"), samples=scale * members + shift)
    reference = evaluate_depth(options(before, output=tmp_path / "reference"))
    plain = evaluate_depth(options(after, output=tmp_path / "plain"))
    mutual = evaluate_depth(options(after, alignment=AlignmentOptions(mutual=True), output=tmp_path / "mutual"))
    variance, unaligned, aligned = (float(one.summary.overall["variance"].value) for one in (reference, plain, mutual))
    assert unaligned > 10 * variance
    assert aligned == pytest.approx(variance, rel=0.02)  # members stay unequal by their noise, and gain a little by it
    assert mutual.metrics["alignment"]["text"].startswith("members aligned to each other")


@pytest.mark.parametrize("extra", [None, "std", "confidence"])
def test_a_published_set_clips_to_its_own_range_after_the_alignment(extra, tmp_path):
    """ScanNet is valid up to 10 m, so a metric prediction of 50 m counts as 10 m."""
    Image.new("RGB", (8, 6)).save(_beside(tmp_path / "scene0406_02" / "color" / "000000.jpg"))
    Image.fromarray(np.full((6, 8), 4000, np.uint16)).save(_beside(tmp_path / "scene0406_02" / "depth" / "000000.png"))
    predictions = tmp_path / "predictions"
    maps = {"mean": np.full((6, 8), 50.0), **({extra: np.ones((6, 8))} if extra else {})}
    np.savez(_beside(predictions / "scene0406_02" / "color" / "000000.npz"), **maps)
    result = evaluate_depth(
        DepthEvaluation(
            predictor="files",
            files=FileOptions(folder=predictions, metric=True),
            data=DataOptions(name="scannet", root=str(tmp_path)),
            output=tmp_path / "out",
            figures=False,
        )
    )
    assert float(result.summary.overall["rmse"].value) == pytest.approx(6.0)
    assert result.metrics["alignment"]["clip"] == [1e-3, 10.0]


# An independent script gave these: AbsRel per group, constant / ramp; then the means over groups
BASELINES = {
    "osd_kinect": (0.205, 0.076), "kitti_lidar": (0.588, 0.359), "nyu": (0.340, 0.248), "priorda": (0.262, 0.181),
    "lingbot": (1.527, 0.880), "tabletop": (0.433, 0.300), "gqcnn": (0.066, 0.045), "middlebury": (0.402, 0.235),
    "sunrgbd": (0.091, 0.091), "tum": (0.304, 0.330), "slambook": (0.643, 0.374), "fusion": (0.261, 0.217),
    "fusion_7scenes": (0.492, 0.138),
}  # fmt: skip
OVERALL = {"constant": (0.432, 0.470), "ramp": (0.267, 0.622)}  # AbsRel, delta1


@pytest.mark.parametrize(("predictor", "column"), [("constant", 0), ("ramp", 1)])
def test_baselines_on_real_photographs_reproduce_the_targets(predictor, column, data_root, tmp_path):
    result = evaluate_depth(
        DepthEvaluation(
            predictor=predictor,
            data=DataOptions(root=str(data_root / "depth_real")),
            score=ScoreOptions(metrics=("depth",)),
            output=tmp_path / "out",
            figures=False,
        )
    )
    half_a_digit = 0.5e-3 + 1e-6
    groups = {name: float(found["abs_relative_difference"].value) for name, found in result.summary.groups.items()}
    assert set(groups) == set(BASELINES)
    for name, value in groups.items():
        assert value == pytest.approx(BASELINES[name][column], abs=half_a_digit), name
    overall = [float(result.summary.overall[name].value) for name in ("abs_relative_difference", "delta1")]
    assert overall == pytest.approx(OVERALL[predictor], abs=half_a_digit)
    assert not result.failures


def test_the_table_has_a_row_per_image_and_agrees_with_the_records(options):
    result = evaluate_depth(options())
    with (options().output / "per_image.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == sorted(GROUPS)
    for row, record in zip(rows, result.records, strict=True):
        assert row["group"] == GROUPS[record.name]
        assert float(row["crps"]) == record.statistics["crps"]
        assert int(row["num_valid"]) == record.num_valid


def test_metrics_json_says_how_the_numbers_were_made(options):
    evaluate_depth(options(), command="python eval/eval_depth.py --some option")
    found = json.loads((options().output / "metrics.json").read_text())
    assert found["command"] == "python eval/eval_depth.py --some option"
    assert found["num_images"] == 5
    assert found["predictor"]["kind"] == "members"
    assert found["config"]["score"]["level"] == 0.95
    assert found["versions"]["torch"]
    assert "least-squares" in found["alignment"]["text"]
    assert found["metrics"]["crps"]["standard_error"] > 0
    assert found["groups"]["desk"]["num_images"] == 3
