"""A rolling 64-bit hash of a token prefix: what a draft names its anchor by.

Not cryptographic: both sides are ours, and a collision can only cost speed, since the verifier
checks every token.
"""

from __future__ import annotations

from collections.abc import Iterable

_MASK = (1 << 64) - 1
EMPTY_PREFIX_HASH = 0x9E3779B97F4A7C15


def extend_prefix_hash(prefix_hash: int, token_id: int) -> int:
    """Hash of a prefix and one more token (the finaliser of splitmix64 over their mix)."""
    x = (prefix_hash ^ ((token_id + 1) * 0xD1342543DE82EF95)) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def prefix_hash(token_ids: Iterable[int], start: int = EMPTY_PREFIX_HASH) -> int:
    """Hash of `token_ids` after a prefix whose hash is `start`."""
    for token_id in token_ids:
        start = extend_prefix_hash(start, token_id)
    return start
