"""Kuramoto-Sivashinsky: time per trajectory and accuracy of our generator and of py-pde, in one run on one thread.

    pip install py-pde
    python scripts/benchmarks/pde.py --output pde.json

All start from the same smooth states and run for the same time; errors are relative RMS differences from a fine
reference (1024 points, step 0.01). Times are processor time, without py-pde's compilation. About two minutes.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from marigold_uq.commands.runner import Invocation, run_command
from marigold_uq.field.data import KuramotoSivashinsky
from marigold_uq.files import atomic_path

Floats = NDArray[np.float64]
DURATION = 20.0  # errors at most double every 7 time units: later, chaos and not the solver decides
REFERENCE = KuramotoSivashinsky(num_points=1024, time_step=0.01, num_states=2, save_interval=DURATION, first_time=0.0)


@dataclass(frozen=True)
class Row:
    """One solver: its relative error after DURATION and processor seconds per trajectory."""

    solver: str
    error: float
    seconds: float


def resample(u: Floats, num_points: int, shift: float = 0.0) -> Floats:
    """Band-limited interpolation of u (..., X) to `num_points` points, moved right by `shift`."""
    spectrum = np.fft.rfft(u)
    kept = np.zeros((*u.shape[:-1], num_points // 2 + 1), dtype=np.complex128)
    count = min(kept.shape[-1], spectrum.shape[-1])
    kept[..., :count] = spectrum[..., :count]
    phase = np.exp(2j * np.pi * np.arange(kept.shape[-1]) * shift / REFERENCE.length)
    return np.fft.irfft(kept * phase, num_points) * num_points / u.shape[-1]


def relative_error(u: Floats, truth: Floats) -> float:
    """RMS of u - truth over RMS of truth."""
    return float(np.sqrt(np.mean((u - truth) ** 2) / np.mean(truth**2)))


def run_ours(start: Floats, truth: Floats, num_points: int, time_step: float) -> Row:
    """A batch of trajectories, the first of which have a known `truth`; the second run is timed."""
    equation = replace(REFERENCE, num_points=num_points, time_step=time_step)
    initial = resample(start, num_points)
    solution, seconds = timed(lambda: equation.solve(initial)[:, 1].numpy())
    name = f"ours, {num_points} points, step {time_step}, batch {len(start)}"
    return Row(name, relative_error(resample(solution[: len(truth)], truth.shape[-1]), truth), seconds / len(start))


def run_py_pde(start: Floats, truth: Floats, num_points: int, method: str) -> Row:
    """One trajectory after the other, as py-pde works; `method` is scipy's LSODA or py-pde's adaptive Runge-Kutta."""
    import pde

    grid = pde.CartesianGrid([[0, REFERENCE.length]], num_points, periodic=True)
    half_cell = REFERENCE.length / num_points / 2  # py-pde's points are cell centres
    equation = pde.PDE({"u": "-u * d_dx(u) - laplace(u + laplace(u))"})
    fields = [pde.ScalarField(grid, u) for u in resample(start, num_points, half_cell)]
    if method == "LSODA":
        solver = pde.ScipySolver(equation, method="LSODA")
    else:
        solver = pde.RungeKuttaSolver(equation, adaptive=True)
    stepper = solver.make_stepper(fields[0].copy(), dt=1e-3)
    stepper(fields[0].copy(), 0.0, 0.01)  # compiles

    def solve() -> Floats:
        results = []
        for field in fields:
            state = field.copy()
            stepper(state, 0.0, DURATION)
            results.append(state.data)
        return np.stack(results)

    solution, seconds = timed(solve)
    expected = resample(truth, truth.shape[-1], half_cell)[:, :: truth.shape[-1] // num_points]
    return Row(f"py-pde, {num_points} points, {method}", relative_error(solution, expected), seconds / len(start))


def timed(function: Callable[[], Floats]) -> tuple[Floats, float]:
    """Result and processor time of a second call."""
    function()
    begin = time.process_time()
    result = function()
    return result, time.process_time() - begin


def initial_states(count: int, seed: int) -> Floats:
    """Smooth random states: noise after six time units."""
    equation = KuramotoSivashinsky(num_states=1)
    return equation.solve(equation.initial_states(seed, range(count)))[:, 0].numpy()


def ratios(rows: Sequence[Row]) -> list[str]:
    """For each py-pde row, how much faster our cheapest setting is that is at least as accurate."""
    lines = []
    for other in (row for row in rows if row.solver.startswith("py-pde")):
        ours = [row for row in rows if row.solver.startswith("ours") and row.error <= other.error]
        for row in ours:
            lines.append(f"{other.seconds / row.seconds:8.0f} times faster: {row.solver} than {other.solver}")
    return lines


@dataclass(frozen=True)
class Options:
    """Compare our generator with py-pde.

    Args:
        batch: Trajectories of ours at once.
        reference_trajectories: Trajectories of py-pde.
        seed: Of the initial states.
        output: Also write JSON here.
    """

    batch: int = 64
    reference_trajectories: int = 4
    seed: int = 0
    output: Path | None = None


def run(args: Options, invocation: Invocation) -> int:
    """Run all solvers, print the table and the ratios."""
    torch.set_num_threads(1)
    start = initial_states(args.batch, args.seed)
    compared = start[: args.reference_trajectories]
    truth = REFERENCE.solve(resample(compared, REFERENCE.num_points))[:, 1].numpy()
    rows = [run_ours(start, truth, points, step) for points, step in ((256, 0.1), (128, 0.5))]
    settings = ((256, "LSODA"), (512, "LSODA"), (256, "Runge-Kutta"))
    rows += [run_py_pde(compared, truth, points, method) for points, method in settings]
    print(f"| solver | relative error at t = {DURATION:g} | ms per trajectory |\n|---|---|---|")
    print("\n".join(f"| {row.solver} | {row.error:.1e} | {1e3 * row.seconds:.3g} |" for row in rows))
    print("\n".join(ratios(rows)))
    if args.output:
        with atomic_path(args.output, overwrite=True) as temporary:
            temporary.write_text(json.dumps([asdict(row) for row in rows], indent=2), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(run_command("scripts/benchmarks/pde.py", Options, run))
