"""An agent loop of twenty turns on a real vLLM: whatever of its prompts can come from the prefix cache does."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.history_hits import BLOCK, QUESTIONS, possible, tool_loop
from inference.link import LinkEngine, serve_link
from inference.vllm import VllmEngine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(400),  # the first test waits for the engine
    pytest.mark.filterwarnings("ignore"),  # vLLM's imports warn a lot
]


async def test_an_agent_loop_computes_nothing_twice(engine: VllmEngine, model: Path) -> None:
    server = await serve_link(engine, "127.0.0.1", 0, "secret")
    link = LinkEngine(server.address, "secret")
    turns = await tool_loop(link, model, engine.context_length, 20)
    await link.close()
    await server.close()

    assert len(turns) == 20
    for turn in turns:
        reasoning, *calls = turn.output
        assert reasoning == "reasoning"
        assert calls in (["function_call"] * 2, ["function_call"] * 3)
    assert turns[0].cached == 0
    for number, (earlier, turn) in enumerate(pairwise(turns), 1):
        known = earlier.prompt + earlier.sampled
        assert turn.cached == possible(earlier, turn.prompt)
        if number in QUESTIONS:  # the template forgets what was thought before, and shows the rest
            assert turn.prompt[: len(known)] != known
            assert turn.cached
        else:  # id for id what the engine had and sampled; the id sampled last has no KV block yet
            assert turn.prompt[: len(known)] == known
            assert turn.cached == (len(known) - 1) // BLOCK * BLOCK
