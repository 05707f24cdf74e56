"""Conversations in the store: their items, and who may change them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from actors.store.database import Database
from actors.store.jobs import DeleteConversation, DeleteItem, PutConversation, PutItems, StoredConversation
from gateway.protocol.items import Item, Message
from tests.support.responses import NOW

NEW = PutConversation("t", "conv_1", "a", NOW, {"topic": "te\0a"})


def said(*names: str) -> tuple[Item, ...]:
    return tuple(Message("user", f"text {name}", id=name) for name in names)


async def test_items_come_back_in_order(database: Database) -> None:
    await database.write([NEW])
    await database.write(
        [PutItems("t", "conv_1", "a", said("z", "y\0\ud800")), PutItems("t", "conv_1", "a", said("x"))]
    )
    await database.write([PutItems("t", "conv_1", "a", said("w"), "resp_1", 3)])

    assert await database.conversation("t", "conv_1") == StoredConversation(
        "conv_1", "t", "a", NOW, {"topic": "te\0a"}, said("z", "y\0\ud800", "x", "w"), "resp_1", 3
    )
    assert await database.conversation("u", "conv_1") is None


async def test_the_same_jobs_again_change_nothing(database: Database) -> None:
    jobs = [NEW, PutItems("t", "conv_1", "a", said("p", "q"), None, 0), DeleteItem("t", "conv_1", "a", "p")]
    for _ in range(2):
        assert await database.write(jobs) == []
        found = await database.conversation("t", "conv_1")
        assert found is not None
        assert found.items == said("q")


async def test_metadata_is_replaced_and_the_rest_stays(database: Database) -> None:
    await database.write([NEW, PutItems("t", "conv_1", "a", said("p"), "resp_1", 1)])
    await database.write([replace(NEW, metadata={"b": "c"})])
    found = await database.conversation("t", "conv_1")

    assert found is not None
    assert (found.metadata, found.items, found.head, found.rendered) == ({"b": "c"}, said("p"), "resp_1", 1)


async def test_only_the_owner_changes_it(database: Database) -> None:
    await database.write([NEW, PutItems("t", "conv_1", "a", said("p"))])
    before = await database.conversation("t", "conv_1")
    refused = [
        replace(NEW, owner="b", metadata={}),
        PutItems("t", "conv_1", "b", said("q")),
        DeleteItem("t", "conv_1", "b", "p"),
        DeleteConversation("t", "conv_1", "b"),
        PutItems("t", "conv_2", "a", said("q")),
        PutItems("u", "conv_1", "a", said("q")),
    ]

    assert await database.write(refused) == refused
    assert await database.conversation("t", "conv_1") == before


async def test_one_of_many_becomes_the_owner(database: Database) -> None:
    await database.write([NEW])
    claims = await asyncio.gather(*(database.claim("t", "conv_1", "a", f"new {n}") for n in range(8)))
    winner = f"new {claims.index(True)}"

    assert claims.count(True) == 1
    assert await database.claim("t", "conv_1", "a", winner)  # its answer was lost
    assert not await database.claim("t", "conv_1", "a", "late")
    assert not await database.claim("u", "conv_1", winner, "thief")
    assert await database.write([PutItems("t", "conv_1", "a", said("old owner's"))]) != []
    assert await database.write([PutItems("t", "conv_1", winner, said("p"))]) == []


async def test_deleted_with_its_items(database: Database) -> None:
    await database.write([NEW, PutItems("t", "conv_1", "a", said("p"))])
    await database.write([DeleteConversation("t", "conv_1", "a")])
    assert await database.conversation("t", "conv_1") is None
    await database.write([NEW])
    found = await database.conversation("t", "conv_1")

    assert found is not None
    assert found.items == ()


async def test_time_takes_it(database: Database) -> None:
    database._now = lambda: NOW + 10
    await database.write([replace(NEW, expires_at=NOW + 10), replace(NEW, id="conv_2", expires_at=NOW + 11)])
    await database.write([PutItems("t", "conv_1", "a", said("p"))])

    assert await database.expire() == 1
    assert await database.conversation("t", "conv_1") is None
    assert await database.conversation("t", "conv_2") is not None
