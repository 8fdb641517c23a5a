"""The bandwidth that follows the residual: only past batches, masks, save and resume."""

import io
import math

import pytest
import torch
from support.laws import generator, random_law, random_value

from marigold_uq.scores import RunningResidualScale, kernel_score


def test_before_any_batch_the_scale_is_that_of_standard_noise() -> None:
    scale = RunningResidualScale(1000)
    assert torch.equal(scale(torch.tensor([0, 500, 999])), torch.ones(3))


def test_the_scale_comes_from_past_batches_only() -> None:
    """Reading does not learn, and learning changes only what is read afterwards."""
    scale, timesteps = RunningResidualScale(1000, momentum=0.5), torch.tensor([10])
    before = scale(timesteps)
    assert torch.equal(before, scale(timesteps))
    scale.update(timesteps, torch.full((1, 4), 3.0))
    assert float(before) == 1.0
    assert float(scale(timesteps)) == pytest.approx(math.sqrt(0.5 * 1 + 0.5 * 9))


def test_the_mean_square_is_a_running_average_with_the_given_momentum() -> None:
    scale, timesteps, expected = RunningResidualScale(1000, momentum=0.9), torch.tensor([10]), 1.0
    for size in (0.5, 2.0, 4.0):
        scale.update(timesteps, torch.full((1, 3, 2), size))
        expected = 0.9 * expected + 0.1 * size**2
    assert float(scale(timesteps)) == pytest.approx(math.sqrt(expected))


def test_it_converges_to_the_rms_of_the_residual_at_each_timestep() -> None:
    scale, rng = RunningResidualScale(1000, num_bins=10, momentum=0.9), generator()
    timesteps = torch.arange(50, 1000, 100)
    truth = torch.linspace(0.1, 2.0, 10)
    for _ in range(100):
        scale.update(timesteps, truth[:, None] * torch.randn(10, 500, generator=rng))
    # a running mean over about 19 batches of 500 squares: relative standard error sqrt(2 / 9500) / 2 = 0.7 %
    torch.testing.assert_close(scale(timesteps), truth, rtol=5 * 0.007, atol=0.0)


def test_samples_of_one_bin_are_learnt_one_after_the_other_and_other_bins_stay() -> None:
    scale = RunningResidualScale(1000, num_bins=10, momentum=0.5)
    scale.update(torch.tensor([0, 99, 900]), torch.tensor([[2.0], [4.0], [3.0]]))  # ten bins of a hundred timesteps
    expected = torch.ones(10)
    expected[0] = 0.5 * (0.5 * 1 + 0.5 * 4) + 0.5 * 16
    expected[9] = 0.5 * 1 + 0.5 * 9
    torch.testing.assert_close(scale.mean_square, expected)


def test_first_and_last_timestep_have_a_bin_even_when_steps_are_few() -> None:
    for steps in (3, 20, 50, 1000):
        assert RunningResidualScale(steps)(torch.arange(steps)).shape == (steps,)


@pytest.mark.parametrize("hidden", [math.nan, math.inf, 1e30])
def test_masked_residuals_do_not_count_whatever_they_are(hidden: float) -> None:
    scale = RunningResidualScale(1000, momentum=0.5)
    residual = torch.tensor([[[3.0, hidden], [hidden, 3.0]]])
    scale.update(torch.tensor([0]), residual, torch.tensor([[[True, False], [False, True]]]))
    assert float(scale.mean_square[0]) == pytest.approx(0.5 + 0.5 * 9)


def test_masks_broadcast_over_channels() -> None:
    scale = RunningResidualScale(1000, momentum=0.5)
    scale.update(torch.tensor([0]), torch.tensor([[[3.0, 7.0], [3.0, 7.0]]]), torch.tensor([[[True, False]]]))
    assert float(scale.mean_square[0]) == pytest.approx(0.5 + 0.5 * 9)


def test_a_sample_without_valid_coordinates_teaches_nothing() -> None:
    scale = RunningResidualScale(1000)
    scale.update(torch.tensor([0]), torch.full((1, 4), 9.0), torch.zeros(1, 4, dtype=torch.bool))
    scale.update(torch.tensor([0]), torch.full((1, 4), math.nan))
    assert torch.equal(scale.mean_square, torch.ones(20))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_residuals_of_any_precision_are_learnt_in_that_of_the_buffer(dtype: torch.dtype) -> None:
    scale = RunningResidualScale(1000, momentum=0.5)
    scale.update(torch.tensor([0]), torch.full((1, 1001), 3.0, dtype=dtype))
    assert scale.mean_square.dtype == torch.float32
    assert float(scale.mean_square[0]) == pytest.approx(5.0)


def test_learning_records_no_gradient() -> None:
    scale, residual = RunningResidualScale(1000), torch.ones(1, 4, requires_grad=True)
    scale.update(torch.tensor([0]), 2 * residual)
    assert not scale.mean_square.requires_grad
    assert not scale(torch.tensor([0])).requires_grad


def test_it_is_saved_and_resumed() -> None:
    scale = RunningResidualScale(1000)
    scale.update(torch.tensor([5, 600]), torch.tensor([[4.0], [0.2]]))
    file = io.BytesIO()
    torch.save(scale.state_dict(), file)
    file.seek(0)
    resumed = RunningResidualScale(1000)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(resumed.mean_square, scale.mean_square)
    for one in (scale, resumed):
        one.update(torch.tensor([5]), torch.tensor([[1.5]]))
    assert torch.equal(resumed(torch.arange(1000)), scale(torch.arange(1000)))


def test_it_is_a_bandwidth_per_dimension_of_the_kernel_score() -> None:
    scale, law = RunningResidualScale(1000, momentum=0.0), random_law("low_rank", (2, 5))
    scale.update(torch.tensor([0, 999]), torch.tensor([[0.5], [3.0]]))
    value, timesteps = random_value(law), torch.tensor([999, 0])
    scores = kernel_score(law, value, bandwidth=scale(timesteps))
    for b, bandwidth in enumerate((3.0, 0.5)):
        torch.testing.assert_close(scores[b], kernel_score(law, value, bandwidth=bandwidth)[b])
