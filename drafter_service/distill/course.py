"""Which lessons a target gives: a part of the corpus is a function of (target, seed, part)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cluster.types import SamplingParams, make_request_key
from drafter_service.distill.dialogue import Dialogue
from drafter_service.distill.given_text import NO_TEXT, GivenText
from drafter_service.distill.lesson import Lesson
from drafter_service.distill.prompts import training_prompt
from drafter_service.distill.teacher import Request, Teacher

T = TypeVar("T")

LESSONS_PER_PART = 64
_QUESTION_SAMPLING = SamplingParams(temperature=0.8, top_p=0.95)
_QUESTION_TOKENS = 64
_TEMPERATURES = (0.0, 0.7, 1.0)
_TEMPERATURE_SHARES = (60, 20, 20)
"""Users mostly ask for little randomness, and greedy text has turns of its own."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a lesson."""

    max_prompt_tokens: int
    """Longer prompts lose their beginning."""
    max_answer_tokens: int


class Course:
    """Lessons in which the target answers questions, some of them its own. Where a text is given,
    every other lesson is from there until it is used up."""

    def __init__(
        self,
        teacher: Teacher,
        dialogue: Dialogue,
        seed: int,
        limits: Limits,
        given: GivenText = NO_TEXT,
    ) -> None:
        self._teacher = teacher
        self._dialogue = dialogue
        self._seed = seed
        self._limits = limits
        self._given = given

    def part(self, part: int, on_tokens: Callable[[int], None] = lambda _: None) -> list[Lesson]:
        """The lessons of this part. `on_tokens` hears of how many tokens were written."""
        indices = range(part * LESSONS_PER_PART, (part + 1) * LESSONS_PER_PART)
        pieces = {i: piece for i in indices if (piece := _every_other(self._given.pieces, i))}
        read = {index: self._teacher.read(piece) for index, piece in pieces.items()}
        questions = self._questions([i for i in indices if i not in read], on_tokens)
        requests = [self._answer_request(index, text) for index, text in questions.items()]
        answers = self._teacher.write(requests, on_tokens)
        written = dict(zip(questions, answers, strict=True))
        return [read.get(index) or written[index] for index in indices]

    def _questions(
        self, indices: Sequence[int], on_tokens: Callable[[int], None]
    ) -> dict[int, str]:
        """What is asked in each lesson."""
        texts = {
            index: _every_other(self._given.questions, index)
            or training_prompt(self._seed, index).text
            for index in indices
        }
        untold = [index for index, text in texts.items() if not text]
        asked = self._teacher.write([self._question_request(index) for index in untold], on_tokens)
        for index, lesson in zip(untold, asked, strict=True):
            written = lesson.token_ids[lesson.num_context :].tolist()
            texts[index] = self._dialogue.decode(written).strip()
        return texts

    def _question_request(self, index: int) -> Request:
        prompt_ids = self._dialogue.before_question
        key = self._key("question", index, prompt_ids)
        return Request(prompt_ids, _QUESTION_SAMPLING, key, _QUESTION_TOKENS)

    def _answer_request(self, index: int, question: str) -> Request:
        rng = random.Random(f"temperature-{self._seed}-{index}")
        temperature = rng.choices(_TEMPERATURES, _TEMPERATURE_SHARES)[0]
        prompt_ids = self._dialogue.question(question)[-self._limits.max_prompt_tokens :]
        key = self._key("answer", index, prompt_ids)
        sampling = SamplingParams(temperature=temperature)
        return Request(prompt_ids, sampling, key, self._limits.max_answer_tokens)

    def _key(self, purpose: str, index: int, prompt_ids: tuple[int, ...]) -> int:
        return make_request_key(f"distill-{purpose}-{self._seed}".encode(), index, prompt_ids)


def _every_other(given: Sequence[T], index: int) -> T | None:
    """What is given for a lesson with an even index."""
    half, is_odd = divmod(index, 2)
    return None if is_odd or half >= len(given) else given[half]
