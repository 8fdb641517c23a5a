"""Burgers' equation: published shock, exact solution, the scheme cell by cell, conservation, initial conditions."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from marigold_uq.field.data import Burgers

SMALL = Burgers(num_points=64, num_states=6, save_interval=0.05)


def one_obvious_step(u: np.ndarray, dt: float, equation: Burgers) -> np.ndarray:
    """PDEBench's midpoint step for one trajectory (X,), cell by cell, as its description reads."""

    def rate(v: np.ndarray) -> np.ndarray:
        n, dx, slope, flux = len(v), equation.spacing, np.zeros(len(v)), np.zeros(len(v))
        for i in range(n):
            a, b = v[i] - v[i - 1], v[(i + 1) % n] - v[i]
            c = (v[(i + 1) % n] - v[i - 1]) / 2
            slope[i] = np.sign(c) * min(2 * min(abs(a), abs(b)), abs(c)) if a * b > 0 else 0.0
        for i in range(n):  # face between cells i and i + 1
            j = (i + 1) % n
            left, right = v[i] + slope[i] / 2, v[j] - slope[j] / 2
            advective = 0.5 * (right**2 / 2 + left**2 / 2 - 0.5 * abs(left + right) * (right - left))
            flux[i] = advective - equation.nu / math.pi * (v[j] - v[i]) / dx
        return -(flux - np.roll(flux, 1)) / dx

    return u + dt * rate(u + dt / 2 * rate(u))


def cole_hopf(equation: Burgers, time: float) -> np.ndarray:
    """u = -2 D (log phi)_x of the heat solution phi = 2 + exp(-4 pi^2 D t) cos(2 pi x): exact, smooth, periodic."""
    decay = math.exp(-4 * math.pi**2 * equation.diffusion * time)
    x = 2 * np.pi * equation.grid
    return 4 * np.pi * equation.diffusion * decay * np.sin(x) / (2 + decay * np.cos(x))


def test_a_step_is_the_obvious_one() -> None:
    equation = replace(SMALL, num_points=32, nu=0.01)
    u = equation.initial_states(0, range(3)) + 0.3 * np.random.default_rng(0).normal(size=(3, 32))  # many extrema
    dt = 1e-4  # far below the limit: a single step
    result = equation.advance(torch.from_numpy(u), dt).numpy()
    np.testing.assert_allclose(result, [one_obvious_step(row, dt, equation) for row in u], rtol=0, atol=1e-13)


def test_solution_agrees_with_the_published_shock(data_root: Path) -> None:
    """burgers_shock.mat: u0 = -sin(pi x) on [-1, 1], nu = 0.01 / pi, u = 0 at both ends.

    The odd solution is also the periodic one. The scheme's error is that of the shock, three cells wide: measured
    9e-4 (RMS, relative) with 512 cells, 4.6e-3 with 256.
    """
    path = data_root / "pde" / "burgers_shock.mat"
    if not path.is_file():
        pytest.skip(f"needs {path}")
    from scipy.interpolate import CubicSpline
    from scipy.io import loadmat

    published = loadmat(path)
    equation = Burgers(start=-1.0, length=2.0, num_points=512, num_states=100)
    x = equation.grid
    solution = equation.solve(-np.sin(np.pi * x)[None])[0].numpy()
    wrapped = np.concatenate([solution[:, -3:], solution, solution[:, :3]], axis=1)
    spline = CubicSpline(np.concatenate([x[-3:] - 2, x, x[:3] + 2]), wrapped, axis=1)
    truth = published["usol"].T  # (100, 256)
    error = np.sqrt(np.mean((spline(published["x"].ravel()) - truth) ** 2) / np.mean(truth**2))
    assert error < 2e-3


def test_the_scheme_has_order_two_on_an_exact_smooth_solution() -> None:
    errors = []
    for num_points in (32, 64, 128):
        equation = Burgers(num_points=num_points, nu=0.2, num_states=2, save_interval=0.2)
        solution = equation.solve(cole_hopf(equation, 0.0)[None])[0, 1].numpy()
        errors.append(np.mean(np.abs(solution - cole_hopf(equation, 0.2))))
    orders = np.log2(np.array(errors[:-1]) / errors[1:])
    assert np.all((orders > 1.7) & (orders < 2.4)), orders  # limited slopes lose a little at the extrema
    assert errors[-1] < 1e-4


