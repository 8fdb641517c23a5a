"""The reducer: weighted means, standard errors and ratios, the same over one and two processes."""

import json
import math
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from marigold_uq import metrics
from marigold_uq.metrics import DerivedQuantity, MeanAccumulator

NUM_SAMPLES = 11


def statistics(num_samples: int = NUM_SAMPLES) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Statistics, mask and weights (N, 4, 5) in float64; masked coordinates hold NaN."""
    rng = torch.Generator().manual_seed(0)
    mask = torch.rand(num_samples, 4, 5, generator=rng) > 0.4
    weight = torch.rand(4, 1, generator=rng, dtype=torch.float64)
    names = ("squared_error", "predicted_squared_error", "crps")
    values = {n: torch.rand(num_samples, 4, 5, generator=rng, dtype=torch.float64) ** 2 for n in names}
    return {n: torch.where(mask, v, torch.nan) for n, v in values.items()}, mask, weight


def accumulate(batches: Iterator[list[int]], **settings: object) -> MeanAccumulator:
    values, mask, weight = statistics()
    accumulator = MeanAccumulator(**settings)  # type: ignore[arg-type]
    for rows in batches:
        accumulator.update({n: v[rows] for n, v in values.items()}, rows, mask=mask[rows], weight=weight)
    return accumulator


class TestMeans:
    @pytest.mark.parametrize("average", ["samples", "coordinates"])
    def test_equal_loops_over_samples_and_coordinates(self, average):
        values, mask, weight = statistics()
        result = accumulate(iter([list(range(NUM_SAMPLES))]), average=average).compute()
        full = (mask * weight).numpy()
        for name, statistic in values.items():
            clean = np.where(mask.numpy(), statistic.numpy(), 0)
            if average == "coordinates":
                expected = (clean * full).sum() / full.sum()
            else:
                expected = np.mean([(clean[i] * full[i]).sum() / full[i].sum() for i in range(NUM_SAMPLES)])
            assert float(result[name].value) == pytest.approx(expected, rel=1e-12)
            assert int(result[name].num_samples) == NUM_SAMPLES

    def test_standard_error_of_a_plain_mean_is_the_textbook_one(self):
        values = torch.rand(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        accumulator = MeanAccumulator()
        accumulator.update({"crps": values}, range(20))
        expected = values.mean(dim=1).numpy().std(ddof=1) / math.sqrt(20)
        assert float(accumulator.compute()["crps"].standard_error) == pytest.approx(expected, rel=1e-10)

    def test_standard_error_of_a_ratio_matches_the_scatter_over_repeated_experiments(self):
        repeats, num_samples, rng = 400, 60, torch.Generator().manual_seed(0)
        values, errors = [], []
        for _ in range(repeats):
            draws = torch.randn(5, num_samples, 3, generator=rng, dtype=torch.float64)
            accumulator = MeanAccumulator()
            accumulator.update(metrics.spread_skill(draws[1:], draws[0]), range(num_samples))
            ratio = accumulator.compute()["spread_skill_ratio"]
            values.append(float(ratio.value))
            errors.append(float(ratio.standard_error))
        # a standard deviation from 400 repeats is known to 1/sqrt(800) = 3.5 %; four of these
        assert np.mean(errors) == pytest.approx(np.std(values, ddof=1), rel=0.14)

    def test_rmse_is_the_root_of_the_overall_mean_and_spread_skill_a_ratio_of_means(self):
        values = {
            "squared_error": torch.tensor([1.0, 9.0]),
            "predicted_squared_error": torch.tensor([4.0, 16.0]),
            "variance": torch.tensor([2.0, 6.0]),
        }
        accumulator = MeanAccumulator()
        accumulator.update(values, [0, 1])
        result = accumulator.compute()
        assert float(result["rmse"].value) == pytest.approx(math.sqrt(5), rel=1e-12)  # a mean of roots would be 2
        assert float(result["spread_skill_ratio"].value) == pytest.approx(math.sqrt(2), rel=1e-12)
        assert float(result["spread"].value) == pytest.approx(2, rel=1e-12)

    def test_derived_quantities_can_be_added_and_need_their_inputs(self):
        accumulator = MeanAccumulator()
        accumulator.update({"crps": torch.tensor([1.0, 3.0]), "baseline": torch.tensor([4.0, 4.0])}, ["a", "b"])
        skill = DerivedQuantity(("crps", "baseline"), lambda ours, theirs: 1 - ours / theirs)
        result = accumulator.compute({**metrics.DERIVED, "skill": skill})
        assert result.keys() == {"crps", "baseline", "skill"}
        assert float(result["skill"].value) == 0.5

    def test_kept_axes_have_their_own_means_and_counts(self):
        values = torch.rand(6, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        mask = torch.ones(6, 3, 1, dtype=torch.bool)
        mask[5, 2] = False  # this forecast ends before the last lead time
        accumulator = MeanAccumulator()
        accumulator.update({"squared_error": values}, range(6), mask=mask, keep=1)
        result = accumulator.compute()
        expected = [values[:, 0].mean(), values[:, 1].mean(), values[:5, 2].mean()]
        np.testing.assert_allclose(result["squared_error"].value, expected, rtol=1e-12)
        np.testing.assert_allclose(result["rmse"].value, np.sqrt(expected), rtol=1e-12)
        assert result["rmse"].num_samples.tolist() == [6, 6, 5]
        last = values[:5, 2].mean(dim=1).numpy()
        assert float(result["squared_error"].standard_error[2]) == pytest.approx(
            last.std(ddof=1) / math.sqrt(5), rel=1e-10
        )

    def test_reliability_and_rank_histograms_go_through_the_same_reducer(self):
        rng = torch.Generator().manual_seed(0)
        samples, target = torch.randn(9, 7, 30, generator=rng), torch.randn(7, 30, generator=rng)
        covered = metrics.reliability(samples, target, [0.4, 0.8])
        counts = metrics.rank_histogram(samples, target, generator=rng, sample_dims=1)
        accumulator = MeanAccumulator()
        accumulator.update({"reliability": covered.movedim(0, 1)}, range(7), keep=1)
        accumulator.update({"rank_histogram": counts / counts.sum(-1, keepdim=True)}, range(7), keep=1)
        result = accumulator.compute()
        np.testing.assert_allclose(result["reliability"].value, covered.mean(dim=(1, 2)), rtol=1e-6)
        np.testing.assert_allclose(result["rank_histogram"].value, counts.sum(0) / counts.sum(), rtol=1e-6)

    def test_samples_without_valid_coordinates_do_not_count(self):
        accumulator = MeanAccumulator()
        mask = torch.tensor([[True, True], [False, False], [True, False]])
        values = torch.tensor([[1.0, 3.0], [torch.nan, torch.nan], [4.0, torch.nan]])
        accumulator.update({"crps": values}, [7, 8, 9], mask=mask)
        estimate, table = accumulator.compute()["crps"], accumulator.samples()["crps"]
        assert float(estimate.value) == 3.0
        assert int(estimate.num_samples) == 2
        assert table.weights.tolist() == [2.0, 0.0, 1.0]
        assert math.isnan(float(table.values[1]))

    def test_one_sample_has_no_standard_error_and_no_sample_no_mean(self):
        accumulator = MeanAccumulator()
        accumulator.update({"crps": torch.tensor([2.0])}, [0])
        accumulator.update({"empty": torch.tensor([2.0])}, [0], mask=torch.tensor([False]))
        result = accumulator.compute()
        assert float(result["crps"].value) == 2.0
        assert math.isnan(float(result["crps"].standard_error))
        assert math.isnan(float(result["empty"].value))
        assert MeanAccumulator().compute() == {}

    def test_a_nan_under_the_mask_shows_in_the_mean(self):
        accumulator = MeanAccumulator()
        accumulator.update({"crps": torch.tensor([1.0, torch.nan])}, [0, 1])
        assert math.isnan(float(accumulator.compute()["crps"].value))

    def test_sums_are_kept_in_float64(self):
        accumulator = MeanAccumulator()
        accumulator.update({"crps": torch.cat([torch.tensor([1e8]), torch.ones(1000)])[None]}, [0])
        # in float32 the thousand ones vanish beside 1e8
        assert float(accumulator.compute()["crps"].value) == pytest.approx((1e8 + 1000) / 1001, rel=1e-14)

    def test_estimates_become_json(self):
        accumulator = MeanAccumulator()
        accumulator.update({"crps": torch.tensor([1.0, 3.0])}, ["a.png", "b.png"])
        assert json.loads(json.dumps(accumulator.compute()["crps"].to_dict())) == {
            "value": 2.0,
            "standard_error": 1.0,
            "num_samples": 2,
        }


class TestIds:
    def test_order_and_batch_size_do_not_change_a_bit(self):
        reference = accumulate(iter([list(range(NUM_SAMPLES))])).compute()
        shuffled = [[7, 2, 10], [0], [5, 1, 9, 3], [8, 6, 4]]
        result = accumulate(iter(shuffled)).compute()
        assert result.keys() == reference.keys()
        for name, estimate in reference.items():
            assert torch.equal(estimate.value, result[name].value)
            assert torch.equal(estimate.standard_error, result[name].standard_error)

    def test_table_is_sorted_by_id_and_keeps_each_sample_once(self):
        table = accumulate(iter([[3, 1], [2, 3, 1]])).samples()["crps"]
        assert table.ids == (1, 2, 3)
        assert table.values.shape == (3,)

    def test_an_id_with_two_different_values_is_an_error(self):
        accumulator = MeanAccumulator()
        accumulator.update({"crps": torch.tensor([1.0, 2.0])}, [0, 1])
        accumulator.update({"crps": torch.tensor([1.5])}, [0])
        with pytest.raises(ValueError, match=r"'crps': id 0 came more than once with different values"):
            accumulator.compute()

    def test_padded_samples_may_differ_by_rounding(self):
        accumulator = MeanAccumulator()
        accumulator.update({"crps": torch.tensor([1.0, 2.0])}, [0, 1])
        accumulator.update({"crps": torch.tensor([1.0 + 1e-5])}, [0])
        assert float(accumulator.compute()["crps"].value) == 1.5

    def test_bad_ids_and_shapes_are_refused(self):
        accumulator = MeanAccumulator()
        with pytest.raises(ValueError, match="one row per id"):
            accumulator.update({"crps": torch.zeros(3, 2)}, [0, 1])
        with pytest.raises(ValueError, match="one row per id"):
            accumulator.update({"crps": torch.tensor(0.5)}, [0])
        with pytest.raises(TypeError, match="integers or strings"):
            accumulator.update({"crps": torch.zeros(2)}, torch.tensor([0.5, 1.0]))
        with pytest.raises(ValueError, match="keep is 2"):
            accumulator.update({"crps": torch.zeros(2, 3)}, [0, 1], keep=2)
        with pytest.raises(ValueError, match="does not broadcast"):
            accumulator.update({"crps": torch.zeros(2)}, [0, 1], mask=torch.ones(3, dtype=torch.bool))
        with pytest.raises(ValueError, match="update of their own"):
            accumulator.update({"crps": torch.zeros(2)}, [0, 1], weight=torch.ones(4, 1))
        with pytest.raises(ValueError, match="weights >= 0"):
            accumulator.update({"crps": torch.zeros(2)}, [0, 1], weight=-torch.ones(2))
        with pytest.raises(ValueError, match="average is 'images'"):
            MeanAccumulator("images")  # type: ignore[arg-type]

    def test_mixtures_that_cannot_be_combined_are_refused(self):
        accumulator = MeanAccumulator()
        accumulator.update({"squared_error": torch.ones(2)}, [0, 1])
        accumulator.update({"predicted_squared_error": torch.ones(1)}, [0])
        with pytest.raises(ValueError, match="'spread_skill_ratio' combines statistics of different samples"):
            accumulator.compute()
        accumulator = MeanAccumulator()
        accumulator.update({"crps": torch.ones(2)}, [0, 1])
        accumulator.update({"crps": torch.ones(1)}, ["a"])
        with pytest.raises(TypeError, match="both integer and string ids"):
            accumulator.compute()
        accumulator = MeanAccumulator()
        accumulator.update({"crps": torch.ones(2, 3)}, [0, 1], keep=1)
        accumulator.update({"crps": torch.ones(1, 3)}, [2])
        with pytest.raises(ValueError, match="different kept shapes"):
            accumulator.compute()


class Rows(Dataset[int]):
    """The row numbers themselves: an odd number, so that two processes need padding."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


