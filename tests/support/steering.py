"""A socket's machine with a client and turns that the test plays, for what steers and interrupts do."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from gateway.protocol.actions import Action, Append, Cancel, Close, Interrupt, Send, Start, Steer, Tell
from gateway.protocol.connection import Connection, ConnectionLimits
from gateway.protocol.steer_table import Ending

LIMITS = ConnectionLimits(lifetime_s=1000.0, grace_s=10.0, drain_grace_s=5.0)
Short = tuple[Any, ...]


def call(call_id: str, name: str = "f") -> dict[str, str]:
    """The stub of a function call's output."""
    return {"type": "function_call_output", "call_id": call_id, "name": name}


class SteeredSocket:
    """Actions come back short: ("start", lane, n, automatic), ("steer", lane), ("interrupt", lane), ("cancel", lane),
    ("append", lane, response), ("close", code), ("error", code), and events as their type without `response.`; all
    frames are in `frames`, those of a running response numbered as its emitter would."""

    def __init__(self, limits: ConnectionLimits = LIMITS, *, rollouts: bool = False, **changes: Any) -> None:
        self.now = 0.0
        self.connection = Connection(replace(limits, **changes), self.now, rollouts=rollouts)
        self.frames: list[dict[str, Any]] = []
        self.starts: list[Start] = []
        self.running: dict[str | None, str] = {}
        self.numbers: dict[str, int] = {}
        self.over: set[str] = set()
        self._made = 0

    # --- the client

    def create(self, lane: str | None = None, n: int = 0, **more: Any) -> list[Short]:
        named = {} if lane is None else {"stream_id": lane}
        return self.text({"type": "response.create", "model": "m", "n": n, **named, **more})

    def steer(self, response: object, given: object = "stop", **more: Any) -> list[Short]:
        return self.text({"type": "response.steer", "previous_response_id": response, "input": given, **more})

    def interrupt(self, response: object, **more: Any) -> list[Short]:
        return self.text({"type": "response.interrupt", "response_id": response, **more})

    def append(self, response: object, **more: Any) -> list[Short]:
        return self.text({"type": "response.append", "response_id": response, "input": [], **more})

    def text(self, frame: dict[str, Any]) -> list[Short]:
        return self.seen(self.connection.receive_text(json.dumps(frame), self.now))

    # --- the turns

    def created(self, lane: str | None = None) -> str:
        """The lane's turn has a response; two events of it are numbered."""
        self._made += 1
        response = f"resp_{self._made}"
        self.running[lane], self.numbers[response] = response, 2
        self.late = self.seen(self.connection.turn_started(lane, response))
        return response

    def begin(self, lane: str | None = None, **more: Any) -> str:
        """A create and its response."""
        self.create(lane, **more)
        return self.created(lane)

    def end(
        self, lane: str | None = None, status: str = "completed", reason: str | None = None, *calls: dict[str, str]
    ) -> None:
        """The terminal event is made."""
        response = self.running[lane]
        self.over.add(response)
        self.numbers[response] += 1
        self.connection.turn_over(lane, Ending(status, reason, calls, self.numbers[response]))

    def ended(self, lane: str | None = None, refusal: str | None = None) -> list[Short]:
        """The turn is over."""
        self.running.pop(lane, None)
        return self.seen(self.connection.turn_ended(lane, self.now, refusal))

    def finish(
        self, lane: str | None = None, status: str = "completed", reason: str | None = None, *calls: dict[str, str]
    ) -> list[Short]:
        """Terminal event and end."""
        self.end(lane, status, reason, *calls)
        return self.ended(lane)

    # --- what comes out

    @property
    def last(self) -> dict[str, Any]:
        return self.frames[-1]

    def seen(self, actions: list[Action]) -> list[Short]:
        return [self.shorten(action) for action in actions]

    def shorten(self, action: Action) -> Short:
        match action:
            case Start(lane, frame, automatic):
                self.starts.append(action)
                return "start", lane, frame["n"], automatic
            case Steer(lane):
                return "steer", lane
            case Interrupt(lane):
                return "interrupt", lane
            case Append(lane, frame):
                return "append", lane, frame["response_id"]
            case Cancel(lane):
                return "cancel", lane
            case Close(code):
                return "close", code
            case Tell(lane, kind, fields):
                response = self.running[lane]
                assert response not in self.over, "told of a response that has ended"
                named = {} if lane is None else {"stream_id": lane}
                self.frames.append({"type": kind, **named, "sequence_number": self.numbers[response], **fields})
                self.numbers[response] += 1
                return (kind.removeprefix("response."),)
            case Send(frame):
                self.frames.append(frame)
                if frame["type"] == "error":
                    return "error", frame["error"]["code"]
                return (frame["type"].removeprefix("response."),)
