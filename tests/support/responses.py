"""Stored responses for tests: given by hand, or drawn by hypothesis."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from actors.conversation import Response, Round
from actors.store.jobs import PutResponse
from actors.stored import StoredResponse
from actors.tokencache import EMPTY
from gateway.protocol.items import (
    AdditionalTools,
    Compaction,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    InputFile,
    InputImage,
    InputText,
    Item,
    Message,
    Opaque,
    OutputText,
    Reasoning,
    ReasoningText,
    Refusal,
    SummaryText,
)
from gateway.protocol.requests import CreateRequest, parse_create
from gateway.protocol.response import ResponseObject
from gateway.protocol.tools import Tool

NOW = 1_800_000_000
TOOLS = [
    {"type": "function", "name": f"tool_{n}", "description": "words " * 20, "parameters": {"type": "object"}}
    for n in range(90)
]
"""Some 15 kB."""


def asked(**body: Any) -> CreateRequest:
    return parse_create({"model": "m", "input": "hello", **body}, transport="http")


def turn(name: str, parent: Response | None = None, *, said: str = "hi", store: bool = True) -> Response:
    """A turn that adds a question, an answer and two token ids."""
    before = EMPTY if parent is None else parent.tokens
    items = (Message("user", f"{said}?"), Message("assistant", (OutputText(said),), id=f"msg_{name}"))
    ids = len(before).to_bytes(4, "little") + len(name).to_bytes(4, "little")
    return Response(
        f"resp_{name}", parent, items, before.extend(ids), None, (), {}, None, "m", store, len(before), len(before)
    )


def put(
    node: Response, tenant: str = "t", *, request: CreateRequest | None = None, expires_at: int | None = None
) -> PutResponse:
    """The job of a completed response whose last item is its output."""
    request = request or asked()
    body = ResponseObject(node.id, NOW, request.echo).render("completed", list(node.items[-1:]))
    record = StoredResponse.of(node.id, body, request, node, 1)
    return PutResponse(tenant, record, "completed", "m", NOW, expires_at)


def chain(prefix: str, length: int) -> list[Response]:
    nodes: list[Response] = []
    for number in range(length):
        nodes.append(turn(f"{prefix}{number}", nodes[-1] if nodes else None, said=f"{prefix} {number}"))
    return nodes


def facts(node: Response | None) -> list[tuple[Any, ...]]:
    """All that is to be kept of a lineage, newest first."""
    return [
        (
            turn.id,
            turn.items,
            turn.tokens.tail(0),
            turn.preamble,
            turn.tools,
            dict(turn.pending),
            turn.lane,
            turn.model,
            turn.store,
            turn.kept,
            turn.begins,
            turn.round,
        )
        for turn in (node.lineage() if node is not None else ())
    ]


def same(record: StoredResponse | None, job: PutResponse) -> bool:
    """Whether what was loaded is what was put."""
    wanted = job.record
    return record is not None and (
        record.id,
        record.body(),
        record.background,
        record.given,
        facts(record.node),
        record.inputs(),
    ) == (
        wanted.id,
        wanted.body(),
        wanted.background,
        wanted.given,
        facts(wanted.node),
        wanted.inputs(),
    )


texts = st.text(st.characters(codec=None), max_size=20)  # lone surrogates too
ids = st.text(string.ascii_letters + string.digits + "_-.é/'\"%", min_size=1, max_size=64)
maybe_ids = st.none() | ids
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
_statuses = st.sampled_from([None, "in_progress", "completed", "incomplete"])
_json_tuples = st.lists(json_values, max_size=2).map(tuple)
_input_parts = (
    st.builds(InputText, texts)
    | st.builds(InputImage, image_url=st.none() | texts, file_id=maybe_ids, detail=st.none() | texts)
    | st.builds(InputFile, file_id=maybe_ids, file_url=maybe_ids, file_data=st.none() | texts, filename=maybe_ids)
    | st.builds(OutputText, texts, annotations=_json_tuples, logprobs=st.none() | _json_tuples)
)
_parts = _input_parts | st.builds(Refusal, texts) | st.builds(ReasoningText, texts) | st.builds(SummaryText, texts)
_output = texts | st.lists(_input_parts, max_size=2).map(tuple)
_names = st.text(string.ascii_letters + "_-", min_size=1, max_size=12)
items: st.SearchStrategy[Item] = st.one_of(
    st.builds(
        Message,
        st.sampled_from(["user", "assistant", "system", "developer"]),
        texts | st.lists(_parts, max_size=3).map(tuple),
        id=maybe_ids,
        status=_statuses,
        phase=st.sampled_from([None, "commentary", "final_answer"]),
    ),
    st.builds(FunctionCall, ids, _names, texts, id=maybe_ids, namespace=st.none() | _names, status=_statuses),
    st.builds(FunctionCallOutput, ids, _output, id=maybe_ids, status=_statuses),
    st.builds(CustomToolCall, ids, _names, texts, id=maybe_ids, namespace=st.none() | _names, status=_statuses),
    st.builds(CustomToolCallOutput, ids, _output, id=maybe_ids, status=_statuses),
    st.builds(
        Reasoning,
        id=maybe_ids,
        summary=st.lists(st.builds(SummaryText, texts), max_size=2).map(tuple),
        content=st.none() | st.lists(st.builds(ReasoningText, texts), max_size=2).map(tuple),
        encrypted_content=st.none() | texts,
        status=_statuses,
    ),
    st.builds(Compaction, texts, id=maybe_ids),
    st.builds(AdditionalTools, _json_tuples, role=_names, id=maybe_ids),
    st.builds(Opaque, _names, json_values, id=maybe_ids),
)
tools = st.builds(
    Tool,
    st.sampled_from(["function", "custom"]),
    _names,
    st.none() | _names,
    st.none() | texts,
    st.none() | st.dictionaries(texts, json_values, max_size=2),
    st.booleans(),
    st.none() | st.tuples(st.sampled_from(["lark", "regex"]), texts),
)


@st.composite
def chains(draw: st.DrawFn, most: int = 6) -> list[Response]:
    """A conversation: turns that keep all of their parent's ids or cut some off, oldest first."""
    nodes: list[Response] = []
    prefix = draw(st.uuids()).hex
    for number in range(draw(st.integers(1, most))):
        parent = nodes[-1] if nodes else None
        kept = 0 if parent is None else draw(st.integers(0, len(parent.tokens)))
        added = draw(st.lists(st.integers(0, 0xFFFFFFFF), max_size=5))
        own = b"".join(each.to_bytes(4, "little") for each in added)
        before = EMPTY if parent is None else parent.tokens.cut(kept)
        old = () if parent is None else draw(st.just(parent.tools) | st.just(()))
        nodes.append(
            Response(
                f"resp_{prefix}{number}",
                parent,
                tuple(draw(st.lists(items, max_size=3))),
                before.extend(own),
                draw(st.none() | texts | st.just(None if parent is None else parent.preamble)),
                (*old, *draw(st.lists(tools, max_size=2))),
                draw(st.dictionaries(ids, texts, max_size=2)),
                draw(st.none() | texts),
                draw(_names),
                True,
                kept,
                draw(st.integers(0, 1 << 40)),
                draw(st.none() | st.builds(Round, st.integers(0, 1 << 40), st.integers(0, 1000))),
            )
        )
    return nodes


def jobs_of(nodes: Sequence[Response], tenant: str = "t") -> list[PutResponse]:
    """Jobs whose objects are short texts: what is in a body is the reader's own affair."""
    return [
        PutResponse(
            tenant,
            StoredResponse(node.id, f'{{"id":"{node.id}"}}', None, False, node.items[:1], node, 10),
            "completed",
            node.model,
            NOW,
        )
        for node in nodes
    ]
