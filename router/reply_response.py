"""The HTTP answer of a generation, streamed or whole, for as long as the client is there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.errors import InternalError, PacelineError, error_row, openai_error_body
from cluster.types import FinishReason, TokenLogprobs
from router import openai_format
from router.metrics import RequestRecord
from router.openai_format import ChunkWriter, FinishedChoice, Json, ReplyShape
from router.reply import Reply
from router.schema import SamplingFields

logger = logging.getLogger("paceline.router")

SEND_GRACE_S = 5.0
"""What a client that does not read has left after its request's deadline."""

LINGER_S = 2.0

SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class ReplyResponse(Response):
    """Answers from a reply that is opened when the answer begins and left when it ends, however it
    ends: done, failed, or the client gone. Errors before the first byte have their own status;
    later ones are an event in the stream, which then ends without `[DONE]`.
    """

    def __init__(
        self,
        opening: AbstractAsyncContextManager[Reply],
        shape: ReplyShape,
        request: SamplingFields,
        timeout_s: float,
        record: RequestRecord,
    ) -> None:
        super().__init__()
        self._record = record
        self._opening = opening
        self._shape = shape
        self._request = request
        self._timeout_s = timeout_s
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = asyncio.create_task(self._answer(send))
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self._record.left()
        finally:
            leaving.cancel()
            answering.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
        if not answering.cancelled():
            answering.result()

    async def _answer(self, send: Send) -> None:
        try:
            async with asyncio.timeout(self._timeout_s + SEND_GRACE_S):
                await self._give(send)
        except PacelineError as error:
            await self._fail(send, error)
        except OSError:  # the client is gone (TimeoutError: it does not read)
            self._record.left()
        except Exception:  # the top of a request: nothing above could answer it
            logger.exception("a request failed")
            await self._fail(send, InternalError("an error of ours; it is in the log"))

    async def _give(self, send: Send) -> None:
        async with self._opening as reply:
            self._record.opened(reply)
            if self._request.stream:
                await self._stream(reply, send)
            else:
                await self._send_all(send, await _whole(reply, self._shape, self._record))

    async def _stream(self, reply: Reply, send: Send) -> None:
        writer = ChunkWriter(reply, self._shape, self._request)
        async for data in _events(reply, writer, self._record):
            if not self._started:
                await self._send_head(send)
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_head(self, send: Send) -> None:
        self._started = True
        headers = [(name.encode(), value.encode()) for name, value in SSE_HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send_all(self, send: Send, response: Response) -> None:
        self._started = True
        await response({"type": "http"}, _nothing, send)

    async def _fail(self, send: Send, error: PacelineError) -> None:
        self._record.failed(error)
        with suppress(OSError):  # the client is gone meanwhile
            if self._started:
                data = openai_format.event(openai_error_body(error))
                await send({"type": "http.response.body", "body": data, "more_body": False})
            else:
                await self._send_all(send, error_response(error))


class EarlyResponse(Response):
    """Answers before the whole body came, and ends the connection, which what still trickles in
    would hold open. For LINGER_S that is thrown away first: a connection that is closed on unread
    bytes is reset, and the client might never read why it was refused."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers["connection"] = "close"
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while (await receive()).get("more_body"):
                    pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def json_response(value: Json, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(openai_format.encode_json(value), status, media_type="application/json")


def error_response(error: PacelineError) -> Response:
    """An error as OpenAI's clients expect it."""
    status = error_row(error).http_status
    kind = EarlyResponse if status in (401, 408, 413) else Response
    data = openai_format.encode_json(openai_error_body(error))
    response = kind(data, status, media_type="application/json")
    if status in (429, 503):
        response.headers["retry-after"] = str(max(1, round(error.retry_after_s or 1)))
    elif status in (500, 504):
        response.headers["x-should-retry"] = "false"  # the SDKs would, and it cannot help
    return response


async def _events(reply: Reply, writer: ChunkWriter, record: RequestRecord) -> AsyncIterator[bytes]:
    async for delta in reply.deltas():
        record.saw(delta)
        data = await _write(reply, partial(writer.delta, delta))
        if data:
            yield data
    yield writer.tail()


Written = TypeVar("Written")


async def _write(reply: Reply, write: Callable[[], Written]) -> Written:
    """Beside the event loop if it takes long."""
    return await asyncio.to_thread(write) if reply.tells_much else write()


async def _whole(reply: Reply, shape: ReplyShape, record: RequestRecord) -> Response:
    texts = [reply.echo(choice.index) for choice in reply.choices]
    reasons: dict[int, FinishReason] = {}
    logprobs: list[list[tuple[int, TokenLogprobs]]] = [[] for _ in reply.choices]
    async for delta in reply.deltas():
        record.saw(delta)
        texts[delta.index] += delta.text
        logprobs[delta.index] += delta.logprobs
        if delta.finish_reason is not None:
            reasons[delta.index] = delta.finish_reason
    choices = [
        FinishedChoice(index, texts[index], reasons[index], logprobs[index])
        for index in sorted(reasons)
    ]
    return await _write(reply, lambda: json_response(openai_format.body(reply, shape, choices)))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _nothing() -> dict[str, str]:
    return {"type": "http.disconnect"}
