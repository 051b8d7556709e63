"""A drafter that does what a test tells it: a real gRPC server on loopback, honest or not.

An `Answer` makes the drafts for one session that owes one. The ones below cover what a drafter can
do wrong; any of them may cost speed and must never cost anything else.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc

from cluster.protocol import drafting_pb2, drafting_pb2_grpc
from cluster.protocol.codec import decode_target_batch, encode_drafter_batch
from cluster.protocol.messages import (
    DrafterBatch,
    DrafterHello,
    OpenSession,
    SessionDraft,
    SessionError,
    TargetBatch,
    TargetHello,
)
from cluster.protocol.prefix_hash import prefix_hash
from cluster.rpc import RpcServer, new_incarnation, start_rpc_server
from cluster.types import Draft, DraftNode, Member

SERVICE_NAME = "paceline.drafting.v1.Drafting"


@dataclass(slots=True)
class ScriptedSession:
    """A session as the verifier told it."""

    opening: OpenSession
    token_ids: list[int]
    paused: bool = False


Answer = Callable[[ScriptedSession], list[SessionDraft]]


def draft_of(
    session: ScriptedSession,
    nodes: Iterable[DraftNode],
    *,
    epoch: int | None = None,
    position: int | None = None,
    anchor_hash: int | None = None,
) -> SessionDraft:
    """A draft anchored at the session's last token, unless told otherwise, that says all."""
    if epoch is None:
        epoch = session.opening.epoch
    if position is None:
        position = len(session.token_ids)
    if anchor_hash is None:
        anchor_hash = prefix_hash(session.token_ids)
    draft = Draft(position, anchor_hash, tuple(nodes), answers=len(session.token_ids))
    return SessionDraft(session.opening.session, epoch, draft)


def chain_of(token_ids: Iterable[int], confidence: float = 0.9) -> list[DraftNode]:
    return [DraftNode(token_id, i - 1, confidence) for i, token_id in enumerate(token_ids)]


# --- honest ------------------------------------------------------------------------------------


def chain(*token_ids: int) -> Answer:
    """Always this chain."""
    return lambda session: [draft_of(session, chain_of(token_ids))]


def oracle(continuation: Callable[[list[int], int], Iterable[int]]) -> Answer:
    """What `continuation(committed, num_tokens)` says comes next."""
    return lambda session: [
        draft_of(
            session,
            chain_of(continuation(session.token_ids, session.opening.num_speculative_tokens)),
        )
    ]


def nothing(session: ScriptedSession) -> list[SessionDraft]:
    """An empty draft."""
    return [draft_of(session, ())]


# --- not honest --------------------------------------------------------------------------------


def silence(session: ScriptedSession) -> list[SessionDraft]:
    """No answer at all."""
    return []


def noise(vocab_size: int, seed: int = 0) -> Answer:
    """Valid drafts of random tokens."""
    rng = random.Random(seed)
    return lambda session: [
        draft_of(session, chain_of([rng.randrange(vocab_size) for _ in range(8)], 1.0))
    ]


def out_of_vocabulary(vocab_size: int) -> Answer:
    """Ids from vocab_size up to the largest that the wire carries."""
    return lambda session: [
        draft_of(session, chain_of(ids)) for ids in ([vocab_size], [1, 2**31 - 1], [2**32 - 1])
    ]


def malformed(session: ScriptedSession) -> list[SessionDraft]:
    """Parents that do not come first, confidences that are none, far too many nodes."""
    return [
        draft_of(session, [DraftNode(1, 0)]),
        draft_of(session, [DraftNode(1, -2)]),
        draft_of(session, [DraftNode(1, -1), DraftNode(2, 7)]),
        draft_of(session, [DraftNode(1, -1, math.nan)]),
        draft_of(session, [DraftNode(1, -1, -0.5)]),
        draft_of(session, [DraftNode(1, -1, math.inf)]),
        draft_of(session, [DraftNode(i, -1) for i in range(1_100)]),
    ]


def stale_epoch(session: ScriptedSession) -> list[SessionDraft]:
    """A draft of the opening before, and one of an opening to come."""
    epoch = session.opening.epoch
    return [draft_of(session, chain_of([1]), epoch=e) for e in (epoch - 1, epoch + 1)]


def wrong_anchor(session: ScriptedSession) -> list[SessionDraft]:
    """A prefix that is not the verifier's."""
    return [draft_of(session, chain_of([1, 2]), anchor_hash=0xBAD)]


def far_anchor(session: ScriptedSession) -> list[SessionDraft]:
    """A prefix longer than the sequence is."""
    return [draft_of(session, chain_of([1, 2]), position=2**32 - 1)]


def unknown_session(session: ScriptedSession) -> list[SessionDraft]:
    """Drafts for sessions that were never opened."""
    return [draft_of(session, chain_of([1]))._replace(session=2**63 + 1)]


def duplicated(answer: Answer, times: int = 3) -> Answer:
    """Each draft of `answer` several times."""
    return lambda session: answer(session) * times


def mixture(seed: int, *answers: Answer) -> Answer:
    """One of them at random each time."""
    rng = random.Random(seed)
    return lambda session: rng.choice(answers)(session)


def misbehaviours(vocab_size: int) -> dict[str, Answer]:
    """All of them by name, and mixtures, for tests that hold for every drafter."""
    answers = {
        "silence": silence,
        "noise": noise(vocab_size),
        "out_of_vocabulary": out_of_vocabulary(vocab_size),
        "malformed": malformed,
        "stale_epoch": stale_epoch,
        "wrong_anchor": wrong_anchor,
        "far_anchor": far_anchor,
        "unknown_session": unknown_session,
        "duplicated": duplicated(noise(vocab_size)),
    }
    mixtures = {f"mixture_{seed}": mixture(seed, *answers.values()) for seed in range(3)}
    return answers | mixtures


