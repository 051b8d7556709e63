"""The HTTP side: OpenAI's endpoints, what load tools ask for, health and status."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.errors import (
    InternalError,
    InvalidRequestError,
    OverloadedError,
    PacelineError,
)
from cluster.metrics import CONTENT_TYPE
from router.api_docs import REQUEST_ID_PATTERN, operation
from router.body import parse_json_object, read_body
from router.cluster_report import cluster_report
from router.gate import Gate
from router.openai_format import ChatShape, CompletionShape
from router.plan import tokenize
from router.reply_response import ReplyResponse, error_response, json_response
from router.request_recorder import RequestRecorder
from router.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    Schema,
    TokenizeRequest,
    parse,
)
from router.service import RouterService
from router.status_page import status_page
from router.verifier_pool import NOT_READY_RETRY_S

SESSION_HEADERS = ("x-session-affinity", "x-correlation-id")
"""One value per conversation; requests that share it go to one verifier."""
MAX_SESSION_LEN = 256
INLINE_BYTES = 1 << 18
"""Larger bodies are parsed beside the event loop."""

Parsed = TypeVar("Parsed", bound=Schema)
Handler = Callable[[Request], Awaitable[Response]]


def create_app(service: RouterService, *, echo_request_id: bool = True) -> FastAPI:
    """The router's ASGI application. It holds no state of its own.

    Behind Ray Serve, which echoes X-Request-ID itself, `echo_request_id` is off: one header, once.
    """
    app = FastAPI(title="Paceline", description="OpenAI-compatible API", redoc_url=None)
    app.add_exception_handler(PacelineError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_middleware(
        Gate,
        authenticate=service.authenticate,
        max_header_bytes=lambda: service.config.limits.max_header_bytes,
    )
    app.add_middleware(RequestIdMiddleware, echo=echo_request_id)
    app.add_middleware(RequestRecorder, metrics=service.requests, clock=service.clock)
    api = _Api(service)
    post: dict[str, tuple[Handler, type[Schema]]] = {
        "/v1/chat/completions": (api.chat, ChatCompletionRequest),
        "/v1/completions": (api.completions, CompletionRequest),
        "/tokenize": (api.tokenize, TokenizeRequest),
        "/detokenize": (api.detokenize, DetokenizeRequest),
    }
    get: dict[str, Handler] = {
        "/": api.page,
        "/v1/models": api.models,
        "/v1/models/{name:path}": api.model,
        "/v1/cluster": api.cluster,
        "/metrics": api.metrics,
        "/health": api.ready,
        "/health/live": api.live,
        "/health/ready": api.ready,
        "/tokenizer_info": api.tokenizer_info,
        "/server_info": api.server_info,
    }
    for path, (handler, schema) in post.items():
        app.add_api_route(
            path, handler, methods=["POST"], response_model=None, **operation(path, schema)
        )
    for path, handler in get.items():
        app.add_api_route(path, handler, methods=["GET"], response_model=None, **operation(path))
        app.add_api_route(
            path, handler, methods=["HEAD"], response_model=None, include_in_schema=False
        )
    return app


class _Api:
    """The handlers."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    # --- generation ---

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        body = await self._parse(request, ChatCompletionRequest)
        opening = self._service.chat(body, request.state.tenant, _session(request.headers))
        timeout_s = self._service.config.request_timeout_s
        return ReplyResponse(opening, ChatShape(), body, timeout_s, request.state.record)

    async def completions(self, request: Request) -> Response:
        """Continue a text."""
        body = await self._parse(request, CompletionRequest)
        opening = self._service.completion(body, request.state.tenant, _session(request.headers))
        timeout_s = self._service.config.request_timeout_s
        return ReplyResponse(opening, CompletionShape(), body, timeout_s, request.state.record)

    # --- tokenizer ---

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a prompt or a conversation, in vLLM's shape."""
        body = await self._parse(request, TokenizeRequest)
        model = self._service.model
        model.check_name(body.model)
        token_ids = tokenize(model, body, self._service.config.tool_call_format)
        strings = model.tokenizer.token_strings(token_ids) if body.return_token_strs else None
        return json_response(
            {
                "tokens": token_ids,
                "count": len(token_ids),
                "max_model_len": model.card.max_model_len,
                "token_strs": strings,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids, special tokens included."""
        body = await self._parse(request, DetokenizeRequest)
        model = self._service.model
        model.check_name(body.model)
        return json_response(
            {"prompt": model.tokenizer.decode(body.tokens, skip_special_tokens=False)}
        )

    async def tokenizer_info(self, request: Request) -> Response:
        """What lm-eval asks for."""
        card = self._service.model.card
        return json_response(
            {
                "eos_token": card.eos_token or None,
                "bos_token": card.bos_token or None,
                "pad_token": card.pad_token or None,
                "chat_template": card.chat_template or None,
            }
        )

    # --- what runs here ---

    async def models(self, request: Request) -> Response:
        """The models served."""
        return json_response({"object": "list", "data": [self._model_entry()]})

    async def model(self, request: Request) -> Response:
        """One model."""
        self._service.model.check_name(request.path_params["name"])
        return json_response(self._model_entry())

    async def cluster(self, request: Request) -> Response:
        """Mode, load and members."""
        return json_response(cluster_report(self._service, await self._service.scrape.routers()))

    async def metrics(self, request: Request) -> Response:
        """Of the whole cluster, in Prometheus' text format."""
        return Response(await self._service.scrape.metrics(), media_type=CONTENT_TYPE)

    async def server_info(self, request: Request) -> Response:
        """What SGLang's benchmark asks for."""
        card = self._service.model.card
        totals = self._service.totals
        steps = totals.num_draft_steps
        length = 1 + totals.num_accepted_tokens / steps if steps else 1.0
        return json_response(
            {
                "model_path": card.name,
                "served_model_name": card.name,
                "max_model_len": card.max_model_len,
                "vocab_size": card.vocab_size,
                "internal_states": [{"avg_spec_accept_length": length}],
            }
        )

    async def page(self, request: Request) -> Response:
        """Status for a person."""
        routers = await self._service.scrape.routers()
        return HTMLResponse(status_page(self._service, routers))

    async def live(self, request: Request) -> Response:
        """200 as long as the process answers."""
        return json_response({"status": "live"})

    async def ready(self, request: Request) -> Response:
        """200 when requests are taken, else 503 with the reason."""
        reason = self._service.not_ready_reason
        if reason is not None:
            raise OverloadedError(reason, code="not_ready", retry_after_s=NOT_READY_RETRY_S)
        return json_response({"status": "ready"})

    def _model_entry(self) -> dict[str, Any]:
        card = self._service.model.card
        return {
            "id": card.name,
            "object": "model",
            "created": 0,
            "owned_by": "paceline",
            "max_model_len": card.max_model_len,
        }

    async def _parse(self, request: Request, schema: type[Parsed]) -> Parsed:
        limits = self._service.config.limits
        body = await read_body(
            request.stream(),
            request.headers.get("content-length"),
            limits.max_body_bytes,
            limits.max_body_s,
        )
        if len(body) <= INLINE_BYTES:
            return parse(schema, parse_json_object(body))
        return await asyncio.to_thread(lambda: parse(schema, parse_json_object(body)))


def _session(headers: Headers) -> str | None:
    found = (headers.get(name) for name in SESSION_HEADERS)
    session = next((value for value in found if value), None)
    return session[:MAX_SESSION_LEN] if session else None


# --- errors -------------------------------------------------------------------------------------


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PacelineError)
    record = getattr(request.state, "record", None)
    if record is not None:
        record.failed(error)
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """What the framework refuses (no such route, wrong method), in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    response = error_response(InvalidRequestError(str(error.detail)))
    response.status_code = error.status_code
    response.headers.update(error.headers or {})
    return response


async def _on_bug(request: Request, error: Exception) -> Response:
    return error_response(InternalError("an error of ours; it is in the log"))


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


# --- X-Request-ID -------------------------------------------------------------------------------

_REQUEST_ID = re.compile(REQUEST_ID_PATTERN)


class RequestIdMiddleware:
    """Checks X-Request-ID and echoes it, or makes one. It is for the client's own bookkeeping:
    nothing inside is named after it."""

    def __init__(self, app: ASGIApp, *, echo: bool) -> None:
        self._app = app
        self._echo = echo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id")
        accepted = given is None or _REQUEST_ID.fullmatch(given) is not None
        request_id = given if given and accepted else secrets.token_hex(16)

        async def send_with_id(message: Message) -> None:
            if self._echo and message["type"] == "http.response.start":
                message.setdefault("headers", [])
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        if accepted:
            await self._app(scope, receive, send_with_id)
        else:
            refusal = error_response(
                InvalidRequestError(
                    "X-Request-ID must be 1 to 64 characters of [A-Za-z0-9._-]",
                    param="X-Request-ID",
                )
            )
            await refusal(scope, receive, send_with_id)
