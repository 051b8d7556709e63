"""What is emitted follows the target's law, whatever drafts, and a rule that breaks the law is
caught by the same test.

That it is the law is shown for plain answers, and of drafted ones that they are the same to the
token, which is more. `make test-long` shows the law for each drafter by itself too.
"""

from __future__ import annotations

import functools
import random

import pytest
import torch

from cluster.config import SchedulerConfig
from cluster.types import SamplingParams
from engine.sampling import SampleRow, sample
from tests.support.engine_driver import EngineDriver
from tests.support.output_law import REJECT_BELOW, p_value, sequence_law, target_probs
from tests.support.scripted_target import ScriptedRunner, hashed_law

VOCAB_SIZE = 5
LENGTH = 3
PROMPT = (1, 2)
NUM_REQUESTS, FEW_REQUESTS = 1_500, 250
TARGET = hashed_law(salt="target", vocab_size=VOCAB_SIZE, sharpness=2.5)
OTHER = hashed_law(salt="other", vocab_size=VOCAB_SIZE, sharpness=2.5)

SAMPLINGS = {
    "t1": SamplingParams(temperature=1.0),
    "t0.7-p0.9": SamplingParams(temperature=0.7, top_p=0.9),
    "t1.3-k3": SamplingParams(temperature=1.3, top_k=3),
}


@functools.cache
def near(prefix):
    """The target's law, somewhat bent: a good drafter's."""
    mixed = zip(TARGET(prefix), OTHER(prefix), strict=True)
    return [0.8 * target + 0.2 * other for target, other in mixed]


def coupled(law):
    """Draws with the request's own noise, as a drafter model does."""

    def draft(committed, request):
        tokens = list(committed)
        for _ in range(request.num_speculative_tokens):
            logits = torch.tensor([law(tuple(tokens))], dtype=torch.float32)
            row = SampleRow(request.sampling, request.request_key, len(tokens))
            tokens += sample(logits, [row])
        return tokens[len(committed) :]

    return draft


def most_likely(committed, request):
    """A point mass, as n-gram lookup gives."""
    tokens = list(committed)
    for _ in range(request.num_speculative_tokens):
        logits = TARGET(tuple(tokens))
        tokens.append(logits.index(max(logits)))
    return tokens[len(committed) :]


def garbage(committed, request):
    rng = random.Random(request.request_key + len(committed))
    return [rng.randrange(VOCAB_SIZE) for _ in range(request.num_speculative_tokens)]


def token_dependent(committed, request):
    """Keeps a draft or drops it by looking at its tokens. Lossless under the coupled rule only."""
    chain = coupled(near)(committed, request)
    return chain if chain[0] in (0, 3) else None if chain[0] == 1 else chain[:1]


DRAFTERS = {
    "none": None,
    "itself": coupled(TARGET),
    "good": coupled(near),
    "poor": coupled(OTHER),
    "point-mass": most_likely,
    "garbage": garbage,
    "token-dependent": token_dependent,
}


@functools.cache
def emitted(drafter, sampling, depth, num_requests=NUM_REQUESTS):
    """What so many requests get from the engine, each with a key of its own."""
    keys = random.Random(0)
    driver = EngineDriver(
        ScriptedRunner(TARGET, num_blocks=400, vocab_size=VOCAB_SIZE),
        drafter=drafter,
        scheduler=SchedulerConfig(max_waiting_sequences=num_requests),
    )
    for _ in range(num_requests):
        driver.submit(
            PROMPT,
            max_tokens=LENGTH,
            sampling=sampling,
            request_key=keys.getrandbits(64),
            ignore_eos=True,
            num_speculative_tokens=depth,
        )
    results = driver.run(max_steps=20_000).values()
    accepted = sum(result.finish.stats.num_accepted_tokens for result in results)
    return [tuple(result.token_ids) for result in results], accepted


def depth_of(name):
    """Every depth with some drafter, no drafter with every depth."""
    return 1 + list(DRAFTERS).index(name) % 3


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize(
    "name", ["none", *(pytest.param(n, marks=pytest.mark.long) for n in DRAFTERS if n != "none")]
)
def test_the_emitted_law_is_the_targets(name, sampling):
    tokens, _ = emitted(DRAFTERS[name], sampling, depth_of(name))
    law = sequence_law(TARGET, PROMPT, LENGTH, VOCAB_SIZE, sampling)
    assert p_value(tokens, law) > REJECT_BELOW


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "none"])
def test_a_drafters_answers_are_the_plain_ones(name, sampling):
    plain, _ = emitted(None, sampling, depth_of("none"))
    tokens, accepted = emitted(DRAFTERS[name], sampling, depth_of(name), FEW_REQUESTS)
    assert accepted > 0, "the drafter took no part: the test shows nothing"
    assert tokens == plain[:FEW_REQUESTS]


# --- negative controls: rules that look right and are not ---------------------------------------

P = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)
Q = torch.tensor([0.5, 0.4, 0.1], dtype=torch.float64)
NUM_DRAWS = 40_000


def noise(generator, n):
    uniform = torch.rand(n, len(P), generator=generator, dtype=torch.float64)
    return -torch.log(-torch.log1p(-uniform))


def ratio_test(*, shared_noise=False, drop=None, correct_from_target=False):
    """One position of rejection sampling over many draws, right unless an argument spoils it."""
    generator = torch.Generator().manual_seed(1)
    draft_noise = noise(generator, NUM_DRAWS)
    recovery_noise = draft_noise if shared_noise else noise(generator, NUM_DRAWS)
    drafts = torch.argmax(torch.log(Q) + draft_noise, dim=1)
    uniform = torch.rand(NUM_DRAWS, generator=generator, dtype=torch.float64)
    accepted = uniform < (P / Q)[drafts]
    residual = P if correct_from_target else torch.clamp(P - Q, min=0)
    recovered = torch.argmax(torch.log(residual) + recovery_noise, dim=1)
    tokens = torch.where(accepted, drafts, recovered)
    if drop is not None:
        plain = torch.argmax(torch.log(P) + noise(generator, NUM_DRAWS), dim=1)
        tokens = torch.where(drop(drafts), plain, tokens)
    return [(token_id,) for token_id in tokens.tolist()]


LAW_OF_P = {(token_id,): prob for token_id, prob in enumerate(P.tolist())}


def test_the_test_itself_accepts_a_right_rule():
    assert p_value(ratio_test(), LAW_OF_P) > REJECT_BELOW


@pytest.mark.parametrize(
    "spoiled",
    [
        pytest.param({"shared_noise": True}, id="shared noise with a ratio test"),
        pytest.param({"drop": lambda drafts: drafts == 0}, id="a drop rule that sees the token"),
        pytest.param({"correct_from_target": True}, id="a correction from the unmodified target"),
    ],
)
def test_the_same_test_rejects(spoiled):
    assert p_value(ratio_test(**spoiled), LAW_OF_P) < REJECT_BELOW


def test_the_law_of_another_temperature_is_rejected():
    tokens, _ = emitted(None, SAMPLINGS["t1"], depth_of("none"))
    wrong = sequence_law(TARGET, PROMPT, LENGTH, VOCAB_SIZE, SamplingParams(temperature=0.7))
    assert p_value(tokens, wrong) < REJECT_BELOW


def test_sampling_parameters_shape_the_law():
    probs = target_probs([1.0, 2.0, 3.0, 0.0], SamplingParams(temperature=0.3, top_p=0.5))
    assert probs == [0.0, 0.0, 1.0, 0.0]
