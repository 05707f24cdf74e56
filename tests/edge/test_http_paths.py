"""Paths and methods, model lists and the Codex catalog."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from tests.support.actors import says
from tests.support.gateway import gateway

BODY = {"model": "m", "input": "x"}


PATHS = (
    ("POST", "/responses", 200),
    ("GET", "/responses", 426),
    ("GET", "/responses/resp_x", 404),
    ("POST", "/responses/input_tokens", 200),
    ("GET", "/responses/compact", 404),
    ("POST", "/conversations", 200),
    ("GET", "/models", 200),
    ("GET", "/models/m", 200),
    ("GET", "/models/other", 404),
    ("GET", "/codex/models", 200),
    ("GET", "/nothing", 404),
    ("DELETE", "/responses", 405),
)


@pytest.mark.parametrize("prefix", ["", "/v1"])
@pytest.mark.parametrize("slash", ["", "/", "//"])
async def test_every_path_with_and_without_v1_and_slash(prefix: str, slash: str) -> None:
    async with (
        gateway(says("ok"), models=("m",)) as running,
        httpx.AsyncClient(base_url=running.http.removesuffix("/v1"), follow_redirects=False) as client,
    ):
        for method, path, status in PATHS:
            body = BODY if method == "POST" and "responses" in path else None
            answer = await client.request(method, prefix + path + slash, json=body)

            assert answer.status_code == status, path
            assert answer.headers["x-request-id"].startswith("req_")
            if status >= 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/responses", "GET, HEAD, OPTIONS, POST"),
        ("/responses/x", "DELETE, GET, HEAD, OPTIONS"),
        ("/responses/x/cancel", "OPTIONS, POST"),
        ("/conversations/x", "DELETE, GET, HEAD, OPTIONS, POST"),
        ("/models", "GET, HEAD, OPTIONS"),
    ],
)
async def test_options_and_405_name_the_methods(path: str, methods: str) -> None:
    async with gateway(says("ok")) as running, httpx.AsyncClient(base_url=running.http) as client:
        options = await client.options(path)
        patched = await client.patch(path)

    assert (options.status_code, options.headers["allow"], options.content) == (204, methods, b"")
    assert (patched.status_code, patched.headers["allow"]) == (405, methods)
    assert patched.json()["error"]["code"] == "method_not_allowed"


async def test_head_is_a_get_without_a_body() -> None:
    async with gateway(says("ok")) as running, httpx.AsyncClient(base_url=running.http) as client:
        made = (await client.post("/responses", json={**BODY, "background": True})).json()["id"]
        answers = [
            await client.head(path)
            for path in ("/models", f"/responses/{made}", f"/responses/{made}?stream=true", "/responses/resp_x")
        ]

    assert [answer.status_code for answer in answers] == [200, 200, 200, 404]
    assert [answer.content for answer in answers] == [b""] * 4
    assert all(answer.headers["content-type"] == "application/json" for answer in answers)


async def test_a_clients_own_timeout_header_changes_nothing() -> None:
    async with gateway(says("one two", pause=0.05)) as running, httpx.AsyncClient(base_url=running.http) as client:
        headers = {"x-request-timeout-seconds": "0.001", "x-stainless-timeout": "0.001"}
        answer = await client.post("/responses", json=BODY, headers=headers)

    assert answer.json()["status"] == "completed"


async def test_the_sdk_lists_models() -> None:
    async with (
        gateway(says("ok"), models=("m", "org/n")) as running,
        AsyncOpenAI(base_url=running.http, api_key="k") as client,
    ):
        listed = [model.id async for model in client.models.list()]
        one = await client.models.retrieve("org/n")

    assert listed == ["m", "org/n"]
    assert (one.id, one.object) == ("org/n", "model")


CODEX_DEMANDS = (
    "slug",
    "display_name",
    "supported_reasoning_levels",
    "shell_type",
    "visibility",
    "supported_in_api",
    "priority",
    "support_verbosity",
    "truncation_policy",
    "experimental_supported_tools",
    "base_instructions",
)


class TestCodexCatalog:
    async def catalog(self, **options: Any) -> list[dict[str, Any]]:
        async with gateway(says("ok"), **options) as running, httpx.AsyncClient(base_url=running.http) as client:
            answer = await client.get("/codex/models?client_version=0.171.0")
        assert answer.status_code == 200
        found: list[dict[str, Any]] = answer.json()["models"]
        return found

    async def test_it_has_what_codex_demands_of_each_model(self) -> None:
        models = await self.catalog(models=("m", "n"), context_length=20_000)

        assert [model["slug"] for model in models] == ["m", "n"]
        for model in models:
            assert all(model[key] is not None for key in CODEX_DEMANDS)
            assert model["context_window"] == 20_000
            assert model["truncation_policy"] == {"mode": "tokens", "limit": 5000}
            assert "use_responses_lite" not in model

    async def test_a_gateway_that_serves_any_name_lists_none_it_does_not_know(self) -> None:
        assert [model["slug"] for model in await self.catalog()] in ([], ["m"])

    async def test_a_key_is_asked_for(self) -> None:
        async with (
            gateway(says("ok"), {"server": {"api_keys": ["right"]}}) as running,
            httpx.AsyncClient(base_url=running.http) as client,
        ):
            assert (await client.get("/codex/models")).status_code == 401
            headers = {"authorization": "Bearer right"}
            assert (await client.get("/codex/models", headers=headers)).status_code == 200

    async def test_a_model_that_still_loads_is_listed_without_what_is_not_known(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("gateway.http_models.CATALOG_PATIENCE_S", 0.05)
        async with gateway(says("ok"), models=("m",)) as running, httpx.AsyncClient(base_url=running.http) as client:
            monkeypatch.setattr(running.gateway.actor.models, "resolve", lambda _: asyncio.sleep(10))
            model = (await client.get("/codex/models")).json()["models"][0]

        assert model["slug"] == "m"
        assert "context_window" not in model
