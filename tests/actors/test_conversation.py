"""Rules for what may be added to a conversation, and what a socket remembers (protocol.md 4.1 to 4.3)."""

from __future__ import annotations

import pytest

from actors.adoption import flatten, restore
from actors.conversation import Lane, Response, ResponseCache, continue_from
from actors.tokencache import EMPTY
from gateway.protocol.errors import ApiError
from gateway.protocol.items import (
    CompactionTrigger,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    InputText,
    Item,
    ItemReference,
    Message,
    Reasoning,
    ReasoningText,
    SummaryText,
)

CALL = FunctionCall("call_1", "look", '{"a":1}', id="fc_1", status="completed")
OUTPUT = FunctionCallOutput("call_1", "found")
USER = Message("user", "hello")


def response(
    name: str,
    *items: Item,
    parent: Response | None = None,
    pending: dict[str, str] | None = None,
    lane: Lane = None,
    preamble: str | None = None,
) -> Response:
    tokens = (EMPTY if parent is None else parent.tokens).extend(name.encode().ljust(4, b"_")[:4])
    return Response(f"resp_{name}", parent, items, tokens, preamble, (), pending or {}, lane, "m", False)


def refused(parent: Response | None, *items: Item) -> ApiError:
    with pytest.raises(ApiError) as caught:
        continue_from(parent, items)
    return caught.value


def test_a_new_chain_takes_everything() -> None:
    link = continue_from(None, [USER])

    assert (link.items, link.body, link.preamble, link.tokens) == ((USER,), (USER,), None, EMPTY)


def test_a_leading_system_message_is_the_preamble_not_body() -> None:
    system = Message("developer", (InputText("Be "), InputText("brief.")))
    link = continue_from(None, [system, USER])

    assert (link.preamble, link.body, link.items) == ("Be brief.", (USER,), (system, USER))


def test_the_preamble_stays_with_the_conversation() -> None:
    first = response("a", Message("system", "s"), USER, preamble="s")
    later = Message("system", "another")

    link = continue_from(first, [later])

    assert (link.preamble, link.body) == ("s", (later,))


def test_after_an_empty_warm_up_the_first_item_can_still_be_the_preamble() -> None:
    link = continue_from(response("warm"), [Message("developer", "d"), USER])

    assert (link.preamble, link.body) == ("d", (USER,))


def test_an_output_answers_the_parents_call() -> None:
    parent = response("a", USER, CALL, pending={"call_1": "look"})

    assert continue_from(parent, [OUTPUT]).pending == {}


def test_a_call_and_its_output_in_one_input() -> None:
    custom = CustomToolCall("call_2", "run", "ls")
    link = continue_from(None, [USER, CALL, OUTPUT, custom, CustomToolCallOutput("call_2", "x")])

    assert len(link.items) == 5


def test_an_output_without_a_call_is_refused() -> None:
    error = refused(response("a", USER), FunctionCallOutput("call_9", "x"))

    assert (error.status, error.code, error.param) == (400, "invalid_function_call_output", "input")
    assert "No tool call found for function call output with call_id call_9" in error.message


def test_a_call_left_without_its_output_is_refused() -> None:
    parent = response("a", USER, CALL, pending={"call_1": "look"})
    error = refused(parent, Message("user", "never mind"))

    assert error.code == "invalid_function_call_output"
    assert "No tool output found for function call call_1" in error.message
    assert dict(parent.pending) == {"call_1": "look"}


def test_one_of_two_outputs_is_not_enough() -> None:
    parent = response("a", CALL, FunctionCall("call_2", "g", "{}"), pending={"call_1": "look", "call_2": "g"})

    assert "call_2" in refused(parent, OUTPUT).message


def test_a_call_repeated_beside_its_output_is_dropped() -> None:
    """LiveKit sends the function_call item again although it names the previous response."""
    parent = response("a", USER, CALL, pending={"call_1": "look"})
    again = FunctionCall("call_1", "look", '{"a":1}')

    assert continue_from(parent, [again, OUTPUT]).items == (OUTPUT,)


def test_an_output_sent_twice_is_dropped_the_second_time() -> None:
    parent = response("b", OUTPUT, parent=response("a", USER, CALL, pending={"call_1": "look"}))

    assert continue_from(parent, [OUTPUT, USER]).items == (USER,)


@pytest.mark.parametrize("item", [FunctionCall("call_1", "look", '{"a":2}'), FunctionCallOutput("call_1", "other")])
def test_the_same_call_id_with_other_content_is_refused(item: Item) -> None:
    parent = response("b", OUTPUT, parent=response("a", USER, CALL))
    error = refused(parent, item)

    assert (error.code, error.param) == ("invalid_value", "input")
    assert "call_1" in error.message


def test_a_message_with_a_known_id_is_dropped_if_it_is_the_same() -> None:
    known = Message("assistant", "hi", id="msg_1")
    parent = response("a", USER, known)

    assert continue_from(parent, [Message("assistant", (InputText("hi"),), id="msg_1"), USER]).items == (USER,)
    assert "msg_1" in refused(parent, Message("assistant", "hi!", id="msg_1")).message


