"""The grammar of a message and its reader agree: what the one allows the other understands."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from cluster.grammar import GrammarKind, GrammarSpec
from cluster.grammar_check import GrammarChecker
from cluster.grammar_matcher import compile_matcher
from engine.grammar import GrammarState
from engine.grammar_vocabulary import GrammarVocabulary
from router.message_grammar import message_grammar
from router.message_reader import MessageForm
from router.schema import ChatCompletionRequest, parse
from router.thinking import Thinking
from router.tokenizer import Tokenizer
from router.tools.call_format import FORMATS, HERMES, LLAMA3_JSON, CallFormat
from router.tools.tool_use import ToolUse, tool_use
from tests.support.grammar_walk import random_walk
from tests.support.tools import TOOLS, thinking_card

CARD = thinking_card()
TOKENIZER = Tokenizer(CARD)
VOCABULARY = GrammarVocabulary(CARD.tokenizer_json, CARD.vocab_size, CARD.eos_token_ids)
ANSWER = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({"enum": [{"name": "Bob"}, {}]}))
PARIS = '{"city": "Paris"}'


def use(**fields: Any) -> ToolUse:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    found = tool_use(parse(ChatCompletionRequest, body | fields))
    assert found is not None
    return found


def ids(text: str) -> tuple[int, ...]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def state(spec: GrammarSpec | None) -> GrammarState:
    assert spec is not None
    return GrammarState(VOCABULARY, spec)


def allows(spec: GrammarSpec | None, text: str) -> bool:
    """As a whole answer."""
    started = state(spec)
    token_ids = ids(text)
    return started.valid_prefix_len(token_ids) == len(token_ids) and _ends(started, token_ids)


def _ends(started: GrammarState, token_ids: tuple[int, ...]) -> bool:
    started.commit(token_ids)
    return started.accepting


@pytest.mark.parametrize("call_format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("thinking", Thinking)
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_what_is_generated_is_read_as_valid_calls(
    call_format: CallFormat, thinking: Thinking, choice: str
) -> None:
    tools = use(tool_choice=choice)
    spec = message_grammar(None, tools, call_format, thinking, ())
    begin = {Thinking.NONE: "", Thinking.OPEN: "hm</think>\n", Thinking.POSSIBLE: "<think></think>"}
    before = begin[thinking] + (call_format.marker if choice == "auto" else "")
    if not call_format.marker and choice == "auto":
        before += '{"name": "get_time"'
    for seed in range(2):
        started = state(spec)
        started.commit(ids(before))
        rng = random.Random(seed)
        closing = [*CARD.eos_token_ids, *ids('"}')]
        text = before + TOKENIZER.decode(random_walk(started, rng, closing))
        message, called = MessageForm(thinking, call_format, tools.names).read(text)
        assert called, text
        assert not message.content
        for call in message.calls:
            arguments = json.loads(call.arguments)
            assert set(arguments) <= {"city", "days"}
            assert ("city" in arguments) == (call.name == "get_weather")


@pytest.mark.parametrize("call_format", FORMATS.values(), ids=FORMATS)
def test_text_is_free_and_calls_are_not(call_format: CallFormat) -> None:
    spec = message_grammar(None, use(), call_format, Thinking.NONE, ())
    weather = call_format.write("get_weather", PARIS)
    time = call_format.write("get_time", "{}")
    two = weather + (call_format.separator or "; ") + time
    for text in ("", "Hi", "1 < 2", "<tool_c", '{"nam', "{", weather, time):
        assert allows(spec, text), text
    assert allows(spec, two) == bool(call_format.separator)
    for text in (call_format.write("get_weather", "{}"), weather[:-1], weather + "x"):
        assert not allows(spec, text), text


def test_text_may_come_before_a_marker_but_other_json_is_no_call() -> None:
    hermes = message_grammar(None, use(), HERMES, Thinking.NONE, ())
    llama = message_grammar(None, use(), LLAMA3_JSON, Thinking.NONE, ())
    assert allows(hermes, "Let me see.\n" + HERMES.write("get_weather", PARIS))
    assert not allows(hermes, HERMES.write("fetch", PARIS))
    assert allows(llama, '{"name": "Bob", "parameters": 5}')
    assert allows(llama, "Bob: " + LLAMA3_JSON.write("get_weather", "{}"))


def test_one_call_where_several_are_not_wanted() -> None:
    one, time = HERMES.write("get_weather", PARIS), HERMES.write("get_time", "{}")
    for fields in (
        {"parallel_tool_calls": False},
        {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
    ):
        spec = message_grammar(None, use(**fields), HERMES, Thinking.NONE, ())
        assert allows(spec, one)
        assert not allows(spec, f"{one}\n{time}")
        assert allows(spec, "Hi") == ("tool_choice" not in fields)


def test_required_calls_come_without_text() -> None:
    spec = message_grammar(ANSWER, use(tool_choice="required"), HERMES, Thinking.NONE, ())
    assert allows(spec, HERMES.write("get_time", "{}"))
    for text in ("", "Hi", "{}", "Hi" + HERMES.write("get_time", "{}")):
        assert not allows(spec, text), text


def test_some_of_the_tools_may_be_all_that_is_allowed() -> None:
    names = [{"type": "function", "function": {"name": "get_time"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": names}}
    tools = use(tool_choice=choice)
    assert len(tools.shown) == 2, "the model sees them all"
    spec = message_grammar(None, tools, HERMES, Thinking.NONE, ())
    assert allows(spec, HERMES.write("get_time", "{}"))
    assert not allows(spec, HERMES.write("get_weather", PARIS))


def test_an_answer_in_a_given_form_or_calls() -> None:
    spec = message_grammar(ANSWER, use(), HERMES, Thinking.NONE, ())
    for text in ("{}", '{"name":"Bob"}', HERMES.write("get_time", "{}")):
        assert allows(spec, text), text
    for text in ("Hi", "", "{}" + HERMES.write("get_time", "{}")):
        assert not allows(spec, text), text


ANSWERS = {
    GrammarKind.JSON_OBJECT: ("", '{"a": 1}', "```"),
    GrammarKind.JSON_SCHEMA: (ANSWER.text, '{"name":"Bob"}', '{"name":"Eve"}'),
    GrammarKind.REGEX: ("[a-c]{3}", "abc", "abd"),
    GrammarKind.CHOICE: ('["yes", "no"]', "yes", "Yes"),
    GrammarKind.LARK: ('start: "a" b\nb: "::=" | %json {"type": "object"}', "a::=", "a:="),
}


@pytest.mark.parametrize("kind", GrammarKind)
@pytest.mark.parametrize("thinking", [Thinking.OPEN, Thinking.POSSIBLE])
def test_a_client_s_grammar_begins_where_the_reasoning_ends(
    kind: GrammarKind, thinking: Thinking
) -> None:
    text, right, wrong = ANSWERS[kind]
    spec = message_grammar(GrammarSpec(kind, text), None, HERMES, thinking, ())
    begin = "<think>" if thinking is Thinking.POSSIBLE else ""
    for gap in ("", "\n\n"):
        assert allows(spec, f"{begin}any ``` text </thin{wrong}</think>{gap}{right}")
        assert not allows(spec, f"{begin}hm</think>{gap}{wrong}")
    assert not allows(spec, f"{begin}hm{right}")
    assert allows(spec, right) == (thinking is Thinking.POSSIBLE)


def test_gbnf_is_told_by_its_rules_not_by_a_text_that_looks_like_one() -> None:
    gbnf = GrammarSpec(GrammarKind.LARK, 'root ::= "a" | "b" root')
    assert allows(gbnf, "bba")
    assert allows(message_grammar(gbnf, None, HERMES, Thinking.OPEN, ()), "x</think>bba")


def test_reasoning_may_speak_of_calls() -> None:
    spec = message_grammar(None, use(), HERMES, Thinking.POSSIBLE, ())
    time = HERMES.write("get_time", "{}")
    assert allows(spec, f"<think>Should I write <tool_call>? {time}</think>\nNo, I say <think>.")
    assert allows(spec, f"<think>Yes.</think>\n{time}")
    assert not allows(spec, f"No <think>. <tool_call>{time}")


@pytest.mark.parametrize("thinking", [Thinking.OPEN, Thinking.POSSIBLE])
def test_markers_that_are_special_tokens_are_written_with_them(thinking: Thinking) -> None:
    described = json.loads(CARD.tokenizer_json)
    for token in described["added_tokens"]:
        token["special"] = True
    card = replace(CARD, tokenizer_json=json.dumps(described))
    tokenizer = Tokenizer(card)
    special = tokenizer.special_ids
    vocabulary = GrammarVocabulary(card.tokenizer_json, card.vocab_size, card.eos_token_ids)
    tools = use()
    spec = message_grammar(None, tools, HERMES, thinking, special)
    assert spec is not None
    started = GrammarState(vocabulary, spec)
    begin = [special["<think>"]] if thinking is Thinking.POSSIBLE else []
    begin += [*ids("hm"), special["</think>"], *ids("Hi"), special["<tool_call>"]]
    started.commit(begin)
    closing = [*card.eos_token_ids, *ids('"}')]
    token_ids = [*begin, *random_walk(started, random.Random(1), closing)]
    assert special["</tool_call>"] in token_ids
    text = tokenizer.decode(token_ids)
    message, called = MessageForm(thinking, HERMES, tools.names).read(text)
    assert called
    assert (message.reasoning, message.content) == ("hm", "Hi")


def test_128_tools_are_within_the_budget() -> None:
    schema = TOOLS[0]["function"]["parameters"]
    functions = [{"name": f"get_{index}", "parameters": schema} for index in range(128)]
    tools = [{"type": "function", "function": function} for function in functions]
    spec = message_grammar(None, use(tools=tools), HERMES, Thinking.NONE, ())
    assert spec is not None
    checker = GrammarChecker(CARD.tokenizer_json, CARD.vocab_size)
    try:
        checker.check(spec)
    finally:
        checker.close()
    assert not compile_matcher(VOCABULARY.tokenizer, spec).is_error()
    assert allows(spec, HERMES.write("get_127", PARIS))
