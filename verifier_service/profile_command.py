"""`paceline profile`: what a step of a model costs on this machine, and where its knee is."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.commands.command_error import CommandError
from cluster.config import KVCacheConfig, ModelConfig
from verifier_service.planner import StepCost

if TYPE_CHECKING:
    from engine.model_runner import ModelRunner

CONTEXTS = (0, 256, 1024, 4096)
_PLOT_WIDTH = 50

Costs = Mapping[int, Mapping[int, float]]
"""Context -> tokens in the step -> milliseconds."""


def add_command(commands: Any) -> None:
    """Add the parser to the subparsers of `paceline`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "profile",
        help="measure what a step of a model costs on this machine",
        description="Measures how long a step takes by its tokens and by the context before them, "
        "and where the knee is: up to it, verifying drafts is nearly free.",
    )
    parser.add_argument("--model", required=True, help="as in model.source of a verifier")
    parser.add_argument("--device", default="auto", help="torch device (%(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16, float16 or float32")
    parser.add_argument("--num-threads", type=int, default=1, help="on a CPU (%(default)s)")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="JSON")
    parser.set_defaults(command=_profile)


def _profile(arguments: argparse.Namespace) -> bool:
    if not arguments.out.parent.is_dir():
        raise CommandError(f"there is no folder {arguments.out.parent}; make it, or change --out")
    runner = _runner(arguments)
    costs = {context: measure(runner, context) for context in CONTEXTS if context < _room(runner)}
    report = _report(runner, arguments.dtype) | profile_of(runner, costs)
    try:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    except OSError as error:
        raise CommandError(f"{arguments.out} cannot be written: {error.strerror}") from error
    print(f"{report['model']} on {report['device']} ({report['decoder']}, {report['dtype']})\n")
    print("\n".join([*table(costs), "", *plot(costs[0])]))
    print(f"\nwritten to {arguments.out}")
    return True


def _runner(arguments: argparse.Namespace) -> ModelRunner:
    import torch
    from pydantic import ValidationError

    from engine.decoder import UnsupportedModelError
    from engine.embedded import EmbeddedModelMissingError
    from engine.loader import load_model
    from engine.memory import MemoryLimitError
    from engine.model_runner import ModelRunner

    try:
        device = torch.device("cpu" if arguments.device == "auto" else arguments.device)
    except RuntimeError as error:
        raise CommandError(f"--device {arguments.device} is no device: use cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CommandError("there is no GPU that torch can use; leave --device out, or say cpu")
    try:
        config = ModelConfig(
            source=arguments.model,
            device=arguments.device,
            dtype=arguments.dtype,
            num_threads=arguments.num_threads,
        )
        runner = ModelRunner(load_model(config), KVCacheConfig())
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][0]).replace("_", "-")
        raise CommandError(f"--{option}: {first['msg']}") from error
    except (UnsupportedModelError, MemoryLimitError, EmbeddedModelMissingError) as error:
        raise CommandError(str(error)) from error
    runner.warm_up()
    return runner


def _room(runner: ModelRunner) -> int:
    return min(runner.kv.num_slots, runner.max_model_len)


def profile_of(runner: ModelRunner, costs: Costs) -> dict[str, Any]:
    """What a simulation goes by."""
    from verifier_service.step_profile import prompt_share

    return {
        "knee_tokens": StepCost(costs[0]).knee(),
        "prompt_share": prompt_share(runner, costs[0]),
        "step_ms": {str(context): dict(of.items()) for context, of in costs.items()},
    }


def measure(runner: ModelRunner, context: int) -> dict[int, float]:
    """Milliseconds of a step behind so much context, by its tokens."""
    from verifier_service.step_profile import step_ms, step_sizes

    sizes = step_sizes(runner, context)
    return {size: step_ms(runner, size, context) for size in sizes}


def _report(runner: ModelRunner, dtype: str) -> dict[str, Any]:
    from verifier_service.step_profile import device_name

    return {
        "model": runner.card.name,
        "fingerprint": runner.card.fingerprint,
        "decoder": runner.card.decoder,
        "device": device_name(runner.device),
        "dtype": "bfloat16" if dtype == "auto" else dtype,
    }


def table(costs: Costs) -> list[str]:
    """Milliseconds by tokens (rows) and context (columns)."""
    contexts = list(costs)
    lines = ["milliseconds of a step, by its tokens and the context before them"]
    lines.append("  tokens" + "".join(f"{context:>10}" for context in contexts))
    for size in costs[0]:
        cells = (f"{costs[c][size]:10.2f}" if size in costs[c] else f"{'':10}" for c in contexts)
        lines.append(f"{size:8}" + "".join(cells))
    return lines


def plot(profile: Mapping[int, float]) -> list[str]:
    """A bar for each number of tokens, with the price of the tokens so far, and the knee."""
    cost = StepCost(profile)
    knee, longest = cost.knee(), max(profile.values())
    lines = [f"without context; the knee is at {knee} tokens: up to there a step takes within 10 %"]
    lines.append("  tokens  each costs")
    for size, ms in profile.items():
        bar = "#" * max(1, round(_PLOT_WIDTH * ms / longest))
        lines.append(f"{size:8}{_share(profile, size):>10.0%}  {bar}{_mark(profile, size, knee)}")
    return lines


def _share(profile: Mapping[int, float], size: int) -> float:
    """What a token of this step costs, as a share of a step of one."""
    return profile[size] / size / profile[1]


def _mark(profile: Mapping[int, float], size: int, knee: int) -> str:
    sizes: Sequence[int] = list(profile)
    return "  < knee" if size == max(s for s in sizes if s <= max(knee, sizes[0])) else ""
