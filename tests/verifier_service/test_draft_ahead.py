"""The engine with drafts that come ahead of the verdict: it does not wait for what it has, it
counts what was foreseen, and a drafter that goes bad is given up and tried again."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from cluster.config import SpeculationConfig
from cluster.protocol.prefix_hash import prefix_hash
from cluster.types import Draft, DraftNode
from tests.support.engine_driver import GREEDY, EngineDriver
from tests.support.reference import decode
from tests.support.scripted_target import VOCAB_SIZE, ScriptedRunner, hashed_law
from verifier_service import engine
from verifier_service.events import DraftArrived, DraftSessionLive, Foresight
from verifier_service.planner import StepProfile

LAW = hashed_law(salt="ahead")
PROMPT = [3, 4, 5]
DEPTH = 4
NUM_TOKENS = 40


def answer(num_tokens=NUM_TOKENS):
    return decode(
        LAW, PROMPT, max_tokens=num_tokens, sampling=GREEDY, request_key=1, stop_ids=frozenset()
    )


class Ahead:
    """An engine with one sequence and a drafter that this test speaks for."""

    def __init__(self, deadline_ms=1.0):
        speculation = SpeculationConfig(
            num_speculative_tokens=DEPTH, draft_deadline_ms=deadline_ms, local_drafters=()
        )
        self.driver = EngineDriver(ScriptedRunner(LAW), speculation=speculation)
        self.seq = self.driver.submit(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)
        self.result = self.driver.results[self.seq]
        self.driver.step()
        self.put(DraftSessionLive(self.seq, "scripted", "incarnation"))

    @property
    def committed(self):
        return (*PROMPT, *self.result.token_ids)

    def put(self, event):
        self.driver.engine.inbox.put(event)

    def draft(self, chain, *, ahead=0, branches=(), answers=None):
        """A chain behind the committed tokens and the `ahead` ones that follow them."""
        prefix = (*PROMPT, *answer())[: len(self.committed) + ahead]
        nodes = [DraftNode(token_id, i - 1, 0.9) for i, token_id in enumerate(chain)]
        for place, token_ids in branches:
            parent = place - 1
            for token_id in token_ids:
                nodes.append(DraftNode(token_id, parent, 0.1))
                parent = len(nodes) - 1
        draft = Draft(len(prefix), prefix_hash(prefix), tuple(nodes), answers)
        self.put(DraftArrived(self.seq, draft, time.monotonic()))

    def right(self, num_tokens, ahead=0):
        start = len(self.result.token_ids) + ahead
        return answer()[start : start + num_tokens]

    def foresights(self):
        self.driver.engine._receive(block=False)
        self.driver.engine._flush()
        return [v.foresight for output in self.driver.outputs for v in output.verdicts]


def wrong(token_id):
    return (token_id + 1) % VOCAB_SIZE


def test_a_step_does_not_wait_where_the_trie_holds_a_chain():
    """The deadline would be a minute. Three steps from one draft and a piece more: of 14 tokens
    each step takes four and the target's own."""
    ahead = Ahead(deadline_ms=60_000)
    ahead.draft(ahead.right(10))
    ahead.draft(ahead.right(4, ahead=10), ahead=10)
    before = len(ahead.result.token_ids)
    for _ in range(2):
        ahead.driver.step()
    assert len(ahead.result.token_ids) == before + 10
    ahead.draft([], answers=len(ahead.committed))
    ahead.driver.step()
    assert len(ahead.result.token_ids) == before + 15
    assert ahead.result.token_ids == answer()[: before + 15]


def test_a_short_chain_is_waited_for_and_the_answer_ends_the_wait():
    ahead = Ahead(deadline_ms=60_000)
    ahead.draft(ahead.right(2), answers=len(ahead.committed))
    ahead.driver.step()
    assert len(ahead.result.token_ids) == 4
    assert ahead.driver.engine._generations[ahead.seq].is_due


def test_what_comes_ahead_does_not_end_the_wait_before_the_depth_is_there():
    ahead = Ahead()
    due = ahead.driver.engine._generations[ahead.seq]
    for at_hand in range(DEPTH):
        ahead.driver.engine._receive(block=False)
        assert due.is_due, at_hand
        ahead.draft(ahead.right(1, ahead=at_hand), ahead=at_hand)
    ahead.driver.engine._receive(block=False)
    assert not due.is_due


