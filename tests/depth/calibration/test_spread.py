"""What turns a map's own words into a standard deviation."""

import pytest
import torch

from marigold_uq.depth.calibration import SpreadRule, Stated
from marigold_uq.depth.evaluation import MeanConfidence, MeanStd, Members, PredictionError

POINT = torch.tensor([[1.0, 2.0], [3.0, -4.0]])


def test_each_base_is_what_it_says() -> None:
    stated = Stated.of(MeanStd(POINT, 0.5 * torch.ones(2, 2)))
    assert torch.equal(SpreadRule("stated").spread(stated), 0.5 * torch.ones(2, 2).double())
    plain = Stated.of(Members.of(POINT[None]))
    assert torch.equal(SpreadRule("depth").spread(plain), POINT.abs().double())
    assert torch.equal(SpreadRule("one").spread(plain), torch.ones(2, 2).double())
    assert float(SpreadRule("map").spread(plain)[0, 0]) == pytest.approx(float(POINT.double().std(correction=0)))


def test_members_state_their_deviation() -> None:
    samples = torch.stack([POINT, POINT + 1, POINT + 2])
    assert torch.allclose(SpreadRule("stated").spread(Stated.of(Members.of(samples))), torch.ones(2, 2).double())


def test_errors_are_learnt_to_fall_with_confidence_and_are_interpolated() -> None:
    """The truth is error = 1 / confidence; noise of a fifth does not break the order."""
    generator = torch.Generator().manual_seed(0)
    confidence = (1 + 9 * torch.rand(20_000, generator=generator)).double()
    error = (1 + 0.2 * torch.randn(20_000, generator=generator)) / confidence
    rule = SpreadRule.learnt("one", confidence, error)
    assert list(rule.errors) == sorted(rule.errors, reverse=True)
    for value in (2.0, 4.0, 8.0):
        stated = Stated(torch.zeros(1), confidence=torch.tensor([value]))
        assert float(rule.spread(stated)) == pytest.approx(1 / value, rel=0.06)
    beyond = [float(rule.spread(Stated(torch.zeros(1), confidence=torch.tensor([c])))) for c in (-5.0, 500.0)]
    assert beyond == [rule.errors[0], rule.errors[-1]]


def test_a_confidence_that_is_the_same_everywhere_teaches_a_constant() -> None:
    rule = SpreadRule.learnt("one", torch.ones(50).double(), torch.arange(50.0).double())
    assert rule == SpreadRule("one", (1.0,), (24.5,))


def test_no_confidence_promises_an_error_of_zero() -> None:
    rule = SpreadRule.learnt("one", torch.arange(40.0).double(), torch.cat([torch.ones(20), torch.zeros(20)]).double())
    assert min(rule.errors) == pytest.approx(1e-3)


def test_rules_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="base must be one of"):
        SpreadRule("metres")
    with pytest.raises(ValueError, match="confidences must rise"):
        SpreadRule("one", (2.0, 1.0), (1.0, 2.0))
    confident = Stated.of(MeanConfidence(POINT, POINT))
    with pytest.raises(PredictionError, match="for maps with 'std' beside the mean; got 'confidence'"):
        SpreadRule("stated").spread(confident)
