"""How a command lives with its terminal: Ctrl-C and SIGTERM at any moment, and pipes that close early."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TextIO

__all__ = [
    "INTERRUPTED",
    "STOPPED_MESSAGE",
    "TERMINATED",
    "Stopped",
    "leave_at_once",
    "stoppable",
    "unbreakable_output",
]

INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM
STOPPED_MESSAGE = "interrupted; run the same command again to resume"
_ECHO_SECONDS = 1.0
"""Launchers pass on a signal that their processes received already; cleaning up is not interrupted by the echo."""


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM, to be cleaned up after; `code` is the exit code."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code


class _Stopper:
    """The handler of both signals."""

    def __init__(self) -> None:
        self.at_once = 0
        self.last = -_ECHO_SECONDS

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.at_once:
            with suppress(OSError):
                os.write(2, f"{STOPPED_MESSAGE}\n".encode())
            os._exit(128 + number)
        now = time.monotonic()
        if now - self.last < _ECHO_SECONDS:
            return
        self.last = now
        raise Stopped(128 + number)


_STOPPER = _Stopper()


@contextmanager
def stoppable(*, last: bool = False) -> Iterator[None]:
    """Within the block SIGTERM ends a command as Ctrl-C does: by an exception, so that what was begun is removed.

    Python handles signals in its main thread only; in another one nothing changes.

    Args:
        last: The process ends after the block: signals that come later do not disturb its end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    _STOPPER.last = -_ECHO_SECONDS  # what ended an earlier command has no echo in this one
    previous = {number: signal.signal(number, _STOPPER) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_IGN if last else handler)


@contextmanager
def leave_at_once() -> Iterator[None]:
    """Within the block nothing has been begun, and either signal ends the process.

    For imports: a module that is interrupted half way may turn the exception into another one, or swallow it.
    """
    _STOPPER.at_once += 1
    try:
        yield
    finally:
        _STOPPER.at_once -= 1


class _Patient(io.RawIOBase):
    """A file descriptor whose reader may leave: then the rest is written to nowhere, and the work goes on."""

    def __init__(self, number: int) -> None:
        self.number = number

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.number

    def isatty(self) -> bool:
        return os.isatty(self.number)

    def write(self, data: Any) -> int:
        try:
            return os.write(self.number, data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.number)
            os.close(nowhere)
            return len(data)


@contextmanager
def unbreakable_output() -> Iterator[None]:
    """Within the block `| head -1` ends what is shown and not the run; names that no encoding can say are shown too."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_unbreakable(stream) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


def _unbreakable(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):  # a test's, or a notebook's
        return stream
    stream.reconfigure(errors="backslashreplace")
    if stream not in (sys.__stdout__, sys.__stderr__) or stream.isatty():
        return stream
    stream.flush()
    patient = io.BufferedWriter(_Patient(stream.fileno()))
    return io.TextIOWrapper(patient, encoding=stream.encoding, errors="backslashreplace", line_buffering=True)
