"""`/conversations` and what is under it (protocol.md 6.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway import http_query
from gateway.gateway import Gateway
from gateway.http_answers import answer
from gateway.http_body import read_body
from gateway.protocol.decode import decode_object
from gateway.protocol.errors import ApiError
from gateway.protocol.invalid import missing, wrong_type
from gateway.protocol.items import Item
from gateway.protocol.requests import parse_input_tokens

MAX_ITEMS = 20


class ConversationEndpoints:
    """The conversation endpoints."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._conversations = gateway.actor.conversations

    async def create(self, request: Request) -> Response:
        """A new conversation, with or without first items."""
        tenant = self._tenant(request)
        metadata, items = _fields(await self._body(request))
        return answer(self._conversations.memory.create(tenant, metadata, items))

    async def retrieve(self, request: Request) -> Response:
        """The conversation object."""
        return answer(await self._call("get", request))

    async def update(self, request: Request) -> Response:
        """New metadata."""
        body = await self._body(request)
        if body.get("metadata") is None:
            raise missing("metadata")
        metadata, _ = _fields({"metadata": body["metadata"]})
        return answer(await self._call("update", request, metadata))

    async def delete(self, request: Request) -> Response:
        """Delete it; its responses stay."""
        return answer(await self._call("delete", request))

    async def add_items(self, request: Request) -> Response:
        """Up to 20 items more; the list of them."""
        body = await self._body(request)
        if body.get("items") is None:
            raise missing("items")
        _, items = _fields({"items": body["items"]})
        return answer(await self._call("add", request, items))

    async def list_items(self, request: Request) -> Response:
        """The items, a page at a time."""
        return answer(await self._call("items", request, http_query.page(request.query_params)))

    async def item(self, request: Request) -> Response:
        """One item."""
        return answer(await self._call("item", request, request.path_params["item_id"]))

    async def delete_item(self, request: Request) -> Response:
        """Delete one item; the conversation object."""
        return answer(await self._call("remove", request, request.path_params["item_id"]))

    def _tenant(self, request: Request) -> str:
        return self._gateway.auth.tenant(request.headers.raw)

    async def _call(self, operation: str, request: Request, *args: Any) -> Any:
        return await self._conversations.call(operation, self._tenant(request), request.path_params["id"], *args)

    async def _body(self, request: Request) -> dict[str, Any]:
        """The body of a request that keeps something. None at all is an empty one."""
        self._gateway.admit()
        self._tenant(request)  # before reading
        body = await read_body(request, self._gateway.settings.server.request_max_bytes)
        return decode_object(body) if body else {}


def _fields(body: Mapping[str, Any]) -> tuple[Mapping[str, str], tuple[Item, ...]]:
    """`metadata` and `items`, which have the form of a create request's `metadata` and `input`. Raises `ApiError`."""
    items = body.get("items")
    if items is not None and not isinstance(items, list):
        raise wrong_type("items", "an array", items)
    if items is not None and len(items) > MAX_ITEMS:
        message = f"Invalid 'items': array too long. Expected at most {MAX_ITEMS} items, but got {len(items)} instead."
        raise ApiError("array_above_max_length", message, "items")
    try:
        read = parse_input_tokens({"model": "-", "input": items, "metadata": body.get("metadata")})
    except ApiError as error:
        if error.param is None or not error.param.startswith("input"):
            raise
        param = error.param.replace("input", "items", 1)
        raise ApiError(error.code, error.message.replace(error.param, param), param) from None
    return read.metadata, read.input
