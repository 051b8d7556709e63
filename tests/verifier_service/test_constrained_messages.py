"""Reasoning, calls and answers in a given form: drafts change nothing about them, wherever in a
block one of them ends and the next begins."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from cluster.config import SpeculationConfig
from cluster.grammar import GrammarKind, GrammarSpec
from cluster.types import FinishReason, GenerationRequest, SamplingParams
from engine.drafting.interface import DraftRequest, DraftSession
from engine.drafting.ngram import NgramDrafter
from router.message_grammar import message_grammar
from router.message_reader import MessageForm
from router.schema import ChatCompletionRequest, parse
from router.thinking import Thinking
from router.tokenizer import Tokenizer
from router.tools.call_format import HERMES
from router.tools.tool_use import ToolUse, tool_use
from tests.support.engine_driver import EngineDriver, Result, ScriptedDrafter
from tests.support.scripted_target import Law, ScriptedRunner, hashed_law
from tests.support.tools import TOOLS, thinking_card
from verifier_service.events import Submitted
from verifier_service.grammars import Grammars

CARD = thinking_card()
TOKENIZER = Tokenizer(CARD)
EOS = CARD.eos_token_ids[0]
DEPTH = 5
ANSWER = GrammarSpec(
    GrammarKind.JSON_SCHEMA,
    json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
)
CALLS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "'


@pytest.fixture(scope="module")
def grammars() -> Any:
    made = Grammars(CARD)
    yield made
    made.close()


def ids(text: str) -> tuple[int, ...]:
    return TOKENIZER.encode(text, add_special_tokens=False)


PROMPT = ids("say")


def wanting(text: str, prompt: Sequence[int] = PROMPT, seed: int = 0) -> Law:
    """Says the text if it may, and then, or where it may not, something random; an end before
    long."""
    script = ids(text)
    noise = hashed_law(salt=str(seed), vocab_size=CARD.vocab_size, sharpness=6.0)

    def law(prefix: tuple[int, ...]) -> list[float]:
        logits = noise(prefix)
        done = len(prefix) - len(prompt)
        if done < len(script):
            logits[script[done]] += 20.0
        else:
            for token_id in (EOS, *ids('"}')):
                logits[token_id] += min(done / 8, 20.0)
        return logits

    return law


def run(
    grammars: Grammars,
    law: Law,
    spec: GrammarSpec | None,
    drafter: ScriptedDrafter | None,
    *,
    prompt: Sequence[int] = PROMPT,
    count: int = 1,
    **fields: Any,
) -> list[Result]:
    """`count` requests at once."""
    runner = ScriptedRunner(law, vocab_size=CARD.vocab_size, num_blocks=400, max_model_len=500)
    speculation = SpeculationConfig(
        planner="fixed", num_speculative_tokens=DEPTH, draft_deadline_ms=1.0, local_drafters=()
    )
    driver = EngineDriver(runner, drafter=drafter, speculation=speculation)
    fields = {"max_tokens": 300, "stop_token_ids": frozenset({EOS})} | fields
    seqs = []
    for key in range(1, count + 1):
        driver.engine._receive(block=False)
        seq = driver.submit(prompt, grammar=spec, request_key=key, **fields)
        driver.engine.inbox.get()
        request = driver.requests[seq]
        driver.engine.inbox.put(Submitted(seq, request, grammars.compile(request)))
        seqs.append(seq)
    results = driver.run()
    for seq in seqs:
        finish = results[seq].finish
        assert finish is not None, results[seq].error
        assert finish.reason is FinishReason.STOP
    return [results[seq] for seq in seqs]


def text_of(result: Result) -> str:
    return TOKENIZER.decode(result.token_ids)


def drafters(plain: Sequence[int], seed: int) -> list[ScriptedDrafter]:
    """One that knows the answer, by pieces and with something wrong behind; and two that do not."""
    rng = random.Random(seed)

    def oracle(committed: tuple[int, ...], request: GenerationRequest) -> list[int]:
        done = len(committed) - len(request.prompt_ids)
        right = plain[done : done + rng.randrange(DEPTH + 1)]
        return [*right, rng.randrange(CARD.vocab_size)]

    def garbage(committed: tuple[int, ...], request: GenerationRequest) -> list[int]:
        return [rng.randrange(CARD.vocab_size) for _ in range(DEPTH)]

    return [oracle, garbage, lambda committed, request: [*ids("<tool_call>\n"), EOS, EOS]]


def use(**fields: Any) -> ToolUse:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    found = tool_use(parse(ChatCompletionRequest, body | fields))
    assert found is not None
    return found


@pytest.mark.parametrize("thinking", [Thinking.OPEN, Thinking.POSSIBLE])
def test_drafts_behind_the_end_of_reasoning_obey_the_grammar(
    grammars: Grammars, thinking: Thinking
) -> None:
    thought = "<think>" if thinking is Thinking.POSSIBLE else ""
    thought += "the lazy dog</think>"
    wanted = f"{thought}```json"
    spec = message_grammar(ANSWER, None, HERMES, thinking, TOKENIZER.special_ids)
    straddling = []

    def fence(committed: tuple[int, ...], request: GenerationRequest) -> tuple[int, ...]:
        done = len(committed) - len(PROMPT)
        chain = ids(wanted)[done : done + DEPTH]
        straddling.append("</think>`" in TOKENIZER.decode(chain))
        return chain

    [plain] = run(grammars, wanting(wanted), spec, None)
    [drafted] = run(grammars, wanting(wanted), spec, fence)
    assert any(straddling), "no draft went over the end of the reasoning"
    assert drafted.token_ids == plain.token_ids
    assert drafted.finish is not None
    assert drafted.finish.stats.num_accepted_tokens >= 3
    assert text_of(plain).startswith(thought)
    assert set(json.loads(text_of(plain).removeprefix(thought))) >= {"a"}
    for drafter in drafters(plain.token_ids, 1):
        assert run(grammars, wanting(wanted), spec, drafter)[0].token_ids == plain.token_ids


def test_drafts_that_no_string_may_hold_are_cut(grammars: Grammars) -> None:
    newline = ids("\n")[0]
    law = wanting('{"a": "the quick fox')
    spec = GrammarSpec(GrammarKind.JSON_OBJECT)
    [plain] = run(grammars, law, spec, None)
    [drafted] = run(grammars, law, spec, lambda committed, request: [newline] * DEPTH)
    assert drafted.token_ids == plain.token_ids
    assert json.loads(text_of(drafted))["a"].startswith("the quick fox")
    assert drafted.finish is not None
    in_string = len(ids("the quick fox")) * DEPTH
    outside = len(drafted.token_ids) * DEPTH - in_string
    assert drafted.finish.stats.num_draft_tokens <= outside


def test_json_objects_at_once_with_drafts(grammars: Grammars) -> None:
    spec = GrammarSpec(GrammarKind.JSON_OBJECT)
    sampling = SamplingParams(1.0)
    law = wanting('{"', seed=3)
    plain = run(grammars, law, spec, None, count=4, sampling=sampling)
    assert len({tuple(result.token_ids) for result in plain}) == 4
    for drafter in drafters(plain[0].token_ids, 3)[:2]:
        drafted = run(grammars, law, spec, drafter, count=4, sampling=sampling)
        assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
        assert all(isinstance(json.loads(text_of(result)), dict) for result in drafted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("choice", "wanted"),
    [("auto", "the lazy dog.\n" + CALLS), ("auto", "the fox<tool"), ("required", CALLS)],
)
def test_calls_are_valid_and_the_same_with_any_drafter(
    grammars: Grammars, choice: str, wanted: str, temperature: float
) -> None:
    tools = use(tool_choice=choice)
    spec = message_grammar(None, tools, HERMES, Thinking.NONE, TOKENIZER.special_ids)
    sampling = SamplingParams(temperature)
    [plain] = run(grammars, wanting(wanted), spec, None, sampling=sampling)
    message, called = MessageForm(call_format=HERMES, names=tools.names).read(text_of(plain))
    assert called == ("<tool_call>" in text_of(plain))
    assert called or choice == "auto"
    for call in message.calls:
        assert set(json.loads(call.arguments)) <= {"city", "days"}
    for drafter in drafters(plain.token_ids, 2):
        [drafted] = run(grammars, wanting(wanted), spec, drafter, sampling=sampling)
        assert drafted.token_ids == plain.token_ids


def test_drafts_of_other_markup_from_the_prompt_cost_speed_only(grammars: Grammars) -> None:
    prompt = ids('<<function=get>> <<tool_call get>> <tool_response>{"name": "get_time')
    law = wanting("the fox <tool_call>\n", prompt)
    tools = use()
    spec = message_grammar(None, tools, HERMES, Thinking.NONE, TOKENIZER.special_ids)

    def look_up(committed: tuple[int, ...], request: GenerationRequest) -> list[int]:
        drafter = NgramDrafter(max_ngram=2, min_ngram=1)
        drafter.begin(DraftSession(1, committed, len(prompt), 1, request.sampling))
        [chain] = drafter.draft([DraftRequest(1, DEPTH)])
        return [node.token_id for node in chain]

    [plain] = run(grammars, law, spec, None, prompt=prompt)
    [drafted] = run(grammars, law, spec, look_up, prompt=prompt)
    assert drafted.token_ids == plain.token_ids
    assert drafted.finish is not None
    stats = drafted.finish.stats
    assert stats.num_draft_tokens > stats.num_accepted_tokens, "no draft was wrong"
    message, called = MessageForm(call_format=HERMES, names=tools.names).read(text_of(drafted))
    assert called
    assert message.content == "the fox"
