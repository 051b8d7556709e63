"""Prompts: each a function of its index, of every kind, and none both learned and held out."""

from __future__ import annotations

from collections import Counter

from drafter_service.distill import prompts
from drafter_service.distill.prompts import (
    ASKED_KINDS,
    Kind,
    held_out_prompts,
    training_prompt,
)

NUM_PROMPTS = 3000


def test_a_prompt_is_a_function_of_seed_and_index() -> None:
    assert training_prompt(3, 5) == training_prompt(3, 5)
    assert len({training_prompt(3, index).text for index in range(200)}) > 100
    assert [training_prompt(3, i) for i in range(20)] != [training_prompt(4, i) for i in range(20)]


def test_every_kind_is_asked_and_the_target_asks_too() -> None:
    kinds = Counter(training_prompt(0, index).kind for index in range(NUM_PROMPTS))
    assert set(kinds) == set(Kind)
    assert min(kinds.values()) > NUM_PROMPTS // 10
    for index in range(NUM_PROMPTS):
        prompt = training_prompt(0, index)
        assert (prompt.text == "") == (prompt.kind is Kind.SELF_WRITTEN)


def test_held_out_prompts_have_their_own_parts() -> None:
    """No subject, passage or snippet is in prompts of both sides."""
    learned = " ".join(training_prompt(0, index).text for index in range(NUM_PROMPTS))
    held_out = " ".join(prompt.text for prompt in held_out_prompts(0, 200))
    for parts in (prompts._SENTENCES, prompts._SNIPPETS, prompts._FUNCTIONS, prompts._TASKS):
        sides = [(part in learned, part in held_out) for part in parts]
        assert (True, True) not in sides
        assert (True, False) in sides
        assert (False, True) in sides


def test_held_out_prompts_are_of_every_kind() -> None:
    kinds = Counter(prompt.kind for prompt in held_out_prompts(1, 8))
    assert kinds == dict.fromkeys(ASKED_KINDS, 8)
