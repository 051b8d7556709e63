"""Members ask for one another's credentials: whoever has none, or another role's, is refused, and
whatever is refused has reached no handler."""

from __future__ import annotations

from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster import protocol
from cluster.config import DrafterConfig, RpcConfig, TlsConfig
from cluster.member_auth import CALLERS, ConfigurationError, MemberAuth, Role
from cluster.protocol import drafting_pb2, drafting_pb2_grpc
from cluster.protocol.codec import encode_target_batch
from cluster.protocol.messages import TargetBatch
from cluster.rpc import open_channel
from drafter_service.service import DrafterService
from tests.support.polling import TIMEOUT_S
from tests.support.raw_verifier import HELLO

REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


@asynccontextmanager
async def drafter(rpc: RpcConfig):
    service = await DrafterService.start(DrafterConfig(rpc=rpc), host="127.0.0.1")
    try:
        yield service
    finally:
        await service.stop(0)


async def call(service: DrafterService, auth: MemberAuth, peer: Role = Role.DRAFTER):
    """Shake hands as a verifier: the status of the call, OK if the drafter's hello came."""
    async with open_channel(service.address, peer, auth=auth) as channel:
        stub = drafting_pb2_grpc.DraftingStub(channel)
        hello = iter([encode_target_batch(TargetBatch(hello=HELLO))])
        answers = stub.Draft(hello, metadata=auth.metadata, timeout=TIMEOUT_S)
        try:
            batch = await answers.read()
        except grpc.aio.AioRpcError as error:
            return error.code()
        assert isinstance(batch, drafting_pb2.DrafterBatch)
        assert batch.hello.drafter
        return grpc.StatusCode.OK


def token_file(folder: Path, *tokens: str) -> str:
    path = folder / "token"
    path.write_text("\n".join(tokens))
    return str(path)


