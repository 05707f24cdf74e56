"""Clients that talk for a while, whatever happens to their server, and what they were told, held against the store."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import sqlalchemy as sa
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from actors.store.database import Database, StoreConfig
from actors.store.tables import LIVING, responses, usage
from gateway.settings import Settings
from tests.support.faults import MODEL
from tests.support.gateway import TERMINALS

RECEIVE_S = 60.0
REDIAL_S = 120.0
PAUSE_S = 0.1
AGREED_S = 60.0
LOST = (ConnectionClosed, InvalidHandshake, httpx.TransportError, OSError, TimeoutError)
"""How a client learns that its connection is gone, or can't be had."""


def saying(words: str, number: int = 0) -> str:
    """An input that the scripted engine answers with these words."""
    return f"Turn {number}. STEPS={json.dumps([{'text': words}])}"


def owner(response_id: str) -> str:
    """The tag of the actor that made it."""
    return response_id.removeprefix("resp_")[:8]


def name_of(error: BaseException) -> str:
    """How a client learns of it."""
    if isinstance(error, ConnectionClosed):
        return f"close {1006 if error.rcvd is None else error.rcvd.code}"
    if isinstance(error, InvalidStatus):
        return f"handshake HTTP {error.response.status_code}"
    return type(error).__name__


def error_of(event: dict[str, Any]) -> str:
    """The code of an error event or of a failed response."""
    code: str = (event["error"] if event["type"] == "error" else event["response"]["error"])["code"]
    return code


@dataclass(slots=True)
class Told:
    """What clients were told of. `ended` has every stored response whose terminal event was seen; `others` those that
    were not to be stored, or had begun when their connection was lost; `unknown` is how many were lost before their id
    was heard of. `codes` counts refusals and failures, `recoveries` has the seconds of turns that took more than one
    try, `turn_s` of all others."""

    ended: dict[str, dict[str, Any]] = field(default_factory=dict)
    others: set[str] = field(default_factory=set)
    unknown: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    recoveries: list[float] = field(default_factory=list)
    turn_s: list[float] = field(default_factory=list)

    def hear(self, event: dict[str, Any]) -> None:
        """A terminal event."""
        if event["type"] in ("error", "response.failed"):
            self.codes[error_of(event)] += 1
        if event["type"] == "error":
            return
        response = event["response"]
        assert response["id"] not in self.ended, "one response ended twice"
        if response["store"]:
            self.ended[response["id"]] = response
        else:
            self.others.add(response["id"])