@pytest.mark.slow  # py-pde imports and compiles for half a minute
def test_solution_agrees_with_py_pde() -> None:
    """Both converge to one solution: the difference of the two second-order schemes at 128 cells is below 1 %."""
    pde = pytest.importorskip("pde", reason="py-pde is the second reference solver: pip install py-pde")
    equation = Burgers(num_points=128, nu=0.1, num_states=2, save_interval=0.2)
    x = 2 * np.pi * equation.grid
    start = np.sin(x) + 0.5 * np.cos(2 * x + 1)
    ours = equation.solve(start[None])[0, 1].numpy()
    grid = pde.CartesianGrid([[0, 1]], 128, periodic=True)
    solver = pde.PDE({"u": f"{equation.diffusion} * laplace(u) - u * d_dx(u)"})
    options = {"solver": "scipy", "method": "LSODA", "backend": "numpy", "tracker": None}
    theirs = solver.solve(pde.ScalarField(grid, start), t_range=0.2, dt=1e-4, **options).data
    assert np.sqrt(np.mean((ours - theirs) ** 2) / np.mean(ours**2)) < 0.01


@pytest.mark.parametrize("nu", [0.0, 0.01])
def test_the_mean_is_conserved_and_no_new_extremum_appears(nu: float) -> None:
    solution = replace(SMALL, nu=nu).solve(SMALL.initial_states(1, range(6)))
    means, high, low = solution.mean(-1), solution.amax(-1), solution.amin(-1)
    torch.testing.assert_close(means, means[:, :1].expand_as(means), rtol=0, atol=1e-13)
    assert (high.diff(dim=1) < 1e-3).all()
    assert (low.diff(dim=1) > -1e-3).all()


def test_a_trajectory_is_the_same_in_any_batch() -> None:
    """Each has its own step length: fast company does not shorten it (1e-13 for vectorised remainders)."""
    together = SMALL.solve(SMALL.initial_states(3, range(5)))
    for i in range(5):
        alone = SMALL.solve(SMALL.initial_states(3, [i]))
        torch.testing.assert_close(together[i : i + 1], alone, rtol=0, atol=1e-13)


def residual_of_two_waves(u: np.ndarray, x: np.ndarray) -> float:
    """Distance of u from the constants plus waves of the best two picks of k = 1..4 (twice the same doubles it)."""
    best = math.inf
    for picks in itertools.combinations_with_replacement(range(1, 5), 2):
        waves = {2 * picks[0]} if picks[0] == picks[1] else set(picks)
        angles = [2 * np.pi * wave * x / (x[-1] - x[0]) for wave in waves]
        design = np.stack([np.ones_like(x), *(f(a) for a in angles for f in (np.sin, np.cos))], axis=1)
        best = min(best, float(np.abs(design @ np.linalg.lstsq(design, u, rcond=None)[0] - u).max()))
    return best


def test_initial_conditions_are_pdebenchs() -> None:
    """With probability 0.81 a constant and the waves of two picks; 0.1 (nearly) zero at the ends; both signs alike."""
    count = 1000
    states = SMALL.initial_states(0, range(count))
    plain = np.mean([residual_of_two_waves(u, SMALL.grid) < 1e-9 for u in states])
    windowed = np.mean(np.abs(states[:, [0, -1]]).max(axis=1) < 1e-6)
    # |u| of a state of one sign is plain too (a few in a hundred): the tolerance is 4 standard errors plus that
    assert 0.81 - 4 * math.sqrt(0.81 * 0.19 / count) < plain < 0.81 + 0.05 + 4 * math.sqrt(0.81 * 0.19 / count)
    assert abs(windowed - 0.1) < 4 * math.sqrt(0.09 / count)
    assert abs(states.mean()) < 4 * states.mean(axis=1).std() / math.sqrt(count)
    assert np.abs(states).max() <= 4


def test_defaults_are_pdebenchs() -> None:
    equation = Burgers()
    assert (len(equation.grid), equation.grid[0]) == (1024, 0.5 / 1024)
    assert (len(equation.times), equation.times[-1]) == (201, pytest.approx(2.0))
    assert equation.diffusion == pytest.approx(0.01 / math.pi)


@pytest.mark.parametrize("wrong", [{"nu": -1.0}, {"cfl": 0.0}, {"cfl": 1.5}])
def test_wrong_parameters_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="nu is not negative and cfl"):
        replace(SMALL, **wrong)
