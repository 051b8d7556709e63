"""The generation service: many routers' requests in, every step's tokens out.

One outgoing message per router and step: the writer sends all that has gathered since its last
message. When a router's stream ends, all its requests are cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

import grpc

from cluster.errors import (
    ERROR_TABLE,
    IncompatiblePeerError,
    InvalidRequestError,
    PacelineError,
    UpstreamLostError,
)
from cluster.grammar import GrammarError
from cluster.lease import Lease
from cluster.load import DrafterState, VerifierLoad, report_interval_s
from cluster.protocol import generation_pb2, generation_pb2_grpc
from cluster.protocol.codec import (
    check_sampling,
    check_token_ids,
    decode_router_batch,
    encode_verifier_batch,
)
from cluster.protocol.messages import (
    NOISE_VERSION,
    PROTOCOL_VERSION,
    RouterBatch,
    RouterHello,
    VerifierBatch,
    VerifierHello,
)
from cluster.types import (
    ErrorEvent,
    FinishEvent,
    GenerationEvent,
    GenerationRequest,
    ModelCard,
)
from engine.grammar import GrammarState
from verifier_service.events import Cancelled, EngineInput, PathChanged, SequenceEvent, Submitted

HELLO_TIMEOUT_S = 5.0
LOAD_PERIOD_S = 0.1
"""Longest time between two load reports to a router that has requests here, or had some less than
LOAD_TAIL_S ago: it shall see that they are freed."""
LOAD_TAIL_S = 1.0
LEASE_CHECK_S = 0.5

MAX_TOP_LOGPROBS = 20
"""Beside a token's own, as the API has it."""
MAX_EVENTS = 256
"""In one message. The largest, log probabilities of a chunk of a prompt, have 50 KB."""

Context = grpc.aio.ServicerContext[generation_pb2.RouterBatch, generation_pb2.VerifierBatch]


@dataclass(slots=True, eq=False)
class _RouterStream:
    """One router: its running requests, and what is to be told to it."""

    seqs: dict[str, int] = field(default_factory=dict)
    """By request id."""
    events: list[GenerationEvent] = field(default_factory=list)
    wakeup: asyncio.Event = field(default_factory=asyncio.Event)
    lease: Lease = field(default_factory=lambda: Lease(time.monotonic()))
    load_interval_s: float = report_interval_s(1)
    """Longest time between two load reports while nothing of this router runs."""
    busy_until: float = 0.0
    """Until then load reports are frequent."""

    def tell(self, event: GenerationEvent) -> None:
        self.events.append(event)
        self.wakeup.set()


