"""Handshake, H1 to H10 of protocol.md 10. Each test is named after its assertion."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.conformance.driver import Gated, SocketClient, client, connected, says, serving, slowly
from tests.support.gateway import Running
from tests.support.sdk import check_error_body

KEYS = {"server": {"api_keys": ["right"]}}


async def refusal(running: Running, **headers: str) -> Any:
    """The HTTP answer to a handshake that fails."""
    with pytest.raises(InvalidStatus) as refused:
        async with running.connect(additional_headers=headers):
            pass
    response = refused.value.response
    check_error_body(json.loads(response.body or b"")["error"])
    return response


@pytest.mark.parametrize("path", ["/v1/responses", "/responses"])
async def test_h1_101_with_a_bearer_key(path: str) -> None:
    """1.1: the gateway routes both paths."""
    async with serving(says("ok"), KEYS) as running:
        url = f"ws://127.0.0.1:{running.port}{path}"
        headers = {"Authorization": "Bearer right"}
        async with running.connect(additional_headers=headers) as ws:
            assert ws.response is not None
            assert ws.response.status_code == 101
            assert ws.response.headers["x-codex-websocket-max-message-bytes"] == str(16 * 2**20)
            assert "openai-model" not in ws.response.headers  # Codex shows "model rerouted" (1.3)
        ws_client = running.connect(additional_headers=headers)
        ws_client.uri = url
        async with ws_client as ws:
            assert (await SocketClient(running, ws).turn(input="hi")).completed


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "right"}])
async def test_h2_401_as_json_without_a_key(headers: dict[str, str]) -> None:
    async with serving(says("ok"), KEYS) as running:
        response = await refusal(running, **headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert json.loads(response.body)["error"]["code"] == "invalid_api_key"


async def test_h3_no_subprotocol_is_echoed() -> None:
    async with serving(says("ok")) as running, running.connect(subprotocols=["realtime", "openai"]) as ws:
        assert ws.subprotocol is None
        assert (await SocketClient(running, ws).turn(input="hi")).completed


@pytest.mark.parametrize("offered", ["deflate", None])
@pytest.mark.parametrize("enabled", [True, False])
async def test_h4_deflate_is_negotiated_if_offered_and_not_needed(offered: str | None, enabled: bool) -> None:
    """Off by default (docs/decisions/0006): clients that offer it take a no."""
    settings = {"server": {"deflate": enabled}}
    async with serving(says("word " * 50), settings) as running, running.connect(compression=offered) as ws:
        assert [extension.name for extension in ws.protocol.extensions] == (
            ["permessage-deflate"] if enabled and offered else []
        )
        assert (await SocketClient(running, ws).turn(input="hi " * 5000)).completed


@pytest.mark.parametrize("value", ["responses_websockets=2026-02-06", "responses_multi_agent=v1", "nonsense"])
async def test_h5_any_openai_beta_is_accepted(value: str) -> None:
    async with serving(says("ok")) as running, running.connect(additional_headers={"OpenAI-Beta": value}) as ws:
        assert (await SocketClient(running, ws).turn(input="hi")).completed


async def test_h6_426_when_sockets_are_off() -> None:
    """Codex then uses HTTP at once (1.3)."""
    async with serving(says("ok"), {"server": {"websocket": False}}) as running:
        assert (await refusal(running)).status_code == 426
        async with connected(running, "sse") as one:
            assert (await one.turn(input="hi")).completed


@pytest.mark.parametrize("path", ["/v1/responses", "/responses"])
async def test_h7_a_get_without_upgrade_is_refused_and_does_not_hang(path: str) -> None:
    async with serving(says("ok")) as running, httpx.AsyncClient(timeout=30) as http:
        answer = await http.get(f"http://127.0.0.1:{running.port}{path}")
        assert answer.status_code == 426
        check_error_body(answer.json()["error"])


async def test_h8_a_ping_is_answered_within_a_second_while_a_turn_runs() -> None:
    """Nothing in the turn has to end for it; the second is the quiet machine's."""
    engine = Gated()
    async with client(engine) as one:
        await one.create(input="hi")
        await one.until("response.output_text.delta")
        await asyncio.wait_for(await one.ws.ping(), 30)
        engine.open.set()
        assert (await one.finish()).completed


async def test_h9_a_frame_of_17_mib_closes_with_1009() -> None:
    """1.4: exactly this code, or Codex and opencode don't turn to HTTP. 16 MiB by default."""
    async with client(says("ok")) as one:
        with pytest.raises(ConnectionClosed) as closed:  # noqa: PT012 - either may notice
            await one.create(input="x" * 17 * 2**20)
            await one.finish()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009


async def test_h10_a_binary_frame_closes_this_socket_alone_with_1003() -> None:
    async with serving(slowly()) as running, connected(running) as one, connected(running) as other:
        await other.create(input="hi")
        await other.until("response.output_text.delta")
        await one.send(b'{"type":"response.create"}')
        with pytest.raises(ConnectionClosed) as closed:
            await one.receive()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1003
        assert (await other.finish()).completed
