"""Random generation under a grammar, without a model."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch

from engine.grammar import GrammarState

MAX_WALK_LEN = 600


def allowed_ids(mask: torch.Tensor) -> list[int]:
    """The ids in one row of GrammarState.masks."""
    ids: list[int] = np.flatnonzero(np.unpackbits(mask.numpy(), bitorder="little")).tolist()
    return ids


def random_walk(state: GrammarState, rng: random.Random, closing_ids: Sequence[int]) -> list[int]:
    """Commit random allowed tokens until the end of sequence. `closing_ids` are tokens that bring
    the end nearer; they are taken the rather the longer it takes."""
    token_ids: list[int] = []
    while not state.finished:
        assert len(token_ids) < MAX_WALK_LEN, "the walk does not come to an end"
        allowed = allowed_ids(state.masks([])[0])
        closing = sorted(set(closing_ids).intersection(allowed))
        hurry = closing and rng.random() < min(0.8, len(token_ids) / 100)
        token_ids.append(rng.choice(closing if hurry else allowed))
        state.commit(token_ids[-1:])
    return token_ids