class GenerationServicer(generation_pb2_grpc.GenerationServicer):
    """Runs on the replica's event loop. `post` puts a value into the engine's inbox."""

    def __init__(
        self,
        card: ModelCard,
        incarnation: str,
        post: Callable[[EngineInput], None],
        load: Callable[[], VerifierLoad],
        compile_grammar: Callable[[GenerationRequest], GrammarState],
    ) -> None:
        """`compile_grammar` may block for a second; it runs in a thread. It raises GrammarError or
        a PacelineError."""
        self._card = card
        self._compile_grammar = compile_grammar
        self._compiling: dict[int, GenerationRequest] = {}
        """Submitted requests whose grammar is not there yet, by seq."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._incarnation = incarnation
        self._post = post
        self._load = load
        self._seq = itertools.count(1)
        self._owners: dict[int, tuple[_RouterStream, str]] = {}
        self._streams: set[_RouterStream] = set()
        self._draining = False
        self.num_expired = 0
        """Requests freed since their router was silent for longer than its lease."""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_requests(self) -> int:
        return len(self._owners)

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    async def drain(self, grace_s: float) -> None:
        """Tell every router to submit nothing more, and let what runs finish within `grace_s`."""
        self._draining = True
        for stream in self._streams:
            stream.wakeup.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle.wait()

    def deliver(self, events: tuple[SequenceEvent, ...]) -> None:
        """Hand a step's events to the routers that own their sequences."""
        for item in events:
            owner = self._owners.get(item.seq)
            if owner is None:
                continue  # Its router cancelled it or left while the step ran.
            stream, request_id = owner
            stream.tell(item.event)
            if isinstance(item.event, FinishEvent | ErrorEvent):
                stream.busy_until = time.monotonic() + LOAD_TAIL_S
                del stream.seqs[request_id]
                self._disown(item.seq)

    async def Generate(  # noqa: N802  the name is the protocol's
        self, request_iterator: AsyncIterator[generation_pb2.RouterBatch], context: Context
    ) -> AsyncIterator[generation_pb2.VerifierBatch]:
        """See generation.proto."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = decode_router_batch(await anext(request_iterator))
            self._check_hello(first.hello)
        except PacelineError as error:
            await context.abort(ERROR_TABLE[type(error)].grpc_code, error.message)
        except (TimeoutError, StopAsyncIteration):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no hello came")
        yield encode_verifier_batch(
            VerifierBatch(hello=VerifierHello(self._incarnation, self._card.fingerprint))
        )
        stream = _RouterStream()
        assert first.hello is not None
        stream.lease.duration_s = first.hello.lease_ms / 1e3
        self._streams.add(stream)
        self._take(stream, first)
        reader = asyncio.create_task(self._read(stream, request_iterator))
        # Apart from the writer, which a router that does not read holds up.
        keeper = asyncio.create_task(self._keep_lease(stream))
        try:
            async for batch in self._outgoing(stream, reader):
                yield encode_verifier_batch(batch)
        finally:
            reader.cancel()
            keeper.cancel()
            self._drop(stream)

    async def _read(
        self, stream: _RouterStream, requests: AsyncIterator[generation_pb2.RouterBatch]
    ) -> None:
        try:
            async for message in requests:
                self._take(stream, decode_router_batch(message))
        finally:
            stream.wakeup.set()

    async def _outgoing(
        self, stream: _RouterStream, reader: asyncio.Task[None]
    ) -> AsyncIterator[VerifierBatch]:
        while not reader.done():
            events = tuple(stream.events[:MAX_EVENTS])
            del stream.events[:MAX_EVENTS]
            stream.wakeup.clear()
            load = self._load()
            yield VerifierBatch(events=events, load=load, drain=self._draining)
            if not stream.events:
                await self._until_due(stream, load)

    async def _until_due(self, stream: _RouterStream, told: VerifierLoad) -> None:
        """Return when there are events, or a load report is due. To a router without requests here
        it is due seldom, but at once if other drafters can be used than it was told."""
        due_at = time.monotonic() + stream.load_interval_s
        while True:
            try:
                async with asyncio.timeout(LOAD_PERIOD_S):
                    await stream.wakeup.wait()
                return
            except TimeoutError:
                now = time.monotonic()
                is_due = stream.seqs or now < stream.busy_until or now >= due_at
                if is_due or _drafter_states(self._load()) != _drafter_states(told):
                    return

    async def _keep_lease(self, stream: _RouterStream) -> None:
        """Free what runs for a router that holds its stream open and says nothing more."""
        while True:
            await asyncio.sleep(LEASE_CHECK_S)
            if not stream.seqs:
                stream.lease.renew()
            if stream.lease.has_lapsed(time.monotonic()):
                self._expire(stream)

    def _expire(self, stream: _RouterStream) -> None:
        self.num_expired += len(stream.seqs)
        message = f"the router said nothing for {stream.lease.duration_s:g} s"
        for request_id, seq in stream.seqs.items():
            self._disown(seq)
            self._post(Cancelled(seq))
            stream.tell(ErrorEvent(request_id, UpstreamLostError.__name__, message))
        stream.seqs.clear()

    def _check_hello(self, hello: RouterHello | None) -> None:
        if hello is None:
            raise InvalidRequestError("the first message must be a hello", param="hello")
        if hello.protocol_version != PROTOCOL_VERSION:
            raise IncompatiblePeerError(
                f"the router speaks protocol {hello.protocol_version}, this verifier "
                f"{PROTOCOL_VERSION} (noise {NOISE_VERSION}); run one release on both"
            )
        if hello.fingerprint != self._card.fingerprint:
            raise IncompatiblePeerError(
                "the router tokenizes for another model than this verifier holds"
            )

    def _take(self, stream: _RouterStream, batch: RouterBatch) -> None:
        stream.lease.renew()
        if batch.load_interval_ms:
            stream.load_interval_s = batch.load_interval_ms / 1e3
        if stream.seqs or batch.submits:
            stream.busy_until = time.monotonic() + LOAD_TAIL_S
        for request in batch.submits:
            try:
                self._check_submit(stream, request)
            except InvalidRequestError as error:
                kind, param = type(error).__name__, error.param or ""
                stream.tell(ErrorEvent(request.request_id, kind, error.message, param))
                continue
            seq = next(self._seq)
            stream.seqs[request.request_id] = seq
            self._owners[seq] = stream, request.request_id
            self._idle.clear()
            if request.grammar is None:
                self._post(Submitted(seq, request))
            else:
                self._compiling[seq] = request
                task = asyncio.create_task(self._submit_constrained(seq, request))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        for request_id in batch.cancels:
            if (running := stream.seqs.pop(request_id, None)) is not None:
                self._disown(running)
                self._post(Cancelled(running))
        for change in batch.set_paths:
            running = stream.seqs.get(change.request_id)
            if running in self._compiling:
                self._compiling[running] = replace(self._compiling[running], path=change.path)
            elif running is not None:
                self._post(PathChanged(running, change.path))

    async def _submit_constrained(self, seq: int, request: GenerationRequest) -> None:
        """Submit once the grammar is compiled, unless it cannot be or nobody waits any more."""
        try:
            grammar = await asyncio.to_thread(self._compile_grammar, request)
        except GrammarError as error:
            self._refuse(seq, InvalidRequestError(str(error), param="grammar"))
        except PacelineError as error:
            self._refuse(seq, error)
        else:
            if seq in self._owners:
                self._post(Submitted(seq, self._compiling[seq], grammar))
        finally:
            del self._compiling[seq]

    def _refuse(self, seq: int, error: PacelineError) -> None:
        if (owner := self._owners.get(seq)) is not None:
            stream, request_id = owner
            kind, param = type(error).__name__, error.param or ""
            stream.tell(ErrorEvent(request_id, kind, error.message, param))
            del stream.seqs[request_id]
            self._disown(seq)

    def _check_submit(self, stream: _RouterStream, request: GenerationRequest) -> None:
        if not request.request_id or request.request_id in stream.seqs:
            raise InvalidRequestError("request_id must be new and not empty", param="request_id")
        if not request.prompt_ids:
            raise InvalidRequestError("prompt_ids must not be empty", param="prompt_ids")
        for name in ("num_top_logprobs", "num_prompt_logprobs"):
            if (getattr(request, name) or 0) > MAX_TOP_LOGPROBS:
                raise InvalidRequestError(f"{name} is over {MAX_TOP_LOGPROBS}", param=name)
        check_sampling(request.sampling, self._card.vocab_size)
        check_token_ids(request.prompt_ids, self._card.vocab_size, "prompt_ids")
        check_token_ids(request.resumed_ids, self._card.vocab_size, "resumed_ids")

    def _drop(self, stream: _RouterStream) -> None:
        self._streams.discard(stream)
        for seq in stream.seqs.values():
            self._disown(seq)
            self._post(Cancelled(seq))
        stream.seqs.clear()

    def _disown(self, seq: int) -> None:
        del self._owners[seq]
        if not self._owners:
            self._idle.set()


def _drafter_states(load: VerifierLoad) -> frozenset[tuple[str, DrafterState]]:
    return frozenset((drafter.incarnation, drafter.state) for drafter in load.drafters)
