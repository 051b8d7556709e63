"""An OpenAI-compatible server in a thread of its own that plays a script."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from tests.support.polling import TIMEOUT_S

Json = dict[str, Any]
Script = Callable[["Exchange"], Awaitable[web.StreamResponse]]


class Exchange:
    """One request, and what may be answered."""

    def __init__(self, number: int, request: web.Request, body: Json) -> None:
        self.number = number
        """How many were asked before; those of the warm-up count."""
        self.body = body
        self._request = request
        self._stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})

    async def begin(self) -> None:
        await self._stream.prepare(self._request)

    async def send(self, data: bytes) -> None:
        """Bytes of the stream as they are."""
        await self._stream.write(data)

    async def event(self, value: Json) -> None:
        await self.send(b"data: " + json.dumps(value).encode() + b"\n\n")

    async def text(self, tokens_so_far: int | None, text: str = "word ") -> None:
        """A chunk with text, and the count of tokens if there is one to tell."""
        chunk: Json = {"choices": [{"index": 0, "delta": {"content": text}}]}
        if tokens_so_far is not None:
            chunk["usage"] = usage(tokens_so_far)
        await self.event(chunk)

    async def done(self, num_tokens: int, **figures: Any) -> web.StreamResponse:
        """Usage, figures and [DONE]."""
        await self.event({"choices": [], "usage": usage(num_tokens), **figures})
        await self.send(b"data: [DONE]\n\n")
        return self._stream

    def abort(self) -> None:
        """Break the connection."""
        assert self._request.transport is not None
        self._request.transport.abort()

    def cut(self) -> web.StreamResponse:
        """No more."""
        return self._stream


def usage(num_tokens: int) -> Json:
    return {
        "prompt_tokens": 10,
        "completion_tokens": num_tokens,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def refusal(status: int, code: str, **headers: str) -> web.Response:
    body = {"error": {"message": "the system is full", "type": "overloaded_error", "code": code}}
    shown = {name.replace("_", "-"): value for name, value in headers.items()}
    return web.json_response(body, status=status, headers=shown)


def answering(
    num_chunks: int = 4, tokens_per_chunk: int = 2, gap_s: float = 0.0, **figures: Any
) -> Script:
    """Chunks of so many tokens, `gap_s` before each but the first."""

    async def script(exchange: Exchange) -> web.StreamResponse:
        await exchange.begin()
        for chunk in range(num_chunks):
            if chunk:
                await asyncio.sleep(gap_s)
            await exchange.text((chunk + 1) * tokens_per_chunk)
        return await exchange.done(num_chunks * tokens_per_chunk, **figures)

    return script


class ScriptedServer:
    """What was asked of it, and where it is."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.url = ""
        self.bodies: list[Json] = []
        self.headers: list[Json] = []
        self.asked = threading.Event()
        """Set with every request; a test may clear it."""
        self.cluster: Json | None = None
        """What GET /v1/cluster tells; None: there is no such thing."""

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.asked.set()
        return await self.script(Exchange(len(self.bodies) - 1, request, body))

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted"}]})

    async def _cluster(self, _: web.Request) -> web.Response:
        if self.cluster is None:
            raise web.HTTPNotFound
        return web.json_response(self.cluster)

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/cluster", self._cluster)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/v1/completions", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner


@contextmanager
def scripted_server(script: Script) -> Iterator[ScriptedServer]:
    """Runs until the block ends."""
    server = ScriptedServer(script)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runner = asyncio.run_coroutine_threadsafe(server.start(), loop).result(TIMEOUT_S)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(_stop(runner), loop).result(TIMEOUT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _stop(runner: web.AppRunner) -> None:
    """Scripts that still play end here."""
    await runner.cleanup()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
