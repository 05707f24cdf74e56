"""Steers and interrupts in any order with turns that start, end, fail and are refused, against a small model.

The model knows no stages: it keeps what each response is and who owns each steer, and says what must come out. That no
steer is lost or used twice is also counted apart from it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.protocol.actions import Action, Interrupt, Send, Steer, Tell
from gateway.protocol.steer_table import Ending
from gateway.protocol.steering import Steering, SteerLimits

MOST = 3
DONE, GONE, CREATION = "response_already_completed", "response_not_active", "successor_creation_failed"
Out = tuple[Any, ...]
Lane = str | None
CALL = {"type": "function_call_output", "call_id": "c", "name": "f"}


class Response:
    """`end` is None while it runs. `next` is its counter; what is told in the stream of a running response is numbered
    there."""

    def __init__(self, name: str, lane: Lane) -> None:
        self.name, self.lane = name, lane
        self.next = 2
        self.interrupted = False
        self.end: str | None = None  # "waits", "completed", "cut", "failed"
        self.sent = False
        self.newest = True
        self.steers: list[str] = []
        self.told: set[str] = set()
        self.held: list[Out] = []

    def say(self, what: str, text: str, code: str | None = None) -> list[Out]:
        number, self.next = self.next, self.next + 1
        said: list[Out] = [(what, self.name, self.lane, None if self.end is None else number, text, code)]
        if self.end is not None and not self.sent:
            self.held += said
            return []
        return said

    def fail(self, code: str) -> list[Out]:
        out = [one for text in self.steers for one in self.say("failed", text, code)]
        self.steers = []
        return out

    def pend(self) -> list[Out]:
        new = [text for text in self.steers if text not in self.told]
        self.told |= set(new)
        return [one for text in new for one in self.say("pending", text)]


class Turn:
    """A turn, and the steers in it."""

    def __init__(self, parent: str | None, taken: list[str], owner: Response | None) -> None:
        self.parent, self.taken, self.owner = parent, taken, owner
        self.response: Response | None = None


class SteeringMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.steering = Steering(SteerLimits(MOST, 10**6), self.new_id)
        self.queue: dict[Lane, list[str | None]] = {None: [], "a": []}  # parents of creates that wait
        self.turns: dict[Lane, Turn] = {}
        self.responses: dict[str, Response] = {}
        self.texts: dict[str, str] = {}
        self.sending, self.sent = "", 0
        self.count = 0
        self.fate: Counter[str] = Counter()
        self.accepted: set[str] = set()
        self.admitting = True

    def new_id(self) -> str:
        self.texts[f"steer_{len(self.texts)}"] = self.sending
        return f"steer_{len(self.texts) - 1}"

    # --- what comes out, in the model's words

    def shorten(self, action: Action) -> Out:
        match action:
            case Steer(lane):
                return "steer", lane
            case Interrupt(lane):
                return "interrupt", lane
            case Tell(lane, kind, fields):
                turn = self.turns[lane]
                assert turn.response is not None
                assert turn.response.end is None
                if kind == "response.interrupt.accepted":
                    return "stopping", fields["response_id"]
                return self.words(kind, lane, None, fields)
            case Send(frame):
                if frame["type"] == "response.interrupt.failed":
                    return "goes on", frame["response_id"], frame["error"]["code"]
                return self.words(frame["type"], frame.get("stream_id"), frame["sequence_number"], frame)
        raise AssertionError(action)

    def words(self, kind: str, lane: Lane, number: int | None, fields: dict[str, Any]) -> Out:
        steer = fields["steer"]
        text = steer["input"] if "input" in steer else self.texts[steer["id"]]
        if "input" in steer and "id" in steer:
            assert self.texts[steer["id"]] == text
        assert fields.get("required_input", [CALL]) == [CALL]
        code = fields["error"]["code"] if "error" in fields else None
        return kind.removeprefix("response.steer."), steer["previous_response_id"], lane, number, text, code

    def got(self, actions: list[Action], expected: list[Out]) -> None:
        short = [self.shorten(action) for action in actions]
        for out in short:
            if out[0] == "failed" and out[4] in self.accepted:
                self.fate[out[4]] += 1
        assert short == expected

    # --- turns

    @rule(lane=st.sampled_from([None, "a"]), data=st.data())
    def create(self, lane: Lane, data: st.DataObject) -> None:
        newest = [one.name for one in self.responses.values() if one.lane == lane and one.newest]
        parent = data.draw(st.sampled_from([None, *newest, *newest, *list(self.responses)[:3]]))
        if lane in self.turns:
            self.queue[lane].append(parent)
        else:
            self.start(lane, parent)

    def start(self, lane: Lane, parent: str | None) -> None:
        owner = self.responses.get(parent or "")
        taken: list[str] = []
        if owner is not None and owner.lane == lane and owner.newest:
            taken, owner.steers = owner.steers, []
        self.turns[lane] = Turn(parent, taken, owner)
        frame = self.steering.starting(lane, {"previous_response_id": parent, "input": "own"})
        texts = [item["content"] for item in frame["input"]] if isinstance(frame["input"], list) else [frame["input"]]
        assert texts == [*taken, "own"]

    def lanes(self, kind: str) -> list[Lane]:
        return [
            lane
            for lane, turn in self.turns.items()
            if kind == ("new" if turn.response is None else "runs" if turn.response.end is None else "over")
        ]

    @precondition(lambda self: self.lanes("new"))
    @rule(data=st.data())
    def created(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(self.lanes("new")))
        turn = self.turns[lane]
        expected: list[Out] = []
        for old in self.responses.values():
            if old.lane == lane and old.newest:
                expected = old.fail(GONE)
                old.newest = False
        for text in turn.taken:
            self.fate[text] += 1
        self.count += 1
        name = f"resp_{self.count}"
        self.got(self.steering.started(lane, name), expected)
        turn.response = self.responses[name] = Response(name, lane)

    @precondition(lambda self: self.lanes("runs"))
    @rule(data=st.data(), end=st.sampled_from(["waits", "waits", "completed", "cut", "failed"]))
    def over(self, data: st.DataObject, end: str) -> None:
        lane = data.draw(st.sampled_from(self.lanes("runs")))
        response = self.turns[lane].response
        assert response is not None
        if response.interrupted and end == "completed":
            end = "cut"
        response.end = end
        response.next += 1
        reason = "interrupted" if response.interrupted else None
        status = {"completed": "completed", "failed": "failed", "cut": "incomplete"}.get(end)
        if status is None:
            status = "incomplete" if response.interrupted else "completed"
        self.steering.over(lane, Ending(status, reason, (CALL,) if end == "waits" else (), response.next))
        if response.interrupted or end == "failed":
            assert response.fail(GONE) == []

    @precondition(lambda self: self.lanes("over"))
    @rule(data=st.data())
    def ended(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(self.lanes("over")))
        response = self.turns[lane].response
        assert response is not None
        response.sent = True
        expected, response.held = response.held, []
        successor = False
        if response.steers and not self.admitting:
            expected += response.fail(CREATION)
        elif response.end == "waits":
            if response.name not in self.queue[lane]:
                expected += response.pend()
        else:
            successor = bool(response.steers)
        self.leave(lane, expected, response if successor else None)

    @precondition(lambda self: self.lanes("new"))
    @rule(data=st.data())
    def refused(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(self.lanes("new")))
        turn = self.turns[lane]
        expected: list[Out] = []
        if turn.owner is not None and turn.taken:
            turn.owner.steers = turn.taken
            expected = turn.owner.fail(CREATION)
        self.leave(lane, expected, None)

    def leave(self, lane: Lane, expected: list[Out], successor: Response | None) -> None:
        """The turn is over; the successor runs next, or what is queued."""
        queued = [
            {"previous_response_id": parent, **({} if name is None else {"stream_id": name})}
            for name, parents in self.queue.items()
            for parent in parents
        ]
        actions, frame = self.steering.ended(lane, queued, self.admitting, "no")
        self.got(actions, expected)
        del self.turns[lane]
        assert (frame is not None) == (successor is not None)
        if successor is not None and frame is not None:
            taken, successor.steers = successor.steers, []
            self.turns[lane] = Turn(successor.name, taken, successor)
            assert frame["previous_response_id"] == successor.name
            assert [item["content"] for item in frame["input"]] == taken
        elif self.queue[lane]:
            self.start(lane, self.queue[lane].pop(0))

    # --- controls

    def target(self, data: st.DataObject) -> str:
        recent = list(self.responses)[-4:]
        return data.draw(st.sampled_from([*recent, *recent, "resp_0"]))

    @rule(data=st.data())
    def steer(self, data: st.DataObject) -> None:
        name = self.target(data)
        self.sent += 1
        self.sending = text = f"steer {self.sent}"
        frame = {"type": "response.steer", "previous_response_id": name, "input": text}
        queued = [{"previous_response_id": parent} for parent in self.queue[None]] + [
            {"previous_response_id": parent, "stream_id": "a"} for parent in self.queue["a"]
        ]
        response = self.responses.get(name)
        expected = self.answer(response, name, text)
        self.got(self.steering.steer(frame, 1, queued, self.admitting), expected)

    def answer(self, response: Response | None, name: str, text: str) -> list[Out]:
        if response is None:
            return [("failed", name, None, 0, text, "response_not_found")]
        code = self.refusal(response)
        if code is not None and not response.newest:
            return [("failed", name, response.lane, 0, text, code)]
        if code is not None:
            return response.say("failed", text, code)
        response.steers.append(text)
        self.accepted.add(text)
        out = response.say("accepted", text)
        if response.end is None:
            return [*out, ("steer", response.lane)]
        return out + (response.pend() if response.sent and name not in self.queue[response.lane] else [])

    def refusal(self, response: Response) -> str | None:
        turn = self.turns.get(response.lane)
        continuing = turn is not None and turn.response is None and turn.parent == response.name
        if response.end is None:
            code = GONE if response.interrupted else None
        elif response.end == "waits":
            code = DONE if continuing or not response.newest else None
        else:
            code = DONE if response.end == "completed" else GONE
        if code is None and not self.admitting:
            code = CREATION
        if code is None and len(response.steers) == MOST:
            code = "too_many_pending_steers"
        return code

    @rule(data=st.data())
    def interrupt(self, data: st.DataObject) -> None:
        name = self.target(data)
        response = self.responses.get(name)
        if response is None:
            expected: list[Out] = [("goes on", name, "response_not_found")]
        elif response.end is None and not response.interrupted:
            response.interrupted = True
            response.next += 1
            expected = [("stopping", name), ("interrupt", response.lane)]
        else:
            finished = response.end in {"completed", "waits"}
            expected = [("goes on", name, DONE if finished else GONE)]
        self.got(self.steering.interrupt({"response_id": name}), expected)

    @precondition(lambda self: self.count > 8)
    @rule()
    def stop_admitting(self) -> None:
        self.admitting = False

    # --- what holds on its own

    @invariant()
    def every_accepted_steer_has_one_fate_or_one_owner(self) -> None:
        assert set(self.fate.values()) <= {1}
        owners = [text for one in self.responses.values() for text in one.steers]
        owners += [text for turn in self.turns.values() if turn.response is None for text in turn.taken]
        held = [out[4] for one in self.responses.values() for out in one.held if out[0] == "failed"]
        on_the_way_back = [text for text in held if text in self.accepted]
        assert Counter(owners) + Counter(on_the_way_back) + self.fate == Counter(self.accepted)
        assert self.steering.owned == len(owners)
        assert self.steering._bytes == len(owners)

    @invariant()
    def the_memory_is_bounded(self) -> None:
        assert len(self.steering._targets) <= len(self.queue)
        assert all(len(one.steers) <= MOST for one in self.responses.values())


SteeringMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestSteeringMachine = SteeringMachine.TestCase
