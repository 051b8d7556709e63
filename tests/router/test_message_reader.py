"""What is content, reasoning or a call does not depend on how a text is cut; nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.types import FinishReason
from router.message import Message
from router.message_reader import MessageForm, MessageReader
from router.thinking import Thinking
from router.tools.call_format import FORMATS, HERMES, LLAMA3_JSON, CallFormat

NAMES = ("get_weather", "get", "get_time")
PARIS = '{"city": "Paris", "note": "a } or </tool_call> \\" {[ "}'
DEPTH = 8
"""Most tokens of a draft: what one step adds is at most one more."""


def call(form: CallFormat, name: str = "get_weather", arguments: str = PARIS) -> str:
    return form.write(name, arguments)


def read(form: MessageForm, pieces: Sequence[str]) -> tuple[Message, bool]:
    """As the client of a stream puts it together."""
    message, reader = Message(), MessageReader(form)
    for piece in pieces:
        message.add(reader.push(piece))
    message.add(reader.finish())
    return message, reader.called


def parts(message: Message) -> tuple[str, str, list[tuple[str, str]]]:
    return message.content, message.reasoning, [(c.name, c.arguments) for c in message.calls]


def cut(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


W = ("get_weather", PARIS)
E = ("get", "{}")
HERMES_TEXTS: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
    "nothing": ("", "", []),
    "text": ("Hello <b>you</b> ", "Hello <b>you</b> ", []),
    "ends in what may be a marker": ("a <tool_ca", "a <tool_ca", []),
    "a call": (call(HERMES), "", [W]),
    "text and a call": ("Let me look.\n" + call(HERMES), "Let me look.", [W]),
    "two calls": (f"{call(HERMES)}\n{call(HERMES, *E)}", "", [W, E]),
    "two calls fused": (call(HERMES) + call(HERMES, *E), "", [W, E]),
    "a call and a newline": (call(HERMES) + "\n", "", [W]),
    "space all around": (f"\n\n{call(HERMES)} \n ", "", [W]),
    "text after a call": (f"Yes.\n{call(HERMES)}\n No.", "Yes.\nNo.", [W]),
    "other spacing": (
        f'<tool_call> {{"name":"get","arguments":{{}}}} </tool_call>{call(HERMES)}',
        "",
        [E, W],
    ),
    "an unknown name": (call(HERMES, "got"), call(HERMES, "got"), []),
    "a longer name": (call(HERMES, "get_weather2"), call(HERMES, "get_weather2"), []),
    "no JSON": ("<tool_call>\nget(1)</tool_call>", "<tool_call>\nget(1)</tool_call>", []),
    "arguments that are no object": (call(HERMES, "get", "[]"), call(HERMES, "get", "[]"), []),
    "a wrong start before a call": (
        "<tool_call><tool_call" + call(HERMES),
        "<tool_call><tool_call",
        [W],
    ),
    "cut in the arguments": (
        call(HERMES)[: call(HERMES).index("Paris")],
        "",
        [("get_weather", '{"city": "')],
    ),
    "cut in the end": (call(HERMES)[:-3], "", [W]),
    "cut in the marker of a second call": (call(HERMES) + "\n<tool", "", [W]),
    "cut in the name": ('<tool_call>\n{"name": "get_w', '<tool_call>\n{"name": "get_w', []),
    "an end that is none": (call(HERMES).removesuffix("}\n</tool_call>") + "done", "done", [W]),
}
LLAMA_TEXTS: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
    "text": ('Say {"name": "get", "parameters": {}}', 'Say {"name": "get", "parameters": {}}', []),
    "a call": (call(LLAMA3_JSON), "", [W]),
    "space before a call": (f"\n {call(LLAMA3_JSON)}\n", "", [W]),
    "other JSON": ('{"name": "Bob"}', '{"name": "Bob"}', []),
    "a brace": ("{", "{", []),
    "a call and text": (f"{call(LLAMA3_JSON)}; and", "; and", [W]),
    "a call and another": (call(LLAMA3_JSON) * 2, call(LLAMA3_JSON), [W]),
}
CASES = [
    pytest.param(form, *case, id=f"{form.name}: {name}")
    for form, texts in ((HERMES, HERMES_TEXTS), (LLAMA3_JSON, LLAMA_TEXTS))
    for name, case in texts.items()
]


@pytest.mark.parametrize(("call_format", "text", "content", "calls"), CASES)
def test_every_cut_gives_the_same_message(
    call_format: CallFormat, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    form = MessageForm(call_format=call_format, names=NAMES)
    assert parts(form.read(text)[0]) == (content, "", calls)
    for size in range(1, len(text) + 2):
        assert parts(read(form, cut(text, size))[0]) == (content, "", calls)


THOUGHT = [
    (Thinking.OPEN, "hm\n\nso </thin </think>\n\nYes", ("Yes", "hm\n\nso </thin", [])),
    (Thinking.OPEN, "\nhm</think>" + call(HERMES), ("", "hm", [W])),
    (Thinking.OPEN, f"hm</think>\nA {call(HERMES)}{call(HERMES)}", ("A", "hm", [W, W])),
    (Thinking.OPEN, f"about {call(HERMES)}</think>", ("", f"about {call(HERMES)}", [])),
    (Thinking.OPEN, "never ends ", ("", "never ends", [])),
    (Thinking.OPEN, "</think>Yes", ("Yes", "", [])),
    (Thinking.POSSIBLE, "<think>hm</think>Yes", ("Yes", "hm", [])),
    (Thinking.POSSIBLE, " \n<think>\nhm\n</think> Yes", ("Yes", "hm", [])),
    (Thinking.POSSIBLE, "Yes <think>hm</think>", ("Yes <think>hm</think>", "", [])),
    (Thinking.POSSIBLE, " Yes", (" Yes", "", [])),
    (Thinking.POSSIBLE, "<thi", ("<thi", "", [])),
    (Thinking.POSSIBLE, "<think>hm", ("", "hm", [])),
    (Thinking.NONE, "<think>hm</think>Yes", ("<think>hm</think>Yes", "", [])),
]


@pytest.mark.parametrize(("thinking", "text", "expected"), THOUGHT)
def test_reasoning_text_and_calls_come_apart_in_any_cut(
    thinking: Thinking, text: str, expected: tuple[str, str, list[tuple[str, str]]]
) -> None:
    form = MessageForm(thinking, HERMES, NAMES)
    for size in range(1, len(text) + 2):
        assert parts(read(form, cut(text, size))[0]) == expected


fragments = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool", "_call>", "<", ">", "\n"),
        *('\n{"name": "get', '", "arguments": ', "{}", "}\n</tool_call>", ' {"a": [1, "}"]}', "; "),
        *('{"name": "get_weather', '", "parameters": ', '{"b": {', "hm", " ", '"', "\\", "}"),
        *(call(HERMES), call(LLAMA3_JSON, *E)),
    ]
)
pieces_of_text = st.lists(fragments, max_size=12)
forms = st.builds(
    MessageForm,
    thinking=st.sampled_from(Thinking),
    call_format=st.sampled_from([None, *FORMATS.values()]),
    names=st.just(NAMES),
)


@given(form=forms, pieces=pieces_of_text, sizes=st.lists(st.integers(1, DEPTH + 1), min_size=1))
def test_no_cut_of_any_text_changes_the_message(
    form: MessageForm, pieces: list[str], sizes: list[int]
) -> None:
    text = "".join(pieces)
    expected, called = form.read(text)

    def cuts() -> Iterator[str]:
        start = step = 0
        while start < len(text):
            end = start + sizes[step % len(sizes)]
            yield text[start:end]
            start, step = end, step + 1

    for given_pieces in (pieces, list(text), list(cuts())):
        message, complete = read(form, given_pieces)
        assert (parts(message), complete) == (parts(expected), called)


@given(form=forms, pieces=pieces_of_text)
def test_without_calls_and_reasoning_the_text_is_the_content(
    form: MessageForm, pieces: list[str]
) -> None:
    text = "".join(pieces)
    message, called = form.read(text)
    if not message.calls and form.thinking is Thinking.NONE:
        assert message.content == text
        assert not called


@given(form=forms, pieces=pieces_of_text)
def test_no_letter_is_lost(form: MessageForm, pieces: list[str]) -> None:
    text = "".join(pieces)
    message, _ = form.read(text)
    kept = message.content + message.reasoning + "".join(c.arguments for c in message.calls)
    markup = 0 if form.call_format is None else len(call(form.call_format, "get_weather", ""))
    most_dropped = len(message.calls) * markup + len("<think></think>")
    num_lost = len("".join(text.split())) - len("".join(kept.split()))
    assert 0 <= num_lost <= most_dropped


def test_a_call_s_name_comes_first_and_once() -> None:
    reader = MessageReader(MessageForm(call_format=HERMES, names=NAMES))
    deltas = [d for char in f"{call(HERMES)}\n{call(HERMES)}" for d in reader.push(char).calls]
    for index in (0, 1):
        first, *others = [delta for delta in deltas if delta.index == index]
        assert first.name == "get_weather"
        assert first.id.startswith("call_")
        assert len(others) > 20, "arguments come as they are written"
        assert not any(delta.name or delta.id for delta in others)
        assert json.loads("".join(delta.arguments for delta in (first, *others)))


@pytest.mark.parametrize(
    ("text", "named", "reason", "expected"),
    [
        (call(HERMES), False, FinishReason.STOP, "tool_calls"),
        (call(HERMES), True, FinishReason.STOP, "stop"),
        (call(HERMES), False, FinishReason.LENGTH, "length"),
        (call(HERMES)[:60], False, FinishReason.STOP, "stop"),
        ("Hello", False, FinishReason.STOP, "stop"),
    ],
)
def test_finish_reasons(text: str, named: bool, reason: FinishReason, expected: str) -> None:
    form = MessageForm(call_format=HERMES, names=NAMES, named=named)
    _, called = form.read(text)
    assert form.finish_reason(reason, called) == expected