def test_near_the_end_a_chain_of_what_is_left_is_enough():
    ahead = Ahead(deadline_ms=60_000)
    while len(ahead.result.token_ids) < NUM_TOKENS - 3:
        ahead.draft([], answers=len(ahead.committed))
        ahead.driver.step()
    ahead.draft(ahead.right(2))
    ahead.driver.step()
    assert ahead.result.finish is not None
    assert ahead.result.token_ids == answer()


@pytest.mark.parametrize(
    ("chain_len", "num_wrong", "branch", "foresight"),
    [
        (6, 0, False, Foresight(corrected=False, is_ready=True)),
        (4, 0, False, Foresight(corrected=False, is_ready=False)),
        (5, 0, False, Foresight(corrected=False, is_ready=False)),
        (4, 2, True, Foresight(corrected=True, is_ready=True)),
        (4, 2, False, Foresight(corrected=True, is_ready=False)),
    ],
    ids=["lead", "no lead", "bonus only", "prepared", "not prepared"],
)
def test_what_was_foreseen_is_counted(chain_len, num_wrong, branch, foresight):
    ahead = Ahead()
    chain = ahead.right(chain_len)
    right = list(chain)
    for place in range(DEPTH - num_wrong, DEPTH) if num_wrong else ():
        chain[place] = wrong(chain[place])
    place = DEPTH - num_wrong
    branches = [(place, [right[place], *ahead.right(1, ahead=place + 1)])] if branch else []
    ahead.draft(chain, branches=branches, answers=len(ahead.committed))
    ahead.driver.step()
    assert ahead.foresights() == [foresight]
    at_hand = ahead.driver.engine._generations[ahead.seq].speculation.holds_chain(1)
    assert at_hand == foresight.is_ready


def test_a_foreseen_correction_is_gone_on_from_without_a_word_of_the_drafter():
    ahead = Ahead(deadline_ms=1.0)
    chain, right = ahead.right(4), ahead.right(6)
    chain[1] = wrong(chain[1])
    ahead.draft(chain, branches=[(1, right[1:4])], answers=len(ahead.committed))
    ahead.driver.step()
    before = len(ahead.result.token_ids)
    ahead.driver.step()
    assert len(ahead.result.token_ids) == before + 3
    assert ahead.result.token_ids == answer()[: before + 3]


# --- a drafter that goes bad ---------------------------------------------------------------------

RISING = StepProfile({1: 1.0, 2: 1.4, 3: 1.8, 5: 2.6, 64: 30.0})
"""ms of a step by its tokens: a draft must be accepted every other time to be worth its place."""


class TimedRunner(ScriptedRunner):
    """Its steps take what the profile says, on a clock of their own."""

    now_s = 0.0

    def forward(self, slices):
        self.now_s += (0.6 + 0.4 * sum(len(part.token_ids) for part in slices)) / 1e3
        return super().forward(slices)


def test_a_drafter_whose_weights_go_bad_is_given_up_and_tried_again(monkeypatch):
    """N7. Its drafts are right, then noise as sure of itself, then right again: soon it is not
    waited for and fewer drafts are verified, and then they are verified and accepted as before."""
    noise = False

    def drafter(committed, request):
        chain = decode(
            LAW,
            committed,
            max_tokens=DEPTH,
            sampling=GREEDY,
            request_key=1,
            stop_ids=frozenset(),
            max_len=4_000,
        )
        return [wrong(token_id) for token_id in chain] if noise else chain

    runner = TimedRunner(LAW, num_blocks=800, max_model_len=2_500)
    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: runner.now_s))
    driver = EngineDriver(
        runner,
        drafter=drafter,
        profile=RISING,
        speculation=SpeculationConfig(num_speculative_tokens=DEPTH, local_drafters=()),
    )
    seq = driver.submit(PROMPT, max_tokens=2_400, ignore_eos=True)
    events = driver.results[seq].events

    def verified(num_steps):
        """(drafts verified, accepted) in the next steps."""
        start = len(events)
        while len(events) < start + num_steps:
            driver.step()
        return (
            sum(event.num_draft_tokens for event in events[start:]),
            sum(sum(event.drafted) for event in events[start:]),
        )

    num_drafted, num_accepted = verified(40)
    assert num_accepted > 0.9 * num_drafted > 60
    noise = True
    verified(100)
    num_drafted, num_accepted = verified(40)
    assert num_accepted == 0
    assert num_drafted <= 100, "of 160"
    speculation = driver.engine._generations[seq].speculation
    assert speculation.value.expected < 0.01, "it is still waited for"
    noise = False
    verified(150)
    num_drafted, num_accepted = verified(40)
    assert num_accepted > 0.9 * num_drafted > 60
