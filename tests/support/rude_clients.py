"""Clients as no one wants them, each on a socket of its own: they leave, trickle, stop reading, or
speak no HTTP at all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any
from urllib.parse import urlsplit

from tests.support.polling import TIMEOUT_S

Body = dict[str, Any]
_RECEIVE_BUFFER_BYTES = 4096


def post(path: str, body: Body) -> bytes:
    """A request as it goes over the wire."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


async def hang_up(url: str, path: str, body: Body, after_s: float) -> bool:
    """Ask, and leave in the middle without a word. Whether the answer was not whole by then."""
    reader, writer = await _connect(url)
    reading = asyncio.create_task(_read_answer(reader))
    writer.write(post(path, body))
    await asyncio.wait([reading], timeout=after_s)
    left = not reading.done()
    reading.cancel()
    writer.transport.abort()
    return left


async def trickle(url: str, path: str, body: Body, every_s: float) -> bytes:
    """Send the body a byte at a time; the first line of the answer, with which it ends."""
    reader, writer = await _connect(url)
    request = post(path, body)
    head = request.index(b"\r\n\r\n") + 4
    writer.write(request[:head])
    answering = asyncio.create_task(reader.readline())
    for byte in request[head:]:
        if (await asyncio.wait([answering], timeout=every_s))[0]:
            break
        writer.write(bytes([byte]))
    async with asyncio.timeout(TIMEOUT_S):
        line = await answering
    writer.transport.abort()
    return line


async def stop_reading(url: str, path: str, body: Body, for_s: float) -> bytes:
    """Ask for much, read nothing for a while, then all the rest."""
    small = socket.socket()
    small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
    small.setblocking(False)
    parts = urlsplit(url)
    await asyncio.get_running_loop().sock_connect(small, (parts.hostname, parts.port))
    reader, writer = await asyncio.open_connection(sock=small, limit=_RECEIVE_BUFFER_BYTES)
    writer.write(post(path, body))
    await asyncio.sleep(for_s)
    async with asyncio.timeout(TIMEOUT_S):
        answer = await _read_answer(reader)
    writer.transport.abort()
    return answer


async def send_raw(address: str, data: bytes, timeout_s: float = 2.0) -> None:
    """Bytes that mean nothing, to any port."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    with contextlib.suppress(TimeoutError, ConnectionError):
        writer.write(data)
        async with asyncio.timeout(timeout_s):
            await reader.read()
    writer.transport.abort()


async def _connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    return await asyncio.open_connection(parts.hostname, parts.port)


async def _read_answer(reader: asyncio.StreamReader) -> bytes:
    """All of a stream, or the start of another answer; the connection may stay open behind it."""
    answer = b""
    while data := await reader.read(1 << 16):
        answer += data
        if answer.endswith(b"0\r\n\r\n"):
            break
    return answer
