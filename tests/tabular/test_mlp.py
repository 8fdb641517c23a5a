"""A stack of models is its models, one by one."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from marigold_uq.models.mlp import StackedBaseline, StackedMLP
from marigold_uq.randomness import member_generators

ROUNDING = {"rtol": 1e-5, "atol": 1e-6}  # float32 products summed in another order


def build(num_models: int = 4) -> StackedMLP:
    network = StackedMLP(num_models, num_features=3, num_targets=2, out_channels=4, num_timesteps=5, width=16)
    return network.reset(member_generators(0, num_models))


def inputs(num_models: int = 4, rows: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    shape = (num_models, rows)
    x, c, f = (torch.randn(*shape, d, generator=g) for d in (2, 3, 2))
    return x, torch.randint(5, shape, generator=g), c, f


def reference(network: StackedMLP, s: int, x: Tensor, t: Tensor, c: Tensor, f: Tensor) -> Tensor:
    """One model, written out: softplus(gate_t * (x W + b)), three times, then the head."""
    hidden = torch.cat([x, c, f], -1)
    for number, layer in enumerate(network.layers):
        gate = network.gate[s, t, 16 * number : 16 * (number + 1)]
        hidden = torch.nn.functional.softplus(gate * (hidden @ layer.weight[s] + layer.bias[s]))
    return hidden @ network.head.weight[s] + network.head.bias[s]


def test_the_stack_computes_what_each_model_computes_alone() -> None:
    network, batch = build(), inputs()
    out = network(*batch)
    for s in range(4):
        torch.testing.assert_close(out[s], reference(network, s, *(part[s] for part in batch)), **ROUNDING)


def test_a_model_that_is_cut_out_gives_the_same_output_and_gradient() -> None:
    network, batch = build(), inputs()
    network(*batch).square().sum().backward()
    for s in range(4):
        alone = network.select(s)
        out = alone(*(part[s : s + 1] for part in batch))
        torch.testing.assert_close(out, network(*batch)[s : s + 1], **ROUNDING)
        out.square().sum().backward()
        for one, many in zip(alone.parameters(), network.parameters(), strict=True):
            assert many.grad is not None
            torch.testing.assert_close(one.grad[0], many.grad[s], rtol=1e-4, atol=1e-4)


def test_one_timestep_for_all_rows_is_the_same_as_naming_it_for_each() -> None:
    network, (x, t, c, f) = build(), inputs()
    torch.testing.assert_close(network(x, 3, c, f), network(x, torch.full_like(t, 3), c, f))


def test_initial_weights_of_a_model_do_not_depend_on_the_others() -> None:
    big, small = build(4), build(2)
    for many, few in zip(big.parameters(), small.parameters(), strict=True):
        assert torch.equal(many[:2], few)
    assert big.gate.min().item() >= 0
    assert 0.9 < big.gate.max().item() <= 1


def test_the_stack_survives_save_and_load(tmp_path: Path) -> None:
    network, batch = build(), inputs()
    network.target_mean += 0.1
    network.save_pretrained(tmp_path)
    loaded = StackedMLP.from_pretrained(tmp_path)
    assert torch.equal(loaded(*batch), network(*batch))
    torch.testing.assert_close(loaded.target_mean.double(), network.target_mean)


def test_wrong_inputs_are_named() -> None:
    network, (x, t, c, f) = build(), inputs()
    with pytest.raises(ValueError, match=r"\[x_t, c, f\]"):
        network(x, t, c[..., :1], f)
    with pytest.raises(ValueError, match="pass one each"):
        network.reset(member_generators(0, 3))


def test_dropout_drops_the_units_that_the_numbers_say() -> None:
    model = StackedBaseline(2, 3, 1, dropout=0.5).reset(member_generators(0, 2))
    x = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    dropped = model(x, torch.full((2, 4, model.num_hidden_units), 0.9))  # all units drop: the last bias remains
    torch.testing.assert_close(dropped, model.layers[-1].bias.expand(2, 4, 1))


def test_a_position_beyond_the_table_is_refused_instead_of_read_from_the_next_model() -> None:
    network, (x, t, c, f) = build(), inputs()
    for wrong in (6, -1):
        with pytest.raises(IndexError, match=r"positions must be within 0\.\.5"):
            network(x, torch.full_like(t, wrong), c, f)
        with pytest.raises(IndexError, match=r"positions must be within 0\.\.5"):
            network(x, wrong, c, f)


def test_between_two_rows_of_the_table_gates_are_interpolated() -> None:
    """At a row itself nothing changes; halfway the gates are the mean of both, for one position and for one each."""
    network, (x, t, c, f) = build(), inputs()
    whole = network(x, t, c, f)
    torch.testing.assert_close(network(x, t.double(), c, f), whole)
    between = network._gates(torch.tensor(2.25))
    torch.testing.assert_close(between[:, 0], 0.75 * network.gate[:, 2] + 0.25 * network.gate[:, 3])
    torch.testing.assert_close(
        network(x, torch.tensor(2.25), c, f), network(x, torch.full_like(t, 2.25, dtype=torch.float32), c, f)
    )
    torch.testing.assert_close(network._gates(torch.tensor(5.0))[:, 0], network.gate[:, 5])  # the last row
    for wrong in (5.01, -0.01, math.nan):
        with pytest.raises(IndexError, match="positions must be within"):
            network(x, wrong, c, f)
