"""What a Llama 3 model says, taken apart as it arrives: text, and calls that are bare JSON objects.

`{"name": …, "parameters": …}` has no markup around it, so where an object stands decides what it is: a call may begin
the answer, follow `<|python_tag|>`, or follow another call, with `; ` between them. Anywhere else braces are text. An
object counts as a call by its keys; as soon as it has another one, or a value that no call has, all of it is text, to
the letter. What the model wrote and what the client sees:

- `{"name": "f", "parameters": {…}}`, also with `arguments` or `"type": "function"`, in any order: a call;
- an object without a name, or with any other key before its call is complete: text;
- no arguments: a call with `{}` if `f` is a tool of the request, else text;
- a name that is no tool: a call, passed on (under a guide: text, as a guide lets no such call through);
- no closing brace when the model ends its message: a call, complete as far as the model is concerned;
- something else than JSON behind complete arguments: a call, then text;
- the same before any arguments: text;
- `<|python_tag|>` and no object (Python code, `brave_search.call(…)`): the text behind the tag.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Literal

from gateway.protocol.deltas import CallEnd, Delta, TextDelta
from gateway.protocol.tools import ToolSet
from inference.detokenizer import Detokenizer
from inference.formats.format import Opening
from inference.formats.jsonstream import ObjectReader, Piece, StringDecoder
from inference.formats.toolcalls import CallReader
from inference.tokenizer import Tokenizer

PYTHON_TAG = "<|python_tag|>"
MESSAGE_ENDS = ("<|eot_id|>", "<|eom_id|>")
"""Control tokens that end a message: the last one of a turn, and one that waits for a tool."""
END_OF_TEXT = "<|end_of_text|>"
LONGEST_BLANK = 64
"""More white space than this before an object is the model's own, and what follows it is text."""

_LONGEST_NAME = 128  # of a tool (`gateway.protocol.items.ToolName`)
_BLANK = re.compile(r"[ \t\r\n]*")
_SEPARATOR = re.compile(r"[} \t\r\n]*;?[ \t\r\n]*")  # with the surplus braces that weak models write
_MARKUP_BEHIND_CALL = "} \t\r\n"
_TYPE = '"function"'


class Llama3Parser:
    """Parser of one turn: `inference.formats.format.OutputParser`."""

    reasoning_tokens = 0

    def __init__(self, tokenizer: Tokenizer, tools: ToolSet, opening: Opening) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._tools = tools
        self._guided = opening.guide is not None
        names = (PYTHON_TAG, *MESSAGE_ENDS, END_OF_TEXT) if tools.callable() else ()
        # Control tokens are known by their ids, so text that spells one stays text.
        self._controls = frozenset(tokenizer.special(name) for name in names if tokenizer.has_special(name))
        self._tag = tokenizer.special(PYTHON_TAG) if tokenizer.has_special(PYTHON_TAG) else None
        # "open": a call may begin; "behind" one; "text": braces mean nothing.
        self._state: Literal["open", "behind", "text"] = "open" if tools.callable() else "text"
        self._call: BareCallReader | None = None
        self._held = ""
        self._early: list[Delta] = []
        if opening.forced:
            self._route(opening.forced, self._early)

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """See `inference.formats.format.OutputParser`."""
        out, self._early = self._early, []
        step = self._detokenizer.step
        run: list[str] = []
        for token_id in ids:
            if token_id in self._controls:
                self._route("".join(run), out)
                run.clear()
                self._control(token_id, out)
            elif text := step(token_id):
                run.append(text)
        self._route("".join(run), out)
        return out

    def finish(self) -> list[Delta]:
        """See `inference.formats.format.OutputParser`."""
        out, self._early = self._early, []
        self._route(self._detokenizer.finish(), out)
        held, self._held = self._held, ""
        if self._call is not None:
            out.extend(self._call.finish())
        elif self._state == "open" and held:
            out.append(TextDelta(held))
        return out

    def _control(self, token_id: int, out: list[Delta]) -> None:
        """The message ends, or the tag is there: an object that is still open goes on no further."""
        if self._call is not None:
            out.extend(self._call.cut())
            self._leave(self._call)
        if token_id == self._tag:
            self._state, self._held = "open", ""

    def _leave(self, call: BareCallReader) -> None:
        self._state = "behind" if call.announced else "text"
        self._call = None

    def _route(self, text: str, out: list[Delta]) -> None:
        """Passes text on to the reader of the state, and what that leaves to the next."""
        while text:
            if self._call is not None:
                deltas, rest = self._call.feed(text)
                out.extend(deltas)
                if rest is not None:
                    self._leave(self._call)
                text = rest or ""
            elif self._state == "text":
                out.append(TextDelta(text))
                return
            else:
                text = self._joint(text)

    def _joint(self, text: str) -> str:
        """Text where a call may begin. Returns what the next reader gets: the object, or what turned out to be text."""
        text, self._held = self._held + text, ""
        match = (_BLANK if self._state == "open" else _SEPARATOR).match(text)
        size = 0 if match is None else match.end()
        lead = text[:size] if self._state == "open" else text[:size].lstrip(_MARKUP_BEHIND_CALL)
        if size <= LONGEST_BLANK and size == len(text):
            self._held = text
            return ""
        if size <= LONGEST_BLANK and text[size] == "{":
            self._call = BareCallReader(self._tools, self._guided, lead)
            return text[size:]
        self._state = "text"
        return lead + text[size:]


