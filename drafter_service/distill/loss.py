"""How far a student is from the target on what the target wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafter_service.distill.lesson import Lesson


@dataclass(frozen=True, slots=True)
class TeacherProbs:
    """What the target held likely, in terms of the draft vocabulary."""

    places: torch.Tensor
    """[n, num_candidates] int64: rows of the student's head."""
    probs: torch.Tensor
    """[n, num_candidates]; 0 for a token that the student cannot say. A row's sum is below 1 by
    those and by all tokens that are no candidates."""
    sayable: torch.Tensor
    """[n] bool: the target's likeliest token is one that the student can say."""


def teacher_probs(lessons: Sequence[Lesson], vocabulary: torch.Tensor, size: int) -> TeacherProbs:
    """Of every token that is to be learned.

    vocabulary  # [draft vocabulary] int64
    size        # of the target's vocabulary
    """
    device = vocabulary.device
    places_of = torch.full((size,), -1, dtype=torch.int64, device=device)
    places_of[vocabulary] = torch.arange(len(vocabulary), device=device)
    places = places_of[torch.cat([lesson.top_ids for lesson in lessons]).to(device).long()]
    log_probs = torch.cat([lesson.top_log_probs for lesson in lessons]).to(device).float()
    known = places >= 0
    return TeacherProbs(places.clamp(min=0), log_probs.exp() * known, known[:, 0])


@dataclass(frozen=True, slots=True)
class Distance:
    """Of a batch; each the mean over its tokens."""

    cross_entropy: torch.Tensor
    """Nats, of the student under the target's candidates."""
    variation: torch.Tensor
    """1 less the overlap sum(min(target, student)): what rejection sampling would reject, and about
    what the coupled rule rejects."""
    agreement: torch.Tensor
    """Share of tokens where both hold the same token likeliest; not differentiable."""


def distance(logits: torch.Tensor, teacher: TeacherProbs) -> Distance:
    """
    logits  # [n, draft vocabulary]
    """
    log_probs = torch.log_softmax(logits, dim=-1).gather(1, teacher.places)
    overlap = torch.minimum(teacher.probs, log_probs.exp()).sum(-1)
    likeliest = logits.detach().argmax(-1)
    return Distance(
        cross_entropy=-(teacher.probs * log_probs).sum(-1).mean(),
        variation=1.0 - overlap.mean(),
        agreement=((likeliest == teacher.places[:, 0]) & teacher.sayable).float().mean(),
    )
