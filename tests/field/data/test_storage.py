"""Field files: resumable generation, our layout and PDEBench's, the command, and what is said about broken files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from marigold_uq.field.config import FieldData, PdeData
from marigold_uq.field.data import (
    PAPER_POINTS,
    PAPER_STATES,
    Burgers,
    FieldDataError,
    KuramotoSivashinsky,
    generate,
    read_trajectories,
    write_trajectories,
)
from marigold_uq.field.data.generation import parts_folder
from marigold_uq.field.splits import open_split
from scripts import generate_pde

h5py = pytest.importorskip("h5py", reason="field files are HDF5: pip install h5py")

SMALL = KuramotoSivashinsky(num_points=32, length=22.0, num_states=4)


@dataclass(frozen=True)
class Interrupted(KuramotoSivashinsky):
    """Is killed when it comes to its third batch."""

    calls: ClassVar[int] = 0

    def solve(self, initial: Any) -> Tensor:
        Interrupted.calls += 1
        if Interrupted.calls == 3:
            raise KeyboardInterrupt
        return super().solve(initial)


def write_pdebench(path: Path, tensor: np.ndarray, extra_times: int = 1) -> Path:
    """A file as PDEBench writes it: one time more than states, cell centres, no metadata."""
    num_states, num_points = tensor.shape[1:]
    with h5py.File(path, "w") as file:
        file["tensor"] = tensor
        file["x-coordinate"] = ((np.arange(num_points) + 0.5) / num_points).astype(np.float32)
        file["t-coordinate"] = (0.01 * np.arange(num_states + extra_times)).astype(np.float32)
    return path


@pytest.fixture
def pdebench(tmp_path: Path) -> tuple[Path, np.ndarray]:
    tensor = np.random.default_rng(0).normal(size=(70, 201, 64)).astype(np.float32)
    return write_pdebench(tmp_path / "1D_Burgers_Sols_Nu0.01.hdf5", tensor), tensor


def test_a_generated_file_holds_the_solution_and_what_made_it(tmp_path: Path) -> None:
    path = generate(SMALL, tmp_path / "ks.h5", 5, seed=3, batch_size=2, progress=False)
    trajectories = read_trajectories(path)
    expected = SMALL.solve(SMALL.initial_states(3, range(5))).float()
    torch.testing.assert_close(trajectories.states, expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(trajectories.x, SMALL.grid)
    np.testing.assert_allclose(trajectories.t, SMALL.times)
    assert trajectories.metadata["equation"] == "kuramoto_sivashinsky"
    assert (trajectories.metadata["seed"], trajectories.metadata["num_points"]) == (3, 32)
    assert [p.name for p in tmp_path.iterdir()] == ["ks.h5"]


def test_an_interrupted_run_goes_on_and_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    parameters = {"num_points": 32, "length": 22.0, "num_states": 4}
    path = tmp_path / "ks.h5"
    Interrupted.calls = 0
    with pytest.raises(KeyboardInterrupt):
        generate(Interrupted(**parameters), path, 9, batch_size=2, progress=False)
    assert not path.exists()
    finished = sorted(parts_folder(path).glob("0*.npy"))
    assert len(finished) == 2
    (parts_folder(path) / ".part-killed.npy").write_bytes(b"half a file")
    finished[0].unlink()  # a hole in the middle is found too
    generate(SMALL, path, 9, batch_size=4, progress=False)
    whole = generate(SMALL, tmp_path / "whole.h5", 9, batch_size=9, progress=False)
    torch.testing.assert_close(read_trajectories(path).states, read_trajectories(whole).states, rtol=0, atol=1e-6)
    assert not parts_folder(path).exists()


def test_an_unfinished_run_is_not_continued_with_other_settings(tmp_path: Path) -> None:
    Interrupted.calls = 2
    with pytest.raises(KeyboardInterrupt):
        generate(Interrupted(num_points=32), tmp_path / "ks.h5", 3, seed=1, progress=False)
    with pytest.raises(ValueError, match="made with other settings: seed was 1, now 2"):
        generate(KuramotoSivashinsky(num_points=32), tmp_path / "ks.h5", 3, seed=2, progress=False)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "ks.h5").write_text("precious")
    with pytest.raises(FileExistsError, match="exists"):
        generate(SMALL, tmp_path / "ks.h5", 2, progress=False)
    assert (tmp_path / "ks.h5").read_text() == "precious"


def test_points_are_thinned_on_storing(tmp_path: Path) -> None:
    equation = Burgers(num_points=32, num_states=2)
    full = read_trajectories(generate(equation, tmp_path / "full.h5", 2, progress=False), points=slice(None, None, 4))
    thin = read_trajectories(generate(equation, tmp_path / "thin.h5", 2, point_stride=4, progress=False))
    assert torch.equal(full.states, thin.states)
    np.testing.assert_array_equal(full.x, thin.x)


def test_pdebench_is_read_as_the_paper_does(pdebench: tuple[Path, np.ndarray]) -> None:
    """The first 104 states, every second, and every fourth point."""
    path, tensor = pdebench
    trajectories = read_trajectories(path, states=PAPER_STATES, points=PAPER_POINTS)
    assert trajectories.states.shape == (70, 52, 16)
    np.testing.assert_array_equal(trajectories.states.numpy(), tensor[:, :104:2, ::4])
    assert trajectories.time_step == pytest.approx(0.02)
    assert trajectories.x[1] == pytest.approx(4.5 / 64)


def test_some_trajectories_can_be_read(pdebench: tuple[Path, np.ndarray]) -> None:
    path, tensor = pdebench
    some = read_trajectories(path, trajectories=slice(5, 69, 3), states=slice(10, 13))
    np.testing.assert_array_equal(some.states.numpy(), tensor[5:69:3, 10:13])
    assert some.t[0] == pytest.approx(0.1)
    with pytest.raises(FieldDataError, match="at least one of each"):
        read_trajectories(path, trajectories=slice(70, 80))


def test_a_file_that_is_not_hdf5_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.h5").write_text("hello")
    with pytest.raises(FieldDataError, match=r"text\.h5 is not an HDF5 file"):
        read_trajectories(tmp_path / "text.h5")
    with pytest.raises(FileNotFoundError, match="no field file"):
        read_trajectories(tmp_path / "absent.h5")


def test_missing_and_mismatched_arrays_are_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["velocity"] = np.zeros(3)
    with pytest.raises(FieldDataError, match="lacks tensor, x-coordinate, t-coordinate; it holds velocity"):
        read_trajectories(tmp_path / "other.h5")
    path = write_pdebench(tmp_path / "wrong.h5", np.zeros((2, 5, 8), np.float32), extra_times=3)
    with pytest.raises(FieldDataError, match=r"wrong grid.*5 .*t-coordinates; got 8 and 8"):
        read_trajectories(path)


def test_nan_is_reported_with_the_trajectories_that_hold_it(tmp_path: Path) -> None:
    tensor = np.ones((4, 5, 8), np.float32)
    tensor[2, 3, 1] = np.nan
    path = write_pdebench(tmp_path / "nan.h5", tensor)
    with pytest.raises(FieldDataError, match=r"1 of 4 trajectories hold NaN or infinity, the first are \[2\]"):
        read_trajectories(path)
    assert len(read_trajectories(path, trajectories=slice(2))) == 2


def test_an_incomplete_tensor_is_not_written(tmp_path: Path) -> None:
    part = (0, np.zeros((1, 2, 8), np.float32))
    with pytest.raises(FieldDataError, match="2 trajectories announced, 1 came"):
        write_trajectories(tmp_path / "a.h5", [part], (2, 2, 8), np.arange(8.0), np.arange(2.0), {})
    assert list(tmp_path.iterdir()) == []


def test_the_command_generates_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "ks.h5"
    command = ["ks", "--output", str(output), "--trajectories", "3", "--num_points", "32", "--num_states", "2"]
    assert generate_pde.main(command) == 0
    assert read_trajectories(output).states.shape == (3, 2, 32)
    assert generate_pde.main(command) == 2
    assert "exists" in capsys.readouterr().err
    assert generate_pde.main(["burgers", "--output", str(tmp_path / "b.h5"), "--nu", "-1"]) == 2
    assert "nu is not negative" in capsys.readouterr().err


def test_a_file_that_is_thinned_already_is_not_thinned_again_unawares(tmp_path: Path) -> None:
    """The strides of burgers.yaml, meant for PDEBench's 1024 points, would leave 64 of the 256 that were generated."""
    equation = Burgers(num_points=64, num_states=6, save_interval=0.02)
    path = generate(equation, tmp_path / "thin.h5", 2, point_stride=4, progress=False)
    with pytest.raises(
        FieldDataError, match="points are thinned already, by 4; taking every 4-th again leaves 4 of them"
    ):
        read_trajectories(path, points=slice(None, None, 4))
    with pytest.raises(FieldDataError, match="holds 6 states; the first 104 were asked for"):
        read_trajectories(path, states=PAPER_STATES)
    data = FieldData(pde=PdeData(str(path), point_stride=4))
    with pytest.raises(FieldDataError, match="thin_again to true if you mean it"):
        open_split(data)
    twice = read_trajectories(path, points=slice(None, None, 2), thin_again=True)
    assert len(twice.x) == 8
    assert twice.metadata["point_stride"] == 8
    assert read_trajectories(path, states=slice(0, 6, 2)).metadata["state_stride"] == 2
