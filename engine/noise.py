"""The noise of coupled sampling: a function of (request key, position, token id), nothing else.

    u(v) = (b(v) + 1/2) / 2**52         b: upper 52 bits of element v of a splitmix64 stream
    E(v) = -log1p(-u(v))                exponentially distributed, and not less than u(v)

splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

Words = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_MASK_64 = (1 << 64) - 1
_SIGN_64 = -(1 << 63)
_GAMMA = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""The finaliser shifts and multiplies by these in turn, and at last shifts once more."""
_LAST_SHIFT = 31
_BITS_PER_UNIFORM = 52
_LEAST_UNIFORM = 2.0 ** -(_BITS_PER_UNIFORM + 1)

_WORDS_PER_PIECE = 24_576
"""Two arrays of these stay in a core's second-level cache, and the calls cost little beside."""
_ROWS_PER_PIECE = 32
"""On an accelerator: bounds the memory."""


def noise_states(positions: Iterable[tuple[int, int]]) -> Words:
    """What the noise of all tokens starts from, for each (request key, position)."""
    states = [
        _mix((_mix((request_key + _GAMMA) & _MASK_64) + position * _GAMMA) & _MASK_64)
        for request_key, position in positions
    ]
    return np.array(states, np.uint64)


def derived_key(request_key: int, use: bytes) -> int:
    """A request's key for another use, unsigned 64 bit: its noise is independent of what the
    request's own key gives, and of every other use."""
    digest = hashlib.blake2b(request_key.to_bytes(8, "little"), digest_size=8, person=use)
    return int.from_bytes(digest.digest(), "little")


def uniforms(key: int, positions: Iterable[int]) -> Floats:
    """One number in (0, 1) for each position; any unsigned 64-bit number is one.

    returns  # [num_positions]
    """
    states = noise_states((key, position) for position in positions)
    bits = noise_bits(states, np.zeros(len(states), np.int64))
    return (bits.astype(np.float64) + 0.5) * 2.0**-_BITS_PER_UNIFORM


def noise_bits(states: Words, token_ids: Ids) -> Words:
    """Each token's element of the splitmix64 stream that starts at its state, the upper 52 bits.

    states, token_ids  # broadcast
    """
    z = (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA) + states
    for shift, factor in _ROUNDS:
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)
    z ^= z >> np.uint64(_LAST_SHIFT)
    return z >> np.uint64(64 - _BITS_PER_UNIFORM)


def exponential(bits: int) -> float:
    """E of one token from its 52 noise bits."""
    return -math.log1p(-(bits + 0.5) * 2.0**-_BITS_PER_UNIFORM)


def log_exponentials(bits: Words) -> Floats:
    """log E of many, within a few units in the last place of what `exponential` gives."""
    uniforms = (bits.astype(np.float64) + 0.5) * 2.0**-_BITS_PER_UNIFORM
    return np.log(-np.log1p(-uniforms))


def find_small(
    states: Words, bounds: Floats, vocab_size: int, device: torch.device
) -> tuple[Ids, Ids]:
    """Every token with u(v) <= the bound of its row, and at most a few others.

    states, bounds  # [n]
    device          # where to look
    returns         # rows and token ids, [num_found] each
    """
    rows = np.flatnonzero(bounds >= _LEAST_UNIFORM)
    if not len(rows):
        return rows, rows
    # The last shift does not reach the upper 31 bits. They decide, so it is left out.
    steps = (np.minimum(bounds[rows], 1.0) * 2.0**31).astype(np.uint64)
    limits = (np.minimum(steps, np.uint64(2**31 - 1)) << np.uint64(33)) | np.uint64(2**33 - 1)
    find = _find_on_cpu if device.type == "cpu" else _find_on_accelerator
    found, token_ids = find(states[rows], limits, vocab_size, device)
    return rows[found], token_ids


def _find_on_cpu(
    states: Words, limits: Words, vocab_size: int, device: torch.device
) -> tuple[Ids, Ids]:
    elements = _elements(vocab_size)
    small = np.empty((len(states), *elements.shape), np.bool_)
    z, shifted = np.empty((2, elements.shape[1]), np.uint64)
    for piece, added in enumerate(elements):
        for row, (state, limit) in enumerate(zip(states, limits, strict=True)):
            np.add(added, state, out=z)
            for shift, factor in _ROUNDS:
                np.right_shift(z, np.uint64(shift), out=shifted)
                np.bitwise_xor(z, shifted, out=z)
                np.multiply(z, np.uint64(factor), out=z)
            np.less_equal(z, limit, out=small[row, piece])
    rows, token_ids = np.divmod(np.flatnonzero(small), elements.size)
    within = token_ids < vocab_size
    return rows[within], token_ids[within]


@lru_cache(maxsize=4)
def _elements(vocab_size: int) -> Words:
    """What each token adds to a state, in pieces of equal length.

    returns  # [num_pieces, piece_len], read only; at least vocab_size together
    """
    num_pieces = -(-vocab_size // _WORDS_PER_PIECE)
    piece_len = -(-vocab_size // num_pieces)
    elements = np.arange(1, num_pieces * piece_len + 1, dtype=np.uint64) * np.uint64(_GAMMA)
    elements.setflags(write=False)
    return elements.reshape(num_pieces, piece_len)


def _find_on_accelerator(
    states: Words, limits: Words, vocab_size: int, device: torch.device
) -> tuple[Ids, Ids]:
    """With words as int64, since torch shifts and compares no others."""
    elements = torch.arange(1, vocab_size + 1, device=device) * _signed(_GAMMA)
    found = []
    for start in range(0, len(states), _ROWS_PER_PIECE):
        piece = slice(start, start + _ROWS_PER_PIECE)
        z = elements + torch.from_numpy(states[piece, None].view(np.int64)).to(device)
        for shift, factor in _ROUNDS:
            z ^= (z >> shift) & ((1 << (64 - shift)) - 1)
            z *= _signed(factor)
        z ^= _SIGN_64
        limit = torch.from_numpy(limits[piece, None].view(np.int64)).to(device) ^ _SIGN_64
        rows, token_ids = torch.nonzero(z <= limit).cpu().unbind(-1)
        found.append((rows.numpy() + start, token_ids.numpy()))
    return np.concatenate([f[0] for f in found]), np.concatenate([f[1] for f in found])


def _mix(z: int) -> int:
    """splitmix64's finaliser on unsigned 64-bit integers."""
    for shift, factor in _ROUNDS:
        z = ((z ^ (z >> shift)) * factor) & _MASK_64
    return z ^ (z >> _LAST_SHIFT)


def _signed(value: int) -> int:
    """The int64 with these 64 bits."""
    return value - (1 << 64) if value >> 63 else value
