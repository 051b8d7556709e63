"""The model drafter's law: a draft is what its model would decode, whatever else it does."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random

import grpc
import pytest
import torch
from pydantic import ValidationError

from cluster.config import DrafterConfig, KVCacheConfig, ModelConfig
from cluster.fingerprint import vocabulary_fingerprint
from cluster.protocol.messages import TargetHello
from cluster.types import SamplingParams
from drafter_service.__main__ import _config
from drafter_service.model_drafter import ModelDrafter
from drafter_service.proposal import chain_len
from drafter_service.service import DrafterService
from engine.decoder import SequenceSlice
from engine.drafting.interface import DraftRequest, DraftSession
from engine.loader import load_model
from engine.model_runner import ModelRunner
from tests.support.raw_verifier import RawVerifier, opening
from tests.support.reference import decode
from tests.support.scripted_target import VOCAB_SIZE, ScriptedRunner, hashed_law
from tests.support.tiny_models import SPECIAL_TOKENS, make_tiny_model, save_tokenizer

GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = [
    GREEDY,
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, top_p=0.9),
    SamplingParams(temperature=0.8, top_k=5),
]
LAW = hashed_law(sharpness=8.0)


class CountingRunner(ScriptedRunner):
    """Counts the tokens it is fed; fails when told to."""

    def __init__(self, law=LAW, **fields):
        super().__init__(law, **fields)
        self.num_failures = 0

    def forward(self, slices):
        if self.num_failures:
            self.num_failures -= 1
            raise MemoryError("told to by the test")
        return super().forward(slices)

    def fed_by(self, action):
        """How many tokens `action` feeds."""
        before = self.num_fed
        action()
        return self.num_fed - before


class Sessions:
    """A model drafter, what it was told, and what it should say."""

    def __init__(self, drafter, runner, law):
        self.drafter, self.runner, self.law = drafter, runner, law
        self.sessions = {}
        self.committed = {}
        self.num_begun = 0
        self.num_branch_nodes = 0
        self.reading = set()
        """Keys that the last draft was not through with."""
        self.always_complete = False
        """No chain may be shorter than what was asked for."""

    @classmethod
    def scripted(cls, *, max_step_tokens=32, law=LAW, read_s=0.0, **fields):
        runner = CountingRunner(law, **fields)
        drafter = ModelDrafter(runner, max_step_tokens=max_step_tokens, read_s=read_s)
        return cls(drafter, runner, law)

    def begin(self, token_ids, sampling=GREEDY):
        self.num_begun += 1
        key = self.num_begun
        session = DraftSession(key, tuple(token_ids), len(token_ids), 1000 + key, sampling)
        self.sessions[key], self.committed[key] = session, list(token_ids)
        self.drafter.begin(session)
        return key

    def extend(self, key, token_ids):
        self.drafter.extend(key, token_ids)
        self.committed[key] += token_ids
        self.check()

    def end(self, key):
        self.drafter.end(key)
        del self.sessions[key], self.committed[key]
        self.check()

    def continuation(self, key, num_tokens, behind=(), banned=()):
        """What the model decodes, token after token; with `banned`, if it were not for those."""
        session = self.sessions[key]

        def law(prefix):
            logits = self.law(prefix)
            return [-math.inf if i in banned else logit for i, logit in enumerate(logits)]

        return decode(
            law if banned else self.law,
            [*self.committed[key], *behind],
            max_tokens=num_tokens,
            sampling=session.sampling,
            request_key=session.request_key,
            stop_ids=frozenset(),
            max_len=10_000,
        )

    def draft(self, *keys, num_tokens=4, num_branches=0, branch_len=3):
        """Token ids of the chain per session, checked against the law; empty for a session that is
        still read."""
        requests = [DraftRequest(key, num_tokens, num_branches, branch_len) for key in keys]
        drafts = self.drafter.draft(requests)
        self.reading = {key for key, nodes in zip(keys, drafts, strict=True) if nodes is None}
        chains = []
        for key, nodes in zip(keys, drafts, strict=True):
            nodes = nodes or ()
            assert all(0.0 <= node.confidence <= 1.0 for node in nodes)
            chain = [node.token_id for node in nodes[: chain_len(nodes)]]
            assert chain == self.continuation(key, len(chain))
            assert len(chain) <= num_tokens
            assert len(chain) == num_tokens or not self.always_complete or key in self.reading
            self.check_branches(key, nodes, len(chain))
            chains.append(chain)
        self.check()
        return chains

    def check_branches(self, key, nodes, num_chain):
        """Each begins with the runner-up and goes on as the model would behind it."""
        paths = {-1: []}
        for index, node in enumerate(nodes):
            paths[index] = [*paths[node.parent], node.token_id]
        for index, node in enumerate(nodes[num_chain:], num_chain):
            self.num_branch_nodes += 1
            before = paths[node.parent]
            banned = [nodes[len(before)].token_id] if node.parent < num_chain else []
            assert [node.token_id] == self.continuation(key, 1, before, banned), paths[index]

    def branches(self, key):
        """Their tokens, each from the committed ones on."""
        session = self.drafter._sessions[key]
        return [[drawn.token_id for drawn in branch.tail] for branch in session.branches]

    def accept(self, key, num_accepted, *, bonus=True):
        """Commit the first tokens of the true continuation and one more, right or wrong."""
        *accepted, right = self.continuation(key, num_accepted + 1)
        self.extend(key, [*accepted, right if bonus else (right + 1) % 3 + 3])

    def check(self):
        """Blocks are conserved, and KV is final exactly where its token is."""
        self.runner.kv.check()
        for key, session in self.drafter._sessions.items():
            for path in session.paths:
                if (cache := path.cache) is not None:
                    assert cache.num_committed == min(cache.num_slots, len(self.committed[key]))
                    assert session.num_uncomputed(path) > 0

    def end_all(self):
        for key in list(self.sessions):
            self.end(key)
        assert self.runner.kv.num_used_blocks == 0


# --- the law -----------------------------------------------------------------------------------


def work(rng, sessions, num_operations, longest_prompt, ids):
    """Random begins, extensions that agree or not, drafts of random batches, and ends."""
    num_drafted = 0
    for _ in range(num_operations):
        open_keys = list(sessions.sessions)
        match rng.choice(["begin", "extend", "extend", "draft", "draft", "draft", "end"]):
            case "begin" if len(open_keys) < 6:
                prompt = rng.choices(ids, k=rng.randint(1, longest_prompt))
                sessions.begin(prompt, rng.choice(SAMPLINGS))
            case "extend" if open_keys:
                key = rng.choice(open_keys)
                if (branches := sessions.branches(key)) and rng.random() < 0.5:
                    sessions.extend(key, [*rng.choice(branches), 3][: rng.randint(1, 8)])
                else:
                    sessions.accept(key, rng.randint(0, 5), bonus=rng.random() < 0.5)
            case "draft" if open_keys:
                keys = rng.sample(open_keys, rng.randint(1, len(open_keys)))
                wanted = {
                    "num_tokens": rng.randint(0, 6),
                    "num_branches": rng.choice([0, 0, 1, 3]),
                    "branch_len": rng.randint(1, 4),
                }
                chains = sessions.draft(*keys, **wanted)
                for _ in range(rng.choice([0, 100])):
                    if sessions.reading:
                        chains = sessions.draft(*keys, **wanted)
                num_drafted += sum(map(len, chains))
            case "end" if open_keys and rng.random() < 0.3:
                sessions.end(rng.choice(open_keys))
    sessions.end_all()
    return num_drafted


@pytest.mark.parametrize("seed", range(24))
def test_drafts_are_what_the_model_would_decode(seed):
    """Batches, orders, rejections and evictions of every kind; pools from ample to far too small.
    Only want of room makes a chain short."""
    rng = random.Random(seed)
    block_size, num_slots = rng.choice([1, 3, 8]), [30, 80, 1000][seed % 3]
    max_step_tokens = rng.choice([1, 5, 32]) if num_slots < 1000 else 512
    sessions = Sessions.scripted(
        max_step_tokens=max_step_tokens,
        num_blocks=num_slots // block_size,
        block_size=block_size,
        max_model_len=1000,
    )
    sessions.always_complete = num_slots == 1000
    assert work(rng, sessions, 50, 40, range(3, VOCAB_SIZE)) > 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=512)


def tiny_runner(folder, **kv_cache):
    loaded = load_model(ModelConfig(source=str(folder), dtype="float32"))
    return ModelRunner(loaded, KVCacheConfig(**kv_cache))


@pytest.fixture(scope="module")
def model_law(folder):
    """The model computed afresh for every prefix."""
    runner = tiny_runner(folder, num_blocks=1, block_size=256, prefix_cache=False)
    known = {}

    def law(prefix):
        if prefix not in known:
            cache = runner.kv.open()
            runner.kv.reserve(cache, len(prefix))
            logits = runner.forward([SequenceSlice(cache.block_table, 0, prefix, 1)])
            runner.kv.close(cache)
            known[prefix] = logits[0].tolist()
        return known[prefix]

    return law


@pytest.mark.parametrize(("num_blocks", "max_step_tokens"), [(200, 32), (8, 5)])
def test_drafts_of_a_real_model_are_what_it_would_decode(
    folder, model_law, num_blocks, max_step_tokens
):
    runner = tiny_runner(folder, num_blocks=num_blocks, block_size=8)
    drafter = ModelDrafter(runner, max_step_tokens=max_step_tokens, read_s=0.0)
    sessions = Sessions(drafter, runner, model_law)
    assert work(random.Random(num_blocks), sessions, 70, 30, range(3, 128)) > 50


def test_a_session_that_was_not_begun_is_a_key_error():
    sessions = Sessions.scripted()
    key = sessions.begin([3, 4])
    sessions.end(key)
    for call in (
        lambda: sessions.drafter.draft([DraftRequest(key, 4)]),
        lambda: sessions.drafter.extend(key, [5]),
        lambda: sessions.drafter.end(key),
    ):
        with pytest.raises(KeyError):
            call()


def test_confidence_is_the_probability_of_the_token(folder, model_law):
    runner = tiny_runner(folder, num_blocks=20)
    sessions = Sessions(ModelDrafter(runner), runner, model_law)
    key = sessions.begin([3, 4, 5], SamplingParams(temperature=0.5))
    [nodes] = sessions.drafter.draft([DraftRequest(key, 5)])
    prefix = (3, 4, 5)
    for node in nodes:
        probs = torch.softmax(torch.tensor(model_law(prefix)) / 0.5, dim=-1)
        assert node.confidence == pytest.approx(float(probs[node.token_id]), rel=1e-4)
        prefix = (*prefix, node.token_id)
    sure = sessions.begin([3, 4, 5], SamplingParams(temperature=1.0, top_k=1))
    [nodes] = sessions.drafter.draft([DraftRequest(sure, 3)])
    assert [node.confidence for node in nodes] == [1.0] * 3


# --- nothing is computed twice -----------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_accepted_rounds_compute_each_token_once(sampling):
    """G1: the last drafted token's KV is computed in the next round, and only then."""
    sessions = Sessions.scripted()
    key = sessions.begin(range(3, 13), sampling)
    for _ in range(20):
        assert len(sessions.draft(key)[0]) == 4
        sessions.accept(key, 4)
    assert sessions.runner.num_fed == len(sessions.committed[key]) - 2
    sessions.end_all()


