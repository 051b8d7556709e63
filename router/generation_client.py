"""One verifier as this router uses it: one long-lived stream that carries every request.

What the router says within one turn of the event loop leaves as one message. When the stream is
lost every request on it learns so at once, and the client dials again for as long as the verifier
is a member of the cluster.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from enum import StrEnum
from typing import Any

import grpc

from cluster.errors import (
    IncompatiblePeerError,
    InvalidRequestError,
    PacelineError,
    UpstreamLostError,
)
from cluster.load import Aged, VerifierLoad, report_interval_s
from cluster.member_auth import OPEN, MemberAuth, Role
from cluster.protocol import codec, generation_pb2, generation_pb2_grpc
from cluster.protocol.messages import (
    NOISE_VERSION,
    PROTOCOL_VERSION,
    RouterBatch,
    RouterHello,
    SetPath,
    VerifierBatch,
    VerifierHello,
)
from cluster.rpc import open_channel
from cluster.types import (
    ErrorEvent,
    FinishEvent,
    GenerationEvent,
    GenerationRequest,
    Member,
    Path,
)
from router.queue_outlook import QueueOutlook, queue_outlook
from router.verifier_routing import RecentCount, VerifierView

logger = logging.getLogger("paceline.router")

HANDSHAKE_TIMEOUT_S = 5.0
FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 2.0
LEASE_S = 10.0
"""A verifier frees what runs for this router when it hears nothing for so long: the event loop is
stuck, however alive the connection is."""
HEARTBEAT_S = 1.0
"""Between two words of a router that has requests running."""

Clock = Callable[[], float]
EventBatch = tuple[GenerationEvent, ...]


class LinkState(StrEnum):
    """Where a client's stream stands."""

    CONNECTING = "connecting"
    READY = "ready"
    REFUSED = "refused"
    """The two do not fit together; never tried again."""
    CLOSED = "closed"


class GenerationStream:
    """The events of one submitted request, one batch per engine step.

    Iterating ends after the batch with the finish event. It raises UpstreamLostError if the
    verifier was lost, and whatever :meth:`fail` was given.
    """

    def __init__(self, request_id: str, leave: Callable[[str], None]) -> None:
        self.request_id = request_id
        self.started = False
        """A batch has come."""
        self._leave = leave
        self._arrived: asyncio.Queue[EventBatch | PacelineError] = asyncio.Queue()
        self._ended = False

    def __aiter__(self) -> AsyncIterator[EventBatch]:
        return self

    async def __anext__(self) -> EventBatch:
        if self._ended and self._arrived.empty():
            raise StopAsyncIteration
        item = await self._arrived.get()
        if isinstance(item, PacelineError):
            raise item
        return item

    def deliver(self, batch: EventBatch) -> bool:
        """Hand over a batch of this request; True if it is the last."""
        self.started = True
        self._ended = isinstance(batch[-1], FinishEvent | ErrorEvent)
        self._arrived.put_nowait(batch)
        return self._ended

    def fail(self, error: PacelineError) -> None:
        """Raise `error` in the consumer, after the batches that came before."""
        self._arrived.put_nowait(error)

    def close(self) -> None:
        """Cancel the request at the verifier, unless it ended. Idempotent."""
        self._leave(self.request_id)


