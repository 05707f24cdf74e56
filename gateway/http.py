"""The HTTP face: every path, with and without `/v1`, on one request core with the socket (protocol.md 6).

Every answer carries `x-request-id`; every refusal is the JSON of `protocol.errors`. Nothing redirects: a path with a
slash at its end is the path without it, since some clients refuse redirects (protocol.md 1.1). Times that clients
announce, such as `x-request-timeout-seconds`, are not looked at: a client that gives up goes away.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.gateway import Gateway
from gateway.http_answers import answer, broken, gone, not_routed, refused
from gateway.http_conversations import ConversationEndpoints
from gateway.http_metrics import MetricsEndpoint
from gateway.http_models import Models
from gateway.http_responses import Responses
from gateway.protocol.errors import ApiError

Endpoint = Callable[[Request], Awaitable[Response]]
Methods = Mapping[str, Endpoint]


def build_http(gateway: Gateway) -> ASGIApp:
    """The application for everything that is not a WebSocket."""
    health = _Health(gateway)
    routes = [_route("/health", {"GET": health.alive}), _route("/health/ready", {"GET": health.ready})]
    routes.append(_route("/metrics", {"GET": MetricsEndpoint(gateway.actor.scrape, gateway.auth).scrape}))
    for prefix in ("/v1", ""):
        routes += [_route(f"{prefix}{path}", methods) for path, methods in _paths(gateway).items()]
    handlers = {ApiError: refused, HTTPException: not_routed, ClientDisconnect: gone, Exception: broken}
    application = Starlette(routes=routes, exception_handlers=handlers)
    application.router.redirect_slashes = False

    async def without_slash(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/"):
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await application(scope, receive, send)

    return without_slash


def _paths(gateway: Gateway) -> dict[str, Methods]:
    """The API. A fixed name goes before the pattern that would match it."""
    responses, conversations, models = Responses(gateway), ConversationEndpoints(gateway), Models(gateway)
    return {
        "/responses": {"POST": responses.create, "GET": responses.upgrade_required},
        "/responses/input_tokens": {"POST": responses.input_tokens},
        "/responses/compact": {"POST": responses.compact},
        "/responses/{id}": {"GET": responses.retrieve, "DELETE": responses.delete},
        "/responses/{id}/cancel": {"POST": responses.cancel},
        "/responses/{id}/input_items": {"GET": responses.input_items},
        "/conversations": {"POST": conversations.create},
        "/conversations/{id}": {
            "GET": conversations.retrieve,
            "POST": conversations.update,
            "DELETE": conversations.delete,
        },
        "/conversations/{id}/items": {"GET": conversations.list_items, "POST": conversations.add_items},
        "/conversations/{id}/items/{item_id}": {"GET": conversations.item, "DELETE": conversations.delete_item},
        "/models": {"GET": models.list},
        "/models/{name:path}": {"GET": models.one},
        "/codex/models": {"GET": models.codex},
    }


def _route(path: str, methods: Methods) -> Route:
    """One route for all methods of a path, so that a refusal can name them. HEAD is a GET whose body stays here."""

    async def endpoint(request: Request) -> Response:
        return await methods["GET" if request.method == "HEAD" else request.method](request)

    return Route(path, endpoint, methods=list(methods))


class _Health:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def alive(self, _: Request) -> Response:
        """Alive: the process answers."""
        return answer({"status": "ok", "draining": self._gateway.draining})

    async def ready(self, _: Request) -> Response:
        """Ready: every model can take a turn and the replica is not draining. 503 until then."""
        ready = self._gateway.actor.models.ready and not self._gateway.draining
        return answer({"ready": ready}, status=200 if ready else 503)