class Line:
    """One socket, and who is told what is heard on it."""

    def __init__(self, ws: ClientConnection, told: Told) -> None:
        self._ws = ws
        self._told = told
        self.running = False
        """Whether a terminal event is to come."""
        self._started: str | None = None

    @classmethod
    async def dial(cls, url: str, told: Told) -> Line:
        """A socket, as soon as one can be had."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + REDIAL_S
        while True:
            try:
                return cls(await connect(url, max_size=None, open_timeout=20), told)
            except LOST as error:
                if loop.time() > deadline:
                    raise
                told.codes[name_of(error)] += 1
                await asyncio.sleep(PAUSE_S)

    async def start(self, words: str | None = None, **body: Any) -> None:
        """Send a `response.create`, stored unless told otherwise; `words` are what is to be answered."""
        given = {"input": saying(words)} if words is not None else {}
        self.running, self._started = True, None
        await self._ws.send(json.dumps({"type": "response.create", "model": MODEL, **given, **body}))

    async def receive(self) -> dict[str, Any]:
        """The next event."""
        event: dict[str, Any] = json.loads(await asyncio.wait_for(self._ws.recv(), RECEIVE_S))
        if event["type"] == "response.created":
            self._started = event["response"]["id"]
        elif event["type"] in TERMINALS:
            self.running = False
            self._told.hear(event)
        return event

    async def until(self, kind: str) -> dict[str, Any]:
        """The next event of this type, in a turn that goes on."""
        while (event := await self.receive())["type"] != kind:
            assert event["type"] not in TERMINALS, event
        return event

    async def rest(self) -> list[dict[str, Any]]:
        """All events up to and with the next terminal one."""
        events = [await self.receive()]
        while events[-1]["type"] not in TERMINALS:
            events.append(await self.receive())
        return events

    async def turn(self, words: str | None = None, **body: Any) -> dict[str, Any]:
        """Create, and its terminal event."""
        await self.start(words, **body)
        return (await self.rest())[-1]

    async def lost(self) -> str:
        """Wait until the socket is closed, and whatever still comes before; how that is told."""
        try:
            while True:
                await self.receive()
        except LOST as error:
            self.gone(error)
            return name_of(error)

    def gone(self, error: BaseException) -> None:
        """It was lost."""
        self._told.codes[name_of(error)] += 1
        self._give_up()

    async def close(self) -> None:
        """Hang up."""
        await self._ws.close()
        self._give_up()

    def _give_up(self) -> None:
        """What is running will not be heard of."""
        if self.running and self._started is None:
            self._told.unknown += 1
        elif self.running and self._started is not None:
            self._told.others.add(self._started)
        self.running = False


class Talker:
    """One conversation of stored responses on a socket that is dialled again when it is lost, as an agent does it:
    what failed or was cut is sent again, on what was last heard to be complete."""

    def __init__(self, url: str, told: Told) -> None:
        self.previous: str | None = None
        self.turns = 0
        self._url = url
        self._told = told
        self._line: Line | None = None

    async def take_turn(self, words: str) -> None:
        """One more completed turn, after as many tries as it takes."""
        began = time.monotonic()
        lost = False
        while not await self._try(words):
            lost = True
            if time.monotonic() - began > REDIAL_S:
                raise TimeoutError(f"no turn for {REDIAL_S:g} s; refusals: {dict(self._told.codes)}")
        self.turns += 1
        (self._told.recoveries if lost else self._told.turn_s).append(time.monotonic() - began)

    async def close(self) -> None:
        """Hang up."""
        if self._line is not None:
            await self._line.close()

    async def _try(self, words: str) -> bool:
        if self._line is None:
            self._line = await Line.dial(self._url, self._told)
        try:
            event = await self._line.turn(input=saying(words, self.turns), previous_response_id=self.previous)
        except LOST as error:
            self._line.gone(error)
            self._line = None
            return False
        if event["type"] != "response.completed":
            assert error_of(event) != "previous_response_not_found", "what was heard to be complete was lost"
            await asyncio.sleep(PAUSE_S)
            return False
        assert event["response"]["previous_response_id"] == self.previous
        self.previous = event["response"]["id"]
        return True


class Poster(Talker):
    """The same by POST, a connection for each request."""

    async def close(self) -> None:
        """Nothing is held."""

    async def _try(self, words: str) -> bool:
        body = {"model": MODEL, "input": saying(words, self.turns), "previous_response_id": self.previous}
        try:
            async with httpx.AsyncClient(timeout=RECEIVE_S) as client:
                answer = await client.post(self._url, json=body)
        except LOST as error:
            self._told.codes[name_of(error)] += 1
            self._told.unknown += 1
            await asyncio.sleep(PAUSE_S)
            return False
        found = _json(answer)
        if answer.status_code != 200 or found.get("status") != "completed":
            if "id" in found:
                self._told.hear({"type": f"response.{found['status']}", "response": found})
            else:
                code = (found.get("error") or {}).get("code") or f"HTTP {answer.status_code}"
                assert code != "previous_response_not_found", "what was heard to be complete was lost"
                self._told.codes[code] += 1
                # HAProxy's own answer tells nothing of what the actor did.
                self._told.unknown += not found
            await asyncio.sleep(PAUSE_S)
            return False
        self._told.hear({"type": "response.completed", "response": found})
        self.previous = found["id"]
        return True


async def talk(talkers: Sequence[Talker], words: str, over: Callable[[], bool], pause_s: float = 0.0) -> None:
    """All of them at once, turn after turn with a pause between until it is over, then one turn more."""

    async def one(talker: Talker) -> None:
        while not over():
            await talker.take_turn(words)
            await asyncio.sleep(pause_s)
        await talker.take_turn(words)
        await talker.close()

    async with asyncio.TaskGroup() as group:
        for talker in talkers:
            group.create_task(one(talker))


@dataclass(slots=True)
class Audit:
    """What the store has against what clients were told: ids of ended responses that it `lost`, has with another body
    (`changed`), has or accounts for twice (`doubled`), and calls completed though no client can have waited for it
    (`invented`)."""

    told: int
    lost: list[str]
    changed: list[str]
    doubled: list[str]
    invented: list[str]

    @property
    def agrees(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.lost or self.changed or self.doubled or self.invented)


async def audit(settings: Settings, http: str, told: Told, *, alone: bool = True) -> Audit:
    """The store's view, once all is written, or after `AGREED_S`. `alone`: nobody else used this store."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + AGREED_S
    while True:
        found = await _compare(settings, http, told, alone=alone)
        if found.agrees or loop.time() > deadline:
            return found
        await asyncio.sleep(1)


async def _compare(settings: Settings, http: str, told: Told, *, alone: bool) -> Audit:
    stored, ledger = await rows_of(settings)
    twice = [name for table in (stored, ledger) for name, n in Counter(name for name, _ in table).items() if n > 1]
    statuses, accounts = dict(stored), dict(ledger)
    lost, changed = [], []
    for name, response in told.ended.items():
        # What failed is accounted for if an engine had worked for it, with the fault's name.
        accounted = response["status"] == "failed" or accounts.get(name) == response["status"]
        if statuses.get(name) != response["status"] or not accounted:
            lost.append(name)
    if not lost:
        changed = await differing(http, told.ended)
    seen = told.ended.keys() | told.others
    untold = sorted({name for table in (stored, ledger) for name, status in table if status == "completed"} - seen)
    # Its terminal event was on the way when the connection went.
    invented = untold if alone and len(untold) > told.unknown else []
    return Audit(len(told.ended), lost, changed, twice, invented)


async def rows_of(settings: Settings) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(id, status) of all stored responses, and of all lines of the ledger."""
    assert settings.store.url is not None
    database = await Database.open(StoreConfig(settings.store.url))
    living = sa.select(responses.c.id, responses.c.status).where(responses.c.state == LIVING)
    accounts = sa.select(usage.c.id, usage.c.status)

    def read(connection: sa.Connection) -> list[list[tuple[str, str]]]:
        return [[(name, status) for name, status in connection.execute(query)] for query in (living, accounts)]

    try:
        stored, ledger = await database._connections.read(read)
    finally:
        await database.close()
    return stored, ledger


async def differing(http: str, told: dict[str, dict[str, Any]]) -> list[str]:
    """Ids of responses that can't be retrieved just as they were told."""
    wrong: list[str] = []
    queue = list(told.items())

    async def work(client: httpx.AsyncClient) -> None:
        while queue:
            name, response = queue.pop()
            answer = await client.get(f"{http}/responses/{name}")
            if answer.status_code != 200 or _json(answer) != response:
                wrong.append(name)

    async with httpx.AsyncClient(timeout=RECEIVE_S) as client, asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(work(client))
    return wrong


def _json(answer: httpx.Response) -> dict[str, Any]:
    with suppress(ValueError):
        found = answer.json()
        if isinstance(found, dict):
            return found
    return {}
