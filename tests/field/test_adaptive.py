"""Adaptive intervals along rollouts: the promise holds for any sequence, misses count as issued, drift is followed."""

import pytest
import torch

from marigold_uq.calibration import AdaptiveConformal
from marigold_uq.field.adaptive import RolloutIntervals

LEADS = 3


def run(intervals: RolloutIntervals, truths: torch.Tensor, std: float = 1.0) -> list[torch.Tensor]:
    """Forecasts of mean 0 from every state; the misses of every lead time, (T - lead + 1, ...)."""
    found: list[list[torch.Tensor]] = [[] for _ in range(LEADS)]
    for truth in truths:
        mean = torch.zeros(LEADS, *truth.shape)
        intervals.issue(mean, torch.full_like(mean, std))
        for lead, missed in intervals.observe(truth).items():
            found[lead - 1].append(missed)
    return [torch.stack(one).double() for one in found]


@pytest.mark.parametrize("kind", ["growing", "jumping", "constant"])
def test_the_share_of_misses_obeys_its_bound_at_every_lead_time_for_any_sequence(kind: str) -> None:
    number, step, coverage = 400, 0.05, 0.8
    steps = torch.arange(1.0, number + 1)
    truths = {
        "growing": 1.02**steps,  # no past score is ever large enough
        "jumping": torch.where((steps // 37) % 2 == 0, 0.01, 30.0),
        "constant": torch.ones(number),
    }[kind]
    misses = run(RolloutIntervals(coverage, LEADS, step=step), truths[:, None])
    for lead, missed in enumerate(misses, 1):
        assert len(missed) == number - lead + 1
        bound = (coverage + lead * step) / (step * len(missed))
        assert abs(float(missed.mean()) - (1 - coverage)) <= bound


def test_a_miss_is_counted_against_the_width_that_was_issued() -> None:
    """The forecast of lead 2 was issued before a huge score came: it misses, though today's width would hold it."""
    scores = torch.full((99, 2, 1), 1.0)
    intervals = RolloutIntervals(0.9, 2, scores=scores, step=0.5, window=3)
    ends = intervals.issue(torch.zeros(2, 1), torch.ones(2, 1))
    torch.testing.assert_close(ends[1], torch.tensor([[float("inf")], [float("inf")]]))  # 3 scores promise no 90 %
    narrow = RolloutIntervals(0.5, 2, scores=scores, step=0.5, window=3)
    first = narrow.issue(torch.zeros(2, 1), torch.ones(2, 1))
    torch.testing.assert_close(first[1], torch.ones(2, 1))
    assert not narrow.observe(torch.tensor([0.5]))[1].any()
    narrow.leads[1].update(torch.tensor([50.0]))  # widens lead 2 for forecasts still to come
    assert float(narrow.leads[1].scale()) > 2.0
    assert narrow.observe(torch.tensor([2.0]))[2].all()


def test_one_lead_time_is_the_known_method() -> None:
    generator = torch.Generator().manual_seed(0)
    truths, held_out = torch.randn(80, 5, generator=generator), torch.rand(50, 5, generator=generator)
    one, known = RolloutIntervals(0.9, 1, scores=held_out[:, None]), AdaptiveConformal(0.9, scores=held_out)
    for truth in truths:
        ends = one.issue(torch.zeros(1, 5), torch.ones(1, 5))
        assert torch.equal(ends[:, 0], known.interval(torch.zeros(5), torch.ones(5)))
        assert torch.equal(one.observe(truth)[1], known.update(truth.abs()))


def test_intervals_follow_a_spread_that_doubles_where_fixed_ones_do_not() -> None:
    generator = torch.Generator().manual_seed(1)
    held_out = torch.randn(300, LEADS, 40, generator=generator).abs()
    drifting = 2 * torch.randn(400, 40, generator=generator)
    adaptive = run(RolloutIntervals(0.9, LEADS, step=0.02, window=200, scores=held_out), drifting)
    fixed = held_out.flatten(2).quantile(0.9, 0)  # (L, 40)
    for lead, missed in enumerate(adaptive):
        stayed = (drifting.abs() > fixed[lead]).double().mean()
        assert float(stayed) > 0.35  # P(|2 z| > 1.645) = .41
        assert abs(float(missed[200:].mean()) - 0.1) < 0.03  # bound .9 + .06 over .02 * 398: .12; usual error is less


def test_forecasts_and_scores_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="num_leads"):
        RolloutIntervals(0.9, 2, scores=torch.rand(10, 3))
    with pytest.raises(ValueError, match="mean and std"):
        RolloutIntervals(0.9, 2).issue(torch.zeros(3), torch.ones(3))
