"""Mixing by probability: proportions, and position i as a function of (seed, epoch, i) alone."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from support.depth_files import write_scannet
from torch.utils.data import DataLoader, Dataset, Subset

from marigold_uq.depth.data import (
    SPECS,
    AugmentedDataset,
    DepthSample,
    DepthTransform,
    ListedDepth,
    MixtureDataset,
    PhotometricTransform,
)


class Numbered(Dataset[DepthSample]):
    """Samples whose depth is their number."""

    def __init__(self, name: str, length: int) -> None:
        self.name, self.length = name, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> DepthSample:
        depth = torch.full((1, 4, 4), float(index))
        return DepthSample(
            image=torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(index)),
            depth=depth,
            valid=torch.ones_like(depth, dtype=torch.bool),
            name=f"{self.name}{index}",
        )


def mixture(length: int = 1000, seed: int = 0, block_size: int = 1) -> MixtureDataset:
    return MixtureDataset([Numbered("a", 50), Numbered("b", 7)], [0.9, 0.1], length, seed, block_size=block_size)


def names(dataset: MixtureDataset) -> list[str]:
    return [sample["name"] for sample in dataset]


def test_proportions_follow_the_probabilities() -> None:
    dataset = mixture(length=20_000)
    share = sum(dataset.source_of(i)[0] == 0 for i in range(20_000)) / 20_000
    assert abs(share - 0.9) < 4 * (0.9 * 0.1 / 20_000) ** 0.5  # four standard errors of a binomial share


def test_no_sample_comes_twice_before_all_others_of_its_set() -> None:
    for prefix, size in (("a", 50), ("b", 7)):
        drawn = [name for name in names(mixture()) if name.startswith(prefix)]
        for start in range(0, len(drawn) - size, size):
            assert len(set(drawn[start : start + size])) == size
    counts = Counter(names(mixture()))
    assert max(counts[f"a{i}"] for i in range(50)) - min(counts[f"a{i}"] for i in range(50)) <= 1


def test_position_i_depends_on_seed_epoch_and_i_only() -> None:
    reference = names(mixture())
    assert names(mixture()) == reference
    assert names(mixture(length=137)) == reference[:137]
    backwards = mixture()
    assert [backwards[i]["name"] for i in reversed(range(1000))] == reference[::-1]
    assert names(mixture(seed=1)) != reference
    other_epoch = mixture()
    other_epoch.set_epoch(3)
    in_third_epoch = names(other_epoch)
    assert in_third_epoch != reference
    other_epoch.set_epoch(0)
    assert names(other_epoch) == reference
    resumed = mixture()
    resumed.set_epoch(3)
    assert [sample["name"] for sample in Subset(resumed, range(500, 1000))] == in_third_epoch[500:]


def test_a_block_comes_from_one_set_so_that_batches_stack() -> None:
    dataset = mixture(length=1003, block_size=4)
    parts = [dataset.source_of(i)[0] for i in range(1003)]
    assert all(len(set(parts[i : i + 4])) == 1 for i in range(0, 1003, 4))
    assert set(parts) == {0, 1}  # 251 blocks: .9**251 is 3e-12


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_give_the_same_samples_also_when_they_outlive_an_epoch(workers: int) -> None:
    transform = DepthTransform(crop_scale=(0.5, 1.0), photometric=PhotometricTransform(brightness=0.3, noise=0.1))
    expected = []
    plain = AugmentedDataset(mixture(length=20), transform, seed=5)
    for epoch in range(2):
        plain.set_epoch(epoch)
        expected.append([plain[i] for i in range(20)])
    dataset = AugmentedDataset(mixture(length=20), transform, seed=5)
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    for epoch in range(2):
        dataset.set_epoch(epoch)
        for got, wanted in zip(loader, expected[epoch], strict=True):
            assert got["name"] == wanted["name"]
            assert torch.equal(got["image"], wanted["image"])
            assert torch.equal(got["depth"], wanted["depth"])
    assert any(not torch.equal(a["image"], b["image"]) for a, b in zip(*expected, strict=True))


def test_problems_of_all_parts_are_collected(tmp_path: Path) -> None:
    parts = []
    for name in ("first", "second"):
        write_scannet(tmp_path / name, 2)
        (tmp_path / name / "scene0406_02/depth/000001.png").unlink()
        parts.append(ListedDepth(SPECS["scannet"], tmp_path / name, on_error="skip"))
    mixed = MixtureDataset(parts, [0.5, 0.5], 20, seed=0)
    dataset = AugmentedDataset(mixed, DepthTransform(), seed=0)
    assert dataset.on_error == "raise"
    assert {sample["name"] for sample in dataset} == {"scene0406_02/color/000000"}
    assert [name for name, _ in dataset.problems] == ["scene0406_02/color/000001"] * 2
    assert dataset.name_of(0).startswith("scene0406_02/color/")


@pytest.mark.parametrize(
    ("probabilities", "message"),
    [([0.9], "one probability per data set"), ([0.9, 0.2], "sum to 1"), ([1.5, -0.5], "non-negative")],
)
def test_wrong_probabilities_are_refused(probabilities: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixtureDataset([Numbered("a", 1), Numbered("b", 1)], probabilities, 10, 0)


def test_empty_parts_and_wrong_indices_are_refused() -> None:
    with pytest.raises(ValueError, match="Numbered is empty"):
        MixtureDataset([Numbered("a", 0)], [1.0], 10, 0)
    with pytest.raises(ValueError, match="seed=-1"):
        MixtureDataset([Numbered("a", 1)], [1.0], 10, -1)
    with pytest.raises(IndexError, match="index 10 of a mixture of length 10"):
        MixtureDataset([Numbered("a", 1)], [1.0], 10, 0)[10]
