"""Says on the terminal what a start is busy with, so that nobody looks at a silent screen for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BEAT_S = 8.0


class Progress:
    """Lines with the seconds since the start. While a phase lasts, one comes at least every `beat_s` seconds."""

    def __init__(
        self, write: Callable[[str], object], clock: Callable[[], float] = time.monotonic, beat_s: float = BEAT_S
    ) -> None:
        self._write = write
        self._clock = clock
        self._beat_s = beat_s
        self._start = clock()
        self._lock = threading.Lock()
        self._last_line = ""
        self._last_time = self._start

    def say(self, text: str) -> None:
        """One line, now. The same line again is left out."""
        with self._lock:
            if text != self._last_line:
                self._put(text)

    @contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """Says `what`, and while the block runs that it still does."""
        over = threading.Event()
        began = self._clock()
        self.say(what)
        thread = threading.Thread(target=self._beat, args=(what, began, over), name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _beat(self, what: str, began: float, over: threading.Event) -> None:
        while not over.wait(self._beat_s / 4):
            with self._lock:
                if self._clock() - self._last_time >= self._beat_s:
                    self._put(f"still {what} ({self._clock() - began:.0f} s)")

    def _put(self, text: str) -> None:
        self._last_line, self._last_time = text, self._clock()
        self._write(f"[{self._last_time - self._start:6.1f} s] {text}\n")
