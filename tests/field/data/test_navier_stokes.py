"""The Navier-Stokes solver: exact solutions, convergence, invariants, and files that become planes again."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from marigold_uq.field.data import (
    FieldDataError,
    NavierStokes,
    PlaneTrajectories,
    Transitions,
    as_plane,
    generate,
    read_trajectories,
    statistics_of,
)
from marigold_uq.field.data.navier_stokes import INITIAL_WAVES

SMALL = {"num_points": 24 * 24, "num_states": 3, "first_time": 0.0}


def _plane(equation: NavierStokes, function) -> torch.Tensor:
    y, x = np.meshgrid(equation.axis, equation.axis, indexing="ij")
    return torch.from_numpy(function(x, y)).reshape(1, -1)


@pytest.mark.parametrize(("waves_x", "waves_y"), [(1, 1), (2, 2), (3, 1)])
def test_taylor_green_vortices_decay_as_the_exact_solution(waves_x, waves_y):
    """cos(ax) cos(by) is an eigenfunction of the Laplacian: its own advection vanishes, it decays by exp(-t nu k^2)."""
    equation = NavierStokes(**SMALL, nu=0.05, drag=0.02, forcing=0.0, save_interval=1.0)
    start = _plane(equation, lambda x, y: 2 * np.cos(waves_x * x) * np.cos(waves_y * y))
    rate = 0.05 * (waves_x**2 + waves_y**2) + 0.02
    for time, state in zip(equation.times, equation.solve(start)[0], strict=True):
        torch.testing.assert_close(state, math.exp(-rate * time) * start[0], atol=1e-12, rtol=1e-12)


def test_laminar_kolmogorov_flow_tends_to_its_exact_steady_state():
    """f = -F k cos(k y) is balanced by w = f / (nu k^2 + drag); parallel flow has no advection."""
    equation = NavierStokes(**SMALL, nu=0.1, drag=0.5, forcing=1.0, forcing_wave=2, save_interval=10.0)
    last = equation.solve(torch.zeros(1, equation.num_points))[0, -1]
    steady = _plane(equation, lambda x, y: -2 * np.cos(2 * y) / (0.1 * 4 + 0.5))[0]
    share = 1 - math.exp(-(0.1 * 4 + 0.5) * 20.0)
    torch.testing.assert_close(last, share * steady, atol=1e-6, rtol=1e-6)


def test_the_rate_of_change_is_velocity_times_gradient_written_out_wave_by_wave():
    """Against sums of sines and cosines, without any transform."""
    equation = NavierStokes(**SMALL, nu=0.0, drag=0.0, forcing=0.0, time_step=1e-4, save_interval=1e-4)
    waves = [(1, 2, 2.1, 0.3), (-2, 1, -1.2, 1.1), (3, 3, 0.6, 2.0)]
    y, x = np.meshgrid(equation.axis, equation.axis, indexing="ij")
    w, w_x, w_y, u, v = (np.zeros_like(x) for _ in range(5))
    for kx, ky, amplitude, phase in waves:
        angle, square = kx * x + ky * y + phase, kx**2 + ky**2
        w += amplitude * np.cos(angle)
        w_x -= amplitude * kx * np.sin(angle)
        w_y -= amplitude * ky * np.sin(angle)
        u -= amplitude * ky / square * np.sin(angle)  # psi = w / k^2, u = psi_y
        v += amplitude * kx / square * np.sin(angle)
    expected = -(u * w_x + v * w_y)
    states = equation.solve(torch.from_numpy(w).reshape(1, -1))[0].reshape(3, *x.shape)
    found = (states[1] - states[0]) / 1e-4
    torch.testing.assert_close(found, torch.from_numpy(expected), atol=1e-3, rtol=0)
    assert np.abs(expected).max() > 1.0


def test_energy_and_enstrophy_are_conserved_without_viscosity_force_and_drag():
    equation = NavierStokes(**SMALL, nu=0.0, drag=0.0, forcing=0.0, save_interval=0.5)
    states = equation.solve(equation.initial_states(0, range(2))).reshape(2, 3, 24, 24)
    spectrum = torch.fft.rfft2(states)
    kx, ky = torch.arange(13.0), torch.fft.fftfreq(24, 1 / 24)[:, None]
    inverse = 1 / (kx**2 + ky**2).clamp(min=1)
    twins = torch.where((kx > 0) & (kx < 12), 2.0, 1.0)
    energy = (spectrum.abs().square() * inverse * twins).sum((-2, -1))
    enstrophy = (spectrum.abs().square() * twins).sum((-2, -1))
    # the start is cut to resolved waves: compare later states
    for total in (energy, enstrophy):
        torch.testing.assert_close(total[:, 2], total[:, 1], rtol=1e-5, atol=0)


def test_halving_the_time_step_divides_the_error_by_sixteen():
    start = NavierStokes(**SMALL).initial_states(3, [0])

    def final(step: float) -> torch.Tensor:
        return NavierStokes(**SMALL, time_step=step, save_interval=0.5, nu=0.02).solve(start)[0, -1]

    exact = final(0.5 / 256)
    errors = [float((final(step) - exact).norm()) for step in (0.1, 0.05, 0.025)]
    orders = [math.log2(coarse / fine) for coarse, fine in pairwise(errors)]
    assert all(3.6 < order < 4.4 for order in orders), orders


def test_finer_grids_agree_ever_better_where_they_share_points():
    """Spectral: each finer grid is closer to the finest by a large factor."""
    settings = {"num_states": 2, "first_time": 0.0, "save_interval": 1.0, "nu": 0.05}
    states = {}
    for side in (24, 48, 96):
        equation = NavierStokes(num_points=side**2, **settings)
        solution = equation.solve(equation.initial_states(1, [0]))[0, -1]
        states[side] = solution.reshape(side, side)[:: side // 24, :: side // 24]
    errors = [float((states[side] - states[96]).norm() / states[96].norm()) for side in (24, 48)]
    assert errors[0] < 0.2
    assert errors[1] < errors[0] / 50, errors


def test_initial_states_are_the_same_waves_on_every_grid_with_variance_one():
    coarse, fine = (NavierStokes(num_points=side**2).initial_states(0, range(64)) for side in (32, 64))
    np.testing.assert_allclose(coarse.reshape(64, 32, 32), fine.reshape(64, 64, 64)[:, ::2, ::2], atol=1e-12)
    assert abs(coarse.var() - 1) < 0.1  # 64 fields of some 50 strong waves: standard error about .03
    power = np.abs(np.fft.fft2(coarse.reshape(64, 32, 32)))
    assert power[:, INITIAL_WAVES + 1 : 32 - INITIAL_WAVES].max() < 1e-9


def test_a_shifted_start_gives_a_shifted_trajectory_along_the_unforced_axis():
    equation = NavierStokes(**SMALL, save_interval=0.5)
    start = torch.from_numpy(equation.initial_states(5, [0])).reshape(1, 24, 24)
    moved = equation.solve(start.roll(7, 2).reshape(1, -1))
    still = equation.solve(start.reshape(1, -1)).reshape(1, 3, 24, 24).roll(7, 3).reshape(1, 3, -1)
    torch.testing.assert_close(moved, still, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_points": 1000}, "square number"),
        ({"num_points": 256}, "at least 289"),
        ({"nu": -1.0}, "at least 0"),
        ({"forcing_wave": 30}, "forcing_wave"),
    ],
)
def test_settings_that_make_no_flow_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        NavierStokes(**settings)


def test_a_generated_file_is_read_as_planes_that_split_and_give_maps(tmp_path):
    pytest.importorskip("h5py")
    equation = NavierStokes(**SMALL, save_interval=0.1)
    path = generate(equation, tmp_path / "plane.h5", 10, progress=False)
    planes = as_plane(read_trajectories(path))
    assert isinstance(planes, PlaneTrajectories)
    assert list(planes.coordinates) == ["y", "x"]
    split = planes.split(test=0.2, validation=0.25)
    window = Transitions(split.train, num_history=2)[0]
    assert window["history"].shape == (2, 1, 24, 24)
    order = np.random.default_rng(0).permutation(10)
    solved = equation.solve(equation.initial_states(0, [int(order[0])])).float().reshape(3, 1, 24, 24)
    torch.testing.assert_close(split.train.read(0, 0, 3), solved)
    assert statistics_of(split.train)["u"].std > 0


def test_a_plane_is_not_thinned_and_a_line_stays_a_line(tmp_path):
    pytest.importorskip("h5py")
    path = generate(NavierStokes(**SMALL, save_interval=0.1), tmp_path / "plane.h5", 2, progress=False)
    with pytest.raises(FieldDataError, match="cannot be thinned"):
        as_plane(read_trajectories(path, points=slice(None, None, 2)))
