"""Training with an image encoder, from rendered scenes to a calibrated pipeline, with the study's own scripts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from support.scripts import load_script
from support.tiny_conditioned import UNET, conditioned_encoder, conditioned_pipeline

from marigold_uq import MarigoldUQDepthPipeline
from marigold_uq.depth.calibration import DepthCalibration, calibrate_depth
from marigold_uq.depth.conditioned_run import (
    ConditionedStart,
    ConditionedTrainConfig,
    start_conditioned,
    train_conditioned,
)
from marigold_uq.depth.conditioned_task import MAX_SLOPE, ConditionedObjective, ConditionedTask, fitted_target
from marigold_uq.depth.config import DataPart, DepthTrainConfig, StartConfig
from marigold_uq.depth.data import DepthTransform
from marigold_uq.depth.data.shards import Shards
from marigold_uq.depth.evaluation.options import DataOptions
from marigold_uq.depth.run import train_depth
from marigold_uq.depth.scenes import ProceduralScenes
from marigold_uq.depth.task import DepthTask
from marigold_uq.models.depth_cells import DepthCells
from marigold_uq.training.config import OptimizerConfig, TrainingConfig
from marigold_uq.training.objective import ObjectiveConfig
from scripts.studies.embedded import cache_features, train

SMALL = {name: list(value) if isinstance(value, tuple) else value for name, value in UNET.items()}
"""As a YAML file holds it."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scenes of 64 x 96 pixels, a tiny encoder, and the features of two variants."""
    folder = tmp_path_factory.mktemp("conditioned")
    for split, length in (("train", 8), ("validation", 40)):
        size = ["--height", "64", "--width", "96", "--shard_size", "4"]
        options = ["--output", str(folder / split), "--split", split, "--length", str(length), *size]
        assert load_script("scripts/render_scenes.py").main(options) == 0
    conditioned_encoder().save_pretrained(folder / "encoder")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_features, "SHAPES", ((64, 96), (32, 96)))
        options = ["--encoder", str(folder / "encoder"), "--scenes", str(folder / "train")]
        options += ["--output", str(folder / "features"), "--variants", "2", "--shard_size", "4"]
        assert cache_features.main(options) == 0
    return folder


def start(made: Path, family: str = "gaussian", **options: object) -> ConditionedStart:
    return ConditionedStart(
        encoder=made / "encoder", unet=UNET, noise_family=family, default_processing_resolution=96, **options
    )  # type: ignore[arg-type]


def config(made: Path, output: Path, beginning: ConditionedStart, steps: int = 2) -> ConditionedTrainConfig:
    loop = TrainingConfig(
        output=output, max_steps=steps, batch_size=4, validate_every=0, tracker="none",
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=0, decay="constant"), ema_decay=0.0,
    )  # fmt: skip
    return ConditionedTrainConfig(beginning, made / "features", training=loop)


def test_kept_features_are_those_of_the_picture_and_shapes_alternate(made: Path) -> None:
    samples = Shards(made / "features")
    assert len(samples) == 16
    assert {tuple(samples[i]["depth"].shape[-2:]) for i in range(16)} == {(32, 48), (16, 48)}
    sample = samples[0]
    assert sample["features_0"].shape == (8, 8, 12)
    assert sample["thumbnail"].shape == (3, 32, 48)
    assert sample["name"] == "train_0_0000000-0"
    again, other = samples[0]["thumbnail"], samples[8]["thumbnail"]
    assert again.shape != other.shape or not again.equal(other)  # another variant of the same scene


def test_augmentation_keeps_picture_and_depth_together() -> None:
    """A picture painted with its own depth stays so, up to the interpolation at edges."""
    ramp = torch.linspace(0.2, 0.8, 128).expand(1, 96, 128).clone()
    sample = {"image": ramp.expand(3, -1, -1), "depth": ramp, "valid": torch.ones(1, 96, 128, dtype=torch.bool)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_features, "COLOURS", lambda image, generator: image)
        for seed in range(5):
            changed = cache_features.augment(sample, (64, 96), torch.Generator().manual_seed(seed))
            assert changed["depth"].shape == (1, 32, 48)
            small = torch.nn.functional.avg_pool2d(changed["image"][:1], 2)
            assert float((small - changed["depth"]).abs().max()) < 0.02


