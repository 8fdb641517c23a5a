"""Ctrl-C and SIGTERM finish the step, save a checkpoint and exit."""

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

__all__ = ["InterruptGuard"]

_REPEAT_SECONDS = 3.0
"""torchrun passes on a Ctrl-C that its processes received already: an echo within this time is not a second one."""


class InterruptGuard:
    """Within the block the first SIGINT or SIGTERM sets `requested`; a second, later SIGINT interrupts at once.

    Python handles signals in its main thread only; in another one the guard does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._first = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "InterruptGuard":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.requested:
            self.requested, self._first = True, now
        elif number == signal.SIGINT and now - self._first > _REPEAT_SECONDS:
            raise KeyboardInterrupt
