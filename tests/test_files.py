"""Files and folders are whole or not there, fingerprints tell contents apart, and other settings are refused."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from marigold_uq import files
from marigold_uq.files import (
    TEMPORARY,
    atomic_folder,
    atomic_path,
    clear_leftovers,
    discard,
    fingerprint,
    make_folder,
    require_same,
)


class Stop(Exception):
    """Stands for whatever goes wrong while a file is being written."""


def names(folder: Path) -> list[str]:
    """Everything in a folder, hidden files too."""
    return sorted(path.name for path in folder.iterdir())


def write_and_stop(path: Path) -> None:
    """What a process does that fails half way."""
    path.write_text("half")
    raise Stop


def write_all(*paths: Path) -> None:
    """Each file holds its place in the list."""
    for number, path in enumerate(paths):
        path.write_text(str(number))


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    with atomic_path(target) as temporary:
        assert (temporary.parent, temporary.suffix) == (tmp_path, ".txt")
        temporary.write_text("new")
        assert not target.exists()
    assert target.read_text() == "new"
    assert names(tmp_path) == ["a.txt"]


def test_a_file_is_replaced_only_if_asked_for(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")
    with pytest.raises(FileExistsError, match=r"a\.txt exists; pass overwrite=True"), atomic_path(target):
        raise AssertionError("the block must not run")
    with atomic_path(target, overwrite=True) as temporary:
        temporary.write_text("new")
    assert target.read_text() == "new"


def test_a_failure_in_the_block_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")
    with pytest.raises(Stop), atomic_path(target, overwrite=True) as temporary:
        write_and_stop(temporary)
    assert target.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_a_file_that_another_process_wrote_meanwhile_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    with pytest.raises(FileExistsError), atomic_path(target) as temporary:
        write_all(temporary, target)
    assert target.read_text() == "1"
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("writer", [atomic_path, atomic_folder])
def test_a_missing_or_impossible_parent_is_named(tmp_path: Path, writer) -> None:
    with pytest.raises(FileNotFoundError, match=r"folder .*missing does not exist; create it first"):
        writer(tmp_path / "missing" / "a").__enter__()
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is a file, not a folder"):
        writer(tmp_path / "file" / "a").__enter__()


@pytest.mark.parametrize(
    ("number", "kind", "message"), [(errno.EACCES, PermissionError, "no permission"), (errno.ENOSPC, OSError, "full")]
)
def test_errors_of_the_disk_name_the_file_that_was_asked_for(tmp_path: Path, number: int, kind: type, message: str):
    with pytest.raises(kind, match=rf"{message}.*a\.txt"), atomic_path(tmp_path / "a.txt") as temporary:
        raise OSError(number, os.strerror(number), str(temporary))


def test_a_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with atomic_folder(target) as temporary:
        (temporary / "sub").mkdir()
        (temporary / "sub" / "a").write_text("new")
        assert not target.exists()
    assert (target / "sub" / "a").read_text() == "new"
    assert names(tmp_path) == ["model"]


def test_a_folder_is_replaced_as_a_whole_and_only_if_asked_for(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").touch()
    with pytest.raises(FileExistsError, match="model exists"), atomic_folder(target):
        raise AssertionError("the block must not run")
    with atomic_folder(target, overwrite=True) as temporary:
        (temporary / "new").touch()
        assert names(target) == ["old"]
    assert names(target) == ["new"]
    assert names(tmp_path) == ["model"]


def test_a_failure_in_the_block_leaves_the_old_folder_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").touch()
    with pytest.raises(Stop), atomic_folder(target, overwrite=True) as temporary:
        write_and_stop(temporary / "new")
    assert names(target) == ["old"]
    assert names(tmp_path) == ["model"]


@pytest.fixture(params=["swap", "no swap"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With and without a system that swaps two names in one step."""
    if request.param == "no swap":
        monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    return str(request.param)


