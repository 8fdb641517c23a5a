"""Novelty: what its signs react to, how often it is wrong in distribution, and that it is kept with a model."""

import json
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from marigold_uq.calibration import Calibration
from marigold_uq.novelty import Novelty, NoveltyReference, novelty_features


def samples(count: int, seed: int, *, width: float = 1.0, shift: float = 0.0, between: float = 0.1) -> Tensor:
    """Features of noisy maps (N, 2, 4, 5), of which the arguments change one thing."""
    g = torch.Generator().manual_seed(seed)
    mean = torch.randn(count, 2, 4, 5, generator=g) + shift
    std = width * (0.2 * torch.randn(count, 2, 1, 1, generator=g)).exp() * torch.ones(4, 5)
    spread = between * (0.2 * torch.randn(count, 2, 4, 5, generator=g)).exp()
    return novelty_features(mean, std, spread)


def test_features_are_the_stated_statistics_of_a_map() -> None:
    mean = torch.tensor([[[[0.0, 2.0], [4.0, 2.0]]]])
    std = torch.tensor([[[[1.0, math.e], [math.e, 1.0]]]])
    found = novelty_features(mean, std, torch.full_like(mean, 3.0))[0]
    rms = math.sqrt((1 + math.e**2) / 2)
    steps = math.sqrt((2**2 + 2**2 + 4**2 + 0**2) / 4)  # two neighbours down, two across
    expected = [math.log(rms), math.log(3), 2, math.log(math.sqrt(2)), math.log(steps), 0.5, 0.5]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_features_of_a_row_are_its_mean_and_log_standard_deviation() -> None:
    mean, std, between = torch.tensor([[1.0, -2.0]]), torch.tensor([[1.0, math.e**2]]), torch.tensor([[math.e, 1.0]])
    found = novelty_features(mean, std, between)[0]
    torch.testing.assert_close(found, torch.tensor([1.0, 0.5, 1.0, -2.0, 0.0, 2.0], dtype=torch.float64))


def test_one_flat_pixel_and_no_spread_at_all_stay_finite() -> None:
    zeros = torch.zeros(3, 1, 1, 1)
    assert novelty_features(zeros, zeros, zeros).isfinite().all()


@pytest.mark.parametrize("rate", [0.05, 0.2])
@pytest.mark.parametrize("count", [40, 61, 1200])
def test_the_false_alarm_rate_in_distribution_is_nominal(rate: float, count: int) -> None:
    """With n ranked samples it is floor(rate (n + 1)) / (n + 1), whatever the distribution; four standard errors."""
    alarms = []
    for seed in range(60):
        reference = NoveltyReference.fit(samples(count, seed), false_alarm_rate=rate)
        alarms.append(Novelty(samples(50, 10_000 + seed).numpy(), reference, {}).is_novel.mean())
    ranked = len(reference.ranked)
    assert ranked == min(count // 2, 499)
    expected = math.floor(rate * (ranked + 1) + 1e-9) / (ranked + 1)
    assert np.mean(alarms) == pytest.approx(expected, abs=4 * np.std(alarms) / math.sqrt(len(alarms)))


@pytest.mark.parametrize(
    ("change", "sign"), [({"width": 3.0}, "head"), ({"between": 0.4}, "members"), ({"shift": 2.0}, "distance")]
)
def test_a_shift_is_flagged_by_its_own_sign(change: dict[str, float], sign: str) -> None:
    reference = NoveltyReference.fit(samples(200, 0))
    novel = Novelty(samples(100, 1, **change).numpy(), reference, {})
    assert novel.is_novel.mean() > 0.95
    assert novel.signs[sign].mean() > 5
    quiet = {"head", "members"} - {sign}
    assert all(abs(novel.signs[name].mean()) < 1 for name in quiet)
    np.testing.assert_array_equal(novel.score, np.stack(list(novel.signs.values())).max(0))


def test_units_do_not_matter() -> None:
    """Of a mean with an offset too: its place is compared in held-out standard deviations."""
    g = torch.Generator().manual_seed(0)
    maps = [torch.randn(80, 1, 6, generator=g).double(), *torch.rand(2, 80, 1, 6, generator=g).double()]
    new = [part[:7] * 1.5 for part in maps]
    scores = []
    for unit, offset in ((1.0, 0.0), (1000.0, 50.0)):
        convert = lambda mean, std, between, u=unit, o=offset: novelty_features(u * mean + o, u * std, u * between)  # noqa: E731
        scores.append(NoveltyReference.fit(convert(*maps)).score(convert(*new)))
    np.testing.assert_allclose(*scores, rtol=1e-5)


def test_correlated_features_are_no_distance() -> None:
    """Mahalanobis: along the direction in which held-out samples vary together a sample is less unusual than across."""
    g = torch.Generator().manual_seed(0)
    first = torch.randn(400, generator=g)
    law = torch.stack([first, first + 0.1 * torch.randn(400, generator=g)], 1)
    reference = NoveltyReference.fit(torch.cat([torch.randn(400, 2, generator=g), law], 1))
    along, across = torch.tensor([[0.0, 0, 1, 1], [0, 0, 1, -1]])
    signs = reference.signs(torch.stack([along, across]))["distance"]
    assert signs[0] < 1
    assert signs[1] > 5


def test_a_constant_feature_is_no_division_by_zero() -> None:
    features = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    features[:, 3] = 7.0
    assert np.isfinite(NoveltyReference.fit(features).score(features)).all()


def test_a_reference_survives_json_with_the_same_p_values() -> None:
    reference = NoveltyReference.fit(samples(90, 0), conditions={"ensemble_size": 4})
    record = Calibration(kappa=1.5, novelty=reference)
    again = Calibration.from_dict(json.loads(json.dumps(record.to_dict())))
    assert again == record
    np.testing.assert_array_equal(again.novelty.p_value(samples(50, 1)), reference.p_value(samples(50, 1)))  # type: ignore[union-attr]
    assert "novelty" not in Calibration().to_dict()


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"a false_alarm_rate of 0\.01 needs 198 samples; got 100"):
        NoveltyReference.fit(samples(100, 0), false_alarm_rate=0.01)
    with pytest.raises(ValueError, match=r"strictly between 0 and 1; got 5"):
        NoveltyReference.fit(samples(100, 0), false_alarm_rate=5)
    with pytest.raises(ValueError, match=r"fitted on 12 features; got 4"):
        NoveltyReference.fit(samples(40, 0)).score(np.zeros((2, 4)))
    with pytest.raises(ValueError, match=r"one shape \(N, C, \*space\)"):
        novelty_features(torch.zeros(2, 1), torch.zeros(2, 1), torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"run pipeline\.fit_novelty"):
        _ = Novelty(np.zeros((1, 4)), None, {}).p_value
    with pytest.raises(TypeError, match="novelty must be a NoveltyReference or None"):
        Calibration(novelty=0.5)  # type: ignore[arg-type]


def test_new_samples_in_distribution_are_as_far_as_held_out_ones_however_few_these_were() -> None:
    """By their own covariance the 30 samples that make it, in ten dimensions, would look nearer than any other."""
    found = [NoveltyReference.fit(samples(60, seed)).signs(samples(200, 1000 + seed)) for seed in range(20)]
    for sign in ("head", "members", "distance"):
        assert abs(np.mean([one[sign].mean() for one in found])) < 0.3
