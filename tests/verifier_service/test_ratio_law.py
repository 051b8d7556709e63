"""Under a ratio test too, what is emitted follows the target's law, whatever the drafter's, through
all processors and however drafts are cut; and what breaks the law is caught by the same test."""

from __future__ import annotations

import functools
import math
import random

import pytest

from cluster.config import SchedulerConfig, SpeculationConfig
from cluster.types import SamplingParams
from tests.support.engine_driver import EngineDriver, chain_draft
from tests.support.law_drafter import by_shared_noise, law_drafter, rounded
from tests.support.output_law import REJECT_BELOW, p_value, sequence_law
from tests.support.scripted_target import ScriptedRunner, hashed_law
from verifier_service.draft_trie import DraftOutcome
from verifier_service.events import DraftArrived, DraftSessionLost
from verifier_service.planner import StepProfile

VOCAB_SIZE = 3
LENGTH = 5
"""The first token comes with the prompt, the last has no draft behind it."""
PROMPT = (1, 0)
NUM_REQUESTS = 400
TARGET = hashed_law(salt="target", vocab_size=VOCAB_SIZE, sharpness=2.5)
OTHER = hashed_law(salt="other", vocab_size=VOCAB_SIZE, sharpness=2.5)
RULES = ("rejection", "block")
PLAIN = SamplingParams(temperature=1.0)
SAMPLINGS = {
    "t1": PLAIN,
    "t0.6-p0.6": SamplingParams(temperature=0.6, top_p=0.6),
    "t0.7-p0.9": SamplingParams(temperature=0.7, top_p=0.9),
    "t1.3-k2": SamplingParams(temperature=1.3, top_k=2),
    "penalties": SamplingParams(
        temperature=1.0,
        frequency_penalty=0.7,
        presence_penalty=0.4,
        logit_bias=((0, 0.5), (1, -0.7)),
    ),
}


@functools.cache
def near(prefix):
    """The target's law, somewhat bent: a good drafter's."""
    mixed = zip(TARGET(prefix), OTHER(prefix), strict=True)
    return [0.6 * target + 0.4 * other for target, other in mixed]


def adjusted_target(sampling):
    """The target's logits with penalties and bias, spelled out once more."""

    def law(prefix):
        logits = TARGET(prefix)
        for token_id, bias in sampling.logit_bias:
            logits[token_id] += bias
        generated = prefix[len(PROMPT) :]
        for token_id in set(generated):
            logits[token_id] -= sampling.frequency_penalty * generated.count(token_id)
            logits[token_id] -= sampling.presence_penalty
        return logits

    return law


GOOD = law_drafter(near)
AHEAD = law_drafter(near, lead=2)
"""Its chain goes on behind what is wanted."""
STEEP = StepProfile({1: 1.0, 64: 1.9, 96: 2.0, 512: 40.0})
"""Ms by tokens: a draft for half of the sequences is nearly free, the next ones are dear."""


@functools.cache
def law_under(sampling):
    return sequence_law(adjusted_target(sampling), PROMPT, LENGTH, VOCAB_SIZE, sampling)


def driver_of(drafter, rule, cls=EngineDriver, target=TARGET, **fields):
    return cls(
        ScriptedRunner(target, num_blocks=400, vocab_size=VOCAB_SIZE),
        drafter=drafter,
        scheduler=SchedulerConfig(max_waiting_sequences=NUM_REQUESTS),
        speculation=SpeculationConfig(
            draft_deadline_ms=1.0, local_drafters=("suffix",), verification=rule
        ),
        **fields,
    )


@functools.cache
def emitted(
    drafter, rule, sampling=PLAIN, depth=3, cls=EngineDriver, is_planned=False, target=TARGET
):
    """What many requests get from the engine, each with a key of its own; and the driver."""
    keys = random.Random(0)
    driver = driver_of(drafter, rule, cls, target, profile=STEEP if is_planned else None)
    for _ in range(NUM_REQUESTS):
        driver.submit(
            PROMPT,
            max_tokens=LENGTH,
            sampling=sampling,
            request_key=keys.getrandbits(64),
            ignore_eos=True,
            num_speculative_tokens=depth,
        )
    results = driver.run(max_steps=20_000).values()
    return [tuple(result.token_ids) for result in results], driver


def num_accepted(driver):
    return sum(r.finish.stats.num_accepted_tokens for r in driver.results.values())


