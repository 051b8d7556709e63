"""Chat templates: what clients write stays text, whatever the template does with it."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import InvalidRequestError
from router.chat import ChatTemplate
from router.tokenizer import Tokenizer
from tests.support.scripted_verifier import CHAT_TEMPLATE, make_card

CARD = make_card()
TOKENIZER = Tokenizer(CARD)
REFERENCE = tokenizers.Tokenizer.from_str(CARD.tokenizer_json)
START, END = TOKENIZER.special_ids["<|im_start|>"], TOKENIZER.special_ids["<|im_end|>"]
SPECIAL_IDS = set(TOKENIZER.special_ids.values())


@functools.cache
def template(source: str = CHAT_TEMPLATE) -> ChatTemplate:
    return ChatTemplate(dataclasses.replace(CARD, chat_template=source), TOKENIZER)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


contents = st.lists(
    st.one_of(
        st.sampled_from(
            ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "start|>", "<", "|>", ">"]
        ),
        st.text(max_size=5),
    ),
    max_size=5,
).map("".join)


@given(messages=st.lists(contents.map(user), min_size=1, max_size=3))
def test_only_the_template_makes_special_tokens(messages: list[dict[str, Any]]) -> None:
    ids = template().encode(messages)
    expected = [START, END] * len(messages) + [START]
    assert [token_id for token_id in ids if token_id in SPECIAL_IDS] == expected


@given(messages=st.lists(contents.map(user), min_size=1, max_size=3))
def test_the_text_of_the_conversation_is_kept(messages: list[dict[str, Any]]) -> None:
    ids = template().encode(messages)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == template().render(messages)


@given(messages=st.lists(st.text("ab <>|\n").map(user), min_size=1, max_size=3))
def test_harmless_conversations_are_encoded_as_the_reference_does(
    messages: list[dict[str, Any]],
) -> None:
    rendered = template().render(messages)
    assert list(template().encode(messages)) == REFERENCE.encode(rendered).ids


def test_texts_that_a_template_joins_make_no_special_token() -> None:
    joined = template("{% for m in messages %}{{ m.content }}{% endfor %}")
    for cut in range(1, len("<|im_start|>")):
        parts = [user("<|im_start|>"[:cut]), user("<|im_start|>"[cut:])]
        assert SPECIAL_IDS.isdisjoint(joined.encode(parts))


def test_every_text_of_a_message_is_guarded() -> None:
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "<|im_end|>", "arguments": '{"a": "<|im_start|>"}'}}],
    }
    source = "{{ messages[0].tool_calls | tojson }}"
    assert SPECIAL_IDS.isdisjoint(template(source).encode([message]))


def test_tools_and_variables_are_guarded_too() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "<|im_end|>"}}
    shown = template("{{ tools | tojson }}{{ style }}{{ messages[0].content }}")
    ids = shown.encode([user("hi")], tools=[tool], variables={"style": "<|im_start|>"})
    assert SPECIAL_IDS.isdisjoint(ids)
    text = TOKENIZER.decode(ids, skip_special_tokens=False)
    assert text == json.dumps([tool]) + "<|im_start|>hi"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "eos_token"])
def test_variables_of_ours_are_not_a_client_s(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        template().encode([user("hi")], variables={name: True})
    assert caught.value.param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize(
    ("source", "renders"),
    [
        (CHAT_TEMPLATE, False),
        ("{%- if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}", True),
        ("{% for t in tools or [] %}{{ t }}{% endfor %}", True),
        ("", False),
    ],
)
def test_whether_a_template_renders_tools_is_seen_from_it(source: str, renders: bool) -> None:
    assert template(source).renders_tools is renders


def test_a_template_may_look_at_the_text() -> None:
    source = "{{ messages[0].content.split('</think>')[-1] | trim }}"
    ids = template(source).encode([user("<think>no</think> <|im_end|> yes ")])
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == "<|im_end|> yes"
    assert SPECIAL_IDS.isdisjoint(ids)


def test_templates_have_what_transformers_gives_them() -> None:
    source = (
        "{%- generation -%}{{ bos_token }}{%- endgeneration -%}"
        "{%- for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ {'a': '<é>'} | tojson }}{{ strftime_now('%Y') }}{%- endfor %}"
    )
    rendered = template(source).render([user("a"), user("b")])
    assert rendered == '<|im_start|>{"a": "<é>"}' + time.strftime("%Y")


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content.x.y }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
    ],
)
def test_a_template_that_fails_costs_only_the_request(source: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        template(source).encode([user("hi")])
    assert caught.value.param == "messages"


def test_a_template_cannot_change_the_messages() -> None:
    with pytest.raises(InvalidRequestError):
        template("{{ messages.append(1) }}").encode([user("hi")])


def test_no_template_is_said() -> None:
    with pytest.raises(InvalidRequestError, match="/v1/completions"):
        template("").encode([user("hi")])


def test_all_private_use_characters_are_refused_quickly() -> None:
    everything = "".join(map(chr, range(0xF0000, 0xFFFFE)))
    started = time.thread_time()
    with pytest.raises(InvalidRequestError):
        template().encode([user(everything)])
    assert time.thread_time() - started < 5.0
