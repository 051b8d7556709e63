"""A request body to JSON, trusting nothing: bounded bytes, strict JSON, bounded depth."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, NoReturn

from cluster.errors import InvalidRequestError, PayloadTooLargeError, SlowRequestError

MAX_DEPTH = 32
MAX_KEYS = 4096
"""Of one object; no field needs more."""


async def read_body(
    chunks: AsyncIterator[bytes], content_length: str | None, max_bytes: int, max_s: float
) -> bytes:
    """The whole body. Raises PayloadTooLargeError from the announced length, before anything is
    read, or as soon as more has come than allowed; SlowRequestError if it takes over `max_s`."""
    if content_length is not None and content_length.isdecimal():
        _check_size(int(content_length), max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(max_s):
            async for chunk in chunks:
                _check_size(len(body) + len(chunk), max_bytes)
                body += chunk
    except TimeoutError as error:
        raise SlowRequestError(f"the body did not arrive within {max_s:g} s") from error
    return bytes(body)


def parse_json_object(body: bytes) -> dict[str, Any]:
    """The JSON object that a body holds. Raises InvalidRequestError for anything else, and for
    what JSON readers differ about: NaN, duplicate keys, lone surrogates."""
    try:
        text = body.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is not UTF-8: {error.reason}") from error
    except RecursionError as error:
        raise InvalidRequestError("the body is nested too deeply") from error
    except ValueError as error:  # JSONDecodeError, or an integer of thousands of digits
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    _check_nesting(value)
    if "\\u" in text:
        _check_surrogates(value)
    return value


def _check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise PayloadTooLargeError(f"the body is over the limit of {max_bytes} bytes")


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequestError(f"the body is not valid JSON: {name} is no JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(pairs) > MAX_KEYS:
        raise InvalidRequestError(f"an object of the body has over {MAX_KEYS} keys")
    if len(result) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise InvalidRequestError(f"the body names the key {twice!r} twice", param=twice)
    return result


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _check_nesting(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for item in level for child in _children(item) if _children(child)]
        if not level:
            return
    raise InvalidRequestError(f"the body is nested deeper than {MAX_DEPTH} levels")


def _check_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            "the body is not valid JSON: a string holds half a surrogate pair"
        ) from error
