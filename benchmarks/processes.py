"""Parts of the system in processes of their own, so that each one's CPU time and memory can be read apart."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

TOKEN = "benchmark"  # noqa: S105 - a loopback link between our own processes
START_TIMEOUT_S = 240.0  # a vLLM takes 40 s, on a busy machine minutes
STOP_TIMEOUT_S = 20.0
CONTEXT_TOKENS = 10_000_000


@dataclass(frozen=True, slots=True)
class Part:
    """A running process and the port it listens on. `pipe` leads to its `Report`, if it counts
    something."""

    port: int
    process: psutil.Process
    pipe: Connection | None = None

    def thread_cpu_s(self) -> float:
        """Time on a CPU so far, to the nanosecond; the kernel's own times count in steps of 10 ms. Threads that have
        ended are left out."""
        return self._schedule(0)

    def kept_waiting_s(self) -> float:
        """Time its threads could have run but the CPUs did other work."""
        return self._schedule(1)

    def _schedule(self, column: int) -> float:
        total = 0
        for file in Path(f"/proc/{self.process.pid}/task").glob("*/schedstat"):
            with suppress(OSError):  # the thread has just ended
                total += int(file.read_text().split()[column])
        return total / 1e9

    def figure(self) -> float:
        """What the process says now of what it was started to count."""
        answer: float = self.ask()
        return answer

    def ask(self) -> Any:
        """What the process tells when it is asked."""
        assert self.pipe is not None
        self.pipe.send(None)
        if not self.pipe.poll(STOP_TIMEOUT_S):
            raise TimeoutError("a process does not say what it has counted")
        return self.pipe.recv()

    def memory_kib(self) -> float:
        """Memory that is this process's alone, KiB."""
        return float(self.process.memory_full_info().uss) / 1024


def this_process() -> Part:
    """The benchmark itself, which listens on nothing."""
    return Part(0, psutil.Process())


class Report:
    """How a process tells the benchmark that it is up, and what it has counted."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def __call__(self, port: int, figure: Callable[[], object] | None = None) -> None:
        """It listens on `port`. `figure` is called when it is asked for."""
        self._pipe.send((port, figure is not None))
        if figure is not None:
            asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._answer, figure)

    def _answer(self, figure: Callable[[], object]) -> None:
        self._pipe.recv()
        self._pipe.send(figure())


@contextmanager
def running(main: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> Iterator[Part]:
    """Run `main(report, *args)` in a new process until the block ends. `report(port)` says that it is up."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(main, theirs, args))  # no daemon: vLLM has a process of its own
    process.start()
    started = psutil.Process(process.pid)
    theirs.close()
    try:
        if not ours.poll(START_TIMEOUT_S):
            raise TimeoutError(f"{main.__name__} did not start")
        port, counts = ours.recv()
        yield Part(port, started, ours if counts else None)
    finally:
        stop(started)
        process.join()


def stop(process: psutil.Process) -> None:
    """End a process of ours and those it has started, kindly first."""
    with suppress(psutil.NoSuchProcess):
        family = [process, *process.children(recursive=True)]
        process.terminate()
        _, left = psutil.wait_procs(family, STOP_TIMEOUT_S)
        for late in left:
            late.kill()


def _run(main: Callable[..., Coroutine[Any, Any, None]], pipe: Connection, args: tuple[Any, ...]) -> None:
    import uvloop

    uvloop.run(main(Report(pipe), *args))


async def engine(report: Report, tokens_per_second: float) -> None:
    """The scripted engine behind a token link. The prompt's last number says how many tokens to answer with."""
    from benchmarks.counting import CountingEngine
    from inference.link import serve_link

    server = await serve_link(CountingEngine(tokens_per_second), "127.0.0.1", 0, TOKEN)
    report(server.address[1])
    await asyncio.Event().wait()


async def gateway(report: Report, engine_port: int, checkpoint: Path | None = None, cached: bool = True) -> None:
    """One session actor behind uvicorn, as in a Serve replica but without Serve, for a ChatML checkpoint or else the
    scripted vocabulary. Not `cached`: every prompt is rendered whole. It counts the bytes of prompts that it sends."""
    import uvicorn

    from actors.engines import Endpoint, EnginePool
    from actors.models import Model, ModelTable
    from actors.session import SessionActor
    from benchmarks.history_formats import UncachedChat
    from gateway.asgi import build_asgi, uvicorn_options
    from gateway.gateway import Gateway
    from gateway.settings import Settings
    from inference.formats.chatml import chatml_format
    from inference.link import LinkEngine
    from inference.tokenizer import scripted_tokenizer

    chat = chatml_format(checkpoint or scripted_tokenizer())
    link = LinkEngine(("127.0.0.1", engine_port), TOKEN)

    async def discover() -> list[Endpoint]:
        return [Endpoint("only", "127.0.0.1", engine_port)]

    async def load() -> Model:
        pool = EnginePool(discover, lambda _: link)
        await pool.start()
        return Model("m", chat if cached else UncachedChat(chat.tokenizer, chat.options), CONTEXT_TOKENS, pool)

    settings = Settings()
    actor = SessionActor(ModelTable({"m": load}, {}, 30.0), "00000000")
    actor.models.start()
    await actor.models.resolve("m")
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        report(listener.getsockname()[1], lambda: link.prompt_bytes_sent)
        options = {"log_level": "warning", "lifespan": "off", **uvicorn_options(settings)}
        await uvicorn.Server(uvicorn.Config(build_asgi(Gateway(settings, actor)), **options)).serve([listener])


async def floor(report: Report, frame_bytes: int) -> None:
    """A bare `websockets` server: the message "N R" is answered with N text frames at R a second, one by one."""
    from websockets.asyncio.server import ServerConnection, serve

    frame = "x" * frame_bytes

    async def handler(connection: ServerConnection) -> None:
        loop = asyncio.get_running_loop()
        async for message in connection:
            count, rate = (float(word) for word in str(message).split())
            start = loop.time()
            for index in range(int(count)):
                if rate:
                    await asyncio.sleep(max(0.0, start + index / rate - loop.time()))
                await connection.send(frame)

    async with serve(handler, "127.0.0.1", 0, compression=None) as server:
        report(next(iter(server.sockets)).getsockname()[1])
        await asyncio.Event().wait()
