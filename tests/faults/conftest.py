"""One cluster on a SQLite file for the faults of processes, and what all its clients were told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faults import FaultyCluster, fault_settings
from tests.support.talk import Told


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="session")
def cluster(folder: Path) -> Iterator[FaultyCluster]:
    with FaultyCluster(fault_settings(f"sqlite:///{folder / 'store.db'}"), folder) as running:
        yield running


@pytest.fixture(scope="session")
def told() -> Told:
    return Told()
