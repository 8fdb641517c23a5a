"""Ctrl-C and SIGTERM at any moment, pipes that close early, and how soon the command answers."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.cli_runs import depth, save_models, save_picture

from marigold_uq.commands import pictures
from marigold_uq.files import TEMPORARY
from marigold_uq.terminal import INTERRUPTED, TERMINATED, Stopped, stoppable

COMMAND = [sys.executable, "-m", "marigold_uq.cli"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for index in range(4):
        save_picture(folder / f"p{index}.png", seed=index)
    return folder


# ----------------------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, TERMINATED)])
def test_a_signal_while_a_file_is_written_leaves_no_half_file_and_its_own_code(
    number: signal.Signals, code: int, models: Path, photos: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from marigold_uq.depth import export

    def interrupted(path: Path, picture: object, **options: object) -> None:
        with export.atomic_path(path, overwrite=True) as temporary:
            temporary.write_bytes(b"half")
            os.kill(os.getpid(), number)
            time.sleep(5)

    monkeypatch.setattr(export, "save_image", interrupted)
    assert depth(models, photos, "-o", photos.parent / "out", "--formats", "npz", "color") == code
    assert capsys.readouterr().err.endswith("interrupted; run the same command again to resume\n")
    left = {path.name for path in (photos.parent / "out").iterdir()}
    assert left == {"p0.npz", "p0.json"}
    assert not [name for name in left if name.startswith(TEMPORARY)]
    monkeypatch.undo()
    assert depth(models, photos, "-o", photos.parent / "out", "--formats", "npz", "color") == 0


def test_handlers_are_back_after_the_command(models: Path, photos: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    depth(models, photos, "-o", photos.parent / "out", "--formats", "npz")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_the_echo_of_a_signal_does_not_disturb_cleaning_up() -> None:
    cleaned = []

    def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            cleaned.append(True)

    with stoppable(), pytest.raises(Stopped) as stop:
        work()
    assert cleaned == [True]
    assert stop.value.code == TERMINATED


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_imports_ends_at_once_without_a_traceback(number: signal.Signals) -> None:
    code = (
        "import os, signal, time\n"
        "from marigold_uq.terminal import leave_at_once, stoppable\n"
        "with stoppable(), leave_at_once():\n"
        "    try:\n"
        f"        os.kill(os.getpid(), {int(number)}); time.sleep(5)\n"
        "    except BaseException as error: raise ImportError('half way') from error\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 128 + number
    assert run.stderr == "interrupted; run the same command again to resume\n"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_any_moment_ends_a_run_cleanly(number: signal.Signals, models: Path, photos: Path) -> None:
    """From the first imports to the last file: a code of its own, no traceback, nothing unfinished left."""
    words = [*COMMAND, "depth", str(photos), "-o", str(photos.parent / "out"), "--model", str(models / "gaussian")]
    started = time.monotonic()
    assert subprocess.run(words, capture_output=True, check=False).returncode == 0
    whole = time.monotonic() - started
    for share in (0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97):
        process = subprocess.Popen([*words, "--overwrite"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        time.sleep(0.15 + share * whole)  # Python itself needs its first tenth of a second
        process.send_signal(number)
        told = process.communicate(timeout=120)[1]
        assert process.returncode in (0, 128 + number), told
        assert "Traceback" not in told
        assert not [path for path in (photos.parent / "out").iterdir() if path.name.startswith(TEMPORARY)]


# ------------------------------------------------------------------------------------------------------------- pipes


def test_a_reader_that_leaves_does_not_end_the_run(models: Path, photos: Path) -> None:
    words = ["depth", str(photos), "-o", "out", "--model", str(models / "gaussian"), "--formats", "npz"]
    command = " ".join([*COMMAND, *words, "--batch_size", "1", "2>&1"])
    script = f"set -o pipefail; {command} | head -1"
    run = subprocess.run(["bash", "-c", script], capture_output=True, cwd=photos.parent, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count(b"\n") == 1  # a bar may be drawn more than once in that line
    assert len(list((photos.parent / "out").glob("*.npz"))) == 4
    assert b"BrokenPipe" not in run.stderr


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["train"], ["train", "--help"]])
def test_a_reader_that_left_before_the_help_came_sees_no_traceback(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    run = subprocess.run([*COMMAND, *words], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert run.returncode == (2 if words == ["train"] else 0)
    assert "Traceback" not in run.stderr
    assert "BrokenPipe" not in run.stderr


def test_bars_can_be_turned_off(
    models: Path, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """tqdm reads TQDM_DISABLE when it is imported; nothing of ours may overrule what it found."""
    seen = []

    class Bar(pictures.tqdm):  # type: ignore[misc, name-defined]
        def __init__(self, *arguments: object, **options: object) -> None:
            seen.append(options)
            super().__init__(*arguments, **options)

    monkeypatch.setattr(pictures, "tqdm", Bar)
    assert depth(models, photos, "-o", photos.parent / "out", "--formats", "npz") == 0
    assert seen
    assert not any("disable" in options for options in seen)


# -------------------------------------------------------------------------------------------------------------- start


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["depth", "--help"], ["info", "--help"]])
def test_help_and_version_take_less_than_half_a_second_of_processor_time(words: list[str]) -> None:
    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    times = []
    for _ in range(3):
        before = used()
        subprocess.run([*COMMAND, *words], capture_output=True, check=True)
        times.append(used() - before)
    assert min(times) < 0.5
