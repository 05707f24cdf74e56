"""A hook that Serve 2.60 does not have: code that runs when a replica is about to stop.

Serve calls `Replica._perform_graceful_shutdown`, which waits for ongoing requests. The patch runs our callbacks first,
so that sockets can be closed with a code and turns on the token link, which Serve does not see, can end. It is a class
patch because Serve pickles deployments by value (spec/ray.md, pitfall P9), and it is guarded: on another Ray it does
nothing, and sockets then end at Serve's own deadline with 1012.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

OnDrain = Callable[[], Awaitable[None]]


def on_drain(callback: OnDrain) -> bool:
    """Have `callback` awaited when this replica begins to stop. Call in the deployment's constructor.

    Returns False, and logs, when this Ray's replica has not the method that is patched. Exceptions of the callback are
    logged; it should bound its own time, as Serve's deadline runs meanwhile.
    """
    from ray.serve._private import replica

    target = getattr(replica, "Replica", None)
    original = getattr(target, "_perform_graceful_shutdown", None)
    if target is None or original is None or not inspect.iscoroutinefunction(original):
        log.warning("this Ray has no known place for a drain hook; sockets end at Serve's own deadline")
        return False
    callbacks: list[OnDrain] | None = getattr(target, "_limpet_on_drain", None)
    if callbacks is None:
        callbacks = []
        target._limpet_on_drain = callbacks  # noqa: SLF001 - the patch is the purpose of this module
        registered = callbacks

        async def drain_first(self: object) -> None:
            for registered_callback in registered:
                try:
                    await registered_callback()
                except Exception:
                    log.exception("a drain callback failed")
            await original(self)

        target._perform_graceful_shutdown = drain_first  # noqa: SLF001
    callbacks.append(callback)
    return True