def test_a_correction_costs_what_was_rejected():
    sessions = Sessions.scripted()
    key = sessions.begin(range(3, 13))
    sessions.draft(key)
    sessions.accept(key, 2, bonus=False)
    # The correction, and three of the four tokens drafted after it.
    assert sessions.runner.fed_by(lambda: sessions.draft(key)) == 4


def test_what_is_not_contradicted_is_still_a_draft():
    """Commits within the tail: a plain step's token, or a verifier that took only some."""
    sessions = Sessions.scripted()
    key = sessions.begin(range(3, 13))
    sessions.draft(key, num_tokens=6)
    sessions.accept(key, 2)
    assert sessions.runner.fed_by(lambda: sessions.draft(key, num_tokens=3)) == 0
    assert sessions.runner.fed_by(lambda: sessions.draft(key, num_tokens=4)) == 1
    sessions.accept(key, 0, bonus=False)
    assert sessions.runner.fed_by(lambda: sessions.draft(key, num_tokens=4)) == 4


def test_tokens_that_came_without_drafts_are_caught_up_on():
    """L3: a stretch of plain steps, told one by one or all at once."""
    sessions = Sessions.scripted()
    key = sessions.begin(range(3, 13))
    sessions.draft(key)
    for _ in range(30):
        sessions.accept(key, 0)
    assert len(sessions.draft(key)[0]) == 4
    sessions.accept(key, 29, bonus=False)
    assert len(sessions.draft(key)[0]) == 4


