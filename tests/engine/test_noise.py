"""The noise: golden vectors, its bits, and the search for small noise against a plain reference."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from engine import noise
from engine.noise import exponential, find_small, log_exponentials, noise_bits, noise_states

MASK = (1 << 64) - 1
CPU = torch.device("cpu")


def reference_mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def reference_bits(request_key: int, position: int, token_id: int) -> int:
    """Element token_id of splitmix64 seeded with the hash of key and position, top 52 bits."""
    gamma = 0x9E3779B97F4A7C15
    state = reference_mix((request_key + gamma) & MASK)
    state = reference_mix((state + position * gamma) & MASK)
    return reference_mix((state + (token_id + 1) * gamma) & MASK) >> 12


# Changing any of these changes what every client receives: NOISE_VERSION must go up with it.
GOLDEN_BITS = [
    (0, 0, 0, 0x568A9B0B1A2C0),
    (0, 0, 1, 0x44E5B8B147EF7),
    (1, 0, 0, 0x6EC85F1F8547B),
    (MASK, 2**31, 151_935, 0x9C11FF216D37B),
    (0x9E3779B97F4A7C15, 17, 49_151, 0x9F86D92C9419D),
]


@pytest.mark.parametrize(("request_key", "position", "token_id", "bits"), GOLDEN_BITS)
def test_golden_noise(request_key: int, position: int, token_id: int, bits: int) -> None:
    states = noise_states([(request_key, position)])
    assert noise_bits(states, np.array([token_id])).tolist() == [bits]


def test_noise_is_splitmix64_by_key_position_and_token() -> None:
    rng = random.Random(0)
    for _ in range(50):
        key, position = rng.getrandbits(64), rng.getrandbits(20)
        ids = [rng.randrange(1 << 18) for _ in range(20)]
        expected = [reference_bits(key, position, token_id) for token_id in ids]
        assert noise_bits(noise_states([(key, position)]), np.array(ids)).tolist() == expected


def test_noise_is_never_zero_or_infinite() -> None:
    for bits in (0, 1, (1 << 52) - 2, (1 << 52) - 1):
        assert 0 < exponential(bits) < math.inf
    assert exponential(0) == pytest.approx(2.0**-53)
    assert exponential((1 << 52) - 1) == pytest.approx(53 * math.log(2))


def test_every_noise_bit_is_fair() -> None:
    """Over tokens of one position, and over positions of one token."""
    over_tokens = noise_bits(noise_states([(7, 3)]), np.arange(100_000))
    over_positions = noise_bits(noise_states((7, i) for i in range(20_000)), np.array([5]))
    for bits in (over_tokens, over_positions):
        for shift in range(52):
            share = ((bits >> np.uint64(shift)) & np.uint64(1)).mean()
            assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(len(bits))


def test_vectorised_logarithms_are_those_of_the_definition() -> None:
    """Far closer than engine/sampling.py allows for."""
    extremes = [0, 1, 2, 1 << 51, (1 << 52) - 2, (1 << 52) - 1]
    rng = random.Random(0)
    bits = extremes + [rng.getrandbits(rng.randint(1, 52)) for _ in range(20_000)]
    expected = [math.log(exponential(b)) for b in bits]
    assert np.abs(log_exponentials(np.array(bits, np.uint64)) - expected).max() < 1e-12


@pytest.mark.parametrize("vocab_size", [1, 7, 64, 5_003, 49_152, 151_936])
def test_finds_all_that_is_small_and_hardly_more(vocab_size: int) -> None:
    states = noise_states((vocab_size, position) for position in range(9))
    bounds = np.array([0.0, 2.0**-60, 1e-9, 1e-4, 0.01, 0.3, 0.999_999, 1.0, np.inf])
    u = (noise_bits(states[:, None], np.arange(vocab_size)) + 0.5) * 2.0**-52
    found = np.zeros(u.shape, np.bool_)
    rows, token_ids = find_small(states, bounds, vocab_size, CPU)
    found[rows, token_ids] = True
    assert len(rows) == found.sum()
    assert np.array_equal(np.argwhere(found), np.stack([rows, token_ids], 1))
    assert found[u <= bounds[:, None]].all()
    assert (u[found] <= (bounds[:, None] + 2.0**-31).repeat(vocab_size, 1)[found]).all()


def test_the_bound_is_inclusive() -> None:
    states = noise_states([(3, 4)])
    u = (noise_bits(states, np.arange(1_000)) + 0.5) * 2.0**-52
    for token_id in range(1_000):
        assert token_id in find_small(states, u[token_id : token_id + 1], 1_000, CPU)[1]


def test_an_accelerator_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    states = noise_states((11, position) for position in range(70))
    bounds = np.geomspace(1e-20, 2.0, 70)
    expected = find_small(states, bounds, 5_003, CPU)
    monkeypatch.setattr(noise, "_find_on_cpu", noise._find_on_accelerator)
    for values, others in zip(expected, find_small(states, bounds, 5_003, CPU), strict=True):
        assert np.array_equal(values, others)
