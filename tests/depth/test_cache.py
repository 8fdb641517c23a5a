"""Latents on disk: for any data set, with a baseline or without, checked, resumable, and the same as reading."""

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.scripts import load_script
from support.tiny_baselines import write_model
from support.tiny_training import tiny_pipeline, write_everything

from marigold_uq import MarigoldUQDepthPipeline
from marigold_uq.cli import main
from marigold_uq.depth.cache import CacheReport, cache_latents, check_cache
from marigold_uq.depth.data import DepthDataset, DepthSample, DepthTransform
from marigold_uq.depth.data.shards import LatentShards, damage_of
from marigold_uq.depth.encoding import LatentEncoder, fitted_truth
from marigold_uq.depth.task import DepthTask, measure_residual
from marigold_uq.models.depth_baseline import DepthBaseline
from marigold_uq.pipelines.depth.baseline import give_baseline
from marigold_uq.training.objective import ObjectiveConfig


class Scenes(DepthDataset):
    """Random pictures of 32 x 48 with depth from 1 to 9 m and a few invalid pixels; `seconds` to read one."""

    def __init__(self, length: int = 7, seconds: float = 0.0) -> None:
        super().__init__(length)
        self.seconds = seconds

    def name_of(self, index: int) -> str:
        return f"scene {index}"

    def read(self, index: int) -> DepthSample:
        time.sleep(self.seconds)
        noise = torch.Generator().manual_seed(index)
        depth = 1 + 8 * torch.rand(1, 32, 48, generator=noise)
        valid = torch.ones(1, 32, 48, dtype=torch.bool)
        valid[:, :4, :4] = False
        image = torch.rand(3, 32, 48, generator=noise)
        return DepthSample(image=image, depth=torch.where(valid, depth, 0.0), valid=valid, name=self.name_of(index))


