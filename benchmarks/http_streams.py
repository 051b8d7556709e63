"""Concurrent completion streams over plain sockets, so that the client costs next to nothing."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Streams:
    """What a set of concurrent streams got."""

    num_tokens: int
    num_chunks: int
    seconds: float
    first_chunk_s: tuple[float, ...]
    """Per stream, from sending the request."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


async def run_streams(url: str, bodies: list[dict[str, Any]]) -> Streams:
    """All bodies to /v1/completions at once. Raises RuntimeError if a stream does not end well."""
    started = time.perf_counter()
    results = await asyncio.gather(*(_stream(url, body) for body in bodies))
    return Streams(
        num_tokens=sum(tokens for tokens, _, _ in results),
        num_chunks=sum(chunks for _, chunks, _ in results),
        seconds=time.perf_counter() - started,
        first_chunk_s=tuple(first for _, _, first in results),
    )


async def _stream(url: str, body: dict[str, Any]) -> tuple[int, int, float]:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
    payload = json.dumps(
        {**body, "stream": True, "stream_options": {"include_usage": True}}
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    started = time.perf_counter()
    writer.write(head.encode() + payload)
    tokens, chunks, first_s, last = 0, 0, 0.0, b""
    while not last.startswith(b"data: [DONE]"):
        line = await asyncio.wait_for(reader.readline(), 120)
        if not line:
            raise RuntimeError(f"the stream was cut after {last!r}")
        if not line.startswith(b"data: "):
            continue
        last = line
        first_s = first_s or time.perf_counter() - started
        chunks += 1
        if b'"choices":[]' in line:
            tokens = json.loads(line[6:])["usage"]["completion_tokens"]
    writer.close()
    return tokens, chunks, first_s
