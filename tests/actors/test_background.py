"""Background turns: their states, their bounds, and every way to end one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from actors.background import BackgroundLimits, Run
from actors.session import SessionActor
from gateway.protocol.errors import ApiError
from inference.engine import Chunk, EngineError
from inference.tokenizer import scripted_tokenizer, unpack_ids
from tests.support.actors import TENANT, actor, asked, run_turn, says, two_actors
from tests.support.engines import PlannedEngine


async def status(actor: SessionActor, response_id: str) -> str:
    found: str = json.loads(await actor.archive.retrieve(TENANT, response_id))["status"]
    return found


async def until(actor: SessionActor, response_id: str, *wanted: str) -> dict[str, Any]:
    for _ in range(500):
        found: dict[str, Any] = json.loads(await actor.archive.retrieve(TENANT, response_id))
        if found["status"] in wanted:
            return found
        await asyncio.sleep(0.01)
    raise AssertionError(f"still {found['status']}")


async def submit(actor: SessionActor, text: str = "hi", tenant: str = TENANT, **fields: Any) -> Run:
    return await actor.background.submit(tenant, asked(text, background=True, **fields))


async def streamed(actor: SessionActor, response_id: str, after: int = -1) -> list[dict[str, Any]]:
    async with asyncio.timeout(30):
        return [
            json.loads(event.data)
            async for events in actor.archive.follow(TENANT, response_id, after)
            for event in events
        ]


async def test_queued_then_in_progress_then_completed() -> None:
    async with actor(says("one two", pause=0.02)) as one:
        run = await submit(one)
        assert json.loads(run.body())["status"] == "queued"
        assert await status(one, run.id) == "queued"
        running = await until(one, run.id, "in_progress")
        assert (running["output"], running["usage"], running["background"]) == ([], None, True)
        done = await until(one, run.id, "completed")

        assert done["output"][0]["content"][0]["text"] == "one two"
        assert done["created_at"] == running["created_at"]
        await run.done.wait()
        assert len(one.background) == 0


async def test_it_can_be_continued_when_it_is_done() -> None:
    async with actor(says("ok")) as one:
        run = await submit(one)
        await until(one, run.id, "completed")
        second = await submit(one, "more", previous_response_id=run.id)
        done = await until(one, second.id, "completed")

    assert done["previous_response_id"] == run.id


@pytest.mark.parametrize("after", [-1, 0, 3, 5, 1000])
async def test_events_are_dense_and_resumable_while_it_runs_and_afterwards(after: int) -> None:
    async with actor(says("one two three", pause=0.01)) as one:
        run = await submit(one)
        live = await streamed(one, run.id, after)
        later = await streamed(one, run.id)

    assert [event["sequence_number"] for event in later] == list(range(len(later)))
    assert later[-1]["type"] == "response.completed"
    assert live == later[after + 1 :]


async def test_a_thousand_events_come_in_small_batches() -> None:
    async with actor(says("word " * 300)) as one:
        run = await submit(one)
        await until(one, run.id, "completed")
        batches = [len(events) async for events in one.archive.follow(TENANT, run.id, -1)]

    assert max(batches) <= 64
    assert sum(batches) > 300


async def test_store_false_is_refused() -> None:
    async with actor(says("ok")) as one:
        with pytest.raises(ApiError) as refused:
            await submit(one, store=False)

    assert (refused.value.status, refused.value.param) == (400, "store")


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"previous_response_id": "resp_nope"}, "previous_response_not_found"),
        ({"conversation": "conv_nope"}, "not_found"),
    ],
)
async def test_what_is_known_to_be_wrong_is_refused_at_once(fields: dict[str, Any], code: str) -> None:
    async with actor(says("ok")) as one:
        with pytest.raises(ApiError) as refused:
            await submit(one, **fields)

        assert refused.value.code == code
        assert len(one.background) == 0


FAULTS: list[tuple[Sequence[Any], str]] = [
    ([EngineError("unavailable", "gone")], "server_error"),
    ([EngineError("overloaded", "later")], "rate_limit_exceeded"),
    ([Chunk(unpack_ids(scripted_tokenizer().encode("He"))), EngineError("invalid", "bad")], "invalid_prompt"),
    ([Chunk([1], finish="abort")], "server_error"),
]


@pytest.mark.parametrize(("plan", "code"), FAULTS)
async def test_an_engine_that_fails_makes_it_failed(plan: Sequence[Any], code: str) -> None:
    async with actor(PlannedEngine(plan)) as one:
        run = await submit(one)
        done = await until(one, run.id, "failed")
        events = await streamed(one, run.id)
        with pytest.raises(ApiError) as refused:
            await run_turn(one, asked(previous_response_id=run.id))

    assert done["error"]["code"] == code
    assert events[-1]["response"] == done
    assert refused.value.code == "previous_response_not_found"


async def test_a_refusal_before_its_first_event_makes_it_failed_with_a_whole_stream() -> None:
    async with actor(says("ok")) as one:
        run = await submit(one, "word " * 200_000)
        done = await until(one, run.id, "failed")
        events = await streamed(one, run.id)

    assert done["error"]["code"] == "context_length_exceeded"
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert [event["sequence_number"] for event in events] == [0, 1, 2]


async def test_the_deadline_makes_it_failed() -> None:
    async with actor(says("word " * 100, pause=0.05), background=BackgroundLimits(deadline_s=0.2)) as one:
        run = await submit(one)
        done = await until(one, run.id, "failed")

    assert done["error"]["code"] == "server_error"


async def test_cancel_while_queued() -> None:
    engine = says("word " * 100, pause=0.05)
    async with actor(engine, background=BackgroundLimits(running=1)) as one:
        first = await submit(one)
        await until(one, first.id, "in_progress")
        second = await submit(one)
        cancelled = json.loads(await one.archive.cancel(TENANT, second.id))
        assert cancelled["status"] == "cancelled"
        assert await streamed(one, second.id) == []
        assert await status(one, first.id) == "in_progress"
        assert len(engine.seen) == 1


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 13, 21, 34])
async def test_cancel_after_so_many_steps_of_the_loop(steps: int) -> None:
    engine = says("one two three four", pause=0.0)
    async with actor(engine) as one:
        await one.models.resolve("m")
        run = await submit(one)
        for _ in range(steps):
            await asyncio.sleep(0)
        first = json.loads(await one.archive.cancel(TENANT, run.id))
        again = json.loads(await one.archive.cancel(TENANT, run.id))
        events = await streamed(one, run.id)

        assert first == again
        assert first["status"] in ("cancelled", "completed")
        ended = bool(events) and events[-1]["type"] == "response.completed"
        assert ended == (first["status"] == "completed")
        assert len(one.background) == 0
        assert json.loads(await one.archive.retrieve(TENANT, run.id)) == first


async def test_cancel_in_the_middle_stops_the_engine_and_ends_streams() -> None:
    engine = says("word " * 100, pause=0.02)
    async with actor(engine) as one:
        run = await submit(one)
        watching = asyncio.create_task(streamed(one, run.id))
        await run.log.more(5, 5)
        cancelled = json.loads(await one.archive.cancel(TENANT, run.id))
        events = await watching
        with pytest.raises(ApiError) as refused:
            await run_turn(one, asked(previous_response_id=run.id))

    assert (cancelled["status"], cancelled["output"], cancelled["usage"]) == ("cancelled", [], None)
    assert engine.aborted == 1
    assert not {event["type"] for event in events} & {"response.completed", "response.failed"}
    assert refused.value.code == "previous_response_not_found"


async def test_only_background_responses_can_be_cancelled_or_streamed_again() -> None:
    async with actor(says("ok")) as one:
        response = await run_turn(one, asked())
        for operation in (one.archive.cancel(TENANT, response["id"]), streamed(one, response["id"])):
            with pytest.raises(ApiError) as refused:
                await operation
            assert refused.value.status == 400


async def test_delete_cancels_what_runs() -> None:
    engine = says("word " * 100, pause=0.02)
    async with actor(engine) as one:
        run = await submit(one)
        await run.log.more(5, 5)
        await one.archive.delete(TENANT, run.id)
        for look in (one.archive.retrieve, one.archive.cancel, one.archive.delete):
            with pytest.raises(ApiError) as refused:
                await look(TENANT, run.id)
            assert refused.value.status == 404

    assert engine.aborted == 1


async def test_slots_go_round_the_tenants() -> None:
    engine = says("ok", pause=0.01)
    async with actor(engine, background=BackgroundLimits(running=1, running_per_tenant=1)) as one:
        mine = [await submit(one, f"mine {n}") for n in range(3)]
        theirs = await submit(one, "theirs", tenant="other")
        await theirs.done.wait()
        left = [run for run in mine if not run.done.is_set()]
        assert left == mine[1:]
        await asyncio.gather(*(run.done.wait() for run in mine))


async def test_a_tenant_has_only_so_many_slots() -> None:
    limits = BackgroundLimits(running=4, running_per_tenant=2)
    async with actor(says("word " * 50, pause=0.02), background=limits) as one:
        runs = [await submit(one) for _ in range(4)]
        other = await submit(one, tenant="other")
        await asyncio.sleep(0.05)

        assert [run.task is not None for run in runs] == [True, True, False, False]
        assert other.task is not None


async def test_queues_are_bounded() -> None:
    limits = BackgroundLimits(running=1, queued=3, queued_per_tenant=2)
    async with actor(says("word " * 50, pause=0.02), background=limits) as one:
        running = await submit(one)
        await until(one, running.id, "in_progress")
        await submit(one)
        await submit(one)
        with pytest.raises(ApiError) as mine:
            await submit(one)
        await submit(one, tenant="other")
        with pytest.raises(ApiError) as everyones:
            await submit(one, tenant="third")

    assert {mine.value.status, everyones.value.status} == {429}
    assert mine.value.headers()["retry-after"]


async def test_a_drain_lets_them_end() -> None:
    async with actor(says("one two", pause=0.02), background=BackgroundLimits(running=1)) as one:
        runs = [await submit(one), await submit(one)]
        await one.background.drain(5.0)

        assert [await status(one, run.id) for run in runs] == ["completed", "completed"]
        with pytest.raises(ApiError) as refused:
            await submit(one)
        assert refused.value.status == 503


async def test_what_outlives_the_grace_fails_and_its_streams_hear_of_it() -> None:
    engine = says("word " * 200, pause=0.05)
    async with actor(engine, background=BackgroundLimits(running=1)) as one:
        running, queued = await submit(one), await submit(one)
        watching = [asyncio.create_task(streamed(one, run.id)) for run in (running, queued)]
        await until(one, running.id, "in_progress")
        await one.background.drain(0.1)
        streams = await asyncio.gather(*watching)

        for run, events in zip((running, queued), streams, strict=True):
            assert await status(one, run.id) == "failed"
            assert events[-1]["type"] == "response.failed"
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert engine.aborted == 1


async def test_a_log_beyond_its_bound_loses_its_beginning_only() -> None:
    async with actor(says("word " * 100), background=BackgroundLimits(log_bytes=8000)) as one:
        run = await submit(one)
        done = await until(one, run.id, "completed")
        with pytest.raises(ApiError) as refused:
            await streamed(one, run.id)
        assert refused.value.param == "starting_after"
        last = await streamed(one, run.id, int(refused.value.message.split("up to ")[1].split()[0]))

    assert last[-1]["response"] == done


@pytest.fixture
async def pair() -> AsyncIterator[tuple[SessionActor, SessionActor]]:
    async with two_actors(says("one two three", pause=0.02)) as (one, two, _):
        yield one, two


class TestOnAnotherActor:
    async def test_poll_and_stream(self, pair: tuple[SessionActor, SessionActor]) -> None:
        one, two = pair
        run = await submit(one)
        assert await status(two, run.id) in ("queued", "in_progress")
        events = await streamed(two, run.id)

        assert events == await streamed(one, run.id)
        assert events[-1]["type"] == "response.completed"
        assert await status(two, run.id) == "completed"

    async def test_it_can_still_be_streamed_where_it_was_adopted(self, pair: tuple[SessionActor, SessionActor]) -> None:
        one, two = pair
        run = await submit(one)
        await until(one, run.id, "completed")
        await run_turn(two, asked(previous_response_id=run.id))

        assert await streamed(two, run.id) == await streamed(one, run.id)
        assert json.loads(await two.archive.cancel(TENANT, run.id))["status"] == "completed"

    async def test_cancel(self, pair: tuple[SessionActor, SessionActor]) -> None:
        one, two = pair
        run = await submit(one)

        assert json.loads(await two.archive.cancel(TENANT, run.id))["status"] == "cancelled"
        assert await status(one, run.id) == "cancelled"

    async def test_refusals_travel(self, pair: tuple[SessionActor, SessionActor]) -> None:
        one, two = pair
        response = await run_turn(one, asked())
        with pytest.raises(ApiError) as refused:
            await two.archive.cancel(TENANT, response["id"])

        assert (refused.value.code, refused.value.status) == ("invalid_value", 400)

    @pytest.mark.parametrize("asker", [0, 1])
    async def test_a_deleted_one_is_gone_everywhere(self, pair: tuple[SessionActor, SessionActor], asker: int) -> None:
        one, two = pair
        response = await run_turn(one, asked())
        child = await run_turn(two, asked(previous_response_id=response["id"]))
        await pair[asker].archive.delete(TENANT, response["id"])

        for each in pair:
            with pytest.raises(ApiError) as refused:
                await run_turn(each, asked(previous_response_id=response["id"]))
            assert refused.value.code == "previous_response_not_found"
            with pytest.raises(ApiError):
                await each.archive.retrieve(TENANT, response["id"])
        for each in pair:
            again = await run_turn(each, asked(previous_response_id=child["id"]))
            assert again["status"] == "completed"

    async def test_another_tenants_id_is_not_found(self, pair: tuple[SessionActor, SessionActor]) -> None:
        one, _ = pair
        run = await submit(one)
        for each in pair:
            for look in (each.archive.retrieve, each.archive.cancel, each.archive.delete):
                with pytest.raises(ApiError) as refused:
                    await look("other", run.id)
                assert refused.value.message == f"Response with id '{run.id}' not found."
        assert (await until(one, run.id, "completed"))["status"] == "completed"

    async def test_an_id_that_names_nobody_is_not_asked_for(self) -> None:
        async with two_actors(says("ok")) as (one, _, network):
            for response_id in ("resp_nope", f"resp_aaaaaaaa{'0' * 32}", "x" * 10_000):
                with pytest.raises(ApiError):
                    await one.archive.retrieve(TENANT, response_id)

            assert network.asked == []