@pytest.fixture(scope="module")
def glpn(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model("glpn", tmp_path_factory.mktemp("glpn") / "glpn")


@pytest.fixture(scope="module")
def dpt(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model("dpt", tmp_path_factory.mktemp("dpt") / "dpt")


def pipeline_around(name: str | None) -> MarigoldUQDepthPipeline:
    pipeline = tiny_pipeline()
    if name is not None:
        give_baseline(pipeline, DepthBaseline.open(name))
    return pipeline.with_family("gaussian")


def fill(
    folder: Path,
    pipeline: MarigoldUQDepthPipeline,
    dataset: Any = None,
    encoder: LatentEncoder | None = None,
    **options: Any,
) -> CacheReport:
    return cache_latents(
        encoder or LatentEncoder(pipeline),
        dataset or Scenes(),
        folder,
        **{"transform": DepthTransform(), "data": {"name": "test"}, "shard_size": 3, "batch_size": 2, **options},
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("baseline", [None, "glpn", "dpt"])
def test_cached_latents_train_as_the_pictures_do(baseline: str | None, request, tmp_path: Path) -> None:
    """Losses agree to half precision, with metric and relative baselines and without."""
    name = None if baseline is None else request.getfixturevalue(baseline)
    pipeline = pipeline_around(name)
    report = fill(tmp_path / "cache", pipeline, transform=DepthTransform(flip=0.0))
    assert (report.num_made, report.num_kept) == (7, 0)
    shards = LatentShards(tmp_path / "cache")
    assert len(shards) == 7
    task = DepthTask(pipeline, Scenes(), ObjectiveConfig())
    if baseline is not None:
        measure_residual(task)
        assert pipeline.baseline.config.residual_scale != 1.0

    def losses(samples: list[Any]) -> torch.Tensor:
        generators = [torch.Generator().manual_seed(i) for i in range(len(samples))]
        return task.losses(task.network, task.collate(samples), generators)

    torch.testing.assert_close(
        losses([Scenes()[i] for i in range(7)]), losses([shards[i] for i in range(7)]), rtol=2e-2, atol=2e-3
    )


def test_variants_are_drawn_anew_and_the_same_again(tmp_path: Path) -> None:
    pipeline = pipeline_around(None)
    transform = DepthTransform(size=(16, 24), crop_scale=(0.5, 1.0))
    for name in ("one", "two"):
        fill(tmp_path / name, pipeline, transform=transform, variants=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    shards = LatentShards(tmp_path / "one")
    assert len(shards) == 14
    names = [shards.name_of(index) for index in range(14)]
    assert names[7:] == [f"{name}#1" for name in names[:7]]
    assert not torch.equal(shards[0]["image_latent"], shards[7]["image_latent"])


def test_two_processes_and_workers_write_what_one_writes(tmp_path: Path) -> None:
    pipeline = pipeline_around(None)
    fill(tmp_path / "one", pipeline)
    for process in range(2):
        fill(tmp_path / "two", pipeline, process=process, processes=2, num_workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_kill_9_in_the_middle_loses_nothing(tmp_path: Path) -> None:
    """Killed once while it writes each of three shards; what was complete stays as it is, and the end is the same."""
    pipeline = pipeline_around(None)
    fill(tmp_path / "whole", pipeline, Scenes(9))
    folder = tmp_path / "cache"
    context = multiprocessing.get_context("fork")
    kept: dict[str, tuple[bytes, float]] = {}
    for number in (1, 2):
        process = context.Process(target=fill, args=(folder, pipeline, Scenes(9, seconds=0.3)))
        process.start()
        assert process.pid is not None
        end = time.monotonic() + 120
        while len(list(folder.glob("00-*/shard.json"))) < number and time.monotonic() < end:
            time.sleep(0.01)
        assert process.is_alive(), "it was to be killed in the middle"
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        for path, (content, modified) in kept.items():
            assert (folder / path).read_bytes() == content
            assert (folder / path).stat().st_mtime == modified
        shards = list(folder.glob("00-*"))
        assert number <= len(shards) < 3
        assert all(damage_of(shard) is None for shard in shards)
        kept = {
            str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime)
            for shard in shards
            for path in shard.iterdir()
        }
    report = fill(folder, pipeline, Scenes(9))
    assert report.num_kept >= 6
    assert contents(folder) == contents(tmp_path / "whole")


def test_a_damaged_shard_is_made_anew(tmp_path: Path, capsys) -> None:
    pipeline = pipeline_around(None)
    fill(tmp_path / "cache", pipeline)
    before = contents(tmp_path / "cache")
    path = tmp_path / "cache" / "00-0000003" / "depth_latent.npy"
    array = np.load(path)
    array[0, 0, 0, 0] += 1
    np.save(path, array)
    assert fill(tmp_path / "cache", pipeline, check=False).num_made == 0
    report = fill(tmp_path / "cache", pipeline)
    assert (report.num_made, report.num_kept) == (3, 4)
    assert "depth_latent.npy is not what was written; made anew" in capsys.readouterr().out
    assert contents(tmp_path / "cache") == before


def test_other_settings_and_other_models_are_refused(tmp_path: Path, glpn: str) -> None:
    pipeline = pipeline_around(None)
    fill(tmp_path / "cache", pipeline)
    with pytest.raises(ValueError, match="transform was"):
        fill(tmp_path / "cache", pipeline, transform=DepthTransform(flip=0.0))
    with pytest.raises(ValueError, match="dtype was 'float32', now 'bfloat16'"):
        fill(tmp_path / "cache", pipeline, encoder=LatentEncoder(pipeline, dtype=torch.bfloat16))
    pipeline.vae.encoder.conv_in.weight.data += 1
    with pytest.raises(ValueError, match="encoder was"):
        fill(tmp_path / "cache", pipeline)
    with pytest.raises(ValueError, match="vae was"):
        check_cache(tmp_path / "cache", LatentEncoder(pipeline))
    around = pipeline_around(glpn)
    task = DepthTask(around, LatentShards(tmp_path / "cache"), ObjectiveConfig())
    with pytest.raises(ValueError, match="without a baseline"):
        task.encoder.encode(task.collate([task.dataset[0]])[0][1])


def test_mixed_sizes_are_refused_with_advice(tmp_path: Path) -> None:
    class Mixed(Scenes):
        def read(self, index: int) -> DepthSample:
            sample = super().read(index)
            if index == 1:
                sample.update({key: sample[key][..., :32] for key in ("image", "depth", "valid")})  # type: ignore[misc]
            return sample

    with pytest.raises(ValueError, match=r"give transform\.size"):
        fill(tmp_path / "cache", pipeline_around(None), Mixed())


def test_the_truth_in_a_baselines_units_leaves_over_what_no_line_mends() -> None:
    noise = torch.Generator().manual_seed(0)
    truth = torch.rand(2, 1, 8, 8, generator=noise) + 1
    valid = torch.rand(2, 1, 8, 8, generator=noise) > 0.2
    torch.testing.assert_close(fitted_truth(3 * truth - 7, truth, valid), 3 * truth - 7)
    maps = truth + 0.2 * torch.rand(2, 1, 8, 8, generator=noise)
    left = fitted_truth(maps, truth, valid) - maps
    for b in range(2):
        own, rest = maps[b][valid[b]].double(), left[b][valid[b]].double()
        assert abs(float(rest.mean())) < 1e-5
        assert abs(float((rest * (own - own.mean())).mean())) < 1e-5
    useless = torch.rand(2, 1, 8, 8, generator=noise)
    assert fitted_truth(useless, truth, valid).std() < 4 * useless.std()


def test_the_command_caches_and_training_takes_the_latents(tmp_path: Path, glpn: str, capsys) -> None:
    """`marigold-uq cache`, then `train_depth.py`, both with --baseline; the model is whole and metric."""
    config = write_everything(tmp_path)
    start = [f"--start.{key}={value}" for key, value in config["start"].items()]
    data = json.dumps([config["data"][0]])
    output = tmp_path / "cache"
    arguments = [*start, "--baseline", glpn, f"--data={data}", "--device", "cpu", "--num_workers", "0"]
    assert main(["cache", "-o", str(output), *arguments]) == 0
    found = capsys.readouterr().out
    assert "6 samples made" in found
    assert main(["cache", "-o", str(output), *arguments]) == 0
    assert "0 samples made, 6 were there" in capsys.readouterr().out
    latents = json.dumps([{"name": "latents", "root": str(output / "00-hypersim"), "probability": 1.0}])
    settings = [f"--training.{key}={value}" for key, value in config["training"].items() if key != "optimizer"]
    train = load_script("train/train_depth.py").main
    assert train([*start, "--baseline", glpn, f"--data={latents}", *settings]) == 0
    pipeline = MarigoldUQDepthPipeline.from_pretrained(tmp_path / "run" / "model")
    assert pipeline.baseline.config.name == glpn
    assert 0 < pipeline.baseline.config.residual_scale != 1.0
    assert not pipeline.config.scale_invariant
    further = [*settings, "--training.max_steps", "2", "--training.output", str(tmp_path / "further")]
    other = ["--start.kind=pipeline", f"--start.name={tmp_path / 'run' / 'model'}"]
    other.append(f"--data={json.dumps(config['data'])}")
    assert train([*start, *other, "--baseline", glpn, *further]) == 0
    again = MarigoldUQDepthPipeline.from_pretrained(tmp_path / "further" / "model").baseline.config.residual_scale
    assert again == pipeline.baseline.config.residual_scale  # the units of what has been learnt, whatever the data
    output_maps = pipeline(np.random.default_rng(0).random((32, 48, 3)), uncertainty="trajectory", ensemble_size=3)
    assert output_maps.prediction.max() > 1.0
    assert output_maps.uncertainty.mean() > 0  # a random decoder saturates here and there
