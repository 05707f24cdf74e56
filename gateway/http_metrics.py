"""`GET /metrics`: the figures of all session actors in Prometheus' text format, from whichever one is asked."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response

from actors.scrape import Scrape
from gateway.auth import Authenticator
from gateway.http_answers import request_id


class MetricsEndpoint:
    """Needs a key where the API does: there is no content in it, but how much everybody does."""

    def __init__(self, scrape: Scrape, auth: Authenticator) -> None:
        self._scrape = scrape
        self._auth = auth

    async def scrape(self, request: Request) -> Response:
        """All figures. Raises `ApiError` for a wrong key."""
        self._auth.tenant(request.headers.raw)
        return Response(
            await self._scrape.text(), headers={"x-request-id": request_id(), "content-type": CONTENT_TYPE_PLAIN_0_0_4}
        )
