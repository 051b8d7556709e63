"""A drafter on disk for a tiny target: its first layers, as they are or as a test makes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from drafter_service.distill.export import write_drafter
from drafter_service.distill.student import Student, first_layers
from engine.models.distilled import FORMAT, DrafterDescription, embeddings_identity
from tests.support.decoders import read_model


def untrained_student(target: Path, num_layers: int) -> Student:
    spec, weights = read_model(target)
    return first_layers(spec, weights, num_layers)


def make_tiny_drafter(
    folder: Path, target: Path, *, num_layers: int = 1, vocabulary: Sequence[int] | None = None
) -> Path:
    """An untrained one, which can say the ids in `vocabulary`, or all."""
    student = untrained_student(target, num_layers)
    write_student(folder, target, student, vocabulary)
    return folder


def write_student(
    folder: Path, target: Path, student: Student, vocabulary: Sequence[int] | None
) -> None:
    description = DrafterDescription(
        format=FORMAT,
        target=str(target),
        target_embeddings=embeddings_identity(student.weights.embedding),
        num_layers=len(student.spec.layers),
    )
    sayable = None if vocabulary is None else torch.tensor(vocabulary)
    write_drafter(folder, description, student.parameters(), sayable)
