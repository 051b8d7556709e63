"""How a target's conversations are written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drafter_service.distill.dialogue import Dialogue
from engine.model_runner import ModelRunner

BOS, EOS = 1, 2


def test_a_question_is_written_by_the_template(dialogue: Dialogue) -> None:
    question = dialogue.question("Why?")
    assert dialogue.decode(question) == "user: Why?\nassistant: "
    assert dialogue.decode(dialogue.before_question) == "user: "
    assert question[: len(dialogue.before_question)] == dialogue.before_question


def test_a_target_without_a_template_goes_on_with_a_text(runner: ModelRunner) -> None:
    bare = Dialogue(replace(runner.card, chat_template=""))
    assert bare.decode(bare.question("Why?")) == "Why?\n"
    assert bare.before_question == (BOS,)


@pytest.mark.parametrize(("bos", "ends", "first"), [("<bos>", (EOS,), BOS), ("", (EOS,), EOS)])
def test_what_a_text_begins_with(
    runner: ModelRunner, bos: str, ends: tuple[int, ...], first: int
) -> None:
    card = replace(runner.card, chat_template="", bos_token=bos, eos_token_ids=ends)
    dialogue = Dialogue(card)
    assert dialogue.text("ab")[0] == first
    assert dialogue.decode(dialogue.text("ab")[1:]) == "ab"