def test_sessions_of_one_prompt_share_nothing():
    """A session carries no salt: whose it is, the drafter cannot know."""
    sessions = Sessions.scripted()
    num_fed = []
    for _ in range(2):
        key = sessions.begin(range(3, 30))
        num_fed.append(sessions.runner.fed_by(lambda key=key: sessions.draft(key)))
    assert num_fed[0] == num_fed[1] > 27


# --- room --------------------------------------------------------------------------------------


def test_the_session_used_least_recently_makes_room():
    sessions = Sessions.scripted(num_blocks=12, block_size=4)
    first, second, third = (sessions.begin([token] * 12) for token in (3, 4, 5))
    for key in (first, second, third, first):
        sessions.draft(key)
    sessions.draft(sessions.begin([6] * 10))
    assert sessions.runner.fed_by(lambda: sessions.draft(first)) == 0
    assert sessions.runner.fed_by(lambda: sessions.draft(third)) == 0
    sessions.accept(second, 4)
    assert sessions.runner.fed_by(lambda: sessions.draft(second)) == 12 + 5 + 3
    sessions.end_all()


def test_what_does_not_fit_beside_the_first_waits_for_its_turn():
    """Two sessions of which the pool holds one: the first of a call is always served."""
    sessions = Sessions.scripted(num_blocks=4, block_size=4)
    one, two = sessions.begin([3] * 10), sessions.begin([4] * 10)
    for keys in ((one, two), (two, one), (one, two)):
        assert len(sessions.draft(*keys)[0]) == 4
        for key in keys:
            sessions.accept(key, 0, bonus=False)
    sessions.end_all()


