"""One choice of one request, from its submission to its end, over as many verifiers as it takes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import replace

from cluster.errors import (
    DeadlineExceededError,
    InternalError,
    OverloadedError,
    PacelineError,
    UpstreamLostError,
    error_from_wire,
)
from cluster.types import (
    ErrorEvent,
    FinishEvent,
    GenerationRequest,
    Path,
    PromptLogprobsEvent,
    TokenLogprobs,
    TokensEvent,
)
from router.admission import retry_after_s
from router.generation_client import EventBatch, GenerationClient
from router.verifier_pool import VerifierPool

logger = logging.getLogger("paceline.router")


class Generation:
    """Submits a request and yields its events, batch by batch; each token exactly once.

    The tokens received are kept in a journal. When the verifier is lost, another one with the same
    fingerprint goes on from the journal: same request key, so the same tokens as if nothing had
    happened. So it does when a verifier is too full to go on. If there is no other, the error of
    the last one is raised; DeadlineExceededError at the deadline; else what the verifier named.
    """

    def __init__(
        self, pool: VerifierPool, request: GenerationRequest, affinity: bytes, max_resumes: int
    ) -> None:
        self.token_ids: list[int] = []
        """The journal: every token received, in order."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        """Of the prompt's tokens behind the first, where the request asked for them."""
        self.path = request.path
        self._pool = pool
        self._request = request
        self._affinity = affinity
        self._max_resumes = max_resumes
        self._lost: set[str] = set()
        self._client: GenerationClient = pool.choose(affinity)
        self._stream = self._client.submit(request)
        self._deadline = self._start_deadline()

    async def events(self) -> AsyncGenerator[EventBatch, None]:
        """To be iterated once. :meth:`close` must be called, whatever happens."""
        while True:
            try:
                async for batch in self._stream:
                    self._record(batch)
                    yield batch
                    if isinstance(batch[-1], FinishEvent):
                        return
            except UpstreamLostError as error:
                self._resume(error)
            except OverloadedError as error:
                self._resume(self._refused(error))

    def set_path(self, path: Path) -> None:
        """Change the path from the next step on."""
        self.path = path
        self._client.set_path(self._stream.request_id, path)

    def close(self) -> None:
        """Free everything here and at the verifier. Idempotent."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._stream.close()

    def _record(self, batch: EventBatch) -> None:
        for event in batch:
            if isinstance(event, ErrorEvent):
                raise error_from_wire(event.kind, event.message, event.param)
        for event in batch:
            if isinstance(event, PromptLogprobsEvent):
                self._record_prompt(event)
            elif not self._prompt_is_told:
                raise InternalError("the verifier left out log probabilities of the prompt")
            elif isinstance(event, TokensEvent):
                if event.position != len(self.token_ids):
                    raise InternalError(
                        f"tokens at position {event.position} arrived after {len(self.token_ids)}"
                    )
                self.token_ids += event.token_ids

    def _record_prompt(self, event: PromptLogprobsEvent) -> None:
        """A verifier that went on for another begins with the prompt again."""
        position = 1 + len(self.prompt_logprobs)
        if event.position > position:
            raise InternalError(
                f"log probabilities of prompt token {event.position} arrived before {position}"
            )
        self.prompt_logprobs += event.logprobs[position - event.position :]

    @property
    def _prompt_is_told(self) -> bool:
        request = self._request
        wanted = request.num_prompt_logprobs is not None
        return not wanted or len(self.prompt_logprobs) == len(request.prompt_ids) - 1

    def _refused(self, error: OverloadedError) -> OverloadedError:
        """A verifier was fuller than its last report: when it will not be, as admission says it."""
        wait_s = self._client.outlook().wait_s
        return OverloadedError(
            error.message, code="queue_full", retry_after_s=retry_after_s(wait_s, at_least_s=1.0)
        )

    def _resume(self, error: PacelineError) -> None:
        """Go on at another verifier, or raise `error`."""
        self._lost.add(self._client.member.incarnation)
        if len(self._lost) > self._max_resumes:
            raise error
        try:
            self._client = self._pool.choose(self._affinity, exclude=self._lost)
        except OverloadedError:
            raise error from None
        self._pool.num_resumes += 1
        logger.info(
            "request %s goes on at %s from token %d",
            self._request.request_id,
            self._client.member.address,
            len(self.token_ids),
        )
        self._stream = self._client.submit(self._continuation())

    def _continuation(self) -> GenerationRequest:
        return replace(
            self._request,
            # Another id, so that what a verifier believed dead still says is not taken for this.
            request_id=f"{self._request.request_id}.{len(self._lost)}",
            resumed_ids=tuple(self.token_ids),
            num_prompt_logprobs=None if self._prompt_is_told else self._request.num_prompt_logprobs,
            path=self.path,
            deadline_ms=self._left_ms(),
        )

    def _left_ms(self) -> int:
        if self._deadline is None:
            return 0
        left_s = self._deadline.when() - asyncio.get_running_loop().time()
        return max(1, int(1000 * left_s))

    def _start_deadline(self) -> asyncio.TimerHandle | None:
        if not self._request.deadline_ms:
            return None
        deadline_s = self._request.deadline_ms / 1000
        return asyncio.get_running_loop().call_later(deadline_s, self._expire, deadline_s)

    def _expire(self, deadline_s: float) -> None:
        self._stream.fail(
            DeadlineExceededError(f"the request did not finish within {deadline_s:g} s")
        )