class PiecemealDriver(EngineDriver):
    """Sends a draft in two pieces, and the second mostly after the deadline of its step: whether
    and where hangs on chance alone."""

    def __init__(self, *args, **fields):
        super().__init__(*args, **fields)
        self._rng = random.Random(1)
        self._held = []

    def _draft(self, output):
        for message in self._held:
            self.engine.inbox.put(message)
        self._held.clear()
        super()._draft(output)

    def _answer(self, seq):
        committed = tuple(self.sessions[seq])
        nodes = list(self._drafter(committed, self.requests[seq]))
        cut = self._rng.randrange(len(nodes))
        first = chain_draft(committed, nodes[:cut])._replace(answers=None)
        self.engine.inbox.put(DraftArrived(seq, first))
        behind = tuple(node.token_id for node in nodes[:cut])
        rest = [node._replace(parent=index - 1) for index, node in enumerate(nodes[cut:])]
        second = chain_draft((*committed, *behind), rest)._replace(answers=len(committed))
        if self._rng.random() < 0.7:
            self._held.append(DraftArrived(seq, second))
        else:
            self.engine.inbox.put(DraftArrived(seq, second))


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("rule", RULES)
def test_the_emitted_law_is_the_targets(rule, sampling):
    """With every processor, and a draft-ahead chain that goes on behind each verdict."""
    tokens, driver = emitted(AHEAD, rule, sampling, depth=2)
    assert num_accepted(driver) > 0.5 * NUM_REQUESTS
    assert p_value(tokens, law_under(sampling)) > REJECT_BELOW


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "drafter",
    [
        pytest.param(law_drafter(TARGET), id="the target itself"),
        pytest.param(law_drafter(OTHER), id="a poor one"),
        pytest.param(
            law_drafter(near, confidence=lambda token_id: 0.05 if token_id == 0 else 0.95),
            id="one whose confidence looks at its token",
        ),
    ],
)
def test_whatever_the_drafter_is(rule, drafter):
    """The last one too: such a word is not listened to."""
    tokens, _ = emitted(drafter, rule, is_planned=True)
    assert p_value(tokens, law_under(PLAIN)) > REJECT_BELOW


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("is_planned", [False, True], ids=["all at hand", "planned"])
def test_drafts_that_come_in_pieces_and_late(rule, is_planned):
    tokens, driver = emitted(AHEAD, rule, cls=PiecemealDriver, is_planned=is_planned)
    assert num_accepted(driver) > 0.5 * NUM_REQUESTS
    assert p_value(tokens, law_under(PLAIN)) > REJECT_BELOW


def test_a_planned_step_leaves_drafts_out():
    """Else the tests above show nothing about the planner."""
    drafted = [
        sum(r.finish.stats.num_draft_tokens for r in driver.results.values())
        for driver in (
            emitted(AHEAD, "block", cls=PiecemealDriver, is_planned=p)[1] for p in (0, 1)
        )
    ]
    assert 0 < drafted[1] < 0.9 * drafted[0]


# --- faults of drafters --------------------------------------------------------------------------


def without_laws(drafter):
    return lambda committed, request: [
        node._replace(law=None) for node in drafter(committed, request)
    ]


def with_impossible_laws(drafter):
    """Each token is none of its law's: the draft and the numbers were made in two ways."""

    def draft(committed, request):
        return [
            node._replace(token_id=(node.law.token_ids[0] + 1) % VOCAB_SIZE)
            if len(node.law.token_ids) < VOCAB_SIZE
            else node._replace(law=node.law._replace(weights=node.law.weights[:-1]))
            for node in drafter(committed, request)
        ]

    return draft


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spoil", [without_laws, with_impossible_laws])
def test_a_draft_whose_law_is_missing_or_impossible_is_verified_by_coupling(rule, spoil):
    """And so gives the very tokens of plain decoding."""
    tokens, driver = emitted(spoil(GOOD), rule)
    plain, _ = emitted(None, rule)
    assert tokens == plain
    outcomes = driver.engine.draft_outcomes
    assert outcomes[DraftOutcome.LAWLESS] > 0
    assert outcomes[DraftOutcome.USED] == 0
    assert p_value(tokens, law_under(PLAIN)) > REJECT_BELOW


def test_one_request_without_laws_leaves_the_others_alone():
    """Every third draft has none; its requests and the others' are lawful, each by its own rule."""
    bad = without_laws(GOOD)

    def drafter(committed, request):
        return (bad if int(request.request_id) % 3 == 0 else GOOD)(committed, request)

    tokens, driver = emitted(drafter, "rejection")
    all_good, _ = emitted(GOOD, "rejection")
    plain, _ = emitted(None, "rejection")
    expected = [plain[i] if (i + 1) % 3 == 0 else all_good[i] for i in range(NUM_REQUESTS)]
    assert tokens == expected
    assert driver.engine.draft_outcomes[DraftOutcome.LAWLESS] > 0