def evaluate_in_process(rank: int, port: int, folder: str) -> None:
    """What an evaluation does under `accelerate launch`: a prepared loader, updates, one compute."""
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in environment.items()}, MASTER_ADDR="127.0.0.1")
    from accelerate import Accelerator

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Rows(), batch_size=2))
    batches = [batch.tolist() for batch in loader]
    result = accumulate(iter(batches)).compute()
    seen = {
        "world_size": torch.distributed.get_world_size(),
        "rows": [row for batch in batches for row in batch],
        "estimates": {name: estimate.to_dict() for name, estimate in result.items()},
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    accelerator.end_training()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class TestProcesses:
    def test_two_processes_with_padding_give_the_numbers_of_one(self, tmp_path):
        torch.multiprocessing.spawn(evaluate_in_process, args=(free_port(), str(tmp_path)), nprocs=2)
        seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
        assert [process["world_size"] for process in seen] == [2, 2]
        rows = [process["rows"] for process in seen]
        assert min(map(len, rows)) >= NUM_SAMPLES // 2  # both worked
        assert len(rows[0]) + len(rows[1]) > NUM_SAMPLES  # and the sampler did repeat samples
        assert set(rows[0]) | set(rows[1]) == set(range(NUM_SAMPLES))
        alone = accumulate(iter([list(range(NUM_SAMPLES))])).compute()
        expected = {name: estimate.to_dict() for name, estimate in alone.items()}
        assert {"rmse", "spread_skill_ratio", "crps"} <= expected.keys()
        assert seen[0]["estimates"] == expected  # bit for bit
        assert seen[1]["estimates"] == expected
