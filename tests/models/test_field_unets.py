"""The U-Nets for fields: the paper's size, periodicity, any grid, checkpoints, and their place in the core."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from marigold_uq.denoising import predict_output
from marigold_uq.models.unet_1d import UNet1d
from marigold_uq.models.unet_2d import UNet2d
from marigold_uq.models.unet_blocks import double, halve, pad_axes
from marigold_uq.models.widen import narrow, widen
from marigold_uq.schedulers import DistributionalDDIMScheduler

SMALL = {"block_out_channels": (8, 16, 16), "layers_per_block": 1, "embedding_channels": 16, "dropout": 0.0}
LEVEL_FACTOR = 4  # three levels: two halvings


def build(kind: type, seed: int = 0, **options: Any) -> Any:
    """A small network in double precision whose branches are all open, so that no part of it goes unnoticed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = kind(**{**SMALL, "in_channels": 3, "out_channels": 2, **options}).double().eval()
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return network


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@torch.no_grad()
def run(network: Any, x: Tensor, timestep: Any = 3) -> Tensor:
    return network(x, timestep)


def assert_same(loaded: Any, network: Any, x: Tensor) -> None:
    """Equal weights to the bit; outputs to rounding, as kernels depend on where in memory the weights lie."""
    weights = loaded.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in network.state_dict().items())
    torch.testing.assert_close(run(loaded.eval(), x), run(network, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "channels", "published"),
    [(UNet1d, 4, 6_455_105), (UNet2d, 13, 15_186_689)],
    ids=["1d", "2d"],
)
def test_default_sizes_are_the_papers(kind: type, channels: int, published: int) -> None:
    """The counts are those of the published networks; 2 % leaves room for details the paper does not give."""
    with torch.device("meta"):
        network = kind()
    count = sum(parameter.numel() for parameter in network.parameters())
    assert network.conv_in.in_channels == channels
    assert count == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize("shift", [LEVEL_FACTOR, 5 * LEVEL_FACTOR, -2 * LEVEL_FACTOR])
def test_periodic_1d_network_commutes_with_shifts_of_the_coarsest_cell(shift: int) -> None:
    network, x = build(UNet1d, periodic=(True,), attention_levels=(1,)), noise(2, 3, 48)
    expected = run(network, x).roll(shift, -1)
    torch.testing.assert_close(run(network, x.roll(shift, -1)), expected, rtol=1e-9, atol=1e-9)


def test_single_precision_shifts_agree_to_1e_5() -> None:
    network, x = build(UNet1d).float(), noise(2, 3, 64).float()
    expected = run(network, x)
    error = (run(network, x.roll(8, -1)) - expected.roll(8, -1)).abs().max() / expected.abs().max()
    assert error < 1e-5


def test_zero_padded_1d_network_does_not_commute_with_shifts() -> None:
    network, x = build(UNet1d, periodic=(False,)), noise(2, 3, 48)
    difference = run(network, x.roll(LEVEL_FACTOR, -1)) - run(network, x).roll(LEVEL_FACTOR, -1)
    assert difference.abs().max() > 1e-2


@pytest.mark.parametrize("periodic", [(False, True), (True, False), (True, True), (False, False)])
def test_each_axis_of_a_2d_network_is_periodic_on_its_own(periodic: tuple[bool, bool]) -> None:
    network, x = build(UNet2d, periodic=periodic), noise(1, 3, 16, 24)
    expected = run(network, x)
    for axis, wraps in zip((2, 3), periodic, strict=True):
        error = (run(network, x.roll(LEVEL_FACTOR, axis)) - expected.roll(LEVEL_FACTOR, axis)).abs().max()
        assert (error < 1e-9) if wraps else (error > 1e-2)


@pytest.mark.parametrize("size", [1, 2, 3, 17, 31, 256])
@pytest.mark.parametrize("periodic", [True, False])
def test_a_1d_network_takes_any_length(size: int, periodic: bool) -> None:
    output = run(build(UNet1d, periodic=(periodic,)), noise(2, 3, size))
    assert output.shape == (2, 2, size)
    assert output.isfinite().all()