@pytest.mark.parametrize("max_model_len", [16, 1000])
def test_a_session_that_outgrows_the_drafter_drafts_nothing(max_model_len):
    """J2, J6: its window, or its pool; the others go on."""
    sessions = Sessions.scripted(num_blocks=4, block_size=4, max_model_len=max_model_len)
    assert sessions.drafter.max_context_len == 16
    long, short = sessions.begin([3] * 11), sessions.begin([4])
    lengths = []
    for _ in range(8):
        lengths.append(len(sessions.draft(long)[0]))
        assert len(sessions.draft(short, long)[0]) == 4
        sessions.extend(long, [7])
    assert lengths == [4, 4, 3, 2, 1, 0, 0, 0]
    assert sessions.runner.kv.num_used_blocks <= 1, "it still holds KV"
    huge = sessions.begin([5] * 500)
    assert sessions.draft(huge, short) == [[], sessions.continuation(short, 4)]
    sessions.end_all()


def test_near_full_prompts_one_after_another():
    """H2."""
    sessions = Sessions.scripted(num_blocks=10, block_size=4)
    for _ in range(3):
        key = sessions.begin([3] * 36)
        assert sessions.draft(key) == [[]]
        assert sessions.reading == {key}
        assert len(sessions.draft(key)[0]) == 4
        sessions.end(key)
        assert sessions.runner.kv.num_used_blocks == 0


def test_a_long_prompt_holds_up_nobody():
    sessions = Sessions.scripted(max_step_tokens=8, num_blocks=100, block_size=4)
    short = sessions.begin([3] * 5)
    long = sessions.begin([4] * 150)
    sessions.draft(short)
    chains, num_calls = [(), ()], 0
    while not chains[0]:
        sessions.accept(short, 4)
        before = sessions.runner.num_forwards
        chains = sessions.draft(long, short)
        assert len(chains[1]) == 4
        assert sessions.runner.num_forwards - before <= 4
        assert sessions.runner.max_rows <= 8
        num_calls += 1
    assert num_calls == pytest.approx(150 / (4 * 6.75), abs=2)


