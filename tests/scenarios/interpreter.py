"""Plays a scenario file against a whole gateway. The format is described in README.md beside this file."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from websockets.exceptions import ConnectionClosed, InvalidStatus

from inference.formats.format import Format
from inference.scripted import Drop, Echo, Fault, Ids, Script, ScriptedEngine, Stall, Step
from inference.tokenizer import Tokenizer, unpack_ids
from tests.conformance import driver
from tests.conformance.driver import TOKENIZER, Result, SocketClient
from tests.scenarios.doubles import Broken, Replicas, chat_format
from tests.support.gateway import Running

FOLDER = Path(__file__).parent
RESULT_KEYS = ("terminal", "error", "response", "events", "text", "output", "count", "same_as", "headers")
Object = dict[str, Any]
BYTES = {TOKENIZER.token_bytes(token)[0]: token for token in range(256)}  # o200k's first tokens are the bytes


def scenarios() -> list[tuple[Path, str]]:
    """Every file, once for each of its transports."""
    found = []
    for path in sorted(FOLDER.glob("*.yaml")):
        found += [(path, transport) for transport in load(path).get("transports", ["socket", "sse"])]
    return found


def load(path: Path) -> Object:
    scenario: Object = yaml.safe_load(path.read_text(encoding="utf-8"))
    known = {"title", "source", "note", "transports", "settings", "thinking", "context_length", "models", "engine"}
    assert scenario.keys() <= known | {"steps", "broken", "each_cut", "format", "replicas"}, scenario.keys()
    return scenario


async def play(path: Path, transport: str) -> None:
    """The whole scenario; once for each place where its first answer can be cut in two, if it asks for that."""
    scenario = load(path)
    cuts: Iterable[int | None] = [None]
    if scenario.get("each_cut"):
        cuts = range(1, len(scenario["engine"][0][0]["say"]))
    options: Object = {key: scenario[key] for key in ("thinking", "context_length", "models") if key in scenario}
    chat = chat_format(scenario.get("format", "plain"))
    engine: Any = ScriptedEngine(chat.tokenizer)
    if "format" in scenario:
        options["formats"] = {"m": chat}
    replicas = Replicas(engine, chat, scenario.get("replicas", 1))
    if "replicas" in scenario:
        options |= {"models": (), "loaders": {"m": replicas.load}}
    scripts = [[_script(answer, cut, chat) for answer in scenario.get("engine", [[{"say": "ok"}]])] for cut in cuts]
    if broken := scenario.get("broken"):
        engine = Broken(engine, broken["message"], broken["after"])
    async with driver.serving(engine, scenario.get("settings"), **options) as running:
        for answers in scripts:
            engine._queued.clear()
            engine.received.clear()
            engine.enqueue(*answers[:-1])
            engine.script = answers[-1]
            async with AsyncExitStack() as stack:
                player = Player(running, transport, stack, replicas)
                await player.steps(scenario["steps"])


def _script(answer: Sequence[Object], cut: int | None, chat: Format) -> Script:
    """One generation's script: say, marked, chars (one token each character), bytes, hex, stall, fault, drop, echo;
    pace."""
    steps: list[Step] = []
    pace: Object = {}
    for entry in answer:
        ((kind, value),) = entry.items()
        match kind:
            case "say" if cut is not None:
                steps += [_ids(value[:cut]), _ids(value[cut:])]
                pace["tokens_per_chunk"] = 1_000_000
            case "say":
                steps.append(_ids(value))
            case "chars":
                steps += [_ids(letter) for letter in value]
            case "bytes":  # tokens of one byte each, so that characters are split
                steps += [Ids([BYTES[byte]]) for byte in value.encode()]
            case "hex":
                steps += [Ids([BYTES[byte]]) for byte in bytes.fromhex(value)]
            case "marked":  # names of control tokens are these tokens
                steps += [_marked(piece, chat.tokenizer) for piece in re.split(r"(<\|\w+\|>)", value) if piece]
            case "stall":
                steps.append(Stall(value))
            case "fault":
                steps.append(Fault(value[0], value[1]))
            case "drop":
                steps.append(Drop())
            case "echo":
                steps.append(Echo(value))
            case _:
                pace[kind] = value
    return Script(tuple(steps), **pace)


def _ids(text: str) -> Ids:
    return Ids(unpack_ids(TOKENIZER.encode(text)))


def _marked(piece: str, tokenizer: Tokenizer) -> Ids:
    return Ids([tokenizer.special(piece)]) if tokenizer.has_special(piece) else _ids(piece)


class Player:
    """Carries out steps. `names` holds what earlier steps gave, for `$name.path` references."""

    def __init__(self, running: Running, transport: str, stack: AsyncExitStack, replicas: Replicas) -> None:
        self.running = running
        self.replicas = replicas
        self.transport = transport
        self.stack = stack
        self.clients: dict[str, Any] = {}
        self.names: Object = {}

    async def steps(self, steps: Sequence[Object]) -> None:
        for number, step in enumerate(steps):
            try:
                await self._step(step)
            except (AssertionError, TimeoutError, ConnectionClosed, KeyError, IndexError) as problem:
                raise AssertionError(f"step {number} {json.dumps(step, default=str)[:300]}: {problem!r}") from problem

    async def _step(self, step: Object) -> None:
        if "only" in step and step["only"] != self.transport:
            return
        if "repeat" in step:
            for number in range(step["repeat"]):
                self.names["n"] = str(number)
                await self.steps(step["steps"])
            return
        kind = next(key for key in step if key not in ("as", "client", "expect", "only", "key"))
        await getattr(self, f"_do_{kind}")(self._resolved(step[kind]), step)

    async def client(self, step: Object) -> Any:
        name = step.get("client", "main")
        if name not in self.clients:
            transport = "socket" if name.startswith("socket") else self.transport
            transport = "json" if name.startswith("http") else transport
            one = driver.connected(self.running, transport, step.get("key", "k"))
            self.clients[name] = await self.stack.enter_async_context(one)
        return self.clients[name]

    # -- steps

    async def _do_turn(self, body: Object, step: Object) -> None:
        """A create and everything up to its terminal event."""
        self._take(await (await self.client(step)).turn(**body), step)

    async def _do_send(self, frame: Any, step: Object) -> None:
        """A raw text frame; an object is made JSON, `pad_to` bytes long if it says so."""
        one: SocketClient = await self.client(step)
        if isinstance(frame, dict) and (size := frame.pop("pad_to", None)) is not None:
            text = json.dumps({"type": "response.create", "model": "m", "store": False, **frame, "input": ""})
            frame = text[:-2] + "x" * (size - len(text)) + text[-2:]
        elif isinstance(frame, dict) and frame.pop("create", False):
            frame = {"type": "response.create", "model": "m", "store": False, **frame}
        await one.send(frame)

    async def _do_binary(self, data: str, step: Object) -> None:
        await (await self.client(step)).send(bytes.fromhex(data))

    async def _do_receive(self, patterns: Sequence[Object], step: Object) -> None:
        """Exactly these frames, in order."""
        one: SocketClient = await self.client(step)
        for pattern in patterns:
            self._matches(await one.receive(), pattern)

    async def _do_until(self, kind: str, step: Object) -> None:
        """Frames up to this type, whatever they are."""
        self._take(Result(await (await self.client(step)).until(kind)), step)

    async def _do_finish(self, _: Any, step: Object) -> None:
        """Everything up to the next terminal event."""
        self._take(await (await self.client(step)).finish(), step)

    async def _do_silent(self, seconds: float, step: Object) -> None:
        await (await self.client(step)).silent(seconds)

    async def _do_connect(self, _: Any, step: Object) -> None:
        await self.client(step)

    async def _do_wait(self, seconds: float, _: Object) -> None:
        await asyncio.sleep(seconds)

    async def _do_closed(self, code: int, step: Object) -> None:
        """The server closes with this code; nothing else comes before."""
        one: SocketClient = await self.client(step)
        with pytest.raises(ConnectionClosed) as closed:
            await one.receive()
        assert closed.value.rcvd is not None, "no close frame"
        assert closed.value.rcvd.code == code, closed.value.rcvd

    async def _do_hang_up(self, how: str, step: Object) -> None:
        """The client goes: `close` with a close frame, `abort` without."""
        one: SocketClient = self.clients.pop(step.get("client", "main"))
        if how == "close":
            await one.ws.close()
        else:
            one.ws.transport.abort()

    async def _do_drain(self, code: int, _: Object) -> None:
        """The replica begins to drain."""
        draining = asyncio.create_task(self.running.gateway.drain(code, "draining"))
        self.stack.push_async_callback(asyncio.wait_for, draining, 10)
        await asyncio.sleep(0)

    async def _do_request(self, request: Object, step: Object) -> None:
        """A plain HTTP request; expect has status, headers and body."""
        request = {"method": "POST", "path": "/v1/responses", **request}
        url = f"http://127.0.0.1:{self.running.port}{request.pop('path')}"
        async with httpx.AsyncClient(timeout=10) as http:
            answer = await http.request(url=url, **request)
        found: Object = {"status": answer.status_code, "headers": dict(answer.headers), "text": answer.text}
        if answer.headers.get("content-type") == "application/json":
            found["body"] = answer.json()
        self._matches(found, step["expect"])
        self._name(found, step)

    async def _do_handshake(self, headers: Object, step: Object) -> None:
        """A handshake that is refused; expect has status, headers and body."""
        try:
            async with self.running.connect(additional_headers=headers):
                raise AssertionError("not refused")
        except InvalidStatus as refused:
            response = refused.response
        found = {"status": response.status_code, "body": json.loads(response.body or b"")}
        found["headers"] = {name.lower(): value for name, value in response.headers.raw_items()}
        self._matches(found, step["expect"])

    async def _do_leave(self, body: Object, _: Object) -> None:
        """A stream over HTTP whose client goes after the first piece of text."""
        url = f"{self.running.http}/responses"
        async with (
            httpx.AsyncClient(timeout=10) as http,
            http.stream("POST", url, json={"model": "m", "stream": True, **body}) as answer,
        ):
            async for line in answer.aiter_lines():
                if line == "event: response.output_text.delta":
                    return
        raise AssertionError("no text came")

    async def _do_prompt(self, wanted: Object, _: Object) -> None:
        """What the engine got: `at` counts generations; in_order and lacks are lists of texts, equals is the whole,
        controls are the names of all its control tokens."""
        await driver.eventually(lambda: self.running.engine.received)  # type: ignore[attr-defined]
        prompt = self.running.engine.received[wanted.get("at", -1)].prompt  # type: ignore[attr-defined]
        tokenizer = self.replicas.chat.tokenizer
        spelled = [(token, tokenizer.token_bytes(token)) for token in unpack_ids(prompt)]
        text = b"".join(piece for _, piece in spelled).decode()
        if "controls" in wanted:
            found = [piece.decode() for token, piece in spelled if token in tokenizer.special_ids]
            assert found == wanted["controls"], found
        at = -1
        for part in wanted.get("in_order", ()):
            at = text.find(part, at + 1)
            assert at >= 0, f"{part!r} not (or not there) in {text!r}"
            assert text.count(part) == 1 or wanted.get("often"), f"{part!r} is there {text.count(part)} times: {text!r}"
        for part in wanted.get("lacks", ()):
            assert part not in text, text
        assert wanted.get("equals", text) == text

    async def _do_guide(self, pattern: str, _: Object) -> None:
        """The constraint that the engine was given last."""
        guide = self.running.engine.received[-1].sampling.guide  # type: ignore[attr-defined]
        assert guide is not None
        self._matches(guide.value, pattern)

    async def _do_engine(self, wanted: Object, _: Object) -> None:
        """What the engine did: `asked` generations, `aborted` ones, how many `replicas` answered; `open` sockets of
        the gateway."""
        engine, gateway = self.running.engine, self.running.gateway
        counts = {
            "asked": lambda: len(engine.received),  # type: ignore[attr-defined]
            "aborted": lambda: engine.aborted,  # type: ignore[attr-defined]
            "replicas": lambda: len(set(self.replicas.served)),
            "open": lambda: len(gateway.sockets),
        }
        for name, number in wanted.items():
            await driver.eventually(lambda count=counts[name], number=number: count() == number)

    async def _do_remove(self, _: Any, __: Object) -> None:
        """The replica that answered last is gone."""
        self.replicas.living.remove(self.replicas.served[-1])

    # -- results

    def _take(self, result: Result, step: Object) -> None:
        self._name(result, step)
        expect = self._resolved(step.get("expect", {"terminal": "completed"} if "until" not in step else {}))
        assert expect.keys() <= set(RESULT_KEYS), expect.keys()
        found: Object = {"terminal": result.last["type"].removeprefix("response."), "headers": dict(result.headers)}
        if "error" in expect:
            found["error"] = result.error
        if "response" in result.last:
            found |= {"response": result.response, "output": result.response["output"], "text": result.text}
        for key in ("terminal", "error", "response", "text", "output"):
            if key in expect:
                self._matches(found.get(key), expect[key], key)
        if "headers" in expect and self.transport != "socket":
            self._matches(found["headers"], expect["headers"], "headers")
        if "events" in expect and self.transport != "json":
            assert _shape(result.types) == expect["events"], _shape(result.types)
        for kind, number in expect.get("count", {}).items():
            if self.transport != "json":
                assert result.types.count(kind) == number, f"{result.types.count(kind)} {kind}"
        if "same_as" in expect:
            _same(result.response["output"], self.names[expect["same_as"]].response["output"])

    def _name(self, found: Any, step: Object) -> None:
        if "as" in step:
            self.names[step["as"]] = found

    def _resolved(self, value: Any) -> Any:
        """`$name.path` becomes what it names; `{repeat: [text, n]}` a long text."""
        if isinstance(value, dict):
            if value.keys() == {"repeat_text"}:
                return value["repeat_text"][0] * value["repeat_text"][1]
            return {key: self._resolved(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [self._resolved(entry) for entry in value]
        if isinstance(value, str) and re.fullmatch(r"\$\w+(\.\w+)*", value) and value not in ("$any", "$absent"):
            name, *path = value[1:].split(".")
            found = self.names[name]
            for part in path:
                if isinstance(found, Result):
                    found = found.id if part == "id" else found.response[part]
                else:
                    found = found[int(part) if part.isdigit() else part]
            return found
        return value

    def _matches(self, found: Any, pattern: Any, where: str = "") -> None:
        """Objects may have more keys than the pattern; lists have the same length; `~x` is a regular expression that
        must be found, `$any` anything but null, `$absent` a key that isn't there."""
        pattern = self._resolved(pattern)
        if isinstance(pattern, Mapping):
            assert isinstance(found, Mapping), f"{where}: {found!r}"
            for key, entry in pattern.items():
                if entry == "$absent":
                    assert key not in found, f"{where}.{key} is {found[key]!r}"
                else:
                    assert key in found, f"{where}.{key} is missing in {found!r}"
                    self._matches(found[key], entry, f"{where}.{key}")
        elif isinstance(pattern, list):
            assert isinstance(found, list), f"{where}: {found!r}"
            assert len(found) == len(pattern), f"{where}: {found!r}"
            for index, (one, entry) in enumerate(zip(found, pattern, strict=True)):
                self._matches(one, entry, f"{where}[{index}]")
        elif pattern == "$any":
            assert found is not None, where
        elif isinstance(pattern, str) and pattern.startswith("~"):
            assert isinstance(found, str), f"{where}: {found!r}"
            assert re.search(pattern[1:], found), f"{where}: {found!r}"
        else:
            assert found == pattern, f"{where}: {found!r}, not {pattern!r}"


def _shape(types: Sequence[str]) -> list[str]:
    """Types without their prefix, repeated ones once."""
    return [kind.removeprefix("response.") for kind, _ in groupby(types)]


def _same(found: Sequence[Object], other: Sequence[Object]) -> None:
    """Equal but for ids."""

    def bare(items: Sequence[Object]) -> list[Object]:
        return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]

    assert bare(found) == bare(other)
