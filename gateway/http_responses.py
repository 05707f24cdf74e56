"""`/responses` and what is under it (protocol.md 6.1 to 6.3): create, and all that can be asked about a response later.

Looking things up works while the replica drains, so that clients can collect what ran in the background.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from actors.compaction import compact
from actors.listing import listed, prefix_of
from gateway import http_query
from gateway.gateway import Gateway
from gateway.http_answers import answer
from gateway.http_body import read_object
from gateway.http_turns import EventStream, while_connected, whole_response
from gateway.protocol.errors import ApiError
from gateway.protocol.requests import CreateRequest, parse_compact, parse_create, parse_input_tokens


class Responses:
    """The response endpoints."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._actor = gateway.actor
        self._limits = gateway.settings.limits

    async def upgrade_required(self, _: Request) -> Response:
        """A GET without an upgrade: say what this URL is."""
        raise ApiError(
            "upgrade_required",
            "GET /v1/responses opens a WebSocket: send 'Upgrade: websocket'. Without one, use POST /v1/responses.",
        )

    async def create(self, request: Request) -> Response:
        """One turn. It ends when its client goes away, unless it runs in the background."""
        tenant, body = await self._read(request)
        create = parse_create(body, transport="http", memo=self._actor.tool_memo)
        if create.background:
            return await self._in_background(tenant, create)
        turn = self._actor.open(tenant).turn(create, None)
        if create.stream:
            return await EventStream.of_turn(turn, self._gateway.http_turns, self._limits)
        return answer(await whole_response(turn, request.receive, self._gateway.http_turns, self._limits))

    async def retrieve(self, request: Request) -> Response:
        """The Response object, or its events with `stream=true`."""
        tenant, response_id = self._asked(request)
        if request.method == "GET" and http_query.stream(request.query_params):
            return await self._replay(tenant, response_id, http_query.starting_after(request.query_params))
        return answer(await self._actor.archive.retrieve(tenant, response_id))

    async def delete(self, request: Request) -> Response:
        """Delete a stored response."""
        tenant, response_id = self._asked(request)
        await self._actor.archive.delete(tenant, response_id)
        return answer({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """Stop a background response; the Response object as it is then."""
        return answer(await self._actor.archive.cancel(*self._asked(request)))

    async def input_items(self, request: Request) -> Response:
        """What a response was made from, a page at a time."""
        page = http_query.page(request.query_params)
        return answer(await self._actor.archive.input_items(*self._asked(request), page))

    async def input_tokens(self, request: Request) -> Response:
        """How many tokens a create with this body would send to the model, context included."""
        tenant, body = await self._read(request)
        names = self._actor.models.names()
        if body.get("model") is None and len(names) == 1:
            body["model"] = names[0]
        # As a turn that generates: the tokens that make the model speak are counted there, too.
        asked = replace(parse_input_tokens(body), generate=True)
        count = self._actor.open(tenant).turn(asked, None).count()
        tokens = await while_connected(count, request.receive, self._gateway.http_turns)
        return answer({"object": "response.input_tokens", "input_tokens": tokens})

    async def compact(self, request: Request) -> Response:
        """A shorter window that stands for the conversation (4.6)."""
        tenant, body = await self._read(request)
        work = self._compact(tenant, parse_compact(body))
        return answer(await while_connected(work, request.receive, self._gateway.http_turns))

    async def _compact(self, tenant: str, request: CreateRequest) -> dict[str, Any]:
        session = self._actor.open(tenant)
        output, usage = await compact(session, request)
        return {
            "id": self._actor.ids.response(),
            "object": "response.compaction",
            "created_at": self._actor.now(),
            "output": [listed(item.id or self._actor.ids.item(prefix_of(item)), item) for item in output],
            "usage": usage.to_json(),
        }

    async def _in_background(self, tenant: str, create: CreateRequest) -> Response:
        run = await self._actor.background.submit(tenant, create)
        if create.stream:
            return await self._replay(tenant, run.id, -1)
        return answer(run.body())

    async def _replay(self, tenant: str, response_id: str, after: int) -> Response:
        # What can be refused is refused before the stream begins.
        await self._actor.archive.events(tenant, response_id, after, 0.0)
        batches = self._actor.archive.follow(tenant, response_id, after)
        return EventStream(batches, [], self._gateway.http_turns, self._limits, number=after + 1)

    async def _read(self, request: Request) -> tuple[str, dict[str, Any]]:
        """The tenant and the body of a request that makes work."""
        self._gateway.admit()
        tenant = self._gateway.auth.tenant(request.headers.raw)
        return tenant, await read_object(request, self._gateway.settings.server.request_max_bytes)

    def _asked(self, request: Request) -> tuple[str, str]:
        """The tenant, and the id that the path names."""
        return self._gateway.auth.tenant(request.headers.raw), request.path_params["id"]
