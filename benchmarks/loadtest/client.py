"""Sends one request and watches its stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.loadtest.prompts import Prompt
from benchmarks.loadtest.record import Json, Outcome, RequestRecord
from benchmarks.loadtest.sse import EventReader

KEEPALIVE_S = 2.0
"""Shorter than servers keep an idle connection, so that none closes under a new request."""
DRAIN_S = 1.0
"""For what may follow `[DONE]` or an error event."""
REFUSALS = frozenset({429, 503})
MAX_MESSAGE_LEN = 300
NONSENSE = (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError)
"""What comes of reading an answer as what it is not."""
SPECULATION_COUNTS = ("num_steps", "num_draft_tokens", "num_accepted_tokens")
TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")


@dataclass(frozen=True, slots=True)
class Target:
    """The server and how it is asked."""

    url: str
    """Without /v1."""
    endpoint: str
    """chat or completions."""
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)
    usage_per_chunk: bool = True
    """Whether it can count tokens in every chunk (stream_options.continuous_usage_stats)."""
    has_cache_salt: bool = True
    """Whether it can keep requests apart in its prefix cache (cache_salt)."""
    timeout_s: float = 120.0

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"

    def body(self, prompt: Prompt, fields: Mapping[str, Any], salt: str) -> Json:
        """Of a request; `salt` keeps cells from reading one another's prefixes."""
        asked: Json = {"prompt": prompt.text}
        if self.endpoint == "chat":
            asked = {"messages": prompt.messages}
        if self.has_cache_salt:
            asked["cache_salt"] = salt
        options: Json = {"include_usage": True}
        if self.usage_per_chunk:
            options["continuous_usage_stats"] = True
        return {
            "model": self.model,
            **asked,
            "max_tokens": prompt.max_tokens,
            "stream": True,
            "stream_options": options,
            **fields,
        }


class Clock:
    """Seconds since an origin."""

    def __init__(self, origin: float) -> None:
        """`origin` is a reading of time.perf_counter, which may lie ahead."""
        self._origin = origin

    def now_s(self) -> float:
        return time.perf_counter() - self._origin


@contextlib.asynccontextmanager
async def http_session() -> AsyncIterator[aiohttp.ClientSession]:
    """One for a cell: as many connections as requests are under way, and none taken over."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield session


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to be sent."""

    cell: int
    index: int
    prompt: Prompt
    fields: Mapping[str, Any]
    salt: str
    scheduled_s: float


async def send(
    session: aiohttp.ClientSession,
    target: Target,
    clock: Clock,
    ask: Ask,
    records: list[RequestRecord],
) -> RequestRecord:
    """Send it and wait for its end, whatever that is. The record is added to `records`, also where
    this is cancelled."""
    watched = Watched(clock, ask)
    try:
        async with asyncio.timeout(target.timeout_s):
            await _exchange(session, target, ask, watched)
    except TimeoutError:
        watched.fail(Outcome.TIMEOUT, f"no end within {target.timeout_s:g} s")
    except (aiohttp.ClientError, OSError) as error:
        outcome = Outcome.UNREACHABLE if watched.status is None else Outcome.BROKEN
        watched.fail(outcome, f"{type(error).__name__}: {error}")
    except asyncio.CancelledError:
        watched.fail(Outcome.CANCELLED, "the load test was interrupted")
        raise
    finally:
        record = watched.record()
        records.append(record)
    return record


async def _exchange(
    session: aiohttp.ClientSession, target: Target, ask: Ask, watched: Watched
) -> None:
    headers = {"Content-Type": "application/json", **target.headers}
    if ask.prompt.session is not None:
        headers["x-session-affinity"] = ask.prompt.session
    body = json.dumps(target.body(ask.prompt, ask.fields, ask.salt)).encode()
    async with session.post(target.url + target.path, data=body, headers=headers) as response:
        watched.status = response.status
        if response.status != 200:
            watched.refuse(await response.read(), response.headers)
            return
        async for received in response.content.iter_any():
            watched.receive(received)
            if watched.is_over:
                break
        await _drain(response)


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read to the end of the body, so that the connection serves again; not for long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            while not response.content.at_eof():
                await response.content.readany()


