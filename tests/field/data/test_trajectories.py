"""Trajectories: splits, statistics, and the samples made of them."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from marigold_uq.field.data import (
    FieldDataError,
    RandomTransitions,
    Trajectories,
    Transitions,
    statistics_of,
)
from marigold_uq.field.encoding import fit_encoder
from marigold_uq.models.field_grid import FieldStatistics, require_grid


def numbered(count: int = 20, num_states: int = 6, num_points: int = 4) -> Trajectories:
    """State s of trajectory i is 100 i + s everywhere."""
    values = 100.0 * torch.arange(count)[:, None, None] + torch.arange(num_states)[:, None]
    return Trajectories(
        values.expand(-1, -1, num_points).clone(), np.arange(float(num_points)), np.arange(num_states) / 2
    )


def varying(count: int) -> Trajectories:
    states = torch.randn(count, 5, 16, generator=torch.Generator().manual_seed(0)) * 3 + 1
    return Trajectories(states, np.arange(16.0), np.arange(5.0))


def owners(part: Trajectories) -> set[int]:
    return set((part.states[:, 0, 0] / 100).int().tolist())


def test_splits_share_no_trajectory_and_lose_none() -> None:
    split = numbered(100).split(seed=1)
    assert [len(part) for part in split] == [81, 9, 10]  # 90/10, and the 90 again 90/10
    assert set.union(*map(owners, split)) == set(range(100))
    assert owners(split.test) == owners(numbered(100).split(seed=1).test)
    assert owners(split.test) != owners(numbered(100).split(seed=2).test)


def test_a_part_that_would_be_empty_is_an_error_unless_it_was_not_asked_for() -> None:
    with pytest.raises(FieldDataError, match="3 trajectories leave none for validation, test"):
        numbered(3).split()
    assert len(numbered(3).split(test=0, validation=0).train) == 3


def test_statistics_are_those_of_the_training_part() -> None:
    split = varying(50).split()
    statistics = statistics_of(split.train)["u"]
    states = split.train.states.double().numpy()
    assert statistics.mean == pytest.approx(states.mean())
    assert statistics.std == pytest.approx(states.std(ddof=1))
    assert statistics.increment_mean == pytest.approx(np.diff(states, axis=1).mean())
    assert statistics.increment_std == pytest.approx(np.diff(states, axis=1).std(ddof=1))
    assert FieldStatistics(**statistics.to_dict()) == statistics
    split.test.states.mul_(1000)
    assert statistics_of(split.train)["u"] == statistics


def test_normalisation_has_unit_variance_and_is_undone() -> None:
    trajectories = varying(8)
    states, encoder = trajectories.states.unsqueeze(2), fit_encoder(trajectories)
    last, target = states[:, :-1].flatten(0, 1), states[:, 1:].flatten(0, 1)
    normalized = encoder.encode_target(last, target)
    assert float(normalized.std()) == pytest.approx(1, abs=1e-5)
    assert float(encoder.statistics["u"].normalize_state(states).mean()) == pytest.approx(0, abs=1e-5)
    torch.testing.assert_close(encoder.decode(last, normalized), target)


def test_constant_states_cannot_be_scaled() -> None:
    constant = Trajectories(torch.ones(2, 3, 4), np.arange(4.0), np.arange(3.0))
    with pytest.raises(FieldDataError, match="do not vary"):
        statistics_of(constant)


def test_transitions_are_all_consecutive_triples() -> None:
    dataset = Transitions(numbered(3))
    assert len(dataset) == 3 * 4
    sample = dataset[5]  # second trajectory, its second transition
    assert sample["name"] == "sequence 1, state 3"
    assert sample["time"] == 1.0  # of the last state of the history
    assert sample["history"][:, 0, 0].tolist() == [101, 102]
    assert sample["future"].shape == (1, 1, 4)
    assert sample["future"][0, 0, 0] == 103
    with pytest.raises(IndexError):
        dataset[12]
    batch = next(iter(DataLoader(dataset, batch_size=4)))
    assert batch["history"].shape == (4, 2, 1, 4)


def test_longer_windows_hold_the_states_that_follow() -> None:
    dataset = Transitions(numbered(3), num_leads=3, stride=2)
    assert len(dataset) == 3  # states 2..4, and 5 states do not leave room for a second
    assert dataset[2]["future"][:, 0, 0].tolist() == [202, 203, 204]


def test_a_sample_can_be_changed_without_changing_the_data() -> None:
    dataset = Transitions(numbered(2))
    dataset[0]["history"].zero_()
    assert dataset[0]["history"][1, 0, 0] == 1


def _place(sample: dict[str, Any]) -> tuple[int, int]:
    """Trajectory and step, from the numbers in the target."""
    trajectory, step = divmod(int(sample["future"][0, 0, 0]), 100)
    return trajectory, step


def test_random_transitions_visit_each_trajectory_once_per_epoch_at_other_times() -> None:
    dataset = RandomTransitions(numbered(40), seed=0)
    epochs = []
    for epoch in (0, 1, 0):
        dataset.set_epoch(epoch)
        epochs.append([_place(dataset[i]) for i in range(len(dataset))])
    assert epochs[0] == epochs[2]
    assert [t for t, _ in epochs[0]] != [t for t, _ in epochs[1]]
    assert sorted(t for t, _ in epochs[0]) == list(range(40))
    assert dict(epochs[0]) != dict(epochs[1])
    assert {step for _, step in epochs[0] + epochs[1]} == {2, 3, 4, 5}


def test_too_few_states_for_a_transition_are_an_error() -> None:
    with pytest.raises(FieldDataError, match=r"num_history=2 .* 2 states there are"):
        Transitions(numbered(3, num_states=2))


@pytest.mark.parametrize(
    ("x", "t", "message"),
    [
        (np.array([0, 1, 2, 4.0]), np.arange(3.0), "x must rise in equal steps"),
        (np.arange(4.0), np.array([0, 2, 1.0]), "t must rise in equal steps"),
        (np.arange(4.0)[::-1], np.arange(3.0), "x must rise"),
        (np.arange(5.0), np.arange(3.0), r"\('N', 3, 5\) by their coordinates; got \(2, 3, 4\)"),
        (np.array([0, 1, np.nan, 3]), np.arange(3.0), "x holds NaN"),
    ],
)
def test_wrong_coordinates_are_named(x: np.ndarray, t: np.ndarray, message: str) -> None:
    with pytest.raises(FieldDataError, match=message):
        Trajectories(torch.zeros(2, 3, 4), x, t)


def test_another_grid_is_named() -> None:
    trajectories = numbered()
    require_grid("file", trajectories.coordinates, {"x": np.arange(4.0)})
    with pytest.raises(FieldDataError, match="4 points from 0 to 3, but the grid asked for has 8 from 0 to 7"):
        require_grid("file", trajectories.coordinates, {"x": np.arange(8.0)})
