"""A router's HTTP API as the command line uses it: the standard library alone, so that a command
starts at once. Whatever goes wrong is an ApiError, in words for the person at the terminal."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from cluster.commands.command_error import CommandError

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "PACELINE_API_KEY"
"""Environment variable with the API key, where the router asks for one."""
REPLY_TIMEOUT_S = 10.0
STREAM_TIMEOUT_S = 630.0
"""Longest silence within an answer: more than the router's own limit, which says what happened."""

Json = dict[str, Any]
_NETWORK_ERRORS = (OSError, http.client.HTTPException)


class ApiError(CommandError):
    """No usable answer; the message says why and what to do."""


class ApiClient:
    """One router. Nothing is kept open between calls."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url.rstrip("/")

    def get(self, path: str) -> str:
        """Body of a GET."""
        with self._open(path, None, REPLY_TIMEOUT_S) as response:
            try:
                body: bytes = response.read()
            except _NETWORK_ERRORS as error:
                raise self._unreachable(error) from error
        return body.decode("utf-8", errors="replace")

    def get_json(self, path: str) -> Json:
        """JSON object that a GET gives."""
        return self.parse(self.get(path))

    def parse(self, body: str) -> Json:
        """The JSON object that a body holds."""
        try:
            value = json.loads(body)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise self.unexpected()
        return value

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[Json]:
        """The events of a streamed answer. Raises ApiError if it ends in any way but `[DONE]`."""
        with self._open(path, json.dumps(body).encode(), STREAM_TIMEOUT_S) as response:
            try:
                for line in response:
                    data = line.strip().removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    if line.startswith(b"data:") and line.endswith(b"\n"):
                        yield self._event(data)
            except _NETWORK_ERRORS as error:
                raise _broken_off(_reason(error)) from error
        raise _broken_off("the connection closed")

    def unexpected(self) -> ApiError:
        """What answers there is something else."""
        return ApiError(
            f"{self.base_url} does not answer as a Paceline router does. Check --url: it is the "
            "address that `paceline serve` prints, without a path"
        )

    def _open(self, path: str, body: bytes | None, timeout_s: float) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.base_url + path, body, headers)
        try:
            response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error) from None
        except _NETWORK_ERRORS as error:
            raise self._unreachable(error) from error
        return response

    def _event(self, data: bytes) -> Json:
        event = self.parse(data.decode("utf-8", errors="replace"))
        if "error" in event:
            raise ApiError(f"the answer failed: {_message(event) or event}. {_LOOK}")
        return event

    def _refused(self, error: urllib.error.HTTPError) -> ApiError:
        try:
            message = _message(json.loads(error.read()))
        except (*_NETWORK_ERRORS, ValueError):
            message = None
        if message is None:
            return self.unexpected()
        advice = ""
        if retry_after_s := error.headers.get("retry-after"):
            advice = f". Try again in {retry_after_s} s. {_LOOK}"
        elif error.code == http.client.UNAUTHORIZED:
            advice = f". The key is taken from the environment variable {KEY_VARIABLE}"
        return ApiError(f"{self.base_url} refused ({error.code}): {message}{advice}")

    def _unreachable(self, error: BaseException) -> ApiError:
        return ApiError(
            f"cannot reach {self.base_url} ({_reason(error)}). Is it running? `make serve` starts "
            "the system on this machine; --url names another one"
        )


_LOOK = "`paceline status` shows what runs"


def _broken_off(reason: str) -> ApiError:
    return ApiError(f"the answer broke off before its end ({reason}). Ask again; {_LOOK}")


def _reason(error: BaseException) -> str:
    cause = getattr(error, "reason", error)
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__


def _message(body: Any) -> str | None:
    """The message of an error body in OpenAI's shape."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else None