@pytest.mark.parametrize("size", [(1, 1), (25, 53), (7, 16)])
def test_a_2d_network_takes_any_size(size: tuple[int, int]) -> None:
    assert run(build(UNet2d, periodic=(False, True)), noise(2, 3, *size)).shape == (2, 2, *size)


def test_padding_wraps_or_fills_with_zeros() -> None:
    x = torch.arange(1.0, 7).reshape(1, 1, 2, 3)
    padded = pad_axes(x, 1, (False, True))[0, 0]
    assert padded.tolist() == [[0] * 5, [3, 1, 2, 3, 1], [6, 4, 5, 6, 4], [0] * 5]


def test_halving_continues_odd_axes_and_doubling_returns_to_the_size() -> None:
    x = torch.tensor([[[2.0, 4.0, 6.0]]])
    assert halve(x, (True,)).tolist() == [[[3.0, 4.0]]]  # 6 with the first point, 2
    assert halve(x, (False,)).tolist() == [[[3.0, 6.0]]]  # 6 with itself
    assert double(halve(x, (False,)), (3,)).tolist() == [[[3.0, 3.0, 6.0]]]


def test_the_timestep_matters_and_neighbours_are_close() -> None:
    network, x = build(UNet1d), noise(1, 3, 32)
    with torch.no_grad():
        near, far = (network.embedding(torch.tensor([t, u])).diff(dim=0).norm() for t, u in ((20, 21), (20, 45)))
    assert not torch.allclose(run(network, x, 1), run(network, x, 40), atol=1e-3)
    assert near < far