def test_prompts_that_come_together_are_drafted_from_as_each_is_read():
    """No call waits for all of them."""
    sessions = Sessions.scripted(max_step_tokens=8, num_blocks=100, block_size=4)
    keys = [sessions.begin([3 + i] * 7) for i in range(8)]
    num_drafted = []
    while not num_drafted or num_drafted[-1] < 8:
        before = sessions.runner.num_forwards
        chains = sessions.draft(*keys)
        assert sessions.runner.num_forwards - before <= 2 + 4
        num_drafted.append(sum(len(chain) == 4 for chain in chains))
    assert num_drafted[0] == 4, "28 of 56 tokens, in forwards of 16"
    assert num_drafted == sorted(num_drafted)


@pytest.mark.parametrize(("read_s", "num_calls"), [(0.0, 18), (60.0, 0)])
def test_a_call_that_only_reads_a_long_prompt_is_short(read_s, num_calls):
    """One forward, or as many as some milliseconds hold: who comes meanwhile waits for no more."""
    sessions = Sessions.scripted(
        max_step_tokens=8, num_blocks=100, block_size=4, max_model_len=400, read_s=read_s
    )
    key = sessions.begin([3] * 150)
    for _ in range(num_calls):
        before = sessions.runner.num_forwards
        assert sessions.runner.fed_by(lambda: sessions.draft(key)) == 8
        assert sessions.reading == {key}
        assert sessions.runner.num_forwards - before == 1
    [chain] = sessions.draft(key)
    assert len(chain) == 4


# --- likely corrections ------------------------------------------------------------------------


def torn_law(prefix):
    """Two of three times one token, else another."""
    first, second = (7 * len(prefix) + 3 * prefix[-1]) % 36 + 4, 3
    return [8.0 * (i == first) + 7.3 * (i == second) for i in range(VOCAB_SIZE)]


def drafted_with_branches(sampling=GREEDY, *, branch_len=3, **fields):
    """A session of 9 tokens with a chain of 4 and branches at all its places."""
    sessions = Sessions.scripted(law=torn_law, **fields)
    key = sessions.begin(range(3, 12), sampling)
    sessions.draft(key)
    sessions.draft(key, num_branches=4, branch_len=branch_len)
    branches = sessions.branches(key)
    assert len(branches) == 4
    return sessions, key, branches


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_branches_begin_with_the_runner_up(sampling):
    sessions, _, _ = drafted_with_branches(sampling)
    assert sessions.num_branch_nodes == 4 * 3
    sessions.end_all()


def test_a_foreseen_correction_costs_nothing():
    sessions, key, branches = drafted_with_branches()
    chain = sessions.continuation(key, 4)
    branch = next(b for b in branches if b[:2] == chain[:2] and b[2] != chain[2])
    sessions.extend(key, branch[:3])
    assert sessions.runner.fed_by(lambda: sessions.draft(key, num_tokens=2)) == 0
    assert sessions.runner.fed_by(lambda: sessions.draft(key, num_tokens=4)) == 2
    assert sessions.branches(key) == []
    sessions.end_all()


def test_branches_behind_what_was_accepted_stay():
    sessions, key, branches = drafted_with_branches()
    sessions.accept(key, 1)
    later = [branch[2:] for branch in branches if branch[:2] == sessions.committed[key][-2:]]
    assert sessions.branches(key) == later
    assert len(later) == 2
    assert sessions.runner.fed_by(lambda: sessions.draft(key, num_tokens=2, num_branches=2)) == 0
    sessions.end_all()


def test_a_branch_computes_its_own_tokens_alone():
    """What it has in common with the chain is shared in full blocks of committed tokens, of which
    10 tokens make 2, and copied behind those."""
    sessions = Sessions.scripted(law=torn_law, block_size=4)
    key = sessions.begin(range(3, 13))
    sessions.draft(key)
    fed = sessions.runner.fed_by(lambda: sessions.draft(key, num_branches=4, branch_len=2))
    assert len(sessions.branches(key)) == 4
    assert fed == 4  # Each one's first token; a second one is drawn and not fed.
    forks = [len(branch) - 2 for branch in sessions.branches(key)]
    assert sorted(forks) == [0, 1, 2, 3]
    # The places 10 to 12 are reached through the third block, 12 and on through the fourth, too.
    assert sessions.runner.num_copied_blocks == sum(1 + (10 + fork > 12) for fork in forks)
    sessions.end_all()


