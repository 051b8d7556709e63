"""Coupled sampling: one token per row, by the noise that engine/noise.py defines.

    y = argmax_v [ log target_probs(v) - log E(v) ]

E(v) is exponentially distributed, so y is exactly a sample of target_probs (an exponential race).
Two members that draw the same position of the same request with similar distributions tend to draw
the same token, and one that draws it again draws it again. Ties go to the lowest id.

Few tokens can win, and a score costs two logarithms. So the likeliest are scored first. Another
token must beat the best of them from a lower logit, for which its noise must be small: the hash
alone tells of nearly all that it is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cluster.types import SamplingParams
from engine.noise import (
    Floats,
    Ids,
    Words,
    exponential,
    find_small,
    log_exponentials,
    noise_bits,
    noise_states,
)
from engine.processors import cut, is_kept, num_ranked
from engine.scaled_logits import ScaledLogits

Logits = npt.NDArray[np.float32]

_SCORE_ERROR = 1e-9
"""More than a vectorised score is off. Those that matter lie between -4 and 37."""


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
    scaled = ScaledLogits(logits, [row.sampling.temperature for row in rows])
    _check_finite(scaled)
    noisy = [index for index, row in enumerate(rows) if not row.sampling.greedy]
    winners = _race(scaled, noisy, [rows[index] for index in noisy]) if noisy else []
    if len(noisy) == len(rows):
        return winners
    token_ids: list[int] = scaled.argmax().tolist()
    for index, token_id in zip(noisy, winners, strict=True):
        token_ids[index] = token_id
    return token_ids


def race(token_ids: Ids, weights: Floats, key: int, position: int) -> int:
    """One token drawn in proportion to the weights, by the noise of (key, position).

    token_ids, weights  # [n]; a weight may be 0, not all are
    """
    bits = noise_bits(noise_states([(key, position)]), token_ids)
    with np.errstate(divide="ignore"):
        scores = np.log(weights) - log_exponentials(bits)
    return int(token_ids[np.argmax(scores)])


def _check_finite(scaled: ScaledLogits) -> None:
    bad = [i for i, largest in enumerate(scaled.largest.tolist()) if not math.isfinite(largest)]
    if bad:
        raise NonFiniteLogitsError(bad)


@dataclass(frozen=True, slots=True)
class _Entrants:
    """Tokens in races, [num_entrants] each."""

    races: Ids
    token_ids: Ids
    logits: Logits
    bits: Words
    scores: Floats
    """Vectorised."""


@dataclass(frozen=True, slots=True)
class _Races:
    """One race for each of m rows, [m] each."""

    states: Words
    lowest: Logits
    last_ids: Ids

    def enter(self, races: Ids, token_ids: Ids, logits: Logits) -> _Entrants:
        """Those of these tokens that may be drawn."""
        kept = is_kept(token_ids, logits, self.lowest[races], self.last_ids[races])
        races, token_ids, logits = races[kept], token_ids[kept], logits[kept]
        bits = noise_bits(self.states[races], token_ids)
        return _Entrants(races, token_ids, logits, bits, logits - log_exponentials(bits))


def _race(scaled: ScaledLogits, indices: list[int], draws: Sequence[SampleRow]) -> list[int]:
    """The winners in the rows with these indices."""
    rows = torch.tensor(indices, device=scaled.largest.device)
    params = [draw.sampling for draw in draws]
    ranked = scaled.top(rows, num_ranked(params))
    cuts = cut(scaled, rows, ranked[0], params)
    races = _Races(
        noise_states((draw.request_key, draw.position) for draw in draws),
        cuts.lowest.cpu().numpy(),
        cuts.last_ids.cpu().numpy(),
    )
    logits, token_ids = (values.cpu().numpy() for values in ranked)  # [num_races, num_ranked]
    each_race = np.arange(len(draws)).repeat(logits.shape[1])
    likely = races.enter(each_race, token_ids.ravel(), logits.ravel())

    # The others have at most the last of these logits. They win only if E <= exp(logit - best),
    # and u <= E.
    last, best = logits[:, -1], _best_scores([likely], len(draws))
    bounds = np.where(last < races.lowest, 0.0, np.exp(last - best + _SCORE_ERROR))
    found, found_ids = find_small(races.states, bounds, scaled.vocab_size, rows.device)
    late = races.enter(found, found_ids, _logits_of(scaled, rows, found, found_ids))
    return _winners([likely, late], len(draws))


def _logits_of(scaled: ScaledLogits, rows: torch.Tensor, races: Ids, token_ids: Ids) -> Logits:
    """[num_tokens]; rows  # [num_races]"""
    places = torch.from_numpy(np.stack([races, token_ids])).to(rows.device)
    return scaled.tokens(rows[places[0]], places[1]).cpu().numpy()


def _best_scores(entrants: Iterable[_Entrants], num_races: int) -> Floats:
    """[num_races]"""
    best = np.full(num_races, -np.inf)
    for some in entrants:
        np.maximum.at(best, some.races, some.scores)
    return best


def _winners(entrants: Sequence[_Entrants], num_races: int) -> list[int]:
    """The token of each race with the highest score.

    Vectorised scores leave hardly more than one. Where they leave several, those of the C library
    decide, which rounds the same wherever a token stands.
    """
    best = _best_scores(entrants, num_races)
    leaders = [(-math.inf, 0)] * num_races
    for some in entrants:
        close = np.flatnonzero(some.scores >= best[some.races] - _SCORE_ERROR)
        columns = (some.races, some.token_ids, some.logits, some.bits)
        for race, token_id, logit, bits in zip(*(c[close].tolist() for c in columns), strict=True):
            score = logit - math.log(exponential(bits))
            leaders[race] = max(leaders[race], (score, -token_id))
    return [-negated_id for _, negated_id in leaders]