class Watched:
    """What is known of a request that is under way."""

    def __init__(self, clock: Clock, ask: Ask) -> None:
        self.status: int | None = None
        self._clock = clock
        self._ask = ask
        self._sent_s = clock.now_s()
        self._outcome: Outcome | None = None
        self._end_s: float | None = None
        self._message = ""
        self._code = ""
        self._retry_after_s: float | None = None
        self._reader = EventReader()
        self._chunk_s: list[float] = []
        self._chunk_tokens: list[int] = []
        self._finish_reason = ""
        self._prompt_tokens: int | None = None
        self._cached_tokens: int | None = None
        self._output_tokens: int | None = None
        self._speculation: Json | None = None
        self._histogram: tuple[int, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether its outcome is known."""
        return self._outcome is not None

    def fail(self, outcome: Outcome, message: str, code: str = "") -> None:
        """The first ending counts."""
        if self._outcome is None:
            self._outcome = outcome
            self._end_s = self._clock.now_s()
            self._message = message[:MAX_MESSAGE_LEN]
            self._code = code

    def refuse(self, body: bytes, headers: Mapping[str, str]) -> None:
        """An answer that is no stream."""
        error = _error_of(body)
        self._retry_after_s = _number(headers.get("Retry-After"))
        outcome = Outcome.REFUSED if self.status in REFUSALS else Outcome.ERROR
        self.fail(outcome, error[0] or body[:MAX_MESSAGE_LEN].decode(errors="replace"), error[1])

    def receive(self, received: bytes) -> None:
        """Bytes of the stream."""
        now_s = self._clock.now_s()
        try:
            for data in self._reader.feed(received):
                if not self.is_over:
                    self._take(data, now_s)
        except (*NONSENSE, RecursionError) as error:
            self.fail(Outcome.BROKEN, f"an event that is no chunk ({error!r})")

    def _take(self, data: bytes, now_s: float) -> None:
        if data == b"[DONE]":
            self._outcome, self._end_s = Outcome.OK, now_s
            return
        chunk = json.loads(data)
        if chunk.get("error") is not None:
            message, code = _error_of(data)
            self.fail(Outcome.BROKEN, message or "an error event", code)
            return
        usage = chunk.get("usage") or {}
        self._take_usage(usage)
        for choice in chunk.get("choices") or ():
            self._finish_reason = str(choice.get("finish_reason") or self._finish_reason)
            if _has_text(choice):
                self._chunk_s.append(now_s)
                if usage:
                    self._chunk_tokens.append(int(usage["completion_tokens"]))
        self._take_figures(chunk)

    def _take_usage(self, usage: Json) -> None:
        if usage:
            self._prompt_tokens = int(usage["prompt_tokens"])
            self._output_tokens = int(usage["completion_tokens"])
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            self._cached_tokens = None if cached is None else int(cached)

    def _take_figures(self, chunk: Json) -> None:
        if speculation := chunk.get("speculation"):
            counts = {name: int(speculation.get(name) or 0) for name in SPECULATION_COUNTS}
            self._speculation = {**speculation, **counts}
        figures = (chunk.get("metrics") or {}).get("speculative_decoding") or {}
        if histogram := figures.get("acceptance_histogram"):
            self._histogram = tuple(map(int, histogram))

    def record(self) -> RequestRecord:
        """What became of it, times to the microsecond. To be asked for at its end."""
        self.fail(Outcome.BROKEN, "the stream ended without [DONE]")
        assert self._outcome is not None
        assert self._end_s is not None
        told_each = len(self._chunk_tokens) == len(self._chunk_s)
        return RequestRecord(
            cell=self._ask.cell,
            index=self._ask.index,
            family=self._ask.prompt.family,
            scheduled_s=round(self._ask.scheduled_s, 6),
            sent_s=round(self._sent_s, 6),
            end_s=round(self._end_s, 6),
            outcome=self._outcome,
            status=self.status,
            message=self._message,
            code=self._code,
            retry_after_s=self._retry_after_s,
            chunk_s=tuple(round(time_s, 6) for time_s in self._chunk_s),
            chunk_tokens=tuple(self._chunk_tokens) if told_each else (),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens,
            finish_reason=self._finish_reason,
            speculation=self._speculation,
            accepted_histogram=self._histogram,
        )


def _has_text(choice: Json) -> bool:
    if choice.get("text"):
        return True
    delta = choice.get("delta") or {}
    return any(delta.get(name) for name in TEXT_FIELDS)


def _error_of(body: bytes) -> tuple[str, str]:
    """(message, code or type) of an error in OpenAI's shape; empty where it is none."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"]), str(error.get("code") or error.get("type") or "")
    except (*NONSENSE, RecursionError):
        return "", ""


def _number(text: str | None) -> float | None:
    """Retry-After in seconds; a date counts as none."""
    try:
        seconds = math.nan if text is None else float(text)
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) else None
