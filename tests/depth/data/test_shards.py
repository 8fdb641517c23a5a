"""Shards on disk: whole or absent, read in order, cut anywhere, also by workers."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from marigold_uq.depth.data.shards import LatentShards, RenderedScenes, write_shard


def write_scenes(root: Path, sizes: tuple[int, ...] = (3, 2)) -> list[str]:
    """Scenes whose depth is their number, in shards of these sizes; their names."""
    names = [f"scene_{i}" for i in range(sum(sizes))]
    first = 0
    for number, size in enumerate(sizes):
        rows = np.arange(first, first + size)
        arrays = {
            "image": np.broadcast_to(rows[:, None, None, None], (size, 3, 4, 6)).astype(np.uint8),
            "depth": np.broadcast_to(rows[:, None, None, None] + 0.5, (size, 1, 4, 6)).astype(np.float16),
            "valid": np.ones((size, 1, 4, 6), bool),
        }
        write_shard(root / f"shard_{number}", arrays, names[first : first + size])
        first += size
    return names


@pytest.mark.parametrize(("start", "length"), [(0, None), (2, None), (1, 3), (4, 1)])
def test_scenes_come_in_order_across_shards(tmp_path: Path, start: int, length: int | None) -> None:
    names = write_scenes(tmp_path)
    scenes = RenderedScenes(tmp_path, start=start, length=length)
    stop = len(names) if length is None else start + length
    assert [scenes.name_of(i) for i in range(len(scenes))] == names[start:stop]
    for i, number in enumerate(range(start, stop)):
        sample = scenes.read(i)
        assert (sample["name"], sample["image"].dtype, sample["depth"].dtype) == (
            names[number],
            torch.float32,
            torch.float32,
        )
        torch.testing.assert_close(sample["image"], torch.full((3, 4, 6), number / 255))
        assert bool((sample["depth"] == number + 0.5).all())
        assert bool(sample["valid"].all())


@pytest.mark.parametrize(("start", "length"), [(5, None), (-1, None), (0, 6), (3, 3)])
def test_samples_that_are_not_there_are_refused(tmp_path: Path, start: int, length: int | None) -> None:
    write_scenes(tmp_path)
    with pytest.raises(ValueError, match="has 5 samples; cannot take"):
        RenderedScenes(tmp_path, start=start, length=length)


def test_an_empty_folder_and_an_index_beyond_the_end_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no shards below"):
        LatentShards(tmp_path)
    write_scenes(tmp_path)
    with pytest.raises(IndexError, match="index 5 of 5 samples"):
        LatentShards(tmp_path)[5]


def test_a_shard_of_unequal_arrays_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="arrays of one length"):
        write_shard(tmp_path / "shard", {"a": np.zeros(2), "b": np.zeros(3)}, ["x", "y"])
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_no_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match="the disk is full"):
        write_shard(tmp_path / "shard", {"a": np.zeros(2)}, ["x", "y"])
    assert list(tmp_path.iterdir()) == []


def test_a_worker_opens_the_files_itself(tmp_path: Path) -> None:
    write_scenes(tmp_path)
    shards = LatentShards(tmp_path)
    expected = shards[4]
    assert shards._arrays
    copy = pickle.loads(pickle.dumps(shards))
    assert not copy._arrays
    assert copy[4]["name"] == expected["name"]
    assert torch.equal(copy[4]["depth"], expected["depth"])


def test_whole_shards_come_with_their_names(tmp_path: Path) -> None:
    names = write_scenes(tmp_path)
    found = list(LatentShards(tmp_path).shards())
    assert [folder.name for folder, _, _ in found] == ["shard_0", "shard_1"]
    assert [len(arrays["depth"]) for _, arrays, _ in found] == [3, 2]
    assert [name for _, _, some in found for name in some] == names