# --- the server --------------------------------------------------------------------------------


@dataclass(eq=False)
class _Stream:
    outbox: asyncio.Queue[DrafterBatch | None] = field(default_factory=asyncio.Queue)
    sessions: dict[int, ScriptedSession] = field(default_factory=dict)


class ScriptedDrafter(drafting_pb2_grpc.DraftingServicer):
    """Use as an async context manager, or start and stop it. Every attribute may be changed while
    it runs."""

    def __init__(self, answer: Answer = nothing, **hello: Any) -> None:
        """`hello` overrides fields of the DrafterHello."""
        self.answer = answer
        self.hello: DrafterHello | None = DrafterHello(
            **{
                "incarnation": new_incarnation(),
                "drafter": "scripted",
                "vocabulary": "",
                "max_sessions": 64,
                "max_speculative_tokens": 16,
            }
            | hello
        )
        """What it says first; None says a batch without a hello."""
        self.incarnation = self.hello.incarnation
        self.delay_s = 0.0
        """How late each answer is."""
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        """Ends every new stream instead of the handshake."""
        self.mute_handshake = False
        """Never answers a hello."""
        self.target_hellos: list[TargetHello] = []
        self.batches: list[TargetBatch] = []
        """Every message that came after a hello."""
        self._streams: set[_Stream] = set()
        self._answers: set[asyncio.Task[None]] = set()
        self._server: RpcServer | None = None

    async def start(self) -> ScriptedDrafter:
        self._server = await start_rpc_server(
            lambda server: drafting_pb2_grpc.add_DraftingServicer_to_server(self, server),
            SERVICE_NAME,
            host="127.0.0.1",
        )
        return self

    async def stop(self) -> None:
        """End it and its streams at once."""
        assert self._server is not None
        await self._server.stop(0)

    async def __aenter__(self) -> ScriptedDrafter:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def member(self) -> Member:
        assert self._server is not None
        return Member(self.incarnation, self._server.address)

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    @property
    def sessions(self) -> dict[int, ScriptedSession]:
        """Open sessions of all streams."""
        return {n: s for stream in self._streams for n, s in stream.sessions.items()}

    def send(self, batch: DrafterBatch) -> None:
        """Say something unasked on every stream."""
        for stream in self._streams:
            stream.outbox.put_nowait(batch)

    def end_streams(self) -> None:
        """End every stream in good order."""
        for stream in self._streams:
            stream.outbox.put_nowait(None)

    def fail_session(self, number: int, kind: str, epoch: int | None = None) -> None:
        """Close a session and say so."""
        for stream in self._streams:
            session = stream.sessions.pop(number, None)
            if session is not None:
                epoch = session.opening.epoch if epoch is None else epoch
                error = SessionError(number, epoch, kind, "told to by the test")
                stream.outbox.put_nowait(DrafterBatch(errors=(error,)))

    async def Draft(  # noqa: N802
        self, request_iterator: AsyncIterator[drafting_pb2.TargetBatch], context: Any
    ) -> AsyncIterator[drafting_pb2.DrafterBatch]:
        first = decode_target_batch(await anext(request_iterator))
        assert first.hello is not None
        self.target_hellos.append(first.hello)
        if self.refusal is not None:
            await context.abort(*self.refusal)
        if self.mute_handshake:
            await asyncio.Event().wait()
        yield encode_drafter_batch(DrafterBatch(hello=self.hello))
        stream = _Stream()
        self._streams.add(stream)
        reader = asyncio.create_task(self._read(stream, request_iterator))
        try:
            while (batch := await stream.outbox.get()) is not None:
                yield encode_drafter_batch(batch)
        finally:
            reader.cancel()
            self._streams.discard(stream)

    async def _read(
        self, stream: _Stream, requests: AsyncIterator[drafting_pb2.TargetBatch]
    ) -> None:
        async for message in requests:
            batch = decode_target_batch(message)
            self.batches.append(batch)
            drafts = [d for s in self._take(stream, batch) for d in self.answer(s)]
            if drafts:
                task = asyncio.create_task(self._reply(stream, DrafterBatch(drafts=tuple(drafts))))
                self._answers.add(task)
                task.add_done_callback(self._answers.discard)
        stream.outbox.put_nowait(None)

    async def _reply(self, stream: _Stream, batch: DrafterBatch) -> None:
        await asyncio.sleep(self.delay_s)
        stream.outbox.put_nowait(batch)

    def _take(self, stream: _Stream, batch: TargetBatch) -> list[ScriptedSession]:
        """Apply a message; returns the sessions that owe a draft for it."""
        owing: set[int] = set()
        for opening in batch.opens:
            stream.sessions[opening.session] = ScriptedSession(opening, list(opening.token_ids))
            owing.add(opening.session)
        for commit in batch.commits:
            session = stream.sessions.get(commit.session)
            if session is not None:
                assert commit.position == len(session.token_ids), "commits are contiguous"
                session.token_ids += commit.token_ids
                owing.add(commit.session)
        for number in batch.pauses:
            stream.sessions[number].paused = True
        for number in batch.resumes:
            stream.sessions[number].paused = False
            owing.add(number)
        for number in batch.closes:
            stream.sessions.pop(number, None)
        return [s for n in sorted(owing) if (s := stream.sessions.get(n)) and not s.paused]
