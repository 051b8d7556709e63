"""A grammar holds at every position of a block, and drafts change nothing about the text."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from cluster.config import SpeculationConfig
from cluster.grammar import GrammarError, GrammarKind, GrammarSpec
from cluster.types import FinishReason, GenerationRequest, SamplingParams
from engine.grammar import GrammarState
from router.tokenizer import Tokenizer
from tests.support.engine_driver import EngineDriver, Result, ScriptedDrafter
from tests.support.scripted_target import ScriptedRunner, hashed_law
from tests.support.scripted_verifier import make_card
from verifier_service.events import Submitted
from verifier_service.grammars import Grammars

CARD = make_card()
TOKENIZER = Tokenizer(CARD)
EOS = CARD.eos_token_ids[0]
PROMPT = TOKENIZER.encode("say", add_special_tokens=False)
DEPTH = 5
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["fox", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
SPEC = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
CHOICE = GrammarSpec(GrammarKind.CHOICE, json.dumps(["the quick fox", "the lazy dog"]))


@pytest.fixture(scope="module")
def grammars() -> Any:
    made = Grammars(CARD)
    yield made
    made.close()


def driver_of(seed: int, drafter: ScriptedDrafter | None) -> EngineDriver:
    law = hashed_law(salt=str(seed), vocab_size=CARD.vocab_size, sharpness=6.0)
    runner = ScriptedRunner(law, vocab_size=CARD.vocab_size, num_blocks=200, max_model_len=300)
    return EngineDriver(
        runner,
        drafter=drafter,
        speculation=SpeculationConfig(planner="fixed", num_speculative_tokens=DEPTH),
    )


def submit(driver: EngineDriver, grammars: Grammars, spec: GrammarSpec, **fields: Any) -> int:
    """As the servicer does: the grammar is compiled and handed over."""
    fields = {"max_tokens": 120, "stop_token_ids": frozenset({EOS})} | fields
    driver.engine._receive(block=False)  # What was submitted before.
    seq = driver.submit(PROMPT, grammar=spec, **fields)
    driver.engine.inbox.get()
    request = driver.requests[seq]
    driver.engine.inbox.put(Submitted(seq, request, grammars.compile(request)))
    return seq


def text_of(result: Result) -> str:
    return TOKENIZER.decode(result.token_ids)


def answer(grammars: Grammars, drafter: ScriptedDrafter | None, seed: int, **fields: Any) -> Result:
    driver = driver_of(seed, drafter)
    seq = submit(driver, grammars, fields.pop("spec", SPEC), request_key=seed, **fields)
    return driver.run()[seq]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_documents_are_valid_and_the_same_with_any_drafter(
    grammars: Grammars, seed: int, temperature: float
) -> None:
    sampling = SamplingParams(temperature, presence_penalty=0.5)
    plain = answer(grammars, None, seed, sampling=sampling)
    assert plain.finish is not None, plain.error
    assert plain.finish.reason is FinishReason.STOP
    document = json.loads(text_of(plain))
    assert set(document) == {"name", "age", "kind"}
    assert 0 <= document["age"] <= 130
    rng = random.Random(seed)

    def oracle(committed: tuple[int, ...], request: GenerationRequest) -> list[int]:
        done = len(committed) - len(PROMPT)
        right = plain.token_ids[done : done + rng.randrange(DEPTH + 1)]
        return [*right, rng.randrange(CARD.vocab_size)]

    def garbage(committed: tuple[int, ...], request: GenerationRequest) -> list[int]:
        return [rng.randrange(CARD.vocab_size) for _ in range(DEPTH)]

    for drafter in (oracle, garbage, lambda committed, request: [EOS] * DEPTH):
        drafted = answer(grammars, drafter, seed, sampling=sampling)
        assert drafted.token_ids == plain.token_ids
    assert answer(grammars, oracle, seed, sampling=sampling).finish.stats.num_accepted_tokens > 3


def test_drafts_that_break_the_grammar_are_cut_before_the_forward(grammars: Grammars) -> None:
    wrong = TOKENIZER.encode("dog", add_special_tokens=False)[0]
    result = answer(grammars, lambda committed, request: [wrong] * DEPTH, 1, spec=CHOICE)
    assert text_of(result) in ("the quick fox", "the lazy dog")
    assert result.finish is not None
    assert result.finish.stats.num_draft_tokens <= 3  # "dog" fits in one place of one choice.


def test_a_constrained_request_leaves_its_neighbours_alone(grammars: Grammars) -> None:
    alone = driver_of(3, None)
    free = alone.submit(PROMPT, max_tokens=20)
    expected = alone.run()[free].token_ids
    driver = driver_of(3, None)
    free = driver.submit(PROMPT, max_tokens=20)
    bound = submit(driver, grammars, SPEC)
    results = driver.run()
    assert results[free].token_ids == expected
    json.loads(text_of(results[bound]))


def test_preempted_and_resumed_it_goes_on_where_it_was(grammars: Grammars) -> None:
    expected = answer(grammars, None, 2).token_ids
    driver = driver_of(2, None)
    seq = submit(driver, grammars, SPEC, request_key=2)
    for step in range(200):
        driver.step()
        if step % 7 == 3 and driver.engine._scheduler.running:
            driver.engine._scheduler._preempt_newest()
    assert driver.results[seq].token_ids == expected
    driver = driver_of(2, None)
    seq = submit(driver, grammars, SPEC, request_key=2, resumed_ids=tuple(expected[:5]))
    driver.results[seq].token_ids += expected[:5]  # The client has these already.
    assert driver.run()[seq].token_ids == expected


def test_a_grammar_that_cannot_go_on_is_that_request_s_error(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = driver_of(1, None)
    bound = submit(driver, grammars, SPEC)
    free = driver.submit(PROMPT, max_tokens=10)
    for _ in range(3):
        driver.step()

    def fail(self: GrammarState, draft_ids: Any) -> Any:
        raise GrammarError("the grammar allows nothing here")

    monkeypatch.setattr(GrammarState, "masks", fail)
    results = driver.run()
    assert results[bound].error is not None
    assert "allows nothing here" in results[bound].error.message
    assert results[free].finish is not None
