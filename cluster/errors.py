"""One error tree, and one table from it to HTTP and gRPC, both ways.

A class says whose fault it is and what may be done; `param` names the field at fault. Errors cross
the wire as (kind, message, param), where kind is the class name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc


class PacelineError(Exception):
    """Base of every error that may reach a client or a peer."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


class InvalidRequestError(PacelineError):
    """The request is wrong; `param` names the field."""


class AuthenticationError(PacelineError):
    """No key, or a wrong one."""


class ModelNotFoundError(PacelineError):
    """The named model is not served here."""


class SlowRequestError(PacelineError):
    """The body did not arrive in time."""


class PayloadTooLargeError(PacelineError):
    """The body is over the limit."""


class TenantOverloadedError(PacelineError):
    """This tenant is over its share."""


class OverloadedError(PacelineError):
    """The system is full, or not ready yet."""


class DeadlineExceededError(PacelineError):
    """The request's own deadline passed."""


class UpstreamLostError(PacelineError):
    """The peer that served this went away."""


class IncompatiblePeerError(PacelineError):
    """Two members do not fit together (protocol, model, vocabulary). Never retried."""


class UnknownSessionError(PacelineError):
    """A message named a session that is not open here; open it again."""


class CancelledRequestError(PacelineError):
    """The consumer left."""


class InternalError(PacelineError):
    """A bug of ours."""


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """How one error class looks outside."""

    http_status: int
    openai_type: str
    grpc_code: grpc.StatusCode


ERROR_TABLE: dict[type[PacelineError], ErrorRow] = {
    InvalidRequestError: ErrorRow(400, "invalid_request_error", grpc.StatusCode.INVALID_ARGUMENT),
    AuthenticationError: ErrorRow(401, "authentication_error", grpc.StatusCode.UNAUTHENTICATED),
    ModelNotFoundError: ErrorRow(404, "invalid_request_error", grpc.StatusCode.NOT_FOUND),
    SlowRequestError: ErrorRow(408, "invalid_request_error", grpc.StatusCode.DEADLINE_EXCEEDED),
    PayloadTooLargeError: ErrorRow(413, "invalid_request_error", grpc.StatusCode.OUT_OF_RANGE),
    TenantOverloadedError: ErrorRow(429, "rate_limit_error", grpc.StatusCode.RESOURCE_EXHAUSTED),
    CancelledRequestError: ErrorRow(499, "cancelled", grpc.StatusCode.CANCELLED),
    InternalError: ErrorRow(500, "server_error", grpc.StatusCode.INTERNAL),
    UpstreamLostError: ErrorRow(502, "upstream_lost", grpc.StatusCode.UNAVAILABLE),
    OverloadedError: ErrorRow(503, "overloaded_error", grpc.StatusCode.UNAVAILABLE),
    DeadlineExceededError: ErrorRow(504, "timeout_error", grpc.StatusCode.DEADLINE_EXCEEDED),
    IncompatiblePeerError: ErrorRow(500, "server_error", grpc.StatusCode.FAILED_PRECONDITION),
    UnknownSessionError: ErrorRow(500, "server_error", grpc.StatusCode.NOT_FOUND),
}

_BY_KIND = {cls.__name__: cls for cls in ERROR_TABLE}


def error_row(error: PacelineError) -> ErrorRow:
    """The table's row of this error's class."""
    return ERROR_TABLE[type(error)]


def error_from_wire(kind: str, message: str, param: str | None = None) -> PacelineError:
    """The error a peer named; a kind this build does not know is an InternalError."""
    return _BY_KIND.get(kind, InternalError)(message, param=param or None)


def openai_error_body(error: PacelineError) -> dict[str, Any]:
    """The JSON body OpenAI's clients expect."""
    return {
        "error": {
            "message": error.message,
            "type": error_row(error).openai_type,
            "param": error.param,
            "code": error.code,
        }
    }
