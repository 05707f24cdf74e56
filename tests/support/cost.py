"""What work costs, on a machine that does other things too."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

TRIES = 5


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU time of this process, without that for objects which tests before have left to the garbage collector."""
    gc.disable()
    try:
        start = time.process_time()
        work()
        return time.process_time() - start
    finally:
        gc.enable()


def ever(within: Callable[[], bool]) -> bool:
    """Whether a few tries come within the bound: what grows too fast never does, and a busy machine is not always
    busy."""
    return any(within() for _ in range(TRIES))
