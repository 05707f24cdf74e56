"""Whatever becomes of a conversation, the prompt of its next turn is what a client would get that sends all its items.

Chains are extended, forked, warmed up, copied between actors and answered with thoughts, texts and parallel calls; the
reference is the same gateway asked with the whole history and nothing to remember. What is sampled is spelled as the
format itself would: other spellings stay as they were sampled, which `test_sampled_ids_stay` shows.
"""

from __future__ import annotations

import asyncio
import pickle
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.adoption import flatten, restore
from actors.conversation import Response
from actors.engines import Endpoint, EnginePool
from actors.models import Model, ModelTable
from actors.session import Session, SessionActor
from gateway.protocol.items import FunctionCallOutput, Item, Message
from gateway.protocol.requests import CreateRequest
from inference.engine import Chunk, Generation
from inference.formats.chatml import ChatMLFormat, ChatMLOptions
from inference.formats.format import Format
from inference.formats.template import template_format
from inference.tokenizer import scripted_tokenizer, unpack_ids
from tests.support import template_families as families
from tests.support.actors import TENANT, asked
from tests.support.engines import PlannedEngine

TOKENIZER = scripted_tokenizer()
TOOLS = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("look", "find")]
FORMATS = (
    "plain",
    "forgets thoughts",
    "keeps thoughts",
    "template in pieces",
    "template that forgets",
    "whole template",
)
TEMPLATES = {
    "template in pieces": families.CHATML,
    "template that forgets": families.THINKING,
    "whole template": families.NASTY["tools at the end"],
}


@cache
def form_of(name: str) -> Format:
    """A format of ours, or a template as the checkpoint brings it."""
    if name in TEMPLATES:
        with TemporaryDirectory() as folder:
            return template_format(families.write_model(Path(folder), TEMPLATES[name]))
    thinking = name != "plain"
    keeps = {"keeps_thinking": name == "keeps thoughts", "keeps_round": name == "forgets thoughts"}
    return ChatMLFormat(TOKENIZER, ChatMLOptions(thinking=thinking, **keeps))


@dataclass(frozen=True)
class Step:
    """A turn on an earlier response (modulo their number; 0 starts anew), and how the model answers it."""

    on: int
    words: str
    instructions: str | None
    thought: str
    said: str
    calls: int
    warm: bool
    copied: bool


class Answering(PlannedEngine):
    """Says what the step says, spelled as ChatML spells it."""

    def __init__(self, form: Format, thinks: bool) -> None:
        super().__init__(())
        self.form = form
        self.thinks = thinks
        self.answer: Step | None = None

    async def generate(self, generation: Generation) -> AsyncGenerator[Chunk, None]:
        self.seen.append(generation)
        assert self.answer is not None
        text = f"<think>\n{self.answer.thought}\n</think>\n\n" if self.thinks and self.answer.thought else ""
        calls = [
            f'<tool_call>\n{{"name": "look", "arguments": {{"n": {n}}}}}\n</tool_call>'
            for n in range(self.answer.calls)
        ]
        text += "\n".join([self.answer.said, *calls] if self.answer.said else calls)
        yield Chunk([*self.spelled(text or "So."), self.form.stop_ids[0]], finish="stop", cached_tokens=0)

    def spelled(self, text: str) -> list[int]:
        tokenizer, ids = self.form.tokenizer, []
        for piece in re.split(r"(</?(?:think|tool_call)>)", text):
            control = bool(piece) and tokenizer.has_special(piece)
            ids += [tokenizer.special(piece)] if control else unpack_ids(tokenizer.encode(piece)) if piece else []
        return ids if TOKENIZER is not tokenizer else unpack_ids(tokenizer.encode(text))


@asynccontextmanager
async def serving(form: Format, engine: PlannedEngine, context: int = 100_000) -> AsyncIterator[SessionActor]:
    async def discover() -> list[Endpoint]:
        return [Endpoint("only", "127.0.0.1", 0)]

    async def load() -> Model:
        pool = EnginePool(discover, lambda _: engine, refresh_s=3600, patience_s=0)
        await pool.start()
        return Model("m", form, context, pool)

    actor = SessionActor(ModelTable({"m": load}, {}, 5.0), "0123abcd", per_lane=1000)
    actor.models.start()
    try:
        yield actor
    finally:
        await actor.close()


async def ask(session: Session, request: CreateRequest) -> Response:
    turn = session.turn(request, None)
    async for _ in turn.run():
        pass
    node = session.cache.get(turn.response_id)
    assert node is not None
    return node


@dataclass
class Run:
    """One conversation tree, and the same asked for as a whole each time."""

    actor: SessionActor
    engine: Answering
    session: Session
    nodes: list[Response | None] = field(default_factory=lambda: [None])

    async def step(self, step: Step) -> None:
        parent = self.nodes[step.on % len(self.nodes)]
        new: list[Item] = []
        if parent is not None:
            new += [FunctionCallOutput(call_id, f"out {step.words}") for call_id in parent.pending]
        if step.words or not new:
            new.append(Message("user", f"word {step.words}"))
        self.engine.answer = step
        request = replace(
            asked("x", tools=TOOLS, instructions=step.instructions, store=False, generate=not step.warm),
            input=tuple(new),
            previous_response_id=None if parent is None else parent.id,
        )
        if parent is not None and step.copied:
            parent = restore(pickle.loads(pickle.dumps(flatten(parent))))
            self.session.forget(parent.id)
            self.session.commit(parent)
        self.nodes.append(await ask(self.session, request))
        if step.warm:
            return
        prompt = self.engine.seen[-1].prompt
        whole = (*(() if parent is None else parent.context()), *new)
        fresh = self.actor.open(TENANT)
        await ask(fresh, replace(request, previous_response_id=None, input=whole))
        assert unpack_ids(prompt) == unpack_ids(self.engine.seen[-1].prompt)
        known = self.engine.seen[-2].known
        if known is not None:
            self.check_known(prompt, known.request_id, known.length)

    def check_known(self, prompt: bytes, request_id: str, length: int) -> None:
        """What the engine is said to know is what it was sent and what it said to it."""
        sent = next((each.prompt for each in self.engine.seen if each.request_id == request_id), None)
        if sent is not None:  # a warm-up's may not have reached the engine yet
            assert prompt[: 4 * length][: len(sent)] == sent[: 4 * length]


words = st.sampled_from(["", "a", "one two", "Zebra 42"])
steps = st.builds(
    Step,
    on=st.integers(0, 20) | st.just(-1),
    words=words,
    instructions=st.sampled_from([None, "Be brief."]),
    thought=st.sampled_from(["", "hm", "first this, then that"]),
    said=st.sampled_from(["", "Well.", "Yes, so it is."]),
    calls=st.integers(0, 3),
    warm=st.sampled_from([False, False, False, True]),
    copied=st.booleans(),
)


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=40)
@given(script=st.lists(steps, min_size=1, max_size=8))
def test_a_chain_has_the_ids_of_its_items(name: str, script: Sequence[Step]) -> None:
    async def run() -> None:
        form = form_of(name)
        engine = Answering(form, thinks="thought" in name or "forgets" in name)
        async with serving(form, engine) as actor:
            tree = Run(actor, engine, actor.open(TENANT))
            for step in script:
                await tree.step(step)

    asyncio.run(run())