class GenerationClient:
    """The stream to one verifier and the requests on it."""

    def __init__(
        self,
        member: Member,
        router_id: str,
        fingerprint: str,
        clock: Clock,
        auth: MemberAuth = OPEN,
    ) -> None:
        self.member = member
        self._auth = auth
        self.state = LinkState.CONNECTING
        self.draining = False
        """The verifier takes nothing more, or is no member any longer."""
        self._hello = RouterHello(router_id, fingerprint, int(1e3 * LEASE_S))
        self._clock = clock
        self._streams: dict[str, GenerationStream] = {}
        self._load_interval_s = report_interval_s(1)
        self._outbox = _Outbox()
        self._load: VerifierLoad | None = None
        self._load_at = clock()
        self._num_unseen = 0
        """Requests sent since the latest report."""
        self._recent = RecentCount()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task = asyncio.create_task(self._keep_connected())

    # --- what the router does with it ---

    @property
    def usable(self) -> bool:
        """Takes new requests."""
        return self.state is LinkState.READY and not self.draining

    @property
    def num_in_flight(self) -> int:
        return len(self._streams)

    def submit(self, request: GenerationRequest) -> GenerationStream:
        """Send a request. Raises UpstreamLostError if there is no stream to send it on."""
        if self.state is not LinkState.READY:
            raise UpstreamLostError(f"verifier {self.member.address} is not connected")
        stream = GenerationStream(request.request_id, self._forget)
        self._streams[request.request_id] = stream
        self._idle.clear()
        self._num_unseen += 1
        self._recent.add(self._clock())
        self._outbox.submit(request)
        return stream

    def set_path(self, request_id: str, path: Path) -> None:
        """Change the path of a running request; without effect if it has ended."""
        if request_id in self._streams:
            self._outbox.set_path(SetPath(request_id, path))

    def set_load_interval(self, interval_s: float) -> None:
        """Ask for load reports at least so often while no request runs there."""
        if interval_s != self._load_interval_s:
            self._load_interval_s = interval_s
            if self.state is LinkState.READY:
                self._outbox.set_load_interval(interval_s)

    def load(self) -> Aged[VerifierLoad] | None:
        """The latest report, None before the first."""
        if self._load is None:
            return None
        return Aged(self._load, self._clock() - self._load_at)

    def view(self) -> VerifierView:
        """What the choice of a verifier is made from."""
        load = self._load or VerifierLoad()
        unstarted = sum(not stream.started for stream in self._streams.values())
        recent = self._recent.value(self._clock())
        return VerifierView(self.member.incarnation, load.running, load.waiting, unstarted, recent)

    def outlook(self) -> QueueOutlook:
        """How long a request sent now would wait there."""
        return queue_outlook(self._load or VerifierLoad(), self._num_unseen, len(self._streams))

    async def retire(self) -> None:
        """Take nothing more, let what runs finish, then close."""
        self.draining = True
        if self.state is LinkState.READY:
            await self._idle.wait()
        await self.close()

    async def close(self) -> None:
        """End the stream; what still runs on it is lost. Idempotent."""
        self.state = LinkState.CLOSED
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._fail_all(UpstreamLostError("the router is closing"))

    # --- the stream ---

    async def _keep_connected(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while not self.draining:
            try:
                await self._serve_one_stream()
            except IncompatiblePeerError as error:
                self._refuse(error)
                return
            except UpstreamLostError as error:
                if self.state is LinkState.READY:
                    backoff_s = FIRST_BACKOFF_S
                self._lose(error)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)

    def _refuse(self, error: IncompatiblePeerError) -> None:
        logger.error("verifier %s refused: %s", self.member.address, error.message)
        self.state = LinkState.REFUSED
        self._fail_all(error)

    def _lose(self, error: UpstreamLostError) -> None:
        if self.state is LinkState.READY:
            logger.warning("verifier %s lost: %s", self.member.address, error.message)
        self.state = LinkState.CONNECTING
        self._load = None
        self._fail_all(error)

    def _fail_all(self, error: PacelineError) -> None:
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()
        self._outbox.clear()
        self._idle.set()

    async def _serve_one_stream(self) -> None:
        """Dial, shake hands and carry requests until the stream is lost; always raises."""
        # A channel of its own for each try: gRPC would add its own back-off to ours.
        async with open_channel(self.member.address, Role.VERIFIER, auth=self._auth) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Generate(metadata=self._auth.metadata)
            tasks: list[asyncio.Task[None]] = []
            try:
                await self._shake_hands(call)
                self.state = LinkState.READY
                if self._load_interval_s != report_interval_s(1):
                    self._outbox.set_load_interval(self._load_interval_s)
                tasks = [asyncio.create_task(self._write(call)), asyncio.create_task(self._beat())]
                while True:
                    self._receive(codec.decode_verifier_batch(await _read(call)))
            except grpc.aio.AioRpcError as error:
                raise _lost_call(error.code(), error.details()) from error
            except (ValueError, InvalidRequestError) as error:
                raise UpstreamLostError(f"malformed message: {error}") from error
            finally:
                for task in tasks:
                    task.cancel()
                call.cancel()

    async def _shake_hands(self, call: Any) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await call.write(codec.encode_router_batch(RouterBatch(hello=self._hello)))
                batch = codec.decode_verifier_batch(await _read(call))
        except TimeoutError as error:
            raise UpstreamLostError("no hello in time") from error
        except asyncio.InvalidStateError as error:  # the call ended before the write
            raise _lost_call(await call.code(), await call.details()) from error
        self._check_hello(batch.hello)
        self._receive(batch)

    def _check_hello(self, hello: VerifierHello | None) -> None:
        if hello is None:
            raise IncompatiblePeerError("the verifier's first message holds no hello")
        if hello.incarnation != self.member.incarnation:
            raise UpstreamLostError("another verifier answers at this address")
        ours = (PROTOCOL_VERSION, NOISE_VERSION, self._hello.fingerprint)
        theirs = (hello.protocol_version, hello.noise_version, hello.fingerprint)
        if ours != theirs:
            raise IncompatiblePeerError(
                f"(protocol, noise, model) is {theirs} at the verifier and {ours} here"
            )

    async def _write(self, call: Any) -> None:
        """Send what the outbox holds, one message per turn; the reader learns of a lost stream."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await call.write(codec.encode_router_batch(await self._outbox.take()))

    async def _beat(self) -> None:
        """Renew the lease of what runs."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self._streams:
                self._outbox.beat()

    def _receive(self, batch: VerifierBatch) -> None:
        if batch.load is not None:
            self._load, self._load_at = batch.load, self._clock()
            self._num_unseen = 0
        if batch.drain:
            self.draining = True
        for request_id, events in _by_request(batch.events).items():
            stream = self._streams.get(request_id)
            if stream is not None and stream.deliver(events):
                self._drop(request_id)

    def _forget(self, request_id: str) -> None:
        """The consumer left."""
        if request_id in self._streams:
            self._drop(request_id)
            self._outbox.cancel(request_id)

    def _drop(self, request_id: str) -> None:
        del self._streams[request_id]
        if not self._streams:
            self._idle.set()


