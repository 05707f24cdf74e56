"""What an operator asks about tenants, on a real database and without a gateway."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from actors.store.database import Database, StoreConfig
from actors.store.jobs import Job, PutUsage
from gateway import cli
from gateway.auth import tenant_of
from tests.support.responses import put, turn

KEY = "sk-one"
TENANT = tenant_of(KEY)


def line(name: str, tenant: str, model: str = "m", age_s: int = 10) -> PutUsage:
    return PutUsage(tenant, name, tenant, model, "completed", int(time.time()) - age_s, 1000, 900, 50, 5, 12, 340)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Settings of a gateway with one key, whose store has something of two tenants."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    url = f"sqlite:///{tmp_path / 'store.db'}"
    jobs: list[Job] = [
        put(turn("a"), tenant=TENANT), put(turn("b"), tenant="local"),
        line("resp_a", TENANT), line("resp_c", TENANT), line("resp_d", TENANT, "n"),
        line("resp_e", TENANT, age_s=40 * 86_400), line("resp_b", "local"),
    ]  # fmt: skip

    async def fill() -> None:
        database = await Database.open(StoreConfig(url))
        await database.write(jobs)
        await database.close()

    asyncio.run(fill())
    file = tmp_path / "limpet.yaml"
    file.write_text(json.dumps({"server": {"api_keys": [KEY]}, "store": {"url": url}}))
    return file


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(arguments) == 0
    return capsys.readouterr().out


def test_usage_by_tenant_and_model(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = said(capsys, "usage", "--config", str(config))
    assert KEY not in table
    rows = [row.split() for row in table.splitlines()]
    assert rows == [
        ["tenant", "model", "turns", "input", "cached", "output", "reasoning"],
        [TENANT, "(key", "1)", "m", "2", "2,000", "1,800", "100", "10"],
        [TENANT, "(key", "1)", "n", "1", "1,000", "900", "50", "5"],
        ["local", "(no", "keys)", "m", "1", "1,000", "900", "50", "5"],
    ]
    assert len({len(row) for row in table.splitlines()}) == 1


def test_usage_of_one_tenant_over_a_longer_time_as_json(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(said(capsys, "usage", "--config", str(config), "--days", "60", "--tenant", TENANT, "--json"))
    assert [(each["model"], each["responses"]) for each in found] == [("m", 3), ("n", 1)]
    assert found[0]["output_tokens"] == 150
    assert said(capsys, "usage", "--config", str(config), "--tenant", "nobody") == "nothing was used in 30 days\n"


def test_a_purge_deletes_what_one_tenant_has_stored_and_no_more(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, "purge", TENANT, "--config", str(config)).startswith("deleted 1 responses and conversations")
    assert said(capsys, "purge", TENANT, "--config", str(config)).startswith("deleted 0 ")
    assert "2,000" in said(capsys, "usage", "--config", str(config))

    url = json.loads(config.read_text())["store"]["url"]

    async def left() -> list[bool]:
        database = await Database.open(StoreConfig(url))
        try:
            return [await database.load(*who) is not None for who in ((TENANT, "resp_a"), ("local", "resp_b"))]
        finally:
            await database.close()

    assert asyncio.run(left()) == [False, True]


def test_where_nothing_is_stored_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "limpet.yaml"
    file.write_text("store: {url: memory}")
    assert cli.main(["usage", "--config", str(file)]) == 1
    assert "store.url is `memory`" in capsys.readouterr().err
