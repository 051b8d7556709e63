"""Whatever a client sends as a grammar, it is refused or served, soon, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from cluster import grammar_check
from cluster.errors import InternalError, OverloadedError
from cluster.grammar import MAX_GRAMMAR_BYTES, GrammarError, GrammarKind, GrammarSpec, check_size
from cluster.grammar_check import GrammarChecker
from tests.support.hostile_grammars import REFUSED, SERVED
from tests.support.polling import TIMEOUT_S
from tests.support.standstill import stand_still

TOKENIZER_JSON = json.dumps(
    {
        "added_tokens": [
            {"id": 3, "content": "<|end|>", "special": True},
            {"id": 4, "content": "<tool>", "special": False},
            {"id": 2000, "content": "<|beyond|>", "special": True},
        ]
    }
)
EASY = GrammarSpec(GrammarKind.JSON_OBJECT)


@pytest.fixture(scope="module", autouse=True)
def _patience() -> Iterator[None]:
    """A busy machine is not one that hangs: here the budget of CPU time must end a grammar."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_check, "_ANSWER_WITHIN_S", 2 * TIMEOUT_S)
        yield


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker(TOKENIZER_JSON, vocab_size=1000)
    checker.check(EASY)
    yield checker
    checker.close()


def lark(text: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.LARK, text)


def worker_pid(checker: GrammarChecker) -> int:
    assert checker._worker is not None
    return checker._worker.pid


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_grammars_are_refused(checker: GrammarChecker, name: str) -> None:
    started = time.monotonic()
    with pytest.raises(GrammarError) as refusal:
        checker.check(REFUSED[name])
    assert time.monotonic() - started < TIMEOUT_S
    message = str(refusal.value)
    assert 0 < len(message) < 400
    assert "\n" not in message
    checker.check(EASY)


@pytest.mark.parametrize("name", SERVED)
def test_grammars_that_only_look_hostile_are_served(checker: GrammarChecker, name: str) -> None:
    checker.check(SERVED[name])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (REFUSED["not implemented"], 'Unimplemented keys: ["not"]'),
        (REFUSED["unknown type"], "Invalid type: strin"),
        (REFUSED["itself"], "the grammar allows nothing here"),
        (REFUSED["nested text"], "not valid JSON: maximum recursion depth exceeded"),
        (REFUSED["prime multiple"], "the grammar is too complex"),
        (REFUSED["unclosed class"], "regex parse error: ([ error: unclosed character class"),
        (lark('start: b\nb: "x'), "line 2: lexer error"),
        (lark('root ::= "a" b'), "not valid GBNF: Rule 'b' not found"),
    ],
)
def test_it_says_what_is_wrong(checker: GrammarChecker, spec: GrammarSpec, message: str) -> None:
    with pytest.raises(GrammarError) as refusal:
        checker.check(spec)
    assert message in str(refusal.value)
    assert "no_forcing" not in str(refusal.value)


def test_special_tokens_may_be_named(checker: GrammarChecker) -> None:
    checker.check(lark('start: <|end|> "a" <[3-999]>'))
    for text in ("start: <tool>", "start: <|beyond|>"):
        with pytest.raises(GrammarError, match="unknown special token"):
            checker.check(lark(text))


def test_a_grammar_that_was_checked_is_remembered(checker: GrammarChecker) -> None:
    slow = REFUSED["prime multiple"]
    with pytest.raises(GrammarError):
        checker.check(slow)
    checker.check(EASY)
    survivor = worker_pid(checker)
    with pytest.raises(GrammarError):
        checker.check(slow)
    assert worker_pid(checker) == survivor


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "_MAX_REMEMBERED", 10)
    checker = GrammarChecker(TOKENIZER_JSON, vocab_size=1000)
    for index in range(30):
        checker.check(GrammarSpec(GrammarKind.REGEX, f"{index}[a-z]+"))
        checker.check(EASY)
    assert len(checker._complaints) == 10
    worker_before = worker_pid(checker)
    checker.check(GrammarSpec(GrammarKind.REGEX, "0[a-z]+"))
    assert worker_pid(checker) == worker_before
    checker.close()


def test_it_goes_on_after_the_process_was_killed(checker: GrammarChecker) -> None:
    killed = worker_pid(checker)
    os.kill(killed, signal.SIGKILL)
    assert checker._worker is not None
    checker._worker.wait()
    checker.check(GrammarSpec(GrammarKind.REGEX, "after a death"))
    assert worker_pid(checker) != killed


def test_a_worker_that_hangs_is_given_up_and_its_grammar_is_not_blamed(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(stand_still(worker_pid(checker)))
    monkeypatch.setattr(grammar_check, "_ANSWER_WITHIN_S", 0.3)
    with pytest.raises(OverloadedError, match="in time"):
        checker.check(GrammarSpec(GrammarKind.REGEX, "answered late"))
    monkeypatch.undo()
    checker.check(GrammarSpec(GrammarKind.REGEX, "answered late"))


def test_many_threads_get_their_own_answers(checker: GrammarChecker) -> None:
    answers: dict[int, bool] = {}

    def check(index: int) -> None:
        text = f"[a-z]{{{index + 1}}}" if index % 2 else f"([a-z]{{{index}}}"
        try:
            checker.check(GrammarSpec(GrammarKind.REGEX, text))
            answers[index] = True
        except GrammarError:
            answers[index] = False

    threads = [threading.Thread(target=check, args=(index,)) for index in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {index: bool(index % 2) for index in range(24)}


def test_who_gets_no_turn_is_told_so(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "_ANSWER_WITHIN_S", 0.05)
    with checker._lock, pytest.raises(OverloadedError):
        checker.check(EASY)


def test_a_worker_that_cannot_start_is_our_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check.sys, "executable", "/bin/false")
    checker = GrammarChecker(TOKENIZER_JSON, vocab_size=1000)
    with pytest.raises(InternalError):
        checker.check(EASY)
    monkeypatch.undo()
    checker.check(EASY)
    checker.close()


def test_closing_ends_the_process() -> None:
    checker = GrammarChecker(TOKENIZER_JSON, vocab_size=1000)
    checker.close()
    checker.check(EASY)
    worker = checker._worker
    assert worker is not None
    checker.close()
    assert worker.returncode is not None


def test_the_limit_counts_bytes() -> None:
    check_size(GrammarSpec(GrammarKind.REGEX, "a" * MAX_GRAMMAR_BYTES))
    with pytest.raises(GrammarError, match="bytes"):
        check_size(GrammarSpec(GrammarKind.REGEX, "é" * (MAX_GRAMMAR_BYTES // 2 + 1)))
