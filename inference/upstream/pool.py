"""Connections to one upstream: kept open, kept warm, with a deadline for every step.

HTTP/1.1 with one connection for each running answer: a lost packet then holds up one of them, and closing the
connection is an abort that every server understands. Nothing here logs a body or a key.

httpx does the HTTP. What goes out is decided here by an allow-list (bugs.md O-92): no header of a client can, as none
comes this far; no cookie comes back, no redirect is followed and no proxy or password of the environment is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache
from http.cookiejar import DefaultCookiePolicy
from typing import Any, Protocol

import httpx
import orjson

from inference.upstream.bodies import Body
from inference.upstream.errors import UpstreamError, broken_off, refusal, silent, unreachable, unreadable
from inference.upstream.silence import Silence
from inference.upstream.sse import EventReader, EventTooLong

log = logging.getLogger(__name__)

ALLOWED_HEADERS = frozenset(
    {
        "x-cerebras-3rd-party-integration",
        "openai-organization",
        "openai-project",
        "http-referer",
        "x-title",
    }
)
"""What an endpoint's settings may add to a request."""

DONE = b"[DONE]"
_END_S = 0.25  # how long the end of a stream may follow its last event, for its connection to be used again
_MAX_REFUSAL_BYTES = 65_536
_MAX_JSON_BYTES = 16 * 1024 * 1024

Observer = Callable[[int, Mapping[str, str]], None]


class Progress(Protocol):
    """How far an answer is, as its reader knows. Asked before each wait for more of it."""

    @property
    def thinking(self) -> bool:
        """Nothing is being said: the model may think unseen, for as long as it likes."""
        ...

    @property
    def ended(self) -> bool:
        """The event that is the last has come, in streams that say so with an event."""
        ...


@dataclass(frozen=True, slots=True)
class Steady:
    """`Progress` of a stream that speaks from its first event to its `[DONE]`."""

    thinking: bool = False
    ended: bool = False


STEADY = Steady()


@dataclass(frozen=True, slots=True)
class Deadlines:
    """In seconds. `first_event_s` runs from sending the request; servers say 200 long before the first token. `idle_s`
    is the longest silence after it, keep-alive comments counting as life, and `thinking_s` that while nothing is being
    said (`Progress.thinking`)."""

    connect_s: float = 5.0
    first_event_s: float = 60.0
    idle_s: float = 30.0
    thinking_s: float = 600.0

    def silence_s(self, progress: Progress) -> float:
        """The longest silence now."""
        return self.thinking_s if progress.thinking else self.idle_s


@dataclass(frozen=True, slots=True)
class Warmth:
    """`connections` of them ask for `path` every `every_s` seconds, so that no turn waits for a handshake."""

    path: str
    connections: int = 2
    every_s: float = 20.0


