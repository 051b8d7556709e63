"""The Drafting service: one stream per verifier, many sessions on each.

A stream's reader applies messages to the session table; its writer sends what has gathered in its
outbox, one message per round. Nothing that comes on one stream can end another.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

import grpc
from google.protobuf.message import DecodeError

from cluster.errors import (
    IncompatiblePeerError,
    InvalidRequestError,
    OverloadedError,
    PacelineError,
    error_row,
)
from cluster.fingerprint import VocabularyFit, vocabulary_fit
from cluster.lease import Lease
from cluster.protocol import drafting_pb2, drafting_pb2_grpc
from cluster.protocol.codec import decode_target_batch, encode_drafter_batch
from cluster.protocol.messages import (
    DrafterBatch,
    DrafterHello,
    SessionDraft,
    SessionError,
    TargetBatch,
    TargetHello,
)
from drafter_service.scheduler import DraftLoop
from drafter_service.session import SessionTable

HELLO_TIMEOUT_S = 5.0
WRITE_TIMEOUT_S = 10.0
"""A verifier that does not take a message for this long loses its stream."""
REPORT_PERIOD_S = 0.1
"""Load reports go with the messages that are sent anyway, at most this often."""
IDLE_REPORT_PERIOD_S = 1.0
"""A stream with nothing to tell still reports this often."""
LEASE_CHECK_S = 0.5
MAX_PENDING_ERRORS = 1_024
"""Untold errors beyond which no more of the stream is read."""

Context = grpc.aio.ServicerContext[drafting_pb2.TargetBatch, drafting_pb2.DrafterBatch]


@dataclass(slots=True, eq=False)
class DrafterStream:
    """One verifier's stream: what is to be told on it besides the drafts in the session table."""

    errors: list[SessionError] = field(default_factory=list)
    drain: bool = False
    """To be told once."""
    ended: bool = False
    """Nothing more will come; the stream ends once all is told."""
    unreadable: bool = False
    """It ended since something came that is no message."""
    wakeup: asyncio.Event = field(default_factory=asyncio.Event)
    room: asyncio.Event = field(default_factory=asyncio.Event)
    reported_at: float = -REPORT_PERIOD_S
    lease: Lease = field(default_factory=lambda: Lease(time.monotonic()))
    held_up: bool = False
    """Nothing is read of it for now, since we have no room."""

    def tell(self, errors: Sequence[SessionError]) -> None:
        """These, and what drafts there are."""
        self.errors += errors
        self.wakeup.set()

    def tell_drain(self) -> None:
        self.drain = True
        self.wakeup.set()

    def end(self) -> None:
        self.ended = True
        self.wakeup.set()

    async def wait_for_room(self) -> None:
        """Return once few enough errors wait to be told."""
        while len(self.errors) > MAX_PENDING_ERRORS:
            self.room.clear()
            await self.room.wait()

    def take(self, drafts: tuple[SessionDraft, ...]) -> DrafterBatch:
        """Everything that is to be told, as one message."""
        batch = DrafterBatch(drafts=drafts, errors=tuple(self.errors), drain=self.drain)
        self.errors, self.drain = [], False
        self.wakeup.clear()
        self.room.set()
        return batch