def test_a_short_run_leaves_a_pipeline_that_loads_and_its_backbone_is_untouched(made: Path, tmp_path: Path) -> None:
    assert train_conditioned(config(made, tmp_path / "run", start(made))).finished
    pipeline = MarigoldUQDepthPipeline.from_pretrained(tmp_path / "run" / "model")
    assert pipeline.scheduler.config.noise_family == "gaussian"
    before = conditioned_encoder().state_dict()
    for name, value in pipeline.image_encoder.state_dict().items():
        assert value.equal(before[name]) == name.startswith("network."), name
    new = start_conditioned(start(made))
    assert not pipeline.vae.weights[-1].weight.equal(new.vae.weights[-1].weight)


def test_the_command_trains_from_a_config_and_flags(made: Path, tmp_path: Path) -> None:
    (tmp_path / "unet.yaml").write_text(yaml.safe_dump({"start": {"encoder": str(made / "encoder"), "unet": SMALL}}))
    loop = ["--training.max_steps", "1", "--training.batch_size", "2", "--training.validate_every", "0"]
    options = ["--features", str(made / "features"), "--training.output", str(tmp_path / "run"), *loop]
    assert train.main(["--config", str(tmp_path / "unet.yaml"), *options, "--training.tracker", "none"]) == 0
    assert MarigoldUQDepthPipeline.from_pretrained(tmp_path / "run" / "model").image_encoder is not None


@pytest.mark.parametrize("family", [{"family": "mixture", "num_components": 2}, {"family": "low_rank", "rank": 2}])
def test_a_family_starts_from_a_point_model(made: Path, tmp_path: Path, family: dict) -> None:
    train_conditioned(config(made, tmp_path / "point", start(made, "point")))
    name = family.pop("family")
    more = ConditionedStart(pipeline=tmp_path / "point" / "model", noise_family=name, **family)
    assert train_conditioned(config(made, tmp_path / name, more)).finished
    assert MarigoldUQDepthPipeline.from_pretrained(tmp_path / name / "model").scheduler.config.noise_family == name


def test_a_start_is_an_encoder_or_a_pipeline_not_both() -> None:
    with pytest.raises(ValueError, match="either encoder"):
        ConditionedStart()


def with_random_features(sample: dict, seed: int) -> dict:
    generator = torch.Generator().manual_seed(seed)
    names = [name for name in sample if name.startswith("features_")]
    return {**sample, **{name: torch.randn(sample[name].shape, generator=generator) for name in names}}


def test_it_learns_two_scenes_by_heart(made: Path) -> None:
    """Encoder head and U-Net together: the score of the distribution of two samples falls to less than a third.

    A random backbone tells hardly one picture from another, so the features are random numbers here.
    """
    pipeline = conditioned_pipeline("gaussian")
    samples = Shards(made / "features", length=2)
    task = ConditionedTask(pipeline, samples, ConditionedObjective(decoded_weight=0.0))
    batch = task.collate([with_random_features(samples[i], seed=i) for i in range(2)])
    optimizer = torch.optim.Adam([p for p in task.network.parameters() if p.requires_grad], 5e-3)
    losses = []
    for step in range(150):
        generators = [torch.Generator().manual_seed(2 * step + i) for i in range(2)]
        loss = task.losses(task.network, batch, generators).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-5:]) < losses[0] / 3


def test_places_without_depth_hardly_count(made: Path) -> None:
    pipeline = conditioned_pipeline("gaussian")
    samples = Shards(made / "features", length=1)
    task = ConditionedTask(pipeline, samples, ConditionedObjective(invalid_weight=0.0))
    sample = samples[0]
    sample["valid"] = sample["valid"].clone()
    sample["valid"][..., :8, :] = False
    changed = {**sample, "depth": sample["depth"].clone()}
    changed["depth"][..., :8, :] = 1e3
    losses = [
        task.losses(task.network, task.collate([one]), [torch.Generator().manual_seed(0)]) for one in (sample, changed)
    ]
    torch.testing.assert_close(*losses)


def test_all_its_modes_are_calibrated(made: Path, tmp_path: Path) -> None:
    train_conditioned(config(made, tmp_path / "run", start(made)))
    data = DataOptions("scenes", root=str(made / "validation"))
    calibrated = tmp_path / "calibrated"
    calibrate_depth(DepthCalibration(str(tmp_path / "run" / "model"), calibrated, data, ensemble_size=4))
    pipeline = MarigoldUQDepthPipeline.from_pretrained(calibrated)
    assert sorted(str(one.uncertainty) for one in pipeline.calibrations) == ["ensemble", "marginal", "trajectory"]
    scene = ProceduralScenes(1, height=64, width=96, split="test")[0]
    output = pipeline(scene["image"], uncertainty="marginal", coverage=0.9, ensemble_size=4)
    assert output.interval.shape == (1, 64, 96, 2)


