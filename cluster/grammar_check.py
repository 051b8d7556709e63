"""Is a client's grammar safe to compile? A process of its own tries, and may die of it."""

from __future__ import annotations

import hashlib
import json
import os
import select
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from cluster.errors import InternalError, OverloadedError
from cluster.grammar import GrammarError, GrammarSpec, check_size

_ANSWER_WITHIN_S = 5.0
"""Of the clock. What ends a grammar is its budget of CPU time, this is for a machine that hangs."""
_MAX_REMEMBERED = 256


class GrammarChecker:
    """Says of each grammar whether it compiles within its budget of time, memory and stack, and
    whether it can be followed. May be used from many threads; grammars are checked in turn.

    The process starts with the first grammar, and anew after each that it died of.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int) -> None:
        self._vocabulary = [vocab_size, _special_ids(tokenizer_json, vocab_size)]
        self._complaints: OrderedDict[bytes, str] = OrderedDict()
        """By hash of the spec; empty if there is none. Least recently used first."""
        self._worker: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def check(self, spec: GrammarSpec) -> None:
        """Blocks, mostly for milliseconds. Raises GrammarError, or OverloadedError if there was no
        turn or no answer within the deadline, or InternalError if there can be no process."""
        check_size(spec)
        key = hashlib.sha256(f"{spec.kind}\0{spec.text}".encode()).digest()
        if not self._lock.acquire(timeout=_ANSWER_WITHIN_S):
            raise OverloadedError("too many grammars are being checked", retry_after_s=1.0)
        try:
            complaint = self._complaints.get(key)
            if complaint is None:
                complaint = self._complaints[key] = self._ask(spec)
            self._complaints.move_to_end(key)
            if len(self._complaints) > _MAX_REMEMBERED:
                self._complaints.popitem(last=False)
        finally:
            self._lock.release()
        if complaint:
            raise GrammarError(complaint)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end_worker()

    def _ask(self, spec: GrammarSpec) -> str:
        if self._worker is None or self._worker.poll() is not None:
            self._start_worker()
        answer = self._exchange([spec.kind, spec.text])
        if answer is None:
            self._end_worker()
            return "the grammar is too complex"
        return answer

    def _start_worker(self) -> None:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._worker = subprocess.Popen(
            [sys.executable, "-m", "cluster.grammar_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )
        if self._exchange(self._vocabulary) is None:
            self._end_worker()
            raise InternalError("the process that checks grammars does not start")

    def _exchange(self, line: list[Any]) -> str | None:
        """The answer to a line, or None if the process died of it. Raises OverloadedError if it
        hangs: that is the machine's fault, and another try may do."""
        assert self._worker is not None
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        try:
            self._worker.stdin.write(json.dumps(line).encode() + b"\n")
            self._worker.stdin.flush()
        except BrokenPipeError:
            return None
        ready, _, _ = select.select([self._worker.stdout], [], [], _ANSWER_WITHIN_S)
        if not ready:
            self._end_worker()
            raise OverloadedError("a grammar was not checked in time", retry_after_s=1.0)
        answer = self._worker.stdout.readline()
        return str(json.loads(answer)) if answer else None

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker.communicate()
            self._worker = None


def _special_ids(tokenizer_json: str, vocab_size: int) -> Mapping[str, int]:
    added: list[dict[str, Any]] = json.loads(tokenizer_json).get("added_tokens", [])
    ids = {token["content"]: token["id"] for token in added if token["special"]}
    return {text: token_id for text, token_id in ids.items() if token_id < vocab_size}