def test_chains_take_the_room_of_branches_first():
    """9 tokens and a chain in blocks of 4; then a session that needs the rest of the pool."""
    sessions, key, _ = drafted_with_branches(num_blocks=16, block_size=4)
    other = sessions.begin([3] * 40)
    while not sessions.draft(other)[0]:
        pass
    assert sessions.branches(key) == []
    assert sessions.runner.fed_by(lambda: sessions.draft(key)) == 0
    sessions.end_all()


def test_without_room_there_are_no_branches_and_the_chain_goes_on():
    sessions = Sessions.scripted(law=torn_law, num_blocks=4, block_size=4)
    key = sessions.begin(range(3, 14))
    assert len(sessions.draft(key)[0]) == 4
    assert len(sessions.draft(key, num_branches=4)[0]) == 4
    sessions.end_all()


def test_a_chain_that_has_proved_right_gets_no_branches():
    """Whatever its confidence says."""
    sessions, key, _ = drafted_with_branches()
    for _ in range(20):
        sessions.draft(key)
        sessions.accept(key, 4)
    sessions.draft(key)
    sessions.draft(key, num_branches=4)
    assert sessions.branches(key) == []
    sessions.end_all()


def test_branches_hold_up_no_chain():
    """16 branches of 6 tokens, where chains grow by 2: the call ends with the chains. The next one,
    with nothing else to do, takes as many forwards as the branches need."""
    sessions = Sessions.scripted(law=torn_law, max_step_tokens=8, num_blocks=400, block_size=16)
    keys = [sessions.begin([token] * 7) for token in range(4, 8)]
    while not all(sessions.draft(*keys)):
        pass
    wanted = {"num_tokens": 6, "num_branches": 4, "branch_len": 6}
    before = sessions.runner.num_forwards
    sessions.draft(*keys, **wanted)
    assert sessions.runner.num_forwards - before == 2
    before = sessions.runner.num_forwards
    sessions.draft(*keys, **wanted)
    assert sessions.runner.num_forwards - before == 3
    assert [len(b) for key in keys for b in sessions.branches(key)] == [6, 7, 8, 9] * 4
    assert sessions.runner.fed_by(lambda: sessions.draft(*keys, **wanted)) == 0
    sessions.end_all()


def test_a_sure_chain_gets_no_branches():
    sessions = Sessions.scripted(law=lambda prefix: [60.0 * logit for logit in torn_law(prefix)])
    key = sessions.begin(range(3, 13))
    sessions.draft(key)
    sessions.draft(key, num_branches=4)
    assert sessions.branches(key) == []
    sessions.end_all()


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("floor", [0.1, 0.3, 0.8])
def test_chains_and_branches_end_where_drafts_are_not_worth_making(sampling, floor):
    unbounded, sessions = Sessions.scripted(law=torn_law), Sessions.scripted(law=torn_law)
    ended = 0
    for first in range(3, 11):
        key = unbounded.begin([*range(3, 13), first], sampling)
        assert key == sessions.begin([*range(3, 13), first], sampling)
        [whole] = unbounded.drafter.draft([DraftRequest(key, 8)])
        unbounded.end(key)
        request = DraftRequest(key, 8, least_survival=floor)
        [chain] = sessions.drafter.draft([request])
        assert chain == whole[: len(chain)]
        survivals = [math.prod(n.confidence for n in chain[:end]) for end in range(len(chain) + 1)]
        assert all(survival >= floor for survival in survivals[:-1]), "drafted for nothing"
        assert len(chain) == 8 or survivals[-1] < floor, "it ended early"
        ended += len(chain) < 8
        fed = sessions.runner.fed_by(lambda request=request: sessions.drafter.draft([request]))
        assert fed == 0, "asked again it goes on"
        for _ in range(4):
            sessions.drafter.draft([DraftRequest(key, 8, 4, 4, floor)])
        for branch in sessions.drafter._sessions[key].branches:
            assert math.prod(drawn.confidence for drawn in branch.tail[:-1]) >= floor or (
                len(branch.tail) == branch.fork + 1
            )
        sessions.end(key)
    assert ended, "the floor was never met"