def test_the_backbone_learns_on_pictures(made: Path, tmp_path: Path) -> None:
    train_conditioned(config(made, tmp_path / "first", start(made)))
    begun = ConditionedStart(pipeline=tmp_path / "first" / "model")
    loop = config(made, tmp_path / "second", begun).training
    assert train_conditioned(ConditionedTrainConfig(begun, scenes=made / "train", training=loop)).finished
    before, after = (
        MarigoldUQDepthPipeline.from_pretrained(tmp_path / run / "model").image_encoder.state_dict()
        for run in ("first", "second")
    )
    assert all(not after[name].equal(value) for name, value in before.items() if name.endswith("fc1.weight"))


def test_later_stages_learn_on_kept_features(made: Path, tmp_path: Path) -> None:
    """As the whole backbone would before its first step; then the weights before the kept level stay, others move."""
    train_conditioned(config(made, tmp_path / "first", start(made)))
    begun = ConditionedStart(pipeline=tmp_path / "first" / "model")
    batch = [Shards(made / "features")[0]]
    losses = []
    for backbone in ("none", "later"):
        pipeline = start_conditioned(begun)
        task = ConditionedTask(pipeline, Shards(made / "features"), ConditionedObjective(), backbone=backbone)
        losses.append(task.losses(task.network, task.collate(batch), [torch.Generator().manual_seed(0)]))
    torch.testing.assert_close(*losses, rtol=5e-3, atol=0)  # kept features are rounded

    loop = config(made, tmp_path / "second", begun).training
    further = ConditionedTrainConfig(begun, made / "features", later_stages=True, training=loop)
    assert train_conditioned(further).finished
    before, after = (
        MarigoldUQDepthPipeline.from_pretrained(tmp_path / run / "model").image_encoder.state_dict()
        for run in ("first", "second")
    )
    for name, value in before.items():
        early = name.startswith(("network.patch_embed.", "network.stages.0.", "network.stages.1.blocks."))
        assert after[name].equal(value) == early, name


def test_later_stages_need_kept_features(made: Path) -> None:
    with pytest.raises(ValueError, match="later_stages learn from kept features"):
        ConditionedTrainConfig(start(made), scenes=made / "train", later_stages=True)


def test_pictures_and_their_kept_features_give_the_same_loss(made: Path) -> None:
    pipeline = conditioned_pipeline("gaussian")
    sample = ProceduralScenes(1, height=64, width=96)[0]
    kept = {"depth": sample["depth"][:, ::2, ::2], "valid": sample["valid"][:, ::2, ::2], "name": sample["name"]}
    pixels = 2 * sample["image"][None] - 1
    with torch.no_grad():
        features = pipeline.image_encoder.features(pixels)
    kept |= {f"features_{level}": own[0] for level, own in enumerate(features)}
    kept["thumbnail"] = 127.5 * (pipeline.image_encoder.thumbnail(pixels)[0] + 1)
    whole = {name: value for name, value in sample.items() if name != "kind"}
    task = ConditionedTask(pipeline, Shards(made / "features"), ConditionedObjective())
    losses = [
        task.losses(task.network, task.collate([one]), [torch.Generator().manual_seed(0)]) for one in (whole, kept)
    ]
    torch.testing.assert_close(*losses)


def test_data_are_features_or_scenes(made: Path) -> None:
    with pytest.raises(ValueError, match="either features or scenes"):
        ConditionedTrainConfig(start(made))


def test_other_training_tasks_refuse_a_pipeline_with_an_image_encoder(made: Path) -> None:
    with pytest.raises(ValueError, match="through an image encoder"):
        DepthTask(conditioned_pipeline("gaussian"), Shards(made / "features"), ObjectiveConfig())


def test_a_head_that_is_there_must_be_the_one_asked_for(made: Path, tmp_path: Path) -> None:
    conditioned_pipeline("gaussian").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has the head"):
        start_conditioned(ConditionedStart(pipeline=tmp_path, noise_family="mixture", num_components=2))


