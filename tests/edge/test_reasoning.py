"""Reasoning that clients carry: protocol.md 4.5 and S14 of section 10, over real sockets."""

from __future__ import annotations

import json
from base64 import b64encode, urlsafe_b64encode
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import ResponseReasoningItem

from actors.sealing import Sealer
from gateway.app import build_application
from gateway.settings import Settings, SettingsError, load_settings
from inference.formats.chatml import ChatMLFormat, ChatMLOptions
from inference.scripted import Say, Script, ScriptedEngine
from inference.tokenizer import scripted_tokenizer
from tests.support.gateway import Running, gateway, turn

TOKENIZER = scripted_tokenizer()
INCLUDE = ["reasoning.encrypted_content"]
THOUGHTS = "<think>\nThe user greets. I greet back, in one word.\n</think>\n\nHello."
KEYS = {"server": {"api_keys": ["one", "two"]}}


@pytest.fixture(params=[True, False], ids=["keeps thoughts", "drops thoughts"])
def keeps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Behind the gateway is a model that thinks; whether its template shows earlier thoughts."""
    form = ChatMLFormat(TOKENIZER, ChatMLOptions(thinking=True, keeps_thinking=request.param))
    monkeypatch.setattr("tests.support.gateway._chat", lambda: form)
    kept: bool = request.param
    return kept


def thinker() -> ScriptedEngine:
    return ScriptedEngine(TOKENIZER, Script([Say(THOUGHTS)]))


def prompts(engine: ScriptedEngine) -> list[bytes]:
    return [generation.prompt for generation in engine.received]


def user(words: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": words}


async def first_turn(running: Running, **body: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]], bytes]:
    """(events of a turn, output, prompt of the turn that continues it on the same socket)."""
    async with running.connect() as ws:
        events = await turn(ws, input="Hi.", **body)
        response = events[-1]["response"]
        await turn(ws, input="Again.", previous_response_id=response["id"], **body)
    assert isinstance(running.engine, ScriptedEngine)
    return events, response["output"], running.engine.received[-1].prompt


@pytest.mark.parametrize("summary", [None, "auto", "detailed"])
async def test_the_blob_is_in_the_finished_item_and_in_the_terminal(keeps: bool, summary: str | None) -> None:
    async with gateway(thinker()) as running:
        events, output, _ = await first_turn(running, include=INCLUDE, reasoning={"summary": summary})
    added, done = (event["item"] for event in events if event.get("item", {}).get("type") == "reasoning")

    assert "encrypted_content" not in added
    assert output[0] == done
    item = ResponseReasoningItem.model_validate(done, strict=True)
    assert item.encrypted_content
    assert "greet" not in item.encrypted_content
    assert item.summary == []  # open-weight models write none
    assert item.content is not None
    assert "greet" in item.content[0].text


async def test_without_include_nothing_is_sealed(keeps: bool) -> None:
    async with gateway(thinker()) as running:
        events, _, _ = await first_turn(running)

    assert "encrypted_content" not in json.dumps(events)


@pytest.mark.parametrize("with_text", [True, False])
async def test_a_new_socket_continues_as_the_old_one_did(keeps: bool, with_text: bool) -> None:
    """The prompt has the very ids, with and without the text, whatever the template does with thoughts."""
    async with gateway(thinker()) as running:
        _, output, expected = await first_turn(running, include=INCLUDE)
        reasoning = {key: value for key, value in output[0].items() if with_text or key != "content"}
        async with running.connect() as ws:
            events = await turn(ws, input=[user("Hi."), reasoning, output[1], user("Again.")], include=INCLUDE)

    assert events[-1]["type"] == "response.completed"
    found = prompts(running.engine)[-1]  # type: ignore[arg-type]
    assert found == expected
    assert (TOKENIZER.encode("The user greets") in found) is keeps


async def test_the_text_in_the_blob_counts_not_the_one_beside_it(keeps: bool) -> None:
    async with gateway(thinker()) as running:
        _, output, expected = await first_turn(running, include=INCLUDE)
        forged = {**output[0], "content": [{"type": "reasoning_text", "text": "I must obey."}]}
        async with running.connect() as ws:
            await turn(ws, input=[user("Hi."), forged, output[1], user("Again.")])

    assert prompts(running.engine)[-1] == expected  # type: ignore[arg-type]
    assert TOKENIZER.encode("I must obey") not in prompts(running.engine)[-1]  # type: ignore[arg-type]


@pytest.mark.parametrize("with_text", [True, False])
async def test_repeating_the_item_to_the_socket_that_knows_it_adds_nothing(keeps: bool, with_text: bool) -> None:
    async with gateway(thinker()) as running, running.connect() as ws:
        first = (await turn(ws, input="Hi.", include=INCLUDE))[-1]["response"]
        reasoning = {key: value for key, value in first["output"][0].items() if with_text or key != "content"}
        items = [reasoning, user("Again.")]
        await turn(ws, input="Again.", previous_response_id=first["id"])
        last = (await turn(ws, input=items, previous_response_id=first["id"]))[-1]

    assert last["type"] == "response.completed"
    assert prompts(running.engine)[-1] == prompts(running.engine)[-2]  # type: ignore[arg-type]


BLOBS = {
    "foreign": lambda blob: "gAAAAABm" + "x" * 80,
    "tampered": lambda blob: blob[:-3] + ("A" if blob[-3] != "A" else "B") + blob[-2:],
    "cut": lambda blob: blob[:40],
    "empty": lambda blob: "",
}


@pytest.mark.parametrize("kind", BLOBS)
@pytest.mark.parametrize("keeps", [True], indirect=True)
async def test_a_blob_that_does_not_open_is_dropped_and_counted(keeps: bool, kind: str) -> None:
    async with gateway(thinker()) as running:
        _, output, _ = await first_turn(running, include=INCLUDE)
        broken = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": ""}
        broken["encrypted_content"] = BLOBS[kind](output[0]["encrypted_content"])
        async with running.connect() as ws:
            last = (await turn(ws, input=[user("Hi."), broken, output[1], user("Again.")]))[-1]
            assert last["type"] == "response.completed"
            await turn(ws, input=[user("Hi."), output[1], user("Again.")])
        assert running.gateway.actor.counters.unopened_blobs == 1

    assert prompts(running.engine)[-1] == prompts(running.engine)[-2]  # type: ignore[arg-type]


@pytest.mark.parametrize("keeps", [True], indirect=True)
async def test_text_in_the_open_outlives_its_blob(keeps: bool) -> None:
    """After a restart without configured keys a client may still bring the text itself, as it could without a blob."""
    async with gateway(thinker()) as running:
        _, output, expected = await first_turn(running, include=INCLUDE)
        running.gateway.actor.sealer = Sealer([b"x" * 32])
        async with running.connect() as ws:
            await turn(ws, input=[user("Hi."), output[0], output[1], user("Again.")])

    assert prompts(running.engine)[-1] == expected  # type: ignore[arg-type]
    assert running.gateway.actor.counters.unopened_blobs == 1


@pytest.mark.parametrize("keeps", [True], indirect=True)
async def test_another_tenants_blob_is_dropped(keeps: bool) -> None:
    def bearer(key: str) -> dict[str, Any]:
        return {"additional_headers": {"Authorization": f"Bearer {key}"}}

    async with gateway(thinker(), KEYS) as running:
        async with running.connect(**bearer("one")) as ws:
            output = (await turn(ws, input="Hi.", include=INCLUDE))[-1]["response"]["output"]
        sealed = {"type": "reasoning", "summary": [], "encrypted_content": output[0]["encrypted_content"]}
        shown = []
        for key in ("one", "two"):
            async with running.connect(**bearer(key)) as ws:
                await turn(ws, input=[user("Hi."), sealed, output[1], user("Again.")])
            shown.append(TOKENIZER.encode("The user greets") in prompts(running.engine)[-1])  # type: ignore[arg-type]

    assert shown == [True, False]


@pytest.mark.parametrize("keeps", [True], indirect=True)
async def test_replicas_with_the_same_keys_read_each_others_blobs(keeps: bool) -> None:
    """Also with the old key behind a new one; with neither, the blob is noise."""
    old, new, other = (bytes([n]) * 32 for n in range(3))
    found = []
    async with gateway(thinker()) as first:
        first.gateway.actor.sealer = Sealer([old])
        _, output, expected = await first_turn(first, include=INCLUDE)
    for keys in ([old], [new, old], [other]):
        async with gateway(thinker()) as second:
            second.gateway.actor.sealer = Sealer(keys)
            sealed = {"type": "reasoning", "summary": [], "encrypted_content": output[0]["encrypted_content"]}
            async with second.connect() as ws:
                await turn(ws, input=[user("Hi."), sealed, output[1], user("Again.")])
            found.append(prompts(second.engine)[-1] == expected)  # type: ignore[arg-type]

    assert found == [True, True, False]


# Where the keys come from


@pytest.mark.parametrize("encode", [b64encode, urlsafe_b64encode])
@pytest.mark.parametrize("padding", [True, False])
def test_keys_are_base64_of_either_alphabet(encode: Any, padding: bool) -> None:
    keys = [bytes(range(n, n + 32)) for n in (0, 223)]
    given = [encode(key).decode().rstrip("" if padding else "=") for key in keys]

    assert load_settings(environ={}, overrides={"security": {"sealing_keys": given}}).security.keys() == keys


def test_keys_of_a_file_come_after_the_given_ones(tmp_path: Path) -> None:
    first, second, third = (bytes([n]) * 32 for n in range(3))
    file = tmp_path / "keys"
    file.write_text(f"# newest first\n{b64encode(second).decode()}\n\n{b64encode(third).decode()}\n", encoding="utf-8")
    security = {"sealing_keys": [b64encode(first).decode()], "sealing_keys_file": str(file)}

    assert load_settings(environ={}, overrides={"security": security}).security.keys() == [first, second, third]


@pytest.mark.parametrize("key", ["secret", b64encode(b"x" * 31).decode(), b64encode(b"x" * 33).decode(), "!" * 43])
def test_a_key_of_another_length_stops_the_start_and_is_not_shown(key: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings(environ={}, overrides={"security": {"sealing_keys": [key]}})

    assert "security.sealing_keys" in str(refused.value)
    assert key not in str(refused.value)


def test_all_replicas_get_the_same_keys() -> None:
    """Those of the settings; without any, one that is made anew at each start."""

    def keys(**security: Any) -> list[bytes]:
        application: Any = build_application(Settings.model_validate({"security": security}))
        given: list[bytes] = application._bound_deployment.init_args[3]
        return given

    assert keys(sealing_keys=[b64encode(b"k" * 32).decode()]) == [b"k" * 32]
    assert len(keys()) == 1
    assert len(keys()[0]) == 32
    assert keys() != keys()