def test_a_chain_of_laws_ends_nowhere_before_its_time():
    """How far it goes must not hang on what was drawn."""
    sessions = Sessions.scripted(law=torn_law)
    sampling = SamplingParams(temperature=1.0)
    session = DraftSession(1, tuple(range(3, 13)), 10, 1001, sampling, wants_laws=True)
    sessions.drafter.begin(session)
    [chain] = sessions.drafter.draft([DraftRequest(1, 8, least_survival=0.9)])
    assert len(chain) == 8
    assert math.prod(node.confidence for node in chain[:-1]) < 0.9
    sessions.drafter.end(1)


# --- what the model cannot read or say ---------------------------------------------------------


def test_a_context_outside_the_vocabulary_drafts_nothing():
    """K1: a target that is padded further may emit ids that the draft model has no row for."""
    sessions = Sessions.scripted()
    mute, sound = sessions.begin([3, VOCAB_SIZE]), sessions.begin([4, 5])
    later = sessions.begin([4, 5])
    assert list(map(len, sessions.draft(mute, sound, later))) == [0, 4, 4]
    sessions.extend(later, [VOCAB_SIZE + 100])
    sessions.extend(mute, [3])
    assert list(map(len, sessions.draft(mute, sound, later))) == [0, 4, 0]
    sessions.end_all()


def test_ids_that_the_tokenizer_does_not_know_are_not_proposed():
    """K1 the other way round: a draft model that is padded further than the target may be."""
    runner = CountingRunner(hashed_law(sharpness=8.0))
    sessions = Sessions(ModelDrafter(runner, vocab_size=30, max_step_tokens=32), runner, runner.law)
    lengths = []
    for token in range(3, 30):
        key = sessions.begin([token])
        for _ in range(2):  # The same, however often it is asked.
            [chain] = sessions.draft(key, num_tokens=8)
        told = sessions.continuation(key, 8)
        known = [token_id < 30 for token_id in told]
        assert len(chain) == ([*known, False]).index(False)
        lengths.append(len(chain))
    assert 0 < sum(lengths) < 8 * len(lengths)
    sessions.end_all()


def test_logits_that_are_not_finite_cost_their_own_session():
    def law(prefix):
        return [math.nan] * VOCAB_SIZE if prefix[0] == 9 else LAW(prefix)

    sessions = Sessions.scripted(law=law)
    poisoned, sound = sessions.begin([9, 9]), sessions.begin([4, 5])
    for _ in range(3):
        assert list(map(len, sessions.draft(poisoned, sound))) == [0, 4]
        assert list(map(len, sessions.draft(poisoned, sound, num_tokens=6))) == [0, 6]
        sessions.extend(poisoned, [3])
        sessions.accept(sound, 4)
    sessions.end_all()


def test_a_forward_that_fails_leaves_nothing_behind():
    sessions = Sessions.scripted()
    keys = [sessions.begin([token, 7, 8]) for token in range(3, 6)]
    sessions.draft(*keys)
    for key in keys:
        sessions.accept(key, 4)
    for num_failures in (1, 2):
        sessions.runner.num_failures = num_failures
        for _ in range(num_failures):
            with pytest.raises(MemoryError):
                sessions.draft(*keys)
            sessions.check()
        assert list(map(len, sessions.draft(*keys))) == [4] * 3
        for key in keys:
            sessions.accept(key, 1, bonus=False)
    sessions.end_all()


# --- configuration and handshake ---------------------------------------------------------------


def test_kind_model_needs_a_model():
    with pytest.raises(ValidationError, match=r"kind model needs .* model\.source"):
        DrafterConfig(kind="model")
    assert DrafterConfig(kind="model", model=ModelConfig()).model is not None


