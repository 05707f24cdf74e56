"""No test of the edge sees this machine's own settings or running gateways."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway import daemon


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("LIMPET_CONFIG", raising=False)
    monkeypatch.setattr(daemon, "LEFTOVER_WAIT_S", 0.2)