class _Outbox:
    """What is to be said to the verifier in the next message."""

    def __init__(self) -> None:
        self._submits: list[GenerationRequest] = []
        self._cancels: list[str] = []
        self._set_paths: list[SetPath] = []
        self._load_interval_ms = 0
        self._filled = asyncio.Event()

    def submit(self, request: GenerationRequest) -> None:
        self._submits.append(request)
        self._filled.set()

    def cancel(self, request_id: str) -> None:
        """A request that has not been sent yet is not sent."""
        unsent = [request for request in self._submits if request.request_id != request_id]
        if len(unsent) == len(self._submits):
            self._cancels.append(request_id)
        self._submits = unsent
        self._filled.set()

    def set_path(self, change: SetPath) -> None:
        self._set_paths.append(change)
        self._filled.set()

    def set_load_interval(self, interval_s: float) -> None:
        self._load_interval_ms = int(1e3 * interval_s)
        self._filled.set()

    def beat(self) -> None:
        """Send a message, even if it says nothing."""
        self._filled.set()

    async def take(self) -> RouterBatch:
        """All of it, once there is something."""
        await self._filled.wait()
        batch = RouterBatch(
            submits=tuple(self._submits),
            cancels=tuple(self._cancels),
            set_paths=tuple(self._set_paths),
            load_interval_ms=self._load_interval_ms,
        )
        self.clear()
        return batch

    def clear(self) -> None:
        self._submits, self._cancels, self._set_paths = [], [], []
        self._load_interval_ms = 0
        self._filled.clear()


def _by_request(events: EventBatch) -> dict[str, EventBatch]:
    grouped: dict[str, EventBatch] = {}
    for event in events:
        grouped[event.request_id] = (*grouped.get(event.request_id, ()), event)
    return grouped


async def _read(call: Any) -> generation_pb2.VerifierBatch:
    message = await call.read()
    if not isinstance(message, generation_pb2.VerifierBatch):  # grpc.aio.EOF
        raise _lost_call(await call.code(), await call.details())
    return message


def _lost_call(code: grpc.StatusCode, details: str | None) -> PacelineError:
    message = f"{code.name}: {details or 'the stream ended'}"
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        return IncompatiblePeerError(message)
    return UpstreamLostError(message)
