"""What tests of the command line share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gateway.progress import Progress
from gateway.settings import Settings, load_settings

ROOT = Path(__file__).resolve().parents[2]


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def settings(**overrides: Any) -> Settings:
    return load_settings(environ={}, overrides=overrides)


def progress(lines: list[str]) -> Progress:
    return Progress(lines.append, clock=lambda: 0.0)