def test_the_command_line_goes_over_the_file(tmp_path):
    file = tmp_path / "drafter.yaml"
    file.write_text("kind: ngram\nmodel: {source: elsewhere, dtype: float32}\n")
    args = argparse.Namespace(config=file, kind="model", model="here", port=0)
    config = _config(args)
    assert (config.kind, config.model) == ("model", ModelConfig(source="here", dtype="float32"))
    args = argparse.Namespace(config=None, kind=None, model=None, port=7070)
    assert _config(args) == DrafterConfig(rpc={"port": 7070})


@contextlib.asynccontextmanager
async def serving(folder, **model):
    config = DrafterConfig(
        kind="model",
        model=ModelConfig(source=str(folder), dtype="float32", **model),
        kv_cache=KVCacheConfig(num_blocks=40),
    )
    service = await DrafterService.start(config, host="127.0.0.1")
    try:
        yield service
    finally:
        await service.stop(0.0)


def hello_of(tokenizer_folder, eos_token_id=2) -> TargetHello:
    tokenizer_json = (tokenizer_folder / "tokenizer.json").read_text()
    return TargetHello("verifier", "target", vocabulary_fingerprint(tokenizer_json, [eos_token_id]))


async def test_a_model_drafter_says_what_it_is(folder):
    async with (
        serving(folder, name="small", max_model_len=300) as service,
        RawVerifier(service.address, hello_of(folder)) as verifier,
    ):
        assert verifier.hello.drafter == service.name == "small"
        assert verifier.hello.max_context_len == 300
        assert verifier.hello.vocabulary == hello_of(folder).vocabulary
        await verifier.open(opening(1, (5, 6, 7)))
        assert (await verifier.draft(1, 3)).draft.nodes


def rename_specials(folder, change):
    """Save a tokenizer there, of which the special tokens have the ids that `change` makes of
    theirs by name."""
    folder.mkdir()
    save_tokenizer(folder, 128)
    file = folder / "tokenizer.json"
    fields = json.loads(file.read_text())
    vocab = fields["model"]["vocab"]
    ids = change({token: vocab.pop(token) for token in SPECIAL_TOKENS})
    fields["model"]["vocab"] = ids | vocab
    for added, (token, token_id) in zip(fields["added_tokens"], ids.items(), strict=True):
        added.update(content=token, id=token_id)
    fields["model"]["unk_token"] = next(iter(ids))
    file.write_text(json.dumps(fields))
    return folder


async def test_text_and_end_must_mean_the_same_and_padding_does_not_count(folder, tmp_path):
    """K1, K2, K4: the same tokenizer fits whatever the models' padding, and so does one with other
    special tokens; one that means something else by the end of a sequence does not."""
    padded = make_tiny_model(tmp_path / "padded", vocab_size=160)
    save_tokenizer(padded, 128)
    renamed = rename_specials(
        tmp_path / "renamed", lambda ids: {"<reserved>": 0, "<bos>": ids["<bos>"], "<eos>": 2}
    )
    moved = rename_specials(tmp_path / "moved", lambda ids: {"<pad>": 0, "<eos>": 1, "<bos>": 2})
    async with serving(padded) as service:
        for hello in (hello_of(folder), hello_of(renamed)):
            async with RawVerifier(service.address, hello) as verifier:
                assert verifier.hello is not None
        for hello in (hello_of(moved, 1), TargetHello("verifier", "target", "")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await RawVerifier(service.address, hello).__aenter__()
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "vocabulary" in caught.value.details()


async def test_a_session_over_the_window_is_refused_alone(folder):
    """J2: the verifier learns that this drafter is not for that sequence, and goes on without."""
    async with (
        serving(folder, max_model_len=16) as service,
        RawVerifier(service.address, hello_of(folder)) as verifier,
    ):
        await verifier.open(opening(1, (5,) * 14), opening(2, (6,) * 3), opening(3, (7,) * 40))
        assert (await verifier.error(3)).kind == "InvalidRequestError"
        assert len((await verifier.draft(1, 14)).draft.nodes) == 2
        await verifier.commit((1, 14, (8, 9)))
        assert (await verifier.draft(1, 16)).draft.nodes == ()
        await verifier.commit((1, 16, (10,)), (2, 3, (11,)))
        assert (await verifier.error(1)).kind == "InvalidRequestError"
        assert (await verifier.draft(2, 4)).draft.nodes
