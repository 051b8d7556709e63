"""Drives an Engine step by step in the test's thread, with drafters that answer at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.config import SchedulerConfig, SpeculationConfig
from cluster.protocol.prefix_hash import prefix_hash
from cluster.types import (
    Draft,
    DraftNode,
    ErrorEvent,
    FinishEvent,
    GenerationRequest,
    Path,
    PromptLogprobsEvent,
    SamplingParams,
    TokenLogprobs,
    TokensEvent,
)
from tests.support.reference import decode
from tests.support.scripted_target import VOCAB_SIZE, Law
from verifier_service.engine import Engine
from verifier_service.events import (
    DraftArrived,
    DraftSessionLive,
    EngineOutput,
    Submitted,
)
from verifier_service.planner import StepProfile

GREEDY = SamplingParams(temperature=0.0)


ScriptedDrafter = Callable[[tuple[int, ...], GenerationRequest], Sequence[int | DraftNode] | None]
"""Committed tokens and the request -> the draft's chain, or None for silence."""


def chain_draft(committed: Sequence[int], chain: Sequence[int | DraftNode]) -> Draft:
    """A draft that hangs one chain on the committed tokens, and says all. Nodes are taken as they
    are, parents included."""
    nodes = tuple(
        item if isinstance(item, DraftNode) else DraftNode(item, index - 1)
        for index, item in enumerate(chain)
    )
    return Draft(len(committed), prefix_hash(committed), nodes, answers=len(committed))


@dataclass
class Result:
    """What one request got."""

    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """From the prompt's second token on."""
    events: list[TokensEvent] = field(default_factory=list)
    finish: FinishEvent | None = None
    error: ErrorEvent | None = None

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.error is not None


def oracle_drafter(
    law: Law, sampling: SamplingParams, request_key: int, depth: int
) -> ScriptedDrafter:
    """Knows the answer: every draft is accepted."""

    def draft(committed: tuple[int, ...], request: GenerationRequest) -> list[int]:
        return decode(law, committed, max_tokens=depth, sampling=sampling, request_key=request_key)

    return draft


def flaky_drafter(rng: random.Random, law: Law) -> ScriptedDrafter:
    """Right, wrong, partly right, empty, silent or out of vocabulary, by turns."""

    def draft(committed: tuple[int, ...], request: GenerationRequest) -> list[int] | None:
        right = decode(law, committed, max_tokens=4, sampling=GREEDY, request_key=1)
        match rng.randrange(6):
            case 0:
                return right
            case 1:
                return [*right[:2], rng.randrange(VOCAB_SIZE)]
            case 2:
                return [rng.randrange(VOCAB_SIZE) for _ in range(4)]
            case 3:
                return []
            case 4:
                return None
            case _:
                return [VOCAB_SIZE + 5]

    return draft


class EngineDriver:
    """The drafter gives a chain for each open session after every output."""

    def __init__(
        self,
        runner: Any,
        *,
        drafter: ScriptedDrafter | None = None,
        scheduler: SchedulerConfig | None = None,
        speculation: SpeculationConfig | None = None,
        replica_name: str = "scripted",
        profile: StepProfile | None = None,
    ) -> None:
        self.runner = runner
        self.results: dict[int, Result] = {}
        self.requests: dict[int, GenerationRequest] = {}
        self.sessions: dict[int, list[int]] = {}
        self.paused: set[int] = set()
        self.outputs: list[EngineOutput] = []
        self._drafter = drafter
        self._replica_name = replica_name
        self.engine = Engine(
            runner,
            scheduler or SchedulerConfig(),
            speculation or SpeculationConfig(draft_deadline_ms=1.0, local_drafters=()),
            self._take,
            profile,
        )

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 16,
        sampling: SamplingParams = GREEDY,
        request_key: int = 1,
        path: Path = Path.SPECULATIVE,
        **fields: Any,
    ) -> int:
        seq = len(self.results) + 1
        self.results[seq] = Result()
        request = GenerationRequest(
            request_id=str(seq),
            request_key=request_key,
            prompt_ids=tuple(prompt),
            sampling=sampling,
            max_tokens=max_tokens,
            path=path,
            **fields,
        )
        self.requests[seq] = request
        self.engine.inbox.put(Submitted(seq, request))
        return seq

    def step(self) -> None:
        """What the loop does, without blocking."""
        self.engine._receive(block=False)
        self.engine._flush()
        if self.engine._generations:
            self.engine._wait_for_drafts()
            self.engine.step()
            self.engine._flush()
        self.runner.kv.check()

    def run(self, max_steps: int = 2_000) -> dict[int, Result]:
        """Until every request has ended."""
        for _ in range(max_steps):
            self.step()
            if all(result.ended for result in self.results.values()):
                return self.results
        raise AssertionError(f"not finished after {max_steps} steps")

    def _take(self, output: EngineOutput) -> None:
        self.outputs.append(output)
        for item in output.events:
            result, event = self.results[item.seq], item.event
            assert not result.ended, "an event after the end"
            if isinstance(event, PromptLogprobsEvent):
                assert event.position == len(result.prompt_logprobs) + 1, "a gap or a repetition"
                assert not result.token_ids, "a token before its prompt was told"
                result.prompt_logprobs += event.logprobs
            elif isinstance(event, TokensEvent):
                assert event.position == len(result.token_ids), "a gap or a repetition"
                result.token_ids += event.token_ids
                result.events.append(event)
            elif isinstance(event, FinishEvent):
                result.finish = event
            else:
                result.error = event
        if self._drafter is not None:
            self._draft(output)

    def _draft(self, output: EngineOutput) -> None:
        for order in output.orders.opens:
            self.sessions[order.seq] = list(order.token_ids)
            name = self._replica_name
            self.engine.inbox.put(
                DraftSessionLive(order.seq, name, "incarnation", order.wants_laws)
            )
        for commit in output.orders.commits:
            committed = self.sessions[commit.seq]
            assert commit.position == len(committed)
            committed += commit.token_ids
        self.paused |= set(output.orders.pauses)
        self.paused -= set(output.orders.resumes)
        for seq in output.orders.closes:
            del self.sessions[seq]
        told = [o.seq for o in output.orders.opens] + [c.seq for c in output.orders.commits]
        for seq in dict.fromkeys([*told, *output.orders.resumes]):
            if seq in self.sessions and seq not in self.paused:
                self._answer(seq)

    def _answer(self, seq: int) -> None:
        assert self._drafter is not None
        committed = tuple(self.sessions[seq])
        chain = self._drafter(committed, self.requests[seq])
        if chain is not None:
            self.engine.inbox.put(DraftArrived(seq, chain_draft(committed, chain)))
