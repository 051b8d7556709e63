"""One stream to one drafter: dial, shake hands, write what is due, hand over what comes.

The stream knows no sessions; its owner does. Every wait has a deadline except the one for the
drafter's next message, which the transport's keepalive bounds and the owner's clock of silence.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError

from cluster.errors import ERROR_TABLE, IncompatiblePeerError
from cluster.fingerprint import VocabularyFit, vocabulary_fit
from cluster.member_auth import OPEN, MemberAuth, Role
from cluster.protocol import drafting_pb2, drafting_pb2_grpc
from cluster.protocol.codec import decode_drafter_batch, encode_target_batch
from cluster.protocol.messages import DrafterBatch, DrafterHello, TargetBatch, TargetHello
from cluster.rpc import open_channel
from cluster.types import Member

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
WRITE_TIMEOUT_S = 2.0
"""A drafter that takes no message for this long is lost."""
MAX_BATCH_BYTES = 2 << 20
"""Of one message from a drafter: drafts are small, and a larger one would hold up the loop."""

DraftCall = grpc.aio.StreamStreamCall[drafting_pb2.TargetBatch, drafting_pb2.DrafterBatch]


class StreamLostError(Exception):
    """The stream ended; with `refused`, dialling this drafter again is of no use."""

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.refused = refused


class StreamOwner(Protocol):
    """What a stream asks of its owner; all calls on the event loop."""

    def ready(self, hello: DrafterHello) -> None:
        """Hands were shaken."""

    def received(self, batch: DrafterBatch) -> None:
        """A message came."""

    async def outgoing(self) -> TargetBatch:
        """Wait until something is due, and return all of it."""


async def run_stream(
    member: Member, hello: TargetHello, owner: StreamOwner, auth: MemberAuth = OPEN
) -> None:
    """Serve one stream until it ends. Raises StreamLostError, always."""
    channel = open_channel(
        member.address, Role.DRAFTER, auth=auth, max_receive_bytes=MAX_BATCH_BYTES
    )
    try:
        stub = drafting_pb2_grpc.DraftingStub(channel)  # type: ignore[no-untyped-call]
        call: DraftCall = stub.Draft(metadata=auth.metadata)
        drafter_hello = await _shake_hands(call, member, hello)
        owner.ready(drafter_hello)
        await _converse(call, owner)
    except grpc.aio.AioRpcError as error:
        refused = error.code() is ERROR_TABLE[IncompatiblePeerError].grpc_code
        reason = f"{error.code().name}: {error.details()}"
        raise StreamLostError(reason, refused=refused) from error
    except asyncio.InvalidStateError as error:  # grpc's word for a write to an ended call
        raise StreamLostError("the stream has ended") from error
    except DecodeError as error:
        raise StreamLostError("something came that is no DrafterBatch") from error
    finally:
        await channel.close(None)


async def _shake_hands(call: DraftCall, member: Member, ours: TargetHello) -> DrafterHello:
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            await call.write(encode_target_batch(TargetBatch(hello=ours)))
            first = await _read(call)
    except TimeoutError:
        raise StreamLostError(f"no hello within {HANDSHAKE_TIMEOUT_S:g} s") from None
    if first.hello is None:
        raise StreamLostError("the first message is not a hello")
    _check_hello(first.hello, member, ours)
    return first.hello


def _check_hello(theirs: DrafterHello, member: Member, ours: TargetHello) -> None:
    if theirs.incarnation != member.incarnation:
        raise StreamLostError("another drafter answers at this address", refused=True)
    versions = (theirs.protocol_version, theirs.noise_version)
    if versions != (ours.protocol_version, ours.noise_version):
        raise StreamLostError(f"protocol and noise versions {versions} are not ours", refused=True)
    fit = vocabulary_fit(theirs.vocabulary, ours.vocabulary)
    if fit is VocabularyFit.NONE:
        raise StreamLostError(f"its vocabulary {theirs.vocabulary} is not ours", refused=True)
    if fit is VocabularyFit.SIMILAR:
        logger.warning(
            "drafter %s (%s) has other special tokens than %s: where those are used, its drafts "
            "are worse",
            *(theirs.drafter, member.address, ours.target_model),
        )


async def _converse(call: DraftCall, owner: StreamOwner) -> None:
    """Read and write until either fails."""
    tasks = [
        asyncio.create_task(_read_all(call, owner)),
        asyncio.create_task(_write_all(call, owner)),
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                await task
    finally:
        for task in tasks:
            task.cancel()
        call.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read_all(call: DraftCall, owner: StreamOwner) -> None:
    while True:
        owner.received(await _read(call))


async def _read(call: DraftCall) -> DrafterBatch:
    message = await call.read()
    if not isinstance(message, drafting_pb2.DrafterBatch):  # grpc.aio.EOF
        raise StreamLostError("the drafter ended the stream")
    return decode_drafter_batch(message)


async def _write_all(call: DraftCall, owner: StreamOwner) -> None:
    while True:
        batch = await owner.outgoing()
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await call.write(encode_target_batch(batch))
        except TimeoutError:
            raise StreamLostError(f"no message taken for {WRITE_TIMEOUT_S:g} s") from None