class UpstreamPool:
    """Connections to one endpoint. Call `start` in the loop that uses it.

    Args:
        base_url: with the API's prefix, such as `https://api.cerebras.ai/v1`.
        key: sent as a bearer token; None for none.
        headers: further headers, of `ALLOWED_HEADERS`.
        deadlines: see there.
        warmth: None leaves connections to cool.
        connections: most at once; more requests wait `connect_s` for one.

    Raises:
        ValueError: a header that is not allowed.
    """

    def __init__(
        self,
        base_url: str,
        key: str | None,
        *,
        headers: Mapping[str, str] | None = None,
        deadlines: Deadlines | None = None,
        warmth: Warmth | None = None,
        connections: int = 256,
    ) -> None:
        given = {name.lower(): value for name, value in (headers or {}).items()}
        if foreign := sorted(given.keys() - ALLOWED_HEADERS):
            raise ValueError(f"not among the headers that may go to an upstream: {', '.join(foreign)}")
        own = {"user-agent": "limpet", "accept-encoding": "identity"}
        bearer = {} if key is None else {"authorization": f"Bearer {key}"}
        self.deadlines = deadlines or Deadlines()
        self._warmth = warmth
        kept_s = 60.0 if warmth is None else 3 * warmth.every_s
        self._client = httpx.AsyncClient(
            base_url=base_url.rstrip("/") + "/",
            headers={**own, **given, **bearer},
            timeout=httpx.Timeout(None, connect=self.deadlines.connect_s, pool=self.deadlines.connect_s),
            limits=httpx.Limits(
                max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=kept_s
            ),
            verify=_authorities(),
            follow_redirects=False,
            trust_env=False,
        )
        self._client.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the first connections, and keep them warm. Returns when they are open or can't be."""
        if self._warmth is not None and self._task is None:
            await self._warm(self._warmth)
            self._task = asyncio.create_task(self._keep_warm(self._warmth), name="upstream-warming")

    async def close(self) -> None:
        """Close every connection. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self._client.aclose()

    async def get(self, path: str, timeout_s: float) -> Any:
        """The JSON found at a path. Raises `UpstreamError`."""
        request = self._client.build_request("GET", path)
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._open(request, None)
                try:
                    return orjson.loads(await _some(response, _MAX_JSON_BYTES))
                finally:
                    await response.aclose()
        except TimeoutError:
            raise silent() from None
        except orjson.JSONDecodeError:
            raise unreadable() from None

    async def events(
        self, path: str, body: Body, observe: Observer | None = None, progress: Progress = STEADY
    ) -> AsyncGenerator[list[bytes], None]:
        """Ask for a stream of events. Yields the data of those that came together, without the last `[DONE]`.

        `observe` is told the status and the headers (in lower case) of the answer, whatever it is; `progress` tells
        which deadline the next data has. Closing the generator closes the connection at once, which aborts the answer.
        The stream's end is no error, wherever it is.

        Raises:
            UpstreamError: refused, unreachable, silent for too long, broken off, or no stream of events.
        """
        headers = {**body.headers, "accept": "text/event-stream"}
        request = self._client.build_request("POST", path, content=body.content, headers=headers)
        due = time.monotonic() + self.deadlines.first_event_s
        try:
            async with asyncio.timeout(self.deadlines.first_event_s):
                response = await self._open(request, observe)
        except TimeoutError:
            raise silent() from None
        silence = Silence()
        pieces = response.aiter_raw()
        try:
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise unreadable()
            reader, heard = EventReader(), False
            # One generator, not several around each other: every level costs each token a microsecond.
            while True:
                silence.begin(self.deadlines.silence_s(progress) if heard else due - time.monotonic())
                try:
                    events = reader.feed(await anext(pieces))
                except asyncio.CancelledError:
                    if silence.broke():
                        raise silent() from None
                    raise
                silence.end()
                if not events:
                    continue
                heard = True
                done = events[-1] == DONE
                if found := events[:-1] if done else events:
                    yield found
                if done or progress.ended:
                    await _read_end(pieces)
                    return
        except StopAsyncIteration:
            return
        except EventTooLong:
            raise unreadable() from None
        except httpx.HTTPError as error:
            log.warning("%s broke off an answer: %s", request.url.host, type(error).__name__)
            raise broken_off() from None
        finally:
            silence.close()
            await response.aclose()

    async def _open(self, request: httpx.Request, observe: Observer | None) -> httpx.Response:
        """An answer with status 200, still to be read."""
        response = await self._send(request)
        if observe is not None:
            observe(response.status_code, response.headers)
        if response.status_code == 200:
            return response
        try:
            error = await _refused(response)
        finally:
            await response.aclose()
        raise error

    async def _send(self, request: httpx.Request) -> httpx.Response:
        try:
            return await self._client.send(request, stream=True)
        except httpx.PoolTimeout:
            message = "All connections to the upstream are in use; try again shortly."
            raise UpstreamError("overloaded", "engine_overloaded", message, 1.0) from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            log.warning("no connection to %s: %s", request.url.host, type(error).__name__)
            raise unreachable() from None
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: the client is closed
            log.warning("%s did not take a request: %s", request.url.host, type(error).__name__)
            raise broken_off() from None

    async def _keep_warm(self, warmth: Warmth) -> None:
        while True:
            await asyncio.sleep(warmth.every_s)
            await self._warm(warmth)

    async def _warm(self, warmth: Warmth) -> None:
        await asyncio.gather(*(self._touch(warmth.path) for _ in range(warmth.connections)))

    async def _touch(self, path: str) -> None:
        """Any answer will do: what counts is the connection."""
        with contextlib.suppress(UpstreamError, TimeoutError):
            async with asyncio.timeout(self.deadlines.connect_s):
                response = await self._send(self._client.build_request("GET", path))
                try:
                    await _some(response, _MAX_REFUSAL_BYTES)
                finally:
                    await response.aclose()


@cache
def _authorities() -> ssl.SSLContext:
    """Whose certificates are trusted: the public ones. To read them takes 50 ms, so that happens once."""
    return httpx.create_ssl_context(trust_env=False)


async def _read_end(pieces: AsyncIterator[bytes]) -> None:
    """What follows the last event, so that the connection can be used again."""
    with contextlib.suppress(TimeoutError, httpx.HTTPError):
        async with asyncio.timeout(_END_S):
            async for _ in pieces:
                pass


async def _pieces(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    try:
        async for piece in response.aiter_raw():
            yield piece
    except httpx.HTTPError as error:
        log.warning("%s broke off an answer: %s", response.url.host, type(error).__name__)
        raise broken_off() from None


async def _some(response: httpx.Response, most: int) -> bytes:
    """The body; what is above `most` bytes is cut off."""
    found = bytearray()
    async with aclosing(_pieces(response)) as pieces:
        async for piece in pieces:
            found += piece
            if len(found) > most:
                break
    return bytes(found[:most])


async def _refused(response: httpx.Response) -> UpstreamError:
    body = b""
    with contextlib.suppress(UpstreamError):  # a body that breaks off says no less than none
        body = await _some(response, _MAX_REFUSAL_BYTES)
    error, detail = refusal(response.status_code, response.headers, body, time.time())
    log.warning(
        "%s answered %d (code %s, type %s)",
        response.url.host,
        response.status_code,
        detail.code or "none",
        detail.type or "none",
    )
    return error
