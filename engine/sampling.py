"""Coupled sampling: the noise is a function of (request key, position, token id), nothing else.

    E(v) = -log1p(-u(v))                            u in (0, 1) from a 64-bit hash
    y    = argmax_v [ log target_probs(v) - log E(v) ]

E(v) is exponentially distributed, so y is exactly a sample of target_probs (an exponential race).
Two members that draw the same position of the same request with similar distributions tend to draw
the same token, and one that draws it again draws it again. Ties go to the lowest id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cluster.types import SamplingParams
from engine.processors import TargetLogits, target_logits

_MASK_64 = (1 << 64) - 1
# splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_BITS_PER_UNIFORM = 52
# How far a float32 score may be from the exact one: at most log(36.8 / 16.6) = 0.8, where u rounds
# towards 1, and 1e-5 elsewhere.
_SCORE_ERROR = 1.0
_LARGEST_FLOAT32_BELOW_1 = 1.0 - 2.0**-24


@dataclass(frozen=True, slots=True)
class SampleRow:
    """How one token is drawn."""

    sampling: SamplingParams
    request_key: int
    """Unsigned 64 bit."""
    position: int
    """Absolute index, prompt included, of the token that is drawn."""


class NonFiniteLogitsError(ArithmeticError):
    """The model gave NaN or infinity in these rows; the other rows may be sampled without them."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(f"the model's logits are not finite in rows {list(rows)}")
        self.rows = tuple(rows)


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Draw one token per row. A row's token does not depend on the other rows.

    logits  # [n, vocab] float32; -inf is probability 0

    Raises NonFiniteLogitsError that names every row with NaN, infinity or nothing to draw.
    """
    assert len(logits) == len(rows)
    if not rows:
        return []
    _check_finite(logits)
    return [
        int(torch.argmax(row_logits))
        if row.sampling.greedy
        else _race(target_logits(row_logits, row.sampling), row)
        for row_logits, row in zip(logits, rows, strict=True)
    ]


def _check_finite(logits: torch.Tensor) -> None:
    finite = torch.isfinite(torch.amax(logits, dim=-1))  # NaN propagates
    if not finite.all():
        raise NonFiniteLogitsError((~finite).nonzero().flatten().tolist())


def _race(target: TargetLogits, row: SampleRow) -> int:
    """The winner of the exponential race.

    float32 finds the few tokens that can win; float64 decides among them. So the winner does not
    depend on how a vectorised logarithm rounds.
    """
    bits = noise_bits(noise_state(row.request_key, row.position), target.token_ids)
    uniforms = bits.float().mul_(2.0**-_BITS_PER_UNIFORM)
    uniforms.clamp_(2.0 ** -(_BITS_PER_UNIFORM + 1), _LARGEST_FLOAT32_BELOW_1)
    rough = target.logits - uniforms.neg_().log1p_().neg_().log_()
    finalists = torch.nonzero(rough >= rough.max() - 2 * _SCORE_ERROR).flatten()
    scores = [
        logit - math.log(exponential(num))
        for logit, num in zip(
            target.logits[finalists].tolist(), bits[finalists].tolist(), strict=True
        )
    ]
    return int(target.token_ids[finalists[scores.index(max(scores))]])


def exponential(bits: int) -> float:
    """E of one token from its 52 noise bits."""
    return -math.log1p(-(bits + 0.5) * 2.0**-_BITS_PER_UNIFORM)


def noise_state(request_key: int, position: int) -> int:
    """What the noise of all tokens at one position starts from; unsigned 64 bit."""
    return _mix((_mix((request_key + _GAMMA) & _MASK_64) + position * _GAMMA) & _MASK_64)


def noise_bits(state: int, token_ids: torch.Tensor) -> torch.Tensor:
    """The token's element of the splitmix64 stream that starts at `state`, its upper 52 bits.

    token_ids  # [n] int64
    returns    # [n] int64 in [0, 2**52)
    """
    z = token_ids * _signed(_GAMMA)
    z += _signed((state + _GAMMA) & _MASK_64)
    _xor_shifted(z, 30)
    z *= _signed(_MIX_1)
    _xor_shifted(z, 27)
    z *= _signed(_MIX_2)
    _xor_shifted(z, 31)
    return _shift_right(z, 64 - _BITS_PER_UNIFORM)


def _mix(z: int) -> int:
    """splitmix64's finaliser on unsigned 64-bit integers."""
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK_64
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK_64
    return z ^ (z >> 31)


def _xor_shifted(z: torch.Tensor, n: int) -> None:
    z ^= _shift_right(z, n)


def _shift_right(z: torch.Tensor, n: int) -> torch.Tensor:
    """Logical shift; torch's own copies the sign."""
    shifted = z >> n
    shifted &= (1 << (64 - n)) - 1
    return shifted


def _signed(value: int) -> int:
    """The int64 with these 64 bits."""
    return value - (1 << 64) if value >> 63 else value