def test_an_old_folder_is_moved_away_as_a_whole_before_it_is_deleted(
    tmp_path: Path, system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, seen = tmp_path / "model", list[list[str]]()
    for name in ("old", "new"):
        with atomic_folder(target, overwrite=True) as temporary:
            write_all(temporary / name, temporary / "both")
            monkeypatch.setattr(files, "remove", lambda path: seen.append(names(path)) if path.exists() else None)
    assert names(target) == ["both", "new"]
    assert seen
    assert all(one == ["both", "old"] for one in seen), "the old folder must be complete when its deletion begins"


def test_the_old_folder_comes_back_if_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").touch()
    replace = os.replace

    def failing(source: Path, destination: Path) -> None:
        if Path(destination) == target and (Path(source) / "new").exists():
            raise OSError(errno.EIO, "input/output error")
        replace(source, destination)

    monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="input/output"), atomic_folder(target, overwrite=True) as temporary:
        (temporary / "new").touch()
    assert names(target) == ["old"]
    assert names(tmp_path) == ["model"]


def test_content_is_on_the_disk_before_the_name_and_the_name_before_the_end(
    tmp_path: Path, system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut leaves a complete name with nothing behind it."""
    done, replace, exchange = list[str](), os.replace, files._exchange

    def note(action: str, path: Path) -> None:
        done.append(f"{action} {'*' if path.name.startswith(TEMPORARY) else path.name}")

    def exchanged(first: Path, second: Path) -> bool:
        note("name", second)
        return exchange(first, second)

    monkeypatch.setattr(files, "_force", lambda path: note("force", path))
    monkeypatch.setattr(os, "replace", lambda one, other: (note("name", Path(other)), replace(one, other)))
    with atomic_path(tmp_path / "a.txt") as temporary:
        temporary.write_text("new")
    assert done == ["force *", "name a.txt", f"force {tmp_path.name}"]
    (tmp_path / "model").mkdir()
    done.clear()
    if system == "swap":
        monkeypatch.setattr(files, "_exchange", exchanged)
    with atomic_folder(tmp_path / "model", overwrite=True) as temporary:
        (temporary / "sub").mkdir()
        (temporary / "sub" / "weights").touch()
    assert done[:3] == ["force *", "force weights", "force sub"]
    assert done[-2] in ("name model", f"force {tmp_path.name}")
    assert done[-1] == f"force {tmp_path.name}"
    assert done.index("name model") > 2


def dead_process() -> int:
    """The number of a process that is over."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def leftover(folder: Path, process: int, rest: str = "", place: str | None = None) -> Path:
    """A folder that a process left behind."""
    path = folder / f"{TEMPORARY}{place or files._place()}-{process}-{'0' * 16}{rest}"
    path.mkdir()
    (path / "half").touch()
    return path


def test_what_a_dead_process_left_is_removed_by_the_next_that_writes_there(tmp_path: Path) -> None:
    left = leftover(tmp_path, dead_process(), ".txt")
    running = leftover(tmp_path, os.getppid())
    elsewhere = leftover(tmp_path, dead_process(), place="0" * 8)
    forgotten = leftover(tmp_path, 1, place="1" * 8)
    os.utime(forgotten, (0, 0))
    with atomic_path(tmp_path / "a.txt") as temporary:
        temporary.touch()
    assert [path.exists() for path in (left, running, elsewhere, forgotten)] == [False, True, True, False]
    clear_leftovers(tmp_path, alone=True)
    assert [path.exists() for path in (running, elsewhere)] == [True, False]


def test_an_old_folder_whose_successor_never_came_gets_its_name_back(tmp_path: Path) -> None:
    left = leftover(tmp_path, dead_process(), ".old.model")
    clear_leftovers(tmp_path)
    assert names(tmp_path / "model") == ["half"]
    left.mkdir()
    clear_leftovers(tmp_path)
    assert names(tmp_path) == ["model"]


def test_a_folder_is_discarded_under_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies while it deletes leaves no half folder under the name of a whole one."""
    write_all(tmp_path / "a")
    monkeypatch.setattr(files, "remove", lambda path: None)
    discard(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    assert names(tmp_path)[0].startswith(TEMPORARY)


def test_a_link_to_a_folder_stays_and_its_folder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "old").touch()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(FileExistsError, match="exists"), atomic_folder(tmp_path / "link"):
        raise AssertionError("the block must not run")
    with atomic_folder(tmp_path / "link", overwrite=True) as temporary:
        (temporary / "new").touch()
    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path / "real") == ["new"]
    assert names(tmp_path) == ["link", "real"]


def test_a_link_to_nothing_gets_its_folder_or_names_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("later")
    with atomic_folder(tmp_path / "link") as temporary:
        (temporary / "new").touch()
    assert names(tmp_path / "later") == ["new"]
    (tmp_path / "lost").symlink_to(tmp_path / "missing" / "model")
    with pytest.raises(FileNotFoundError, match=r"the folder .*missing does not exist; create it first"):
        atomic_folder(tmp_path / "lost").__enter__()
    assert names(tmp_path) == ["later", "link", "lost"]


@pytest.mark.parametrize("writer", [atomic_path, atomic_folder])
def test_an_error_of_another_file_keeps_its_name(tmp_path: Path, writer) -> None:
    other = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/elsewhere/input.png")
    with pytest.raises(PermissionError, match=r"Permission denied: '/elsewhere/input\.png'"), writer(tmp_path / "a"):
        raise other
    assert names(tmp_path) == []


def test_a_folder_for_output_is_made_with_its_parents_unless_a_file_is_in_the_way(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    (tmp_path / "file").touch()
    for blocked in (tmp_path / "file", tmp_path / "file" / "b"):
        with pytest.raises(NotADirectoryError, match="a file is in the way"):
            make_folder(blocked)


def test_equal_inputs_have_equal_fingerprints(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "a").write_text("x")
    array = np.arange(6).reshape(2, 3)
    assert fingerprint(tmp_path / "one") == fingerprint(tmp_path / "two")
    assert fingerprint(array, "s", 3) == fingerprint(np.asfortranarray(array), "s", 3)
    assert fingerprint({"b": 1, "a": [2]}) == fingerprint({"a": [2], "b": 1})


def test_any_change_changes_the_fingerprint(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "a").write_text("x")
    seen = [fingerprint(folder)]
    (folder / "a").rename(folder / "b")
    seen.append(fingerprint(folder))
    (folder / "b").write_text("y")
    seen.append(fingerprint(folder))
    (folder / "c").touch()
    seen.append(fingerprint(folder))
    array = np.arange(6.0)
    seen += [fingerprint(array), fingerprint(array.reshape(2, 3)), fingerprint(array.astype("float32"))]
    seen += [fingerprint("ab", "c"), fingerprint("a", "bc"), fingerprint("abc"), fingerprint(1), fingerprint("1")]
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("part", [torch.zeros(5000), {1, 2}, object(), [{"a": {3}}], np.array([{1}], dtype=object)])
def test_what_has_no_exact_text_has_no_fingerprint(part) -> None:
    with pytest.raises(TypeError, match=r"cannot hash a (Tensor|set|object): pass numpy arrays"):
        fingerprint(part)


def test_simple_values_have_fingerprints() -> None:
    parts = [None, True, np.bool_(False), 1, 2.5, 1j, np.float32(3), b"a", "a", np.array(["a", None], dtype=object)]
    assert len({fingerprint(part) for part in parts}) == len(parts)


def test_a_missing_file_has_no_fingerprint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fingerprint(tmp_path / "missing")


def test_other_settings_are_refused_with_every_difference(tmp_path: Path) -> None:
    made = {"steps": 4, "seed": 0, "family": "gaussian"}
    require_same(tmp_path, made, dict(made))
    require_same(tmp_path, json.loads(json.dumps({"sizes": [1, 2]})), {"sizes": (1, 2)})
    with pytest.raises(ValueError, match=r"other settings: family was 'gaussian', now None; steps was 4, now 8\. "):
        require_same(tmp_path, made, {"steps": 8, "seed": 0})
