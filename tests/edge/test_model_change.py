"""A conversation may change its model (protocol.md 8.18); ids of one vocabulary never reach another model."""

from __future__ import annotations

from inference.formats.chatml import chatml_format
from inference.scripted import Say, Script, ScriptedEngine
from inference.tokenizer import load_o200k, scripted_tokenizer, unpack_ids
from tests.support.gateway import gateway, turn

OURS = scripted_tokenizer()
# The same text ids, other control ids.
THEIRS = load_o200k({"<|im_start|>": 201_500, "<|im_end|>": 201_501})


async def test_the_whole_context_is_rendered_anew_for_another_model_and_back() -> None:
    engine = ScriptedEngine(OURS, Script((Say("ok"),)), tokens_per_second=0)
    async with (
        gateway(engine, models=("ours", "theirs"), formats={"theirs": chatml_format(THEIRS)}) as running,
        running.connect() as ws,
    ):
        system = {"type": "message", "role": "system", "content": "Be kind."}
        first = (await turn(ws, model="ours", input=[system, {"role": "user", "content": "one"}]))[-1]["response"]
        second = (await turn(ws, model="theirs", input="two", previous_response_id=first["id"]))[-1]["response"]
        third = (await turn(ws, model="theirs", input="three", previous_response_id=second["id"]))[-1]["response"]
        await turn(ws, model="ours", input="four", previous_response_id=third["id"])

    one, two, three, four = (unpack_ids(generation.prompt) for generation in engine.received)
    assert not set(two) & {OURS.special("<|im_start|>"), OURS.special("<|im_end|>")}
    assert not set(four) & {201_500, 201_501}
    # Within one model the ids only grow; every prompt holds the whole conversation.
    assert three[: len(two)] == two
    for prompt, vocabulary in ((two, THEIRS), (three, THEIRS), (four, OURS)):
        said = b"".join(vocabulary.token_bytes(token) for token in prompt).decode()
        assert "Be kind." in said
        assert "one" in said
        assert "two" in said
    assert one[0] == OURS.special("<|im_start|>")
