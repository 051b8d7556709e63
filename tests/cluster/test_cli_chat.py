"""`paceline chat`."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.commands.api_client import ApiClient
from cluster.commands.chat import pieces, summary
from tests.cluster.scripted_router import (
    MODELS,
    SPECULATION,
    ScriptedRouter,
    chunk,
    fails,
    says,
    streams,
)
from tests.support.polling import TIMEOUT_S

CHAT = "/v1/chat/completions"
ANSWER = (
    chunk("Hello"),
    chunk(" out there friend", 3, [(0, 10)]),
    chunk("", speculation=SPECULATION),
)


def router_that(*answers):
    """Gives these answers to chat completions one after the other."""
    left = iter(answers)
    return ScriptedRouter({"/v1/models": says(MODELS), CHAT: lambda handler: next(left)(handler)})


def test_a_pipe_gets_the_text_and_nothing_else(paceline):
    router = router_that(streams(*ANSWER))
    with router.running():
        assert paceline("chat", "hi", "--url", router.url) == (0, "Hello out there friend\n", "")


def test_what_is_asked_for(paceline):
    router = router_that(streams(*ANSWER))
    with router.running():
        paceline("chat", "hi", "--url", router.url + "/")
    assert router.asked == [
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hi"}],
            "stream": True,
            "speculation": {"mode": "auto", "trace": True},
        }
    ]


def test_a_terminal_gets_tints_and_a_summary(paceline, terminal):
    router = router_that(streams(*ANSWER))
    terminal()
    with router.running():
        code, out, _ = paceline("chat", "hi", "--url", router.url)
    assert code == 0
    assert out.startswith("Hello\x1b[36m out there\x1b[0m friend\n")
    assert "[ngram: 3 of 4 drafts accepted; 5 tokens in 2 steps]" in out


def test_no_color_is_honoured(paceline, terminal, monkeypatch):
    router = router_that(streams(*ANSWER))
    terminal()
    monkeypatch.setenv("NO_COLOR", "1")
    with router.running():
        _, out, _ = paceline("chat", "hi", "--url", router.url)
    assert "\x1b" not in out
    assert "3 of 4 drafts accepted" in out


def test_the_model_cannot_command_the_terminal(paceline, terminal):
    router = router_that(streams(chunk("a\x1b]0;title\x07b\r\n\tc\x9b31m")))
    terminal()
    with router.running():
        _, out, _ = paceline("chat", "hi", "--url", router.url)
    assert out == "a]0;titleb\n\tc31m\n"


def test_a_conversation_is_kept(paceline, monkeypatch):
    router = router_that(streams(chunk("one")), streams(chunk("two")))
    monkeypatch.setattr("sys.stdin", io.StringIO("first\n\n  \nsecond\n"))
    with router.running():
        assert paceline("chat", "--url", router.url) == (0, "one\ntwo\n", "")
    assert router.asked[1]["messages"] == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "second"},
    ]


def test_a_failed_turn_leaves_no_trace_in_the_conversation(paceline, monkeypatch):
    router = router_that(fails(400, "the prompt is too long"), streams(chunk("fine")))
    monkeypatch.setattr("sys.stdin", io.StringIO("long\nshort\n"))
    with router.running():
        code, out, err = paceline("chat", "--url", router.url)
    assert (code, out) == (1, "fine\n")
    assert "the prompt is too long" in err
    assert router.asked[1]["messages"] == [{"role": "user", "content": "short"}]


def test_ctrl_c_ends_an_answer_and_not_the_conversation(paceline, monkeypatch):
    stream = ApiClient.stream
    interruptions = iter([True])

    def interrupted(self, path, body):
        if next(interruptions, False):
            raise KeyboardInterrupt
        return stream(self, path, body)

    router = router_that(streams(chunk("fine")))
    monkeypatch.setattr(ApiClient, "stream", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    with router.running():
        assert paceline("chat", "--url", router.url) == (0, "fine\n", "")
    assert router.asked[0]["messages"] == [{"role": "user", "content": "two"}]


@pytest.mark.parametrize(
    "ending",
    [streams(chunk("Hel"), done=False), streams(chunk("Hel"), done=False, cut=True)],
)
def test_a_stream_without_done_is_a_failure(ending, paceline):
    router = router_that(ending)
    with router.running():
        code, out, err = paceline("chat", "hi", "--url", router.url)
    assert (code, out) == (1, "Hel\n")
    assert "broke off before its end" in err
    assert "paceline status" in err


def test_a_silent_stream_is_a_failure(paceline, monkeypatch):
    monkeypatch.setattr("cluster.commands.api_client.STREAM_TIMEOUT_S", 1.0)
    given_up = threading.Event()

    def stall(handler):
        streams(chunk("Hel"), done=False, cut=True)(handler)
        handler.wfile.flush()
        assert given_up.wait(TIMEOUT_S)

    router = router_that(stall)
    with router.running():
        code, out, err = paceline("chat", "hi", "--url", router.url)
        given_up.set()
    assert (code, out) == (1, "Hel\n")
    assert "timed out" in err


def test_an_error_in_the_stream_is_told(paceline):
    error = {"error": {"message": "the verifier is gone", "type": "upstream_lost"}}
    router = router_that(streams(chunk("Hel"), error, done=False))
    with router.running():
        code, out, err = paceline("chat", "hi", "--url", router.url)
    assert (code, out) == (1, "Hel\n")
    assert "the verifier is gone" in err
    assert "broke off" not in err


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (fails(400, "messages[0].content is missing", "messages"), "refused (400)"),
        (fails(503, "512 of 512 generations are in flight", retry_after="1"), "Try again in 1 s"),
        (says("<html>"), "broke off"),
        (streams({"choices": [{}]}), "does not answer as a Paceline router"),
        (streams({"choices": [{"delta": None}]}), "does not answer as a Paceline router"),
        (streams([1]), "does not answer as a Paceline router"),
    ],
)
def test_other_bad_answers(answer, words, paceline):
    router = router_that(answer)
    with router.running():
        code, out, err = paceline("chat", "hi", "--url", router.url)
    assert (code, out) == (1, "")
    assert words in err


def test_a_conversation_on_a_terminal():
    """The whole program on a pseudo-terminal: greeting, prompt, tinted answer, Ctrl-D."""
    router = router_that(streams(*ANSWER))
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    command = [sys.executable, "-m", "cluster.cli", "chat"]
    with (
        router.running(),
        subprocess.Popen(
            [*command, "--url", router.url],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
        ) as process,
    ):
        try:
            os.close(theirs)
            greeting = read_until(ours, b"> ")
            os.write(ours, b"hi\n")
            answer = read_until(ours, b"steps]", b"> ")
            os.write(ours, b"\x04")
            assert process.wait(TIMEOUT_S) == 0
        finally:
            process.kill()
            os.close(ours)
    assert b"tiny at http://127.0.0.1:" in greeting
    assert b"\x1b[36m out there\x1b[0m friend" in answer


def read_until(terminal: int, *marks: bytes) -> bytes:
    """All that comes until the last of the marks, each after the one before."""
    shown, start = b"", 0
    for mark in marks:
        while mark not in shown[start:]:
            ready, _, _ = select.select([terminal], [], [], TIMEOUT_S)
            assert ready, f"{mark!r} did not come, but {shown!r}"
            shown += os.read(terminal, 4096)
        start = shown.index(mark, start) + len(mark)
    return shown


@pytest.mark.parametrize(
    ("text", "spans", "expected"),
    [
        ("abc", [], [("abc", False)]),
        ("abc", [(0, 3)], [("abc", True)]),
        ("abcd", [(0, 2)], [("ab", True), ("cd", False)]),
        ("abcdef", [(0, 2), (3, 5)], [("ab", True), ("c", False), ("de", True), ("f", False)]),
        ("", [], []),
    ],
)
def test_what_is_tinted(text, spans, expected):
    assert pieces(text, spans) == expected


@given(st.text(), st.lists(st.integers(0, 30), max_size=6))
def test_tinting_loses_no_text(text, edges):
    edges = sorted(edges)[: len(edges) // 2 * 2]
    spans = list(zip(edges[::2], edges[1::2], strict=True))
    assert "".join(piece for piece, _ in pieces(text, spans)) == text


def test_the_summary_of_a_plain_answer_says_why():
    plain = SPECULATION | {"path": "plain", "reason": "auto: over 16", "num_draft_tokens": 0}
    assert summary(plain, 2) == "[plain, no drafts; 2 tokens in 2 steps; auto: over 16]"
