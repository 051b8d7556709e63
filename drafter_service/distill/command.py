"""`paceline distill`: trains a drafter for a target."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

_NUM_PASSES = 3.0
"""More of them learn the answers by heart: new answers teach more, and cost about twice as much."""


def add_command(commands: Any) -> None:
    """Add the parser to the subparsers of `paceline`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "distill",
        help="train a drafter for a target",
        description="Trains a small drafter on what the target itself writes. Run again with the "
        "same options, it goes on where it was.",
    )
    parser.add_argument("--target", required=True, help="as in model.source of a verifier")
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="the drafter's folder"
    )
    parser.add_argument(
        "--tokens",
        type=_positive,
        default=1_000_000,
        help="that the target writes (%(default)s); more make a better drafter",
    )
    parser.add_argument(
        "--passes",
        type=_positive_float,
        default=_NUM_PASSES,
        help="how often each token is learned, on average (%(default)s)",
    )
    parser.add_argument("--layers", type=_positive, default=4, help="of the drafter (%(default)s)")
    parser.add_argument(
        "--vocabulary-size",
        type=_positive,
        default=8192,
        help="tokens that the drafter can say: the target's most frequent ones (%(default)s)",
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="learn from this too: plain text, or .jsonl with conversations whose questions the "
        "target answers",
    )
    parser.add_argument("--device", default="auto", help="torch device (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.set_defaults(command=_distill)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError("must be over 0")
    return value


def _distill(arguments: argparse.Namespace) -> bool:
    from drafter_service.distill.distillation import Distillation  # Imports torch.
    from drafter_service.distill.progress import Progress
    from drafter_service.distill.settings import Settings

    settings = Settings(
        target=arguments.target,
        num_tokens=arguments.tokens,
        num_passes=arguments.passes,
        num_layers=arguments.layers,
        vocabulary_size=arguments.vocabulary_size,
        text=None if arguments.text is None else str(arguments.text),
        seed=arguments.seed,
    )
    Distillation(settings, arguments.out, arguments.device, Progress()).run()
    return True
