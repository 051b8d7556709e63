"""How much of a drafter's drafts a target accepts, by the rule that verifiers apply.

The target's tokens do not depend on drafts: at each position it draws its own, and a draft is
accepted while it equals that. So the answers are generated once, and the drafter, given the tokens
before each position and that position's noise, either draws the same token or it does not. What a
verifier would have accepted in each of its steps follows from that alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.types import SamplingParams, make_request_key
from drafter_service.distill.dialogue import Dialogue
from drafter_service.distill.prompts import Kind, Prompt
from drafter_service.distill.teacher import Request, Teacher
from engine.decoder import SequenceSlice
from engine.model_runner import ModelRunner
from engine.sampling import SampleRow, sample

NUM_SPECULATIVE_TOKENS = 4
_PIECE_TOKENS = 64
"""Drafted at once, since each gives a row of logits over the vocabulary."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Of some answers."""

    num_steps: int
    """Of a verifier that had NUM_SPECULATIVE_TOKENS drafts in each."""
    num_tokens: int
    """That those steps gave."""
    num_survived: tuple[int, ...]
    """Steps in which the first draft was accepted, the first two, and so on."""

    @property
    def length(self) -> float:
        """Tokens a step, from 1."""
        return self.num_tokens / max(1, self.num_steps)

    @property
    def survival(self) -> tuple[float, ...]:
        """Share of the steps in which the first i drafts were accepted."""
        return tuple(n / max(1, self.num_steps) for n in self.num_survived)

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(
            self.num_steps + other.num_steps,
            self.num_tokens + other.num_tokens,
            tuple(a + b for a, b in zip(self.num_survived, other.num_survived, strict=True)),
        )


NOTHING = Acceptance(0, 0, (0,) * NUM_SPECULATIVE_TOKENS)


def measure(
    target: ModelRunner,
    drafter: ModelRunner,
    prompts: Sequence[Prompt],
    temperatures: Iterable[float],
    *,
    batch_size: int,
    max_tokens: int,
    seed: int,
) -> dict[tuple[Kind, float], Acceptance]:
    """By kind of prompt and temperature. Each prompt is answered once at each temperature."""
    dialogue = Dialogue(target.card)
    cases = [(prompt, temperature) for temperature in temperatures for prompt in prompts]
    requests = []
    for index, (prompt, temperature) in enumerate(cases):
        prompt_ids = dialogue.question(prompt.text)
        key = make_request_key(f"acceptance-{seed}".encode(), index, prompt_ids)
        requests.append(Request(prompt_ids, SamplingParams(temperature), key, max_tokens))
    measured: dict[tuple[Kind, float], Acceptance] = {}
    answers = Teacher(target, batch_size).write(requests)
    for (prompt, temperature), request, answer in zip(cases, requests, answers, strict=True):
        written = answer.token_ids[answer.num_context :].tolist()
        drafted = _drafted(drafter, request, written)
        matches = [ours == theirs for ours, theirs in zip(drafted, written, strict=True)]
        of_kind = measured.get((prompt.kind, temperature), NOTHING)
        measured[prompt.kind, temperature] = of_kind + of_matches(matches)
    return measured


def of_matches(matches: Sequence[bool]) -> Acceptance:
    """Of one answer: at each position, whether the drafter draws the target's token there."""
    num_survived = [0] * NUM_SPECULATIVE_TOKENS
    num_steps = position = 0
    while position < len(matches):
        drafts = matches[position : position + NUM_SPECULATIVE_TOKENS]
        num_accepted = next((i for i, match in enumerate(drafts) if not match), len(drafts))
        for i in range(num_accepted):
            num_survived[i] += 1
        num_steps += 1
        position += num_accepted + 1
    return Acceptance(num_steps, len(matches), tuple(num_survived))


def _drafted(drafter: ModelRunner, request: Request, written: Sequence[int]) -> list[int]:
    """What the drafter draws at each place of an answer, given all before it."""
    token_ids = [*request.prompt_ids, *written][:-1]
    num_prompt = len(request.prompt_ids)
    cache = drafter.kv.open()
    assert drafter.kv.reserve(cache, len(token_ids)), "the KV pool holds one sequence at least"
    drawn: list[int] = []
    for start in range(0, len(token_ids), _PIECE_TOKENS):
        piece = token_ids[start : start + _PIECE_TOKENS]
        end = start + len(piece)
        num_logits = min(len(piece), max(0, end - num_prompt + 1))
        logits = drafter.forward([SequenceSlice(cache.block_table, start, piece, num_logits)])
        rows = [
            SampleRow(request.sampling, request.request_key, position)
            for position in range(end - num_logits + 1, end + 1)
        ]
        drawn += sample(logits, rows)
    drafter.kv.close(cache)
    return drawn
