"""A verifier's end of one drafting stream, spoken by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from cluster.member_auth import Role
from cluster.protocol import drafting_pb2_grpc
from cluster.protocol.codec import decode_drafter_batch, encode_target_batch
from cluster.protocol.messages import (
    CommitTokens,
    DrafterBatch,
    DrafterHello,
    OpenSession,
    SessionDraft,
    SessionError,
    TargetBatch,
    TargetHello,
)
from cluster.rpc import open_channel
from cluster.types import SamplingParams
from tests.support.polling import TIMEOUT_S
from verifier_service.draft_trie import DraftOutcome, DraftTrie

HELLO = TargetHello("raw-verifier", "target", "vocabulary-a")


def opening(session: int, token_ids: tuple[int, ...], **fields: Any) -> OpenSession:
    defaults = {
        "epoch": 1,
        "num_prompt_tokens": len(token_ids),
        "request_key": 1,
        "sampling": SamplingParams(),
        "num_speculative_tokens": 4,
    }
    return OpenSession(session=session, token_ids=token_ids, **defaults | fields)


class RawVerifier:
    """Use as an async context manager; entering shakes hands."""

    def __init__(self, address: str, hello: TargetHello | None = HELLO) -> None:
        self._channel = open_channel(address, Role.DRAFTER)
        self._call = drafting_pb2_grpc.DraftingStub(self._channel).Draft()
        self._hello = hello
        self.hello: DrafterHello | None = None
        self.batches: list[DrafterBatch] = []
        """Every message after the hello."""
        self._tries: dict[int, DraftTrie] = {}

    async def __aenter__(self) -> RawVerifier:
        await self.send(TargetBatch(hello=self._hello))
        self.hello = (await self.read()).hello
        self.batches.clear()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()

    async def leave(self) -> None:
        """Vanish, as a killed verifier does."""
        self._call.cancel()
        await self._channel.close(None)

    async def send(self, batch: TargetBatch) -> None:
        for opening in batch.opens:
            self._tries[opening.session] = DraftTrie(opening.token_ids, 1 << 32)
        for commit in batch.commits:
            trie = self._tries.get(commit.session)
            if trie is not None and commit.position == trie.num_committed:
                trie.commit(commit.token_ids)
        await asyncio.wait_for(self._call.write(encode_target_batch(batch)), TIMEOUT_S)

    async def open(self, *openings: OpenSession) -> None:
        await self.send(TargetBatch(opens=openings))

    async def commit(self, *items: tuple[int, int, tuple[int, ...]]) -> None:
        await self.send(TargetBatch(commits=tuple(CommitTokens(*item) for item in items)))

    async def read(self) -> DrafterBatch:
        """The next message; raises AioRpcError if the stream failed, EOFError if it ended well."""
        message = await asyncio.wait_for(self._call.read(), TIMEOUT_S)
        if not hasattr(message, "drafts"):
            raise EOFError
        self.batches.append(decode_drafter_batch(message))
        for item in self.batches[-1].drafts:
            if (trie := self._tries.get(item.session)) is not None:
                assert trie.insert(item.draft) is not DraftOutcome.MALFORMED
        return self.batches[-1]

    async def read_until(self, done: Callable[[RawVerifier], bool]) -> None:
        while not done(self):
            await self.read()

    async def draft(self, session: int, position: int) -> SessionDraft:
        """The draft that answers this session at this position, read if it has not come yet."""

        def found() -> list[SessionDraft]:
            return [d for d in self.drafts if (d.session, d.draft.answers) == (session, position)]

        await self.read_until(lambda _: bool(found()))
        return found()[0]

    async def chain(self, session: int, position: int) -> list[int]:
        """What is drafted behind this position of this session once that is answered: at most four
        tokens."""
        await self.draft(session, position)
        assert self._tries[session].num_committed == position
        return list(self._tries[session].best_chain(4))

    async def error(self, session: int) -> SessionError:
        await self.read_until(lambda v: any(e.session == session for e in v.errors))
        return next(e for e in self.errors if e.session == session)

    @property
    def drafts(self) -> list[SessionDraft]:
        return [draft for batch in self.batches for draft in batch.drafts]

    @property
    def errors(self) -> list[SessionError]:
        return [error for batch in self.batches for error in batch.errors]