def test_timesteps_per_sample_equal_single_calls() -> None:
    network, x = build(UNet1d), noise(2, 3, 32)
    both = run(network, x, torch.tensor([4, 31]))
    for i, t in enumerate((4, 31)):
        torch.testing.assert_close(both[i : i + 1], run(network, x[i : i + 1], t), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(run(network, x, torch.tensor(4)), run(network, x, 4))


@pytest.mark.parametrize(("kind", "size"), [(UNet1d, (17,)), (UNet2d, (9, 12))], ids=["1d", "2d"])
def test_a_gradient_reaches_every_parameter_at_the_start(kind: type, size: tuple[int, ...]) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = kind(**{**SMALL, "in_channels": 3, "attention_levels": (0, 1)}).double()
    network(noise(2, 3, *size), torch.tensor([3, 20])).square().sum().backward()
    without = [name for name, p in network.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert without == []


def test_dropout_acts_in_training_only() -> None:
    network, x = build(UNet1d, dropout=0.5), noise(1, 3, 32)
    torch.testing.assert_close(run(network, x), run(network, x))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert not torch.allclose(run(network.train(), x), run(network, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_has_the_dtype_of_the_network(dtype: torch.dtype) -> None:
    network = build(UNet1d).to(dtype)
    output = run(network, noise(1, 3, 32).to(dtype), torch.tensor([7]))
    reference = run(build(UNet1d), noise(1, 3, 32), 7)
    assert output.dtype == dtype
    assert (output.double() - reference).norm() / reference.norm() < (1e-4 if dtype == torch.float32 else 0.2)


@pytest.mark.parametrize(
    ("kind", "size", "periodic"), [(UNet1d, (20,), (False,)), (UNet2d, (8, 12), (False, True))], ids=["1d", "2d"]
)
def test_a_checkpoint_reloads_to_the_same_function(
    kind: type, size: tuple[int, ...], periodic: tuple[bool, ...], tmp_path: Path
) -> None:
    network, x = build(kind, periodic=periodic).float(), noise(1, 3, *size).float()
    network.save_pretrained(tmp_path)
    loaded: Any = kind.from_pretrained(tmp_path)  # type: ignore[attr-defined]
    assert loaded.periodic == periodic
    assert_same(loaded, network, x)


@pytest.mark.slow
def test_a_checkpoint_reloads_in_a_fresh_process(tmp_path: Path) -> None:
    network, x = build(UNet1d).float(), noise(1, 3, 20).float()
    network.save_pretrained(tmp_path / "unet")
    torch.save((x, run(network, x)), tmp_path / "pair.pt")
    code = (
        "import sys, torch; from marigold_uq.models.unet_1d import UNet1d; folder = sys.argv[1]\n"
        "x, y = torch.load(folder + '/pair.pt')\n"
        "with torch.no_grad(): assert torch.allclose(UNet1d.from_pretrained(folder + '/unet').eval()(x, 3), y)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


@pytest.mark.parametrize(
    ("family", "options"), [("gaussian", {}), ("mixture", {"num_components": 3}), ("low_rank", {"rank": 2})]
)
def test_widening_keeps_the_mean_and_narrowing_undoes_it(family: str, options: dict[str, int], tmp_path: Path) -> None:
    network, x = build(UNet1d, out_channels=1).float(), noise(1, 3, 20).float()
    before = run(network, x)
    widen(network, family, **options)
    scheduler = DistributionalDDIMScheduler(num_train_timesteps=50, noise_family=family, **options)
    law = scheduler.noise_distribution(run(network, x), (1, 20))
    torch.testing.assert_close(law.mean, before, rtol=1e-4, atol=1e-4)
    network.save_pretrained(tmp_path)
    assert_same(UNet1d.from_pretrained(tmp_path), network, x)
    narrow(network, family, **options)
    torch.testing.assert_close(run(network, x), before)


def test_the_network_is_a_denoiser_for_the_reverse_loop() -> None:
    """A Gaussian law through predict_output and a whole reverse loop; the condition is bound outside."""
    network = build(UNet1d, out_channels=2).float()
    scheduler = DistributionalDDIMScheduler(
        num_train_timesteps=50, beta_start=0.001, beta_end=0.2, noise_family="gaussian", eta=1.0
    )
    scheduler.set_timesteps(5)
    generator = torch.Generator().manual_seed(0)
    condition, x = noise(3, 2, 24).float(), noise(3, 1, 24, seed=2).float()

    def denoiser(x_t: Tensor, timestep: Tensor | int) -> Tensor:
        return run(network, torch.cat([x_t, condition], 1), timestep)

    law = predict_output(denoiser, scheduler, x, 49)
    assert law.mean.shape == x.shape
    assert (law.variance > 0).all()
    for t in scheduler.timesteps:
        x = scheduler.step(denoiser(x, t), t, x, generator=generator).prev_sample
    assert x.shape == (3, 1, 24)
    assert x.isfinite().all()


@pytest.mark.parametrize(
    ("shape", "timestep", "message"),
    [
        ((1, 2, 16), 1, r"3 channels, 1 spatial axes\); got \(1, 2, 16\)"),
        ((1, 3, 4, 4), 1, r"got \(1, 3, 4, 4\)"),
        ((2, 3, 16), torch.tensor([1, 2, 3]), r"each of the 2 samples; got shape \(3,\)"),
    ],
)
def test_wrong_inputs_are_named(shape: tuple[int, ...], timestep: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(UNet1d)(noise(*shape), timestep)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (UNet2d, {"periodic": (True,)}, "one entry per spatial axis, 2 in UNet2d"),
        (UNet1d, {"attention_levels": (3,)}, "attention_levels count from 0 to 2"),
        (UNet1d, {"layers_per_block": 0}, "layers_per_block are positive"),
    ],
)
def test_wrong_constructor_arguments_are_named(kind: type, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(kind, **options)


@pytest.mark.parametrize("max_period", [50.0, 10_000.0])
@pytest.mark.parametrize("kind", [UNet1d, UNet2d])
def test_the_slowest_wave_of_the_timestep_has_the_period_asked_for(kind: type, max_period: float) -> None:
    """cos(t), ..., cos(t / max_period), then the sines."""
    network, seen = build(kind, max_period=max_period, periodic=(True,) * (1 if kind is UNet1d else 2)), []
    network.embedding.first.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    run(network, noise(1, 3, *[8] * (1 if kind is UNet1d else 2)), torch.tensor([30.0]))
    half = len(seen[0]) // 2
    found = [float(seen[0][place]) for place in (0, half - 1, half, -1)]
    waves = [math.cos(30), math.cos(30 / max_period), math.sin(30), math.sin(30 / max_period)]
    assert found == pytest.approx(waves, abs=1e-5)
