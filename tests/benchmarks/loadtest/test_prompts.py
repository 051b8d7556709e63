"""Prompts follow from seed and index, in every family."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.loadtest.arrivals import Arrival
from benchmarks.loadtest.profile import Family, GeneratedPrompts, PromptFile
from benchmarks.loadtest.prompts import SESSIONS_AT_ONCE, TOKENS_PER_WORD, Prompt, make_prompts
from cluster.commands.command_error import CommandError


def prompts(seed: int = 0, count: int = 50, **fields: object) -> list[Prompt]:
    config = GeneratedPrompts.model_validate({"kind": "generated", **fields})
    source = make_prompts(config, seed)
    return [source.prompt(index, None) for index in range(count)]


@pytest.mark.parametrize("family", list(Family))
def test_prompts_follow_from_the_seed_and_differ(family: Family) -> None:
    shares = {family.value: 1}
    asked = prompts(families=shares, output_tokens={"low": 3, "high": 9})
    assert asked == prompts(families=shares, output_tokens={"low": 3, "high": 9})
    assert asked != prompts(1, families=shares, output_tokens={"low": 3, "high": 9})
    assert len({prompt.text for prompt in asked}) == len(asked)
    assert {prompt.family for prompt in asked} == {family.value}
    assert {prompt.max_tokens for prompt in asked} == set(range(3, 10))


def test_a_prompt_does_not_depend_on_which_were_asked_before() -> None:
    source = make_prompts(GeneratedPrompts(kind="generated"), 0)
    later_first = source.prompt(40, None)
    assert later_first == prompts()[40]


def test_families_have_their_shares() -> None:
    asked = prompts(count=2_000, families={"chat": 3, "copy": 1})
    chats = sum(prompt.family == "chat" for prompt in asked)
    assert chats / len(asked) == pytest.approx(0.75, abs=0.04)


def test_shared_prefixes_are_shared() -> None:
    asked = prompts(count=40, families={"shared_prefix": 1}, shared_prefixes=4)
    documents = {prompt.text.split("\n\n")[0] for prompt in asked}
    assert len(documents) == 4
    assert all(len(document.split()) > 150 for document in documents)


def test_a_conversation_grows_by_what_it_was() -> None:
    turns = 3
    asked = prompts(count=SESSIONS_AT_ONCE * turns, families={"session": 1}, session_turns=turns)
    for member in (0, 17):
        first, second, third = (asked[member + turn * SESSIONS_AT_ONCE] for turn in range(turns))
        assert first.session == second.session == third.session
        assert len(first.messages) == 1
        assert second.messages[: len(first.messages)] == first.messages
        assert third.messages[: len(second.messages)] == second.messages
        assert [m["role"] for m in third.messages] == ["user", "assistant"] * 2 + ["user"]
    assert asked[0].session != asked[1].session


@pytest.mark.parametrize("family", list(Family))
@pytest.mark.parametrize("tokens", [5, 40, 700])
def test_lengths_of_a_trace_are_kept(family: Family, tokens: int) -> None:
    config = GeneratedPrompts(kind="generated", families={family: 1.0}, shared_prefix_tokens=64)
    prompt = make_prompts(config, 0).prompt(3, Arrival(1.0, tokens, 11))
    assert prompt.max_tokens == 11
    words = len(prompt.text.split())
    assert words * TOKENS_PER_WORD == pytest.approx(tokens, rel=0.25, abs=6)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "a", "output_tokens": 5, "family": "mine"}\n\n'
        '{"messages": [{"role": "system", "content": "b"}, {"role": "user", "content": "c"}]}\n'
        '{"turns": ["d", "e"], "category": "math"}\n'
    )
    source = make_prompts(PromptFile(kind="file", path=path, output_tokens=9), 0)
    asked = [source.prompt(index, None) for index in range(4)]
    assert [prompt.text for prompt in asked] == ["a", "b\n\nc", "d", "a"]
    assert [prompt.max_tokens for prompt in asked] == [5, 9, 9, 5]
    assert [prompt.family for prompt in asked[:3]] == ["mine", "file", "math"]


@pytest.mark.parametrize(
    ("text", "told"),
    [("", "no prompts"), ("{}", "row 1"), ('{"prompt": "a"}\n[]', "row 2"), ("x", "row 1")],
)
def test_a_bad_file_says_what_is_wrong(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(CommandError) as caught:
        make_prompts(PromptFile(kind="file", path=path), 0)
    assert told in str(caught.value)