@pytest.mark.parametrize(
    "repeated",
    [
        Reasoning(id="rs_1", summary=(SummaryText("s"),)),
        Reasoning(id="rs_1", summary=(SummaryText("s"),), content=(ReasoningText("s"),), encrypted_content="b"),
        Reasoning(
            id="rs_1", summary=(SummaryText("s"),), encrypted_content="other", foreign="o\nb", status="completed"
        ),
    ],
)
def test_a_thought_is_the_same_however_little_of_it_a_client_keeps(repeated: Reasoning) -> None:
    known = Reasoning(id="rs_1", summary=(SummaryText("s"),), encrypted_content="blob", foreign="o\nblob")
    link = continue_from(response("a", USER, known), [repeated, Message("user", "more")])
    assert link.items == (Message("user", "more"),)
    assert (
        refused(response("a", USER, known), Reasoning(id="rs_1", summary=(SummaryText("t"),))).code == "invalid_value"
    )
    said = Reasoning(id="rs_1", content=(ReasoningText("hm"),))
    other = Reasoning(id="rs_1", content=(ReasoningText("oh"),))
    assert refused(response("a", USER, said), other).code == "invalid_value"


def test_a_reference_must_point_into_the_context() -> None:
    parent = response("a", Message("assistant", "hi", id="msg_1"))

    assert continue_from(parent, [ItemReference("msg_1"), USER]).items == (USER,)
    assert "msg_2" in refused(parent, ItemReference("msg_2")).message


def test_a_trigger_is_no_item_of_the_conversation() -> None:
    assert continue_from(None, [USER, CompactionTrigger()]).items == (USER,)


def test_context_is_the_whole_lineage_in_order() -> None:
    first = response("a", USER)
    second = response("b", CALL, parent=first)

    assert second.context() == [USER, CALL]


class TestResponseCache:
    def test_the_newest_of_a_lane_can_be_continued(self) -> None:
        cache = ResponseCache(per_lane=1)
        first, second = response("a"), response("b")
        cache.commit(first)
        cache.commit(second)

        assert (cache.get("resp_a"), cache.get("resp_b")) == (None, second)

    def test_lanes_do_not_displace_each_other(self) -> None:
        cache = ResponseCache(per_lane=1)
        cache.commit(response("a", lane="x"))
        cache.commit(response("b", lane="y"))

        assert cache.get("resp_a") is not None

    def test_the_parent_of_a_waiting_turn_outlives_its_successors(self) -> None:
        cache = ResponseCache(per_lane=1)
        cache.commit(response("a"))
        cache.protect(frozenset(["resp_a"]))
        cache.commit(response("b"))
        assert cache.get("resp_a") is not None
        cache.protect(frozenset())

        assert cache.get("resp_a") is None

    def test_the_end_of_protection_leaves_what_its_lane_still_holds(self) -> None:
        cache = ResponseCache(per_lane=1)
        cache.commit(response("a"))
        cache.protect(frozenset(["resp_a", "resp_unknown"]))
        cache.protect(frozenset())

        assert cache.get("resp_a") is not None

    def test_a_failed_continuation_evicts_its_parent(self) -> None:
        cache = ResponseCache(per_lane=4)
        cache.commit(response("a", lane="x"))
        cache.evict("resp_a", "x")

        assert cache.get("resp_a") is None

    def test_a_failed_fork_keeps_its_parent(self) -> None:
        cache = ResponseCache(per_lane=4)
        cache.commit(response("a", lane="x"))
        cache.evict("resp_a", "y")

        assert cache.get("resp_a") is not None

    def test_eviction_wins_over_protection(self) -> None:
        cache = ResponseCache(per_lane=1)
        cache.commit(response("a"))
        cache.protect(frozenset(["resp_a"]))
        cache.evict("resp_a", None)
        assert cache.get("resp_a") is None
        cache.protect(frozenset())

        assert len(cache) == 0

    def test_evicting_the_unknown_is_nothing(self) -> None:
        ResponseCache(per_lane=1).evict("resp_z", None)


def test_a_deep_chain_moves_to_another_actor_and_back() -> None:
    import pickle

    chain = None
    for index in range(3000):
        chain = response(f"{index:04d}", USER, parent=chain)
    assert chain is not None
    moved = restore(pickle.loads(pickle.dumps(flatten(chain))))

    assert moved.context() == chain.context()
    assert moved.tokens.tail(0) == chain.tokens.tail(0)
    assert moved.id == chain.id


def test_a_call_that_was_cut_off_may_be_answered_and_need_not() -> None:
    cut = FunctionCall("call_1", "look", '{"a":', id="fc_1", status="incomplete")
    parent = response("a", USER, cut)

    assert continue_from(parent, [USER]).items == (USER,)
    assert continue_from(parent, [OUTPUT]).items == (OUTPUT,)


def test_a_long_history_with_ids_is_linked_in_linear_time() -> None:
    """16,000 items with ids took four seconds of the event loop when each walked all others."""
    items = [Message("user", "x", id=f"msg_{index}") for index in range(16_000)]

    assert len(continue_from(None, items).items) == len(items)


def test_repeats_are_found_however_many_are_sent() -> None:
    parent = None
    history: list[Item] = []
    for index in range(40):
        item = Message("user", f"{index}", id=f"msg_{index}")
        history.append(item)
        parent = response(str(index), item, parent=parent)

    assert continue_from(parent, [*history, USER]).items == (USER,)
    assert continue_from(parent, [history[3], USER]).items == (USER,)
