"""The OpenAPI document: what each endpoint takes and answers. Handlers read bodies and write
replies themselves, so the framework knows neither."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from cluster.errors import ERROR_TABLE, CancelledRequestError
from router.reply_schema import (
    ChatReply,
    ClusterReply,
    CompletionReply,
    Described,
    DetokenizeReply,
    ErrorReply,
    Health,
    ModelEntry,
    ModelList,
    ServerInfo,
    TokenizeReply,
    TokenizerInfo,
)
from router.schema import Schema

Json = dict[str, Any]

REPLIES: Mapping[str, type[Described]] = {
    "/v1/chat/completions": ChatReply,
    "/v1/completions": CompletionReply,
    "/tokenize": TokenizeReply,
    "/detokenize": DetokenizeReply,
    "/v1/models": ModelList,
    "/v1/models/{name:path}": ModelEntry,
    "/v1/cluster": ClusterReply,
    "/health": Health,
    "/health/live": Health,
    "/health/ready": Health,
    "/tokenizer_info": TokenizerInfo,
    "/server_info": ServerInfo,
}
"""JSON that an endpoint answers, by path."""

STREAMING = frozenset({"/v1/chat/completions", "/v1/completions"})
"""They answer with server-sent events where the request says `stream: true`."""

TEXTS: Mapping[str, type[Response]] = {"/metrics": PlainTextResponse, "/": HTMLResponse}
"""Endpoints that answer something else than JSON."""

REQUEST_ID_PATTERN = "^[A-Za-z0-9._-]{1,64}$"
_REQUEST_ID: Json = {
    "name": "X-Request-ID",
    "in": "header",
    "required": False,
    "description": "Echoed; made if there is none.",
    "schema": {"type": "string", "pattern": REQUEST_ID_PATTERN},
}


def operation(path: str, body: type[Schema] | None = None) -> Json:
    """What the framework is to say of an endpoint, as arguments of `add_api_route`."""
    extra: Json = {"parameters": [*_path_parameters(path), _REQUEST_ID]}
    if body is not None:
        extra["requestBody"] = {"required": True, "content": {"application/json": _schema(body)}}
    return {
        "responses": {200: _success(path), **_errors(path)},
        "response_class": TEXTS.get(path, JSONResponse),
        "openapi_extra": extra,
    }


def _success(path: str) -> Json:
    described: Json = {"description": "Done."}
    if path in REPLIES:
        described["model"] = REPLIES[path]
    if path in STREAMING:
        described["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    return described


def _path_parameters(path: str) -> list[Json]:
    names = re.findall(r"{(\w+)(?::\w+)?}", path)
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]


def _schema(body: type[Schema]) -> Json:
    described = body.model_json_schema()
    definitions = described.pop("$defs", {})
    return {"schema": _inlined(described, definitions)}


def _inlined(node: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(node, dict):
        name = str(node.get("$ref", "")).removeprefix("#/$defs/")
        if name:
            return _inlined(definitions[name], definitions)
        return {key: _inlined(value, definitions) for key, value in node.items()}
    return [_inlined(item, definitions) for item in node] if isinstance(node, list) else node


def _errors(path: str) -> dict[int, Json]:
    """Every status that a client can see, with the errors behind it. They are JSON even where the
    endpoint answers something else, whose class the framework would take for its errors too."""
    reply: Json = {"model": ErrorReply}
    if path in TEXTS:
        reference = {"$ref": f"#/components/schemas/{ErrorReply.__name__}"}
        reply = {"content": {"application/json": {"schema": reference}}}
    return {status: {**reply, "description": text} for status, text in _error_texts().items()}


def _error_texts() -> dict[int, str]:
    by_status: dict[int, list[str]] = {}
    for error, row in ERROR_TABLE.items():
        if error is not CancelledRequestError:
            by_status.setdefault(row.http_status, []).append((error.__doc__ or "").strip())
    return {status: " ".join(texts) for status, texts in sorted(by_status.items())}