class Authority:
    """A certificate authority, and the files of members it vouches for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = trustme.CA()
        self._count = 0

    def rpc(self, *names: str, ca: trustme.CA | None = None, **fields: object) -> RpcConfig:
        """`ca` signs, instead of this authority."""
        self._count += 1
        folder = self.folder / str(self._count)
        folder.mkdir()
        self.write(folder, *names, ca=ca, **fields)
        return RpcConfig(
            tls=TlsConfig(
                certificate=str(folder / "crt"), key=str(folder / "key"), ca=str(folder / "ca")
            )
        )

    def write(
        self, folder: Path, *names: str, ca: trustme.CA | None = None, **fields: object
    ) -> None:
        issued = (ca or self.ca).issue_cert(*names, **fields)
        issued.private_key_pem.write_to_path(folder / "key")
        (folder / "crt").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        self.ca.cert_pem.write_to_path(folder / "ca")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


# --- the token ---


async def test_whoever_lacks_the_token_is_refused(tmp_path):
    async with drafter(RpcConfig(token_file=token_file(tmp_path, "secret"))) as service:
        (tmp_path / "other").mkdir()
        wrong = MemberAuth(RpcConfig(token_file=token_file(tmp_path / "other", "secreT")))
        assert await call(service, MemberAuth()) is grpc.StatusCode.UNAUTHENTICATED
        assert await call(service, wrong) is grpc.StatusCode.UNAUTHENTICATED
        right = MemberAuth(RpcConfig(token_file=str(tmp_path / "token")))
        assert await call(service, right) is grpc.StatusCode.OK


async def test_a_token_is_renewed_without_a_restart(tmp_path):
    path = token_file(tmp_path, "old")
    async with drafter(RpcConfig(token_file=path)) as service:
        (tmp_path / "peer").mkdir()
        peer = MemberAuth(RpcConfig(token_file=token_file(tmp_path / "peer", "old")))
        token_file(tmp_path, "new", "old")
        assert await call(service, peer) is grpc.StatusCode.OK
        token_file(tmp_path, "new")
        assert await call(service, peer) is grpc.StatusCode.UNAUTHENTICATED
        token_file(tmp_path / "peer", "new")
        assert await call(service, peer) is grpc.StatusCode.OK


async def test_health_is_open_and_reflection_is_not_served(tmp_path):
    async with (
        drafter(RpcConfig(token_file=token_file(tmp_path, "secret"))) as service,
        open_channel(service.address, Role.DRAFTER) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        checked = await health.Check(health_pb2.HealthCheckRequest())
        assert checked.status == health_pb2.HealthCheckResponse.SERVING
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ServerReflectionInfo(iter([asked])).read()
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


# --- mutual TLS ---


async def test_only_a_certificate_of_the_right_role_and_authority_opens_a_drafter(authority):
    async with drafter(authority.rpc("drafter.paceline")) as service:
        verifier = MemberAuth(authority.rpc("verifier.paceline"))
        assert await call(service, verifier) is grpc.StatusCode.OK

        for role in (Role.DRAFTER, Role.ROUTER):
            other = MemberAuth(authority.rpc(role.dns_name))
            assert await call(service, other) is grpc.StatusCode.PERMISSION_DENIED

        stranger = MemberAuth(authority.rpc("verifier.paceline", ca=trustme.CA()))
        yesterday = datetime.now(UTC) - timedelta(days=1)
        expired = MemberAuth(authority.rpc("verifier.paceline", not_after=yesterday))
        for auth in (stranger, expired, MemberAuth()):
            assert await call(service, auth) is grpc.StatusCode.UNAVAILABLE
        assert service.num_sessions == 0


async def test_a_server_without_any_client_certificate_check_is_not_what_we_run(authority):
    """A client that trusts the authority and shows nothing."""
    async with drafter(authority.rpc("drafter.paceline")) as service:
        credentials = grpc.ssl_channel_credentials(authority.ca.cert_pem.bytes())
        options = [("grpc.ssl_target_name_override", "drafter.paceline")]
        async with grpc.aio.secure_channel(service.address, credentials, options) as channel:
            call = drafting_pb2_grpc.DraftingStub(channel).Draft(
                iter([encode_target_batch(TargetBatch(hello=HELLO))]), timeout=TIMEOUT_S
            )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_peer_that_poses_as_a_drafter_is_not_spoken_to(authority):
    async with drafter(authority.rpc("router.paceline")) as service:
        verifier = MemberAuth(authority.rpc("verifier.paceline"))
        assert await call(service, verifier) is grpc.StatusCode.UNAVAILABLE


async def test_a_certificate_is_renewed_without_a_restart(authority):
    rpc = authority.rpc("drafter.paceline")
    async with drafter(rpc) as service:
        verifier = MemberAuth(authority.rpc("verifier.paceline"))
        assert await call(service, verifier) is grpc.StatusCode.OK
        authority.write(Path(rpc.tls.certificate).parent, "router.paceline")
        assert await call(service, verifier) is grpc.StatusCode.UNAVAILABLE
        authority.write(Path(rpc.tls.certificate).parent, "drafter.paceline")
        assert await call(service, verifier) is grpc.StatusCode.OK


# --- nothing is forgotten ---


def test_every_service_says_who_may_call_it():
    folder = Path(protocol.__path__[0])
    services = set()
    for path in folder.glob("*.proto"):
        text = path.read_text()
        package = text.split("package ")[1].split(";")[0]
        names = [line.split()[1] for line in text.splitlines() if line.startswith("service ")]
        services |= {f"{package}.{name}" for name in names}
    assert services
    assert services <= set(CALLERS)


@pytest.mark.parametrize(
    ("rpc", "key"),
    [
        (RpcConfig(token_file="/nowhere/token"), "rpc.token_file"),
        (RpcConfig(tls=TlsConfig(certificate="/a", key="/b", ca="/c")), r"rpc\.tls\.key"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_at_start(rpc, key):
    with pytest.raises(ConfigurationError, match=key):
        MemberAuth(rpc)


def test_an_empty_token_file_is_no_token(tmp_path):
    with pytest.raises(ConfigurationError, match="holds no token"):
        MemberAuth(RpcConfig(token_file=token_file(tmp_path, "  ")))