def test_a_fitted_target_differs_from_the_prediction_by_what_alignment_leaves() -> None:
    """Truth = slope * predicted depth + shift + error: after the fit the error alone remains, in predicted units."""
    cells = DepthCells(cell=4, upsampling=2)
    generator = torch.Generator().manual_seed(0)
    depth = torch.rand(2, 4, 6, 8, generator=generator) - 0.5
    known = torch.rand(depth.shape, generator=generator) < 0.9
    error = 0.1 * torch.randn(depth.shape, generator=generator)
    weight = known.double()
    columns = torch.stack([torch.ones_like(depth), depth], -1).double()
    for sample in range(2):  # the part of the error that a line explains belongs to the fit
        rows = weight[sample].sqrt().flatten()
        basis = columns[sample].flatten(0, 2) * rows[:, None]
        line = torch.linalg.lstsq(basis, (error[sample].flatten() * rows)[:, None]).solution
        error[sample] -= (columns[sample] @ line)[..., 0].float()
    truth = 0.8 * depth + 0.1 + error
    target = fitted_target(cells, cells.to_latent(depth), cells.to_latent(truth), known)
    expected = (depth + error / 0.8)[known]
    torch.testing.assert_close(cells.to_depth(target)[known], expected, atol=1e-4, rtol=0)


def test_a_fit_does_not_excuse_a_map_without_relief() -> None:
    cells = DepthCells(cell=4, upsampling=2)
    truth = torch.linspace(-0.9, 0.9, 4 * 6 * 8).view(1, 4, 6, 8)
    flat = cells.to_latent(0.01 * truth)
    target = fitted_target(cells, flat, cells.to_latent(truth), torch.ones_like(truth, dtype=torch.bool))
    torch.testing.assert_close(cells.to_depth(target).std(), truth.std() / MAX_SLOPE, rtol=0.05, atol=0)


def test_with_all_timesteps_half_of_the_samples_are_at_other_ones(made: Path, tmp_path: Path) -> None:
    """And the trained model denoises in several steps."""
    pipeline = start_conditioned(start(made))
    task = ConditionedTask(pipeline, Shards(made / "features"), ConditionedObjective(all_timesteps=True))
    last = pipeline.scheduler.noisiest_timestep
    drawn = task._timesteps([torch.Generator().manual_seed(seed) for seed in range(400)])
    assert abs(float((drawn == last).float().mean()) - 0.5) < 0.1
    assert len(set(drawn[drawn != last].tolist())) > 100
    several = replace(config(made, tmp_path / "run", start(made)), objective=ConditionedObjective(all_timesteps=True))
    assert train_conditioned(several).finished
    trained = MarigoldUQDepthPipeline.from_pretrained(tmp_path / "run" / "model")
    picture = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    result = trained(picture, num_inference_steps=3, ensemble_size=2)
    assert np.isfinite(np.asarray(result.prediction)).all()


def finetuning(made: Path, output: Path, **options: object) -> DepthTrainConfig:
    """As `train/train_depth.py` reads it: a finished model, and pictures of one's own."""
    loop = config(made, output, start(made)).training
    scenes = [DataPart("scenes", root=str(made / "train"))]
    begin = StartConfig(name=str(made / "finished"), kind="pipeline", noise_family="gaussian")
    return DepthTrainConfig(start=begin, data=scenes, transform=DepthTransform(size=(64, 96)), training=loop, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("trainable", ["full", "frozen_backbone"])
def test_a_finished_model_is_finetuned_by_the_command_for_all_models(
    made: Path, tmp_path: Path, trainable: str
) -> None:
    if not (made / "finished").exists():
        conditioned_pipeline("gaussian").save_pretrained(made / "finished")
    assert train_depth(finetuning(made, tmp_path / "run", trainable=trainable)).finished
    before = MarigoldUQDepthPipeline.from_pretrained(made / "finished")
    after = MarigoldUQDepthPipeline.from_pretrained(tmp_path / "run" / "model")
    old, new = before.image_encoder.state_dict(), after.image_encoder.state_dict()
    moved = {name.startswith("network.") for name in old if not old[name].equal(new[name])}
    assert moved == ({True, False} if trainable == "full" else {False})
    assert not after.unet.conv_out.weight.equal(before.unet.conv_out.weight)


def test_adapters_and_heads_alone_are_refused_with_an_image_encoder(made: Path, tmp_path: Path) -> None:
    conditioned_pipeline("gaussian").save_pretrained(tmp_path / "model")
    config = finetuning(made, tmp_path / "run", trainable="head")
    config = replace(config, start=replace(config.start, name=str(tmp_path / "model")))
    with pytest.raises(ValueError, match="'full' or 'frozen_backbone'; got 'head'"):
        train_depth(config)