class BareCallReader:
    """Reads one object that may be a call, from its opening brace. `lead` is the white space before it, which is text
    if the object is. `known_only`: a name that is no tool's makes it text.

    What it finds to be a call goes to a `CallReader` in that one's form, which knows tools and their kinds."""

    def __init__(self, tools: ToolSet, known_only: bool, lead: str = "") -> None:
        self._known = tools.by_model_name()
        self._known_only = known_only
        self._reader = ObjectReader()
        self._call = CallReader(self._known)
        self._seen = [lead]  # what is text if no call comes of it
        self._type = ""
        self._name: str | None = None
        self._name_raw = ""
        self._key: str | None = None  # where the arguments are
        self._early: list[str] = []  # arguments read before the name
        self._read = False  # the arguments are complete
        self.announced = False

    def feed(self, text: str) -> tuple[list[Delta], str | None]:
        """What `text` adds, and what of it lies behind the object; None while the object goes on."""
        out: list[Delta] = []
        position, passing = 0, 0
        while True:
            start = position
            pieces, position = self._reader.feed(text, position, passing)
            if not self.announced:
                self._seen.append(text[start:position])
            if not all(self._take(piece, out) for piece in pieces) or self._reader.failed:
                return self._fail(out), text[position:]
            if self._reader.done:
                return self._end(out), text[position:]
            if not self._reader.stopped:
                return out, None
            if not self._reader.inside:  # a `<` between a key and a value
                return self._fail(out), text[position:]
            passing = 1

    def cut(self) -> list[Delta]:
        """The model ended its message inside the object. It takes the call for complete, so that is what it is."""
        if not self.announced or self._read:
            return self._end([])
        return [*self._call.finish(), CallEnd()]

    def finish(self) -> list[Delta]:
        """No more text, as sampling was cut off. The call stays open if its name is a tool's, else it was text."""
        if self.announced:
            return [] if self._read else self._call.finish()
        if self._name not in self._known:
            return self._fail([])
        deltas, _ = self._call.feed(f'{{"name": {json.dumps(self._name)}')
        return [*deltas, *self._call.finish()]

    def _take(self, piece: Piece, out: list[Delta]) -> bool:
        """Whether it still is, or may become, a call."""
        if self.announced:
            if piece.key == self._key and not self._read:
                self._deliver(piece.raw, piece.complete, out)
            return True
        if piece.key == "type":
            self._type += piece.raw
            return _TYPE.startswith(self._type) and (not piece.complete or self._type == _TYPE)
        if piece.key == "name":
            return self._name is not None or self._takes_name(piece, out)
        if piece.key not in ("parameters", "arguments"):
            return False
        self._key = self._key or piece.key
        if piece.key != self._key or self._read:
            return True
        if self._name is None:
            self._early.append(piece.raw)
            self._read = piece.complete
        else:
            self._announce([piece.raw], piece.complete, out)
        return True

    def _takes_name(self, piece: Piece, out: list[Delta]) -> bool:
        self._name_raw += piece.raw
        if not self._name_raw.startswith('"') or len(self._name_raw) > 6 * _LONGEST_NAME + 2:  # \u00e9 and quotes
            return False
        if not piece.complete:
            return True
        decoder = StringDecoder()
        name = decoder.feed(self._name_raw[1:]) + decoder.finish()
        if not name or len(name) > _LONGEST_NAME or (self._known_only and name not in self._known):
            return False
        self._name = name
        if self._early:
            self._announce(self._early, self._read, out)
        return True

    def _announce(self, arguments: Sequence[str], complete: bool, out: list[Delta]) -> None:
        """A name and the first of the arguments are there: from here on it is a call."""
        self.announced = True
        self._seen.clear()
        out += self._call.feed(f'{{"name": {json.dumps(self._name)}, "arguments":')[0]
        self._deliver("".join(arguments), complete, out)

    def _deliver(self, raw: str, complete: bool, out: list[Delta]) -> None:
        self._read = complete
        out += self._call.feed(raw)[0]

    def _end(self, out: list[Delta]) -> list[Delta]:
        """Nothing follows inside the object. A call of a known tool without arguments is one with none."""
        if not self.announced and self._name in self._known and self._key is None:
            self._announce(["{}"], True, out)
        return self._fail(out)

    def _fail(self, out: list[Delta]) -> list[Delta]:
        """The object can't go on: a call that was announced is over, anything else was text."""
        if self.announced:
            out += self._call.feed("}")[0]
        elif seen := "".join(self._seen):
            out.append(TextDelta(seen))
        return out
