"""What can go wrong with the store, in three kinds, and which error of a driver is which.

No message quotes a statement's values or what the database says: both may hold content (design.md decision 11).
"""

from __future__ import annotations

import asyncio
import sqlite3
from typing import Literal

from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

ErrorKind = Literal["transient", "full", "permanent"]

# PostgreSQL, appendix A: whole classes, then single codes.
_TRANSIENT_CLASSES = frozenset({"08", "40", "53", "57"})
_TRANSIENT_STATES = frozenset({"25006", "55P03"})  # read-only after a fail-over; a lock not had in time
_FULL_STATES = frozenset({"53100"})
_TRANSIENT_SQLITE = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_INTERRUPT,
    }
)
_PRIMARY_CODE = 0xFF


class StoreError(Exception):
    """`transient`: the same call may work later (gone, restarting, locked, too slow). `full`: it may work once there is
    room. `permanent`: it won't work until somebody changes something."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(kind, message)  # both, so that it survives pickling
        self.kind: ErrorKind = kind

    def __str__(self) -> str:
        return str(self.args[1])


class Unreadable(StoreError):
    """Content that these keys don't open, or that was changed behind our back."""


def store_error(error: BaseException) -> StoreError:
    """The error of a driver, of SQLAlchemy or of a deadline as ours."""
    if isinstance(error, StoreError):
        return error
    if isinstance(error, PoolTimeout):
        return StoreError("transient", "Every connection to the database is in use.")
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return StoreError("transient", "The database did not answer in time.")
    if isinstance(error, OSError):
        return StoreError("transient", f"The database can't be reached ({type(error).__name__}).")
    if isinstance(error, sqlite3.Error):
        return _sqlite_error(error)
    if isinstance(error, DBAPIError):
        return _driver_error(error)
    if isinstance(error, SQLAlchemyError):
        return StoreError("permanent", f"The database refused ({type(error).__name__}).")
    return StoreError("permanent", f"The store failed ({type(error).__name__}).")


def _driver_error(error: DBAPIError) -> StoreError:
    original: BaseException | None = error.orig
    if isinstance(original, sqlite3.Error):
        return _sqlite_error(original)
    state = getattr(original, "sqlstate", None)
    if isinstance(state, str):
        kind: ErrorKind = "permanent"
        if state in _FULL_STATES:
            kind = "full"
        elif state[:2] in _TRANSIENT_CLASSES or state in _TRANSIENT_STATES:
            kind = "transient"
        return StoreError(kind, f"The database answered with SQLSTATE {state}.")
    if error.connection_invalidated or _lost(original):
        return StoreError("transient", "The connection to the database was lost.")
    return StoreError("permanent", f"The database refused ({type(original).__name__}).")


def _sqlite_error(error: sqlite3.Error) -> StoreError:
    code = getattr(error, "sqlite_errorcode", None)
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    if code is None:
        return StoreError("permanent", f"SQLite refused ({name}).")
    primary = code & _PRIMARY_CODE
    if primary == sqlite3.SQLITE_FULL:
        return StoreError("full", "The disk or the database file is full.")
    kind: ErrorKind = "transient" if primary in _TRANSIENT_SQLITE else "permanent"
    return StoreError(kind, f"SQLite answered with {name}.")


def _lost(error: BaseException | None) -> bool:
    """Whether the driver speaks of its connection. It wraps what it caught, at times more than once."""
    while error is not None:
        if isinstance(error, OSError | TimeoutError):
            return True
        if "InterfaceError" in type(error).__name__ or "ConnectionDoesNotExist" in type(error).__name__:
            return True
        error = error.__cause__
    return False
