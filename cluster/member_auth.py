"""Who may speak to whom: how members prove to one another what they are.

Two means, and both may be used: a token that every member holds (`rpc.token_file`), and mutual
TLS (`rpc.tls`) with certificates that name a role. With neither, a port answers whoever reaches it,
which is for one machine or a closed network. The files are read for every new connection, so that
they can be renewed without a restart.

A certificate names its role as a DNS name, `verifier.paceline` and so on; the address it is reached
at does not matter. A drafter's certificate opens no verifier: `CALLERS` says which role may call
what, and what is not named there is refused.
"""

from __future__ import annotations

import hmac
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health

from cluster.commands.command_error import CommandError
from cluster.config import RpcConfig, TlsConfig


class Role(StrEnum):
    """What a member is."""

    ROUTER = "router"
    VERIFIER = "verifier"
    DRAFTER = "drafter"

    @property
    def dns_name(self) -> str:
        """How a certificate says so."""
        return f"{self.value}.paceline"


CALLERS: Mapping[str, frozenset[Role]] = {
    "paceline.generation.v1.Generation": frozenset({Role.ROUTER}),
    "paceline.drafting.v1.Drafting": frozenset({Role.VERIFIER}),
    "paceline.members.v1.Members": frozenset({Role.ROUTER}),
}
"""Which roles may call a service. Health is open to all: probes have no credentials."""

Check = Callable[[Any, str], Awaitable[None]]


class MemberAuth:
    """What one member shows to its peers and asks of them. Raises ConfigurationError for files that
    cannot be read."""

    def __init__(self, rpc: RpcConfig = RpcConfig()) -> None:  # noqa: B008  frozen
        self._tls = rpc.tls
        self._token_file = rpc.token_file
        self._tokens()
        if self._tls is not None:
            _read_files(self._tls)

    @property
    def is_open(self) -> bool:
        """Nothing is asked of anyone."""
        return self._tls is None and self._token_file is None

    # --- as a server ---

    def interceptors(self) -> Sequence[grpc.aio.ServerInterceptor[Any, Any]]:
        """What stands before every service of a server."""
        return () if self.is_open else (_Gate(self._check),)

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Listen at host:port; the port that was bound."""
        if self._tls is None:
            return server.add_insecure_port(address)
        tls = self._tls
        credentials = grpc.dynamic_ssl_server_credentials(
            _certificates(tls), lambda: _certificates(tls), require_client_authentication=True
        )
        return server.add_secure_port(address, credentials)

    async def _check(self, context: Any, service: str) -> None:
        callers = CALLERS.get(service, frozenset())
        if self._token_file is not None and not self._has_token(context.invocation_metadata()):
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "the member token is missing or wrong"
            )
        if self._tls is not None:
            shown = context.auth_context().get("x509_subject_alternative_name", ())
            if not any(role.dns_name.encode() in shown for role in callers):
                names = " or ".join(sorted(callers)) or "no role"
                await context.abort(
                    grpc.StatusCode.PERMISSION_DENIED,
                    f"{service} is open to {names}; the certificate names no such role",
                )
        elif not callers:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{service} is open to no role")

    def _has_token(self, metadata: Any) -> bool:
        shown = str(dict(metadata or ()).get("authorization", "")).encode()
        matches = [hmac.compare_digest(shown, b"Bearer " + token) for token in self._tokens()]
        return any(matches)

    # --- as a client ---

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """To be sent with every call."""
        tokens = self._tokens()
        return (("authorization", f"Bearer {tokens[0].decode()}"),) if tokens else ()

    def channel(
        self, address: str, peer: Role, options: Mapping[str, int | str]
    ) -> grpc.aio.Channel:
        """A channel to a member that must be a `peer`."""
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options=list(options.items()))
        named = dict(options) | {"grpc.ssl_target_name_override": peer.dns_name}
        key, certificate, ca = _read_files(self._tls)
        credentials = grpc.ssl_channel_credentials(ca, key, certificate)
        return grpc.aio.secure_channel(address, credentials, options=list(named.items()))

    def _tokens(self) -> list[bytes]:
        """One a line: the first is shown, every one is taken."""
        if self._token_file is None:
            return []
        tokens = _read(self._token_file, "rpc.token_file").split()
        if not tokens:
            raise ConfigurationError(f"rpc.token_file: {self._token_file} holds no token")
        return tokens


class ConfigurationError(CommandError):
    """A file that the configuration names is of no use; the message names the key."""


OPEN = MemberAuth()
"""Asks nothing, shows nothing."""


class _Gate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Runs the check before the handler of any service but health."""

    def __init__(self, check: Check) -> None:
        self._check = check

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        handler = await continuation(handler_call_details)
        service = handler_call_details.method.rpartition("/")[0].lstrip("/")
        if handler is None or service == health.SERVICE_NAME:
            return handler
        return _guarded(handler, self._check, service)


def _guarded(handler: Any, check: Check, service: str) -> Any:
    """The handler behind the check."""
    kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
    kind = next(kind for kind in kinds if getattr(handler, kind) is not None)
    inner = getattr(handler, kind)

    async def whole(request: Any, context: Any) -> Any:
        await check(context, service)
        return await inner(request, context)

    async def streamed(request: Any, context: Any) -> Any:
        await check(context, service)
        async for message in inner(request, context):
            yield message

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    behaviour = streamed if inspect.isasyncgenfunction(inner) else whole
    return make(behaviour, handler.request_deserializer, handler.response_serializer)


def _certificates(tls: TlsConfig) -> Any:
    key, certificate, ca = _read_files(tls)
    return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=ca)


def _read_files(tls: TlsConfig) -> tuple[bytes, bytes, bytes]:
    """Key, certificate chain and root, all PEM."""
    return (
        _read(tls.key, "rpc.tls.key"),
        _read(tls.certificate, "rpc.tls.certificate"),
        _read(tls.ca, "rpc.tls.ca"),
    )


def _read(path: str, key: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{key}: cannot read {path}: {error.strerror}") from error
