"""One error tree, one table, both ways."""

from __future__ import annotations

import grpc
import pytest

from cluster.errors import (
    ERROR_TABLE,
    AuthenticationError,
    DeadlineExceededError,
    IncompatiblePeerError,
    InternalError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    PacelineError,
    PayloadTooLargeError,
    TenantOverloadedError,
    UpstreamLostError,
    error_from_wire,
    error_row,
    openai_error_body,
)


def descendants(cls: type[PacelineError]) -> set[type[PacelineError]]:
    below = set(cls.__subclasses__())
    return below.union(*map(descendants, below))


def test_every_class_of_the_tree_is_in_the_table_and_nothing_else_is():
    assert set(ERROR_TABLE) == descendants(PacelineError)


@pytest.mark.parametrize("cls", ERROR_TABLE)
def test_an_error_crosses_the_wire_as_what_it_is(cls):
    sent = cls("what happened", param="the_field")
    received = error_from_wire(type(sent).__name__, sent.message, sent.param)
    assert type(received) is cls
    assert (received.message, received.param) == (sent.message, sent.param)
    assert error_row(received) == error_row(sent)


def test_the_wires_empty_param_is_no_param():
    assert error_from_wire("InvalidRequestError", "what", "").param is None


@pytest.mark.parametrize("kind", ["", "ErrorOfTheFuture", "PacelineError", "dict"])
def test_a_kind_that_this_build_does_not_know_is_an_internal_error(kind):
    error = error_from_wire(kind, "what happened")
    assert type(error) is InternalError
    assert error.message == "what happened"


@pytest.mark.parametrize(
    ("cls", "status"),
    [
        (InvalidRequestError, 400),
        (AuthenticationError, 401),
        (ModelNotFoundError, 404),
        (PayloadTooLargeError, 413),
        (TenantOverloadedError, 429),
        (OverloadedError, 503),
        (DeadlineExceededError, 504),
    ],
)
def test_the_statuses_that_clients_rely_on(cls, status):
    assert ERROR_TABLE[cls].http_status == status


@pytest.mark.parametrize("row", ERROR_TABLE.values())
def test_a_status_is_an_error_and_never_422(row):
    assert 400 <= row.http_status < 600
    assert row.http_status != 422
    assert row.grpc_code is not grpc.StatusCode.OK
    assert row.openai_type


def test_only_a_misfit_is_a_failed_precondition():
    """Peers never try again after that code."""
    final = [
        cls
        for cls, row in ERROR_TABLE.items()
        if row.grpc_code is grpc.StatusCode.FAILED_PRECONDITION
    ]
    assert final == [IncompatiblePeerError]


@pytest.mark.parametrize("cls", ERROR_TABLE)
def test_the_body_has_openais_shape(cls):
    body = openai_error_body(cls("what happened", param="n", code="a_code"))
    assert body == {
        "error": {
            "message": "what happened",
            "type": ERROR_TABLE[cls].openai_type,
            "param": "n",
            "code": "a_code",
        }
    }


def test_an_error_says_what_happened():
    assert str(UpstreamLostError("the verifier is gone")) == "the verifier is gone"
