"""What stands before every route: the size of the headers, and the API key.

Closed by default: a path is open only if it is named here.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.errors import AuthenticationError, InvalidRequestError, PacelineError
from router.api_keys import Tenant
from router.reply_response import error_response

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
"""Probes have no key."""
ADMIN_PATHS = frozenset({"/", "/v1/cluster", "/metrics"})
"""They tell of everyone's traffic."""


class Gate:
    """ASGI middleware. Leaves the tenant in the request's state."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        authenticate: Callable[[str | None], Tenant],
        max_header_bytes: Callable[[], int],
    ) -> None:
        """`authenticate` says whose an Authorization header is, or raises AuthenticationError."""
        self._app = app
        self._authenticate = authenticate
        self._max_header_bytes = max_header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check_headers(scope)
                if scope["path"] not in OPEN_PATHS:
                    scope.setdefault("state", {})["tenant"] = self._tenant(scope)
            except PacelineError as error:
                response = error_response(error)
                if isinstance(error, AuthenticationError):
                    response.headers["www-authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check_headers(self, scope: Scope) -> None:
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size > self._max_header_bytes():
            raise InvalidRequestError(
                f"the headers are over the limit of {self._max_header_bytes()} bytes"
            )

    def _tenant(self, scope: Scope) -> Tenant:
        tenant = self._authenticate(Headers(scope=scope).get("authorization"))
        if scope["path"] in ADMIN_PATHS and not tenant.admin:
            raise AuthenticationError(
                f"{scope['path']} needs a key with admin: true", code="admin_key_needed"
            )
        return tenant
