"""A corpus: its parts come back as they were written, and are the same when written again."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.commands.command_error import CommandError
from drafter_service.distill.corpus import Corpus
from drafter_service.distill.course import LESSONS_PER_PART, Course
from drafter_service.distill.dialogue import Dialogue
from drafter_service.distill.given_text import read_text
from drafter_service.distill.lesson import Lesson
from drafter_service.distill.teacher import Teacher
from engine.model_runner import ModelRunner

from .conftest import LIMITS, same


def test_a_part_comes_back_as_it_was_written(lessons: list[Lesson], tmp_path: Path) -> None:
    corpus = Corpus(tmp_path / "corpus")
    assert not corpus.has(3)
    corpus.write(3, lessons)
    assert corpus.has(3)
    assert all(same(*pair) for pair in zip(corpus.read(3), lessons, strict=True))
    assert [file.name for file in (tmp_path / "corpus").iterdir()] == ["part-00003.safetensors"]


def test_a_part_is_a_function_of_seed_and_number(
    runner: ModelRunner, dialogue: Dialogue, lessons: list[Lesson]
) -> None:
    """However many sequences are written at a time, and whatever was written before."""
    course = Course(Teacher(runner, 7), dialogue, 0, LIMITS)
    assert all(same(*pair) for pair in zip(course.part(0), lessons, strict=True))
    assert len(lessons) == LESSONS_PER_PART
    assert max(lesson.num_learned for lesson in lessons) == LIMITS.max_answer_tokens
    assert max(lesson.num_context for lesson in lessons) == LIMITS.max_prompt_tokens


def test_every_other_lesson_is_from_a_given_text(
    runner: ModelRunner, dialogue: Dialogue, lessons: list[Lesson], tmp_path: Path
) -> None:
    file = tmp_path / "text.txt"
    file.write_text("".join(chr(40 + i % 80) for i in range(100)))
    given = read_text(file, dialogue, 30)
    assert [len(piece) for piece in given.pieces] == [30, 30, 30, 11]
    taught = Course(Teacher(runner, 64), dialogue, 0, LIMITS, given).part(0)
    for index, piece in enumerate(given.pieces):
        assert tuple(taught[2 * index].token_ids.tolist()) == piece
        assert taught[2 * index].num_context == 1
    others = [1, 3, 5, *range(7, LESSONS_PER_PART)]
    assert all(same(taught[index], lessons[index]) for index in others)


def test_the_target_answers_given_questions(
    runner: ModelRunner, dialogue: Dialogue, tmp_path: Path
) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text(
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "Why?"}]}\n'
        '\n{"messages": [{"role": "user", "content": "How?"}]}\n'
    )
    given = read_text(file, dialogue, 30)
    assert given.questions == ("Why?", "How?")
    taught = Course(Teacher(runner, 64), dialogue, 0, LIMITS, given).part(0)
    for lesson, question in zip((taught[0], taught[2]), given.questions, strict=True):
        assert tuple(lesson.token_ids[: lesson.num_context].tolist()) == dialogue.question(question)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.txt", b"", "holds nothing to learn"),
        ("latin.txt", b"\xff\xfe", "cannot be read"),
        ("chat.jsonl", b'{"messages": []}', "line 1"),
        ("chat.jsonl", b'\n{"text": "x"}', "line 2"),
        ("chat.jsonl", b"nonsense", "line 1"),
    ],
)
def test_a_text_that_is_none(
    dialogue: Dialogue, tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CommandError, match=words):
        read_text(tmp_path / name, dialogue, 30)


def test_a_text_that_is_not_there(dialogue: Dialogue, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"gone.txt cannot be read"):
        read_text(tmp_path / "gone.txt", dialogue, 30)
