"""The drafting protocol under every interleaving that 2,000 seeds make: the real state machines of
both sides on a simulated network and clock (tests/support/drafting_simulation.py).

Each life ends in calm, and then in silence: so each shows that neither side ever knew tokens that
the other had not said, that every message came to an outcome with a name, that faults which are
over are got over, and that nothing is left.
"""

from __future__ import annotations

import logging
from collections import Counter

import pytest

import verifier_service.draft_client as draft_client
from drafter_service.session import SessionTable
from tests.support.drafting_simulation import World, live
from verifier_service.draft_trie import DraftOutcome, DraftTrie
from verifier_service.drafter_link import DrafterLink

NUM_SEEDS = 2_000
NUM_GROUPS = 20


@pytest.fixture(autouse=True)
def _quiet():
    """Every fault is logged, and here nearly all is faults."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_no_interleaving_breaks_the_protocol(group):
    """And the faults happened: no outcome is left out."""
    outcomes: Counter[str] = Counter()
    for seed in range(group, NUM_SEEDS, NUM_GROUPS):
        world = live(seed)
        counters, told = world.client.counters, world.told
        outcomes.update(told.outcomes)
        outcomes["stale epoch"] += counters.stale_epochs
        outcomes["unknown session"] += counters.unknown_sessions
        outcomes["session error"] += counters.session_errors
        outcomes["stream lost"] += counters.streams_lost
        outcomes["re-sync"] += counters.resyncs
        outcomes["foreseen"] += told.num_hits
        outcomes["accepted"] += told.num_accepted
    assert outcomes.keys() >= set(DraftOutcome) - {DraftOutcome.LAWLESS}, "no law is asked for"
    assert min(outcomes.values()) > 0


# --- what is spoiled is seen ---------------------------------------------------------------------


def _takes_any_commit(self, session, commit, now):
    """A gap, or other tokens, go unnoticed."""
    session.token_ids.extend(commit.token_ids)
    self._hear(session, now)


def _forgets_to_answer(self, session, num_committed, nodes, *, answers, ended):
    return _propose(self, session, num_committed, nodes, answers=False, ended=ended)


def _closes_in_silence(self, session):
    """The drafter is not told."""
    del self._streams[session.stream][session.number]
    del self._by_key[session.session_key]
    self._untold[session.stream].pop(session.number, None)
    self._owing.pop(session.session_key, None)


def _lets_go_in_silence(self, session):
    """The other side is not told."""
    seq = session.order.seq
    session.link = None
    del self.sessions[seq]
    self._unsent.pop(seq, None)


def _believes_all(self, draft, drafter=""):
    """A draft is inserted wherever the tip is."""
    self.graft([node for node in draft.nodes if node.parent < 0], drafter)
    return DraftOutcome.USED if draft.nodes else DraftOutcome.DUPLICATE


def _drops_in_silence(self, link, item, now):
    """A stale draft has no outcome."""
    session = self._sessions.get(item.session)
    if session is not None and session.link is link and item.epoch == session.epoch:
        _take_draft(self, link, item, now)


_propose = SessionTable.propose
_take_draft = draft_client.DraftClient._take_draft


@pytest.mark.parametrize(
    ("owner", "method", "spoiled"),
    [
        (SessionTable, "_commit", _takes_any_commit),
        (SessionTable, "propose", _forgets_to_answer),
        (SessionTable, "_close", _closes_in_silence),
        (DrafterLink, "let_go", _lets_go_in_silence),
        (DraftTrie, "insert", _believes_all),
        (draft_client.DraftClient, "_take_draft", _drops_in_silence),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_is_spoiled_is_seen(owner, method, spoiled, monkeypatch):
    monkeypatch.setattr(owner, method, spoiled)
    for seed in range(60):
        try:
            live(seed)
        except (AssertionError, KeyError):
            return
    pytest.fail("nothing was noticed")


def test_a_life_is_the_same_each_time():
    def story(seed: int) -> tuple:
        world: World = live(seed)
        return world.client.counters, world.told, world.simulation.now

    assert story(7) == story(7)
