"""The way of a turn's events onto the wire: in the order of their numbers, whoever made them, none lost or twice."""

from __future__ import annotations

import asyncio

import pytest

from gateway.protocol.actions import Start
from gateway.protocol.emitter import Event
from gateway.socket_turns import RunningTurn


class Client:
    """Takes a frame each time `reads` is released; a cancelled send has written nothing, as with uvicorn."""

    def __init__(self) -> None:
        self.got: list[str] = []
        self.reads = asyncio.Semaphore(0)
        self.turn = RunningTurn(Start(None, {}), self.send)

    async def send(self, text: str) -> None:
        await self.reads.acquire()
        self.got.append(text)

    async def read(self, count: int) -> None:
        for _ in range(count):
            self.reads.release()
        for _ in range(10):
            await asyncio.sleep(0)


def events(*names: str) -> list[Event]:
    return [Event(name, name) for name in names]


async def test_what_is_told_while_a_batch_is_sent_comes_behind_it_and_before_the_next() -> None:
    client = Client()
    writing = asyncio.create_task(client.turn.write(events("1", "2", "3")))
    await client.read(1)
    client.turn.tell(*events("4"))
    await client.read(2)
    assert not writing.done()
    await client.read(1)
    await writing
    await client.read(1)
    await client.turn.write(events("5"))

    assert client.got == ["1", "2", "3", "4", "5"]


async def test_what_is_told_while_nothing_is_sent_goes_out_at_once_and_holds_up_the_next_batch() -> None:
    client = Client()
    for name in ("1", "2"):
        client.turn.tell(*events(name))
    await client.read(0)
    writing = asyncio.create_task(client.turn.write(events("3")))
    await client.read(0)
    client.turn.tell(*events("4"))
    await client.read(4)
    await writing
    await client.turn.finish()

    assert client.got == ["1", "2", "3", "4"]


@pytest.mark.parametrize("told", [False, True])
async def test_a_stopped_turn_loses_no_event_and_sends_none_twice(told: bool) -> None:
    client = Client()
    if told:
        client.turn.tell(*events("1", "2")[:1])
        await client.read(0)
    client.turn.enter()
    client.turn.task = asyncio.create_task(client.turn.write(events(*("2", "3") if told else ("1", "2", "3"))))
    await client.read(0)
    client.turn.stop()
    await asyncio.gather(client.turn.task, return_exceptions=True)
    last = asyncio.create_task(client.turn.write(events("failed")))
    await client.read(4)
    await last
    await client.turn.finish()

    assert client.got == ["1", "2", "3", "failed"]


async def test_a_turn_that_is_stopped_before_its_first_step_never_takes_it() -> None:
    turn = Client().turn
    turn.stop()

    with pytest.raises(asyncio.CancelledError):
        turn.enter()
