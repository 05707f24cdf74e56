"""Our log lines in Serve's replica logs: a replica gives handlers to Serve's own logger only."""

from __future__ import annotations

import logging

LOGGERS = ("gateway", "actors", "inference", "limpet")


def log_to_serve(level: str) -> None:
    """Write our lines of this level and above where this replica's Serve writes its own. Call in the constructor."""
    # On a full disk the report of a line that could not be written goes to stderr, which Serve sends to the same
    # logger: turns then hang for good.
    logging.raiseExceptions = False
    handlers = logging.getLogger("ray.serve").handlers
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(level.upper())
        logger.handlers = list(handlers)
        logger.propagate = not handlers
