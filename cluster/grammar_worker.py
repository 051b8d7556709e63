"""The process that compiles clients' grammars first, to see whether it survives. grammar_check.py
starts it as `python -m cluster.grammar_worker` and is told of its end by the closed pipe.

A line in is a JSON list; a line out is a JSON string, empty if the grammar may be used:

    -> [vocabulary size, {special token: id, ...}]          once
    <- ""
    -> [kind, text]
    <- "" or what is wrong with it

What takes too long, too much memory or too much stack ends the process without a line.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import sys
import threading
from collections.abc import Mapping
from types import SimpleNamespace

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from cluster.grammar import GrammarError, GrammarKind, GrammarSpec
from cluster.grammar_matcher import compile_matcher, raise_if_broken

CPU_BUDGET_S = 0.5
_MEMORY_BYTES = 1 << 30
_STACK_BYTES = 1 << 21
"""A quarter of what threads have by default, so that what passes here has room elsewhere."""
_NUM_STEPS = 64
"""How far a grammar is followed."""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


def _serve() -> None:
    vocab_size, special_ids = json.loads(sys.stdin.readline())
    tokenizer = _byte_tokenizer(vocab_size, special_ids)
    _answer("")
    for line in sys.stdin:
        kind, text = json.loads(line)
        # Nobody handles this signal, so the process dies of it, whatever it is at.
        signal.setitimer(signal.ITIMER_PROF, CPU_BUDGET_S)
        complaint = _complaint(tokenizer, GrammarSpec(GrammarKind(kind), text), vocab_size)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer(complaint)


def _answer(line: str) -> None:
    print(json.dumps(line), flush=True)


def _byte_tokenizer(vocab_size: int, special_ids: Mapping[str, int]) -> LLTokenizer:
    """The special tokens where a model has them, for grammars that name them, and behind its
    vocabulary the 256 bytes. A model's own tokens would take a second and 100 MB to read."""
    tokens = [b""] * vocab_size + [bytes([byte]) for byte in range(256)]
    for text, token_id in special_ids.items():
        tokens[token_id] = text.encode()
    vocabulary = _ByteVocabulary(
        eos_token_id=vocab_size + 256,
        bos_token_id=None,
        tokens=[*tokens, b"<end of text>"],
        special_token_ids=[*special_ids.values(), vocab_size + 256],
        vocab_size=vocab_size,
    )
    return LLTokenizer(TokenizerWrapper(vocabulary))


class _ByteVocabulary(SimpleNamespace):
    """As TokenizerWrapper wants it."""

    vocab_size: int

    def __call__(self, text: bytes) -> list[int]:
        return [self.vocab_size + byte for byte in text]


def _complaint(tokenizer: LLTokenizer, spec: GrammarSpec, vocab_size: int) -> str:
    try:
        matcher = compile_matcher(tokenizer, spec)
        _follow(matcher, vocab_size)
    except GrammarError as error:
        return str(error)
    return ""


def _follow(matcher: LLMatcher, vocab_size: int) -> None:
    """Generate some bytes and take them back. Raises GrammarError if the grammar allows nothing, is
    too complex to be followed, or cannot be taken back, which speculation needs."""
    rng = random.Random(0)
    for num_consumed in range(_NUM_STEPS + 1):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little") >> vocab_size
        raise_if_broken(matcher)
        allowed_bytes = [byte for byte in range(256) if allowed >> byte & 1]
        if not allowed_bytes or num_consumed == _NUM_STEPS:
            break
        matcher.consume_token(vocab_size + rng.choice(allowed_bytes))
        raise_if_broken(matcher)
    matcher.rollback(num_consumed)
    raise_if_broken(matcher)


if __name__ == "__main__":
    main()