def test_a_drafter_that_always_proposes_what_the_target_never_draws_is_never_accepted():
    sampling = SamplingParams(temperature=1.0, logit_bias=((2, -1e5),))

    def only_two(prefix):
        return [0.0, 0.0, 1e6]

    tokens, driver = emitted(law_drafter(only_two), "rejection", sampling)
    assert sum(r.finish.stats.num_draft_tokens for r in driver.results.values()) > NUM_REQUESTS
    assert num_accepted(driver) == 0
    assert p_value(tokens, law_under(sampling)) > REJECT_BELOW


class LosingDriver(EngineDriver):
    """Now and then a session is lost; the others go on."""

    def _draft(self, output):
        super()._draft(output)
        for commit in output.orders.commits:
            if commit.seq in self.sessions and (commit.seq + commit.position) % 3 == 0:
                self.engine.inbox.put(DraftSessionLost(commit.seq))


@pytest.mark.parametrize("rule", RULES)
def test_a_session_that_is_lost_goes_on_without_drafts(rule):
    tokens, driver = emitted(AHEAD, rule, cls=LosingDriver)
    assert num_accepted(driver) > 0
    assert p_value(tokens, law_under(PLAIN)) > REJECT_BELOW


@pytest.mark.parametrize("rule", RULES)
def test_a_request_whose_verifier_is_lost_goes_on_in_the_targets_law(rule):
    """What two steps gave was delivered; another verifier goes on with another depth."""
    _, lost = emitted(GOOD, rule)
    driver = driver_of(AHEAD, rule)
    for seq, result in lost.results.items():
        delivered = [token_id for event in result.events[:2] for token_id in event.token_ids]
        driver.submit(
            PROMPT,
            max_tokens=LENGTH,
            resumed_ids=tuple(delivered),
            sampling=PLAIN,
            request_key=lost.requests[seq].request_key,
            ignore_eos=True,
            num_speculative_tokens=1,
        )
        driver.results[seq].token_ids += delivered
    results = driver.run(max_steps=20_000).values()
    tokens = [tuple(result.token_ids) for result in results]
    assert p_value(tokens, law_under(PLAIN)) > REJECT_BELOW


# --- which requests the rule is for --------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "wants"),
    [
        ({"sampling": PLAIN}, True),
        ({"sampling": SamplingParams(temperature=0.0)}, False),
        ({"sampling": PLAIN, "prediction_ids": (1, 2, 3)}, False),
    ],
    ids=["sampled", "greedy", "predicted"],
)
def test_laws_are_asked_for_where_they_gain(fields, wants):
    driver = driver_of(GOOD, "rejection")
    driver.submit(PROMPT, max_tokens=LENGTH, ignore_eos=True, **fields)
    driver.run()
    [order] = [order for output in driver.outputs for order in output.orders.opens]
    assert order.wants_laws is wants


def test_coupled_sessions_ask_for_no_laws_and_ignore_them():
    tokens, driver = emitted(GOOD, "coupled")
    assert not any(order.wants_laws for out in driver.outputs for order in out.orders.opens)
    assert tokens == emitted(None, "coupled")[0]


# --- negative controls ---------------------------------------------------------------------------

TARGET_PROBS = (1e-9, 0.6, 0.4)
DRAFT_PROBS = (0.6, 0.38, 0.02)


def always(probs):
    logits = [math.log(prob) for prob in probs]
    return lambda prefix: list(logits)


def keeps_by_token(committed, request):
    """Drops drafts for what they are."""
    nodes = law_drafter(always(DRAFT_PROBS))(committed, request)
    return nodes if nodes[0].token_id == 1 else []


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("drafter", "is_lawful"),
    [
        pytest.param(law_drafter(always(DRAFT_PROBS)), True, id="a right drafter"),
        pytest.param(
            law_drafter(always(DRAFT_PROBS), draw=by_shared_noise), False, id="shared noise"
        ),
        pytest.param(
            law_drafter(always(DRAFT_PROBS), tell=rounded), False, id="a law rounded after the draw"
        ),
        pytest.param(keeps_by_token, False, id="drafts dropped by their tokens"),
    ],
)
def test_what_breaks_the_law_is_caught(rule, drafter, is_lawful):
    """On tokens that do not hang on one another, so that all of them count."""
    tokens, _ = emitted(drafter, rule, target=always(TARGET_PROBS))
    behind_first = [(token_id,) for answer in tokens for token_id in answer[1:]]
    law = {(token_id,): prob for token_id, prob in enumerate(TARGET_PROBS)}
    assert (p_value(behind_first, law) > REJECT_BELOW) is is_lawful