class DraftingServicer(drafting_pb2_grpc.DraftingServicer):
    """See the module. `hello` is what this drafter is; sessions live in `table`."""

    def __init__(self, hello: DrafterHello, table: SessionTable, draft_loop: DraftLoop) -> None:
        self._hello = hello
        self._table = table
        self._draft_loop = draft_loop
        self._streams: dict[int, DrafterStream] = {}

    def deliver(self, stream: int, errors: Sequence[SessionError]) -> None:
        """A round brought drafts of this stream, or errors."""
        self._streams[stream].tell(errors)

    def drain(self) -> None:
        """Take no new stream and no new session; tell the verifiers."""
        self._table.draining = True
        for stream in self._streams.values():
            stream.tell_drain()

    def end_streams(self) -> None:
        """End every stream once it has told what it has to."""
        for stream in self._streams.values():
            stream.end()

    async def Draft(  # noqa: N802  the name is the protocol's
        self, request_iterator: AsyncIterator[drafting_pb2.TargetBatch], context: Context
    ) -> None:
        """See drafting.proto."""
        first = await self._handshake(request_iterator, context)
        number = self._table.open_stream()
        stream = self._streams[number] = DrafterStream()
        assert first.hello is not None
        stream.lease.duration_s = first.hello.lease_ms / 1e3
        self._take(number, first)
        reader = asyncio.create_task(self._read(number, request_iterator))
        keeper = asyncio.create_task(self._keep_lease(number))
        try:
            await self._write(number, context)
            if stream.unreadable:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "that was no TargetBatch")
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the verifier does not read")
        finally:
            reader.cancel()
            keeper.cancel()
            del self._streams[number]
            self._table.close_stream(number)
            self._draft_loop.wake()

    async def _handshake(
        self, requests: AsyncIterator[drafting_pb2.TargetBatch], context: Context
    ) -> TargetBatch:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = decode_target_batch(await anext(requests))
            self._check_hello(first.hello)
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await context.write(encode_drafter_batch(DrafterBatch(hello=self._hello)))
        except PacelineError as error:
            await context.abort(error_row(error).grpc_code, error.message)
        except (TimeoutError, StopAsyncIteration, DecodeError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no hello came")
        return first

    def _check_hello(self, hello: TargetHello | None) -> None:
        if hello is None:
            raise InvalidRequestError("the first message must be a hello", param="hello")
        ours = self._hello
        for what, theirs, mine in (
            ("protocol", hello.protocol_version, ours.protocol_version),
            ("noise", hello.noise_version, ours.noise_version),
        ):
            if theirs != mine:
                raise IncompatiblePeerError(
                    f"the verifier has {what} version {theirs}, this drafter {mine}; "
                    "run one release on both"
                )
        if vocabulary_fit(ours.vocabulary, hello.vocabulary) is VocabularyFit.NONE:
            raise IncompatiblePeerError(
                f"{ours.drafter} has another vocabulary ({ours.vocabulary}) than "
                f"{hello.target_model} ({hello.vocabulary})"
            )
        if self._table.draining:
            raise OverloadedError("this drafter drains")

    async def _read(self, number: int, requests: AsyncIterator[drafting_pb2.TargetBatch]) -> None:
        stream = self._streams[number]
        try:
            async for message in requests:
                self._take(number, decode_target_batch(message))
                stream.held_up = True
                await self._draft_loop.wait_for_room()
                await stream.wait_for_room()
                stream.held_up = False
        except DecodeError:
            stream.unreadable = True
        finally:
            stream.end()

    async def _keep_lease(self, number: int) -> None:
        """Close the sessions of a verifier that holds its stream open and says nothing more."""
        stream = self._streams[number]
        while True:
            await asyncio.sleep(LEASE_CHECK_S)
            if stream.held_up or not self._table.num_sessions_of(number):
                stream.lease.renew()
            if stream.lease.has_lapsed(time.monotonic()):
                stream.tell(self._table.expire_stream(number, stream.lease.duration_s))
                self._draft_loop.wake()

    def _take(self, number: int, batch: TargetBatch) -> None:
        self._streams[number].lease.renew()
        errors = self._table.apply(number, batch, time.monotonic())
        if errors or self._table.has_news(number):
            self._streams[number].tell(errors)
        self._draft_loop.wake()

    async def _write(self, number: int, context: Context) -> None:
        stream = self._streams[number]
        while not stream.ended:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IDLE_REPORT_PERIOD_S):
                    await stream.wakeup.wait()
            batch = stream.take(self._table.take_drafts(number))
            now = time.monotonic()
            if now - stream.reported_at >= REPORT_PERIOD_S:
                stream.reported_at = now
                batch = replace(batch, load=self._draft_loop.report())
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await context.write(encode_drafter_batch(batch))
