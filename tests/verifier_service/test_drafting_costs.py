"""What drafting costs without bringing anything: each round of it, and acceptance that falls
unnoticed from one version to the next."""

from __future__ import annotations

import time

import pytest

from cluster.config import SpeculationConfig
from cluster.types import Path, SamplingParams
from engine.drafting.interface import Drafter, DraftRequest, DraftSession
from engine.drafting.ngram import NgramDrafter
from engine.drafting.suffix import SuffixDrafter
from tests.support import prompts
from tests.support.engine_driver import EngineDriver, oracle_drafter
from tests.support.scripted_target import ScriptedRunner, continuation_law

DEPTH = 4
PROMPT = (3, 4, 5)
ANSWER = tuple(5 + 7 * position % 31 for position in range(60))
GREEDY = SamplingParams(temperature=0.0)


# --- a round ------------------------------------------------------------------------------------


class TimedDriver(EngineDriver):
    """Counts the CPU time of the engine's steps, without the model's forward."""

    def __init__(self, **options: object) -> None:
        law = continuation_law(ANSWER, len(PROMPT))
        runner = ScriptedRunner(law, num_blocks=1024)
        drafter = oracle_drafter(law, GREEDY, 1, DEPTH)
        speculation = SpeculationConfig(local_drafters=(), draft_deadline_ms=1_000, planner="fixed")
        super().__init__(runner, drafter=drafter, speculation=speculation, **options)
        self.engine_s: list[float] = []
        self._forward, self._forward_s = runner.forward, 0.0
        runner.forward = self._timed_forward

    def _timed_forward(self, slices):
        began = time.thread_time()
        logits = self._forward(slices)
        self._forward_s += time.thread_time() - began
        return logits

    def step(self) -> None:
        self.engine._receive(block=False)
        self.engine._flush()
        self._forward_s, began = 0.0, time.thread_time()
        self.engine._wait_for_drafts()
        self.engine.step()
        self.engine_s.append(time.thread_time() - began - self._forward_s)
        self.engine._flush()


@pytest.mark.parametrize("num_sequences", [1, 16])
def test_a_round_of_drafts_costs_little_beside_the_model(num_sequences: int) -> None:
    """Waiting, choosing, verifying and accepting, with a model whose time is left out."""
    least_ms = {}
    for path in Path:
        driver = TimedDriver()
        for _ in range(num_sequences):
            driver.submit(PROMPT, max_tokens=len(ANSWER) - 1, path=path)
        driver.run()
        accepted = [sum(event.drafted) for event in driver.results[1].events]
        assert (max(accepted) == DEPTH) is (path is Path.SPECULATIVE)
        least_ms[path] = 1e3 * sorted(driver.engine_s)[len(driver.engine_s) // 4]
    assert least_ms[Path.SPECULATIVE] - least_ms[Path.PLAIN] < 3.0 + 0.5 * num_sequences


# --- acceptance ---------------------------------------------------------------------------------

CORPUS = [*prompts.COPYING, *prompts.CODE, *(f"{line}\n" * 4 for line in prompts.LINES)]
"""As bytes: a text of fixed tokens, so that what is accepted is a fixed number."""


def accepted_per_step(drafter: Drafter) -> float:
    """Of a verifier that writes the corpus down, with drafts in every step."""
    num_tokens = num_steps = 0
    for number, text in enumerate(CORPUS):
        token_ids = tuple(text.encode())
        drafter.begin(DraftSession(number, token_ids[:1], 1, 0, GREEDY))
        position = 1
        while position < len(token_ids):
            [nodes] = drafter.draft([DraftRequest(number, DEPTH)])
            drafted = [node.token_id for node in nodes or ()]
            rest = token_ids[position:]
            num_accepted = next(
                (i for i, (a, b) in enumerate(zip(drafted, rest, strict=False)) if a != b),
                min(len(drafted), len(rest)),
            )
            new_ids = rest[: num_accepted + 1]
            drafter.extend(number, new_ids)
            position += len(new_ids)
            num_tokens += len(new_ids)
            num_steps += 1
        drafter.end(number)
    return num_tokens / num_steps


@pytest.mark.parametrize(
    ("drafter", "least"),
    [
        (NgramDrafter(4, 2), 1.975),
        (NgramDrafter(4, 2, min_survival=0.3), 1.937),
        (SuffixDrafter(2, 8, 0.1, 100_000, False), 2.006),
    ],
    ids=["ngram", "ngram with a floor", "suffix"],
)
def test_acceptance_on_a_fixed_corpus_does_not_fall(drafter: Drafter, least: float) -> None:
    """Less than 2 % below the figure of the version that this was written for."""
    assert accepted_per_step(drafter) >= 0.98 * least
