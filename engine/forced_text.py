"""Where a grammar leaves only one text, which token shall spell it.

Any token that begins the text is allowed then, one of a single character too, and a model that
would have written something else picks among them no better than at random: its text takes half
as many steps again, and gets worse. So only the longest of them stays.

llguidance can do this, and better, by the tokenizer's own segmentation. But it follows the text to
its end, which may be a million characters away or, in a grammar such as `/a*/ "ab"`, nowhere.
"""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher

from engine.grammar_vocabulary import Bitmask, GrammarVocabulary

_MOST_CANDIDATES = 64


def forced_token(matcher: LLMatcher, vocabulary: GrammarVocabulary, allowed: Bitmask) -> int | None:
    """The longest of the allowed tokens, if every way to go on spells it; else None. The matcher
    stands where it stood, unless it came to its limits and failed."""
    candidates = _texts(vocabulary, allowed)
    if len(candidates) < 2:
        return None
    longest = max(candidates, key=lambda token_id: len(candidates[token_id]))
    return longest if _is_forced(matcher, vocabulary, candidates, candidates[longest]) else None


def _is_forced(
    matcher: LLMatcher, vocabulary: GrammarVocabulary, candidates: dict[int, bytes], text: bytes
) -> bool:
    """Goes along the text by the shortest tokens: behind a shorter one there may be ways that are
    not there behind a longer one."""
    num_consumed = 0
    while text and candidates and all(_agree(text, piece) for piece in candidates.values()):
        shortest = min(candidates, key=lambda token_id: len(candidates[token_id]))
        text = text[len(candidates[shortest]) :]
        if text:
            matcher.consume_token(shortest)
            num_consumed += 1
            candidates = {} if matcher.is_accepting() else _next_texts(matcher, vocabulary)
    matcher.rollback(num_consumed)
    return not text


def _agree(text: bytes, piece: bytes) -> bool:
    return bool(piece) and (text.startswith(piece) or piece.startswith(text))


def _next_texts(matcher: LLMatcher, vocabulary: GrammarVocabulary) -> dict[int, bytes]:
    num_bytes = len(vocabulary.tokens)
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8, count=num_bytes)
    return _texts(vocabulary, mask & vocabulary.tokens)


def _texts(vocabulary: GrammarVocabulary, allowed: Bitmask) -> dict[int, bytes]:
    """The tokens that are allowed, with their texts; none if they are many."""
    places = np.flatnonzero(allowed)
    if len(places) > _MOST_CANDIDATES:
        return {}
    return {
        token_id: vocabulary.text(token_id)
        for place in places.tolist()
        for token_id in range(8 * place, 8 * place + 8)
        if allowed[place] >> (token_id & 7) & 1
    }
