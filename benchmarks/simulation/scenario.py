"""What a simulation simulates: a YAML file, checked before anything runs.

Frozen, unknown keys refused. Paths in a scenario are relative to its file.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from benchmarks.loadtest.profile import Factor, Positive, Slo, TokenRange
from benchmarks.settings_file import load_settings, shipped_names
from benchmarks.simulation.production import (
    AdmissionConfig,
    PathPolicyConfig,
    SchedulerConfig,
    replica_policy,
)
from cluster.commands.command_error import CommandError
from cluster.config import FiniteMillis, FiniteSeconds, Section

SHIPPED = Path(__file__).parent / "scenarios"
MAX_CHAIN = 32
"""Longest chain of drafts that is simulated, what was drafted ahead included."""

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Millis = Annotated[float, Field(ge=0, le=600_000, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]
Natural = Annotated[int, Field(ge=0)]
CostTable = Annotated[dict[Positive, FiniteMillis], Field(min_length=1)]


class Kind(Section):
    """A kind of traffic: how long it is and how well it can be foreseen."""

    share: Factor = 1.0
    """Of the requests, as a weight."""
    acceptance: Annotated[tuple[Share, ...], Field(min_length=1)] = (0.7,)
    """Chance of the first, second, ... draft of a chain to be accepted if all before it were; the
    last one goes on."""
    spread: Annotated[float, Field(ge=0, lt=1)] = 0.3
    """How far chances differ from token to token: 0 not at all, near 1 almost all are 0 or 1. The
    drafter's confidence tells the chance of each token, rounded to hundredths."""
    prompt_tokens: TokenRange = TokenRange(low=64, high=192)
    """Length of prompts."""
    output_tokens: TokenRange = TokenRange(low=64, high=192)
    """Length of answers."""
    mode: Literal["auto", "on", "off"] = "auto"
    """What requests of this kind ask for themselves, in every arm."""
    tier: Literal["flex", "default", "priority"] = "default"
    """Service tier: how long they keep speculating as load grows."""


class RatePoint(Section):
    """A corner of a rate curve."""

    at_s: Seconds
    """Simulated time."""
    per_s: Annotated[float, Field(ge=0, le=1_000_000, allow_inf_nan=False)]
    """Requests per second."""


class RateLoad(Section):
    """Requests at times of their own, at a rate that changes."""

    kind: Literal["rate"]
    rate: Annotated[tuple[RatePoint, ...], Field(min_length=1)]
    """Between two corners the rate changes evenly; before the first and after the last it stays."""
    arrivals: Literal["poisson", "gamma", "constant"] = "poisson"
    """Law of the gaps between requests, as the load test has it."""
    cv: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Standard deviation of gamma gaps over their mean: 1 is Poisson, above it come bursts."""

    @model_validator(mode="after")
    def _consistent(self) -> RateLoad:
        times = [point.at_s for point in self.rate]
        if any(after <= before for before, after in pairwise(times)):
            raise ValueError("rate: at_s must rise from corner to corner")
        if self.arrivals != "gamma" and self.cv != 1.0:
            raise ValueError("cv needs arrivals: gamma")
        return self


class TraceLoad(Section):
    """The requests of a trace at its times, with its lengths."""

    kind: Literal["trace"]
    trace: Path
    """A file that `paceline loadtest` replays."""
    speed: Factor = 1.0
    """How many times faster than recorded."""
    length_scale: Factor = 1.0
    """Factor on all lengths."""
    max_prompt_tokens: Positive = 1_000_000
    """Longer prompts are cut to this, after scaling."""
    max_output_tokens: Positive = 1_000_000
    """Longer answers are cut to this, after scaling."""
    start_s: Seconds = 0.0
    """Where in the trace to begin, in its own seconds."""


class Scaling(Section):
    """How many replicas there are, as `autoscaling_config` in a Serve YAML says it."""

    policy_function: str = "cluster.autoscaling:PerReplicaTarget"
    """As `module:name`."""
    policy_kwargs: dict[str, Any]
    """Its arguments."""
    min_replicas: Natural = 1
    """Never fewer."""
    max_replicas: Positive
    """Never more."""
    look_back_period_s: FiniteSeconds = 30.0
    """Reports are averaged over so long."""
    upscale_delay_s: Seconds = 30.0
    """More must be wanted for so long."""
    downscale_delay_s: Seconds = 600.0
    """Fewer must be wanted for so long."""
    start_s: Seconds = 60.0
    """Until a new replica serves."""

    @model_validator(mode="after")
    def _can_be_made(self) -> Scaling:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas must not be above max_replicas")
        try:
            replica_policy(self.policy_function, self.policy_kwargs)
        except (ImportError, AttributeError, ValueError, TypeError) as error:
            raise ValueError(f"policy_function: {error}") from None
        return self


class Verifiers(Section):
    """Verifier replicas, all alike."""

    count: Positive
    """At the start."""
    step_ms: CostTable | None = None
    """Time of a step by its tokens: linear between the points, as far as they go and beyond."""
    profile: Path | None = None
    """Instead: what `paceline profile --out` wrote."""
    prompt_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """What a token of a prompt costs, over one that draws."""
    context_ms: Millis = 0.0
    """What 1,000 tokens of context in the running sequences add to a step."""
    drafting_ms: Millis = 0.0
    """What planning adds to a step in which any sequence is drafted for."""
    jitter: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Standard deviation of the logarithm of a step's time."""
    kv_tokens: Positive = 1_000_000
    """Tokens that the KV cache holds."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """What a step may hold, as a verifier is configured."""
    num_speculative_tokens: Annotated[int, Field(ge=0, le=16)] = 8
    """Most drafts verified per sequence and step."""
    draft_deadline_ms: FiniteMillis = 20.0
    """Longest wait for a draft that is due."""
    scaling: Scaling | None = None
    """By default their number stays."""

    @model_validator(mode="after")
    def _one_table(self) -> Verifiers:
        if (self.step_ms is None) == (self.profile is None):
            raise ValueError("give either step_ms or profile")
        return self

    @property
    def table(self) -> dict[int, float]:
        """ms by tokens. Of a scenario that was loaded."""
        assert self.step_ms is not None
        return dict(self.step_ms)


class Drafters(Section):
    """Drafter replicas, all alike."""

    count: Natural
    """At the start."""
    token_ms: CostTable = Field(default_factory=lambda: {1: 2.0, 64: 4.0})
    """Time for the next token of all chains of a round, by its sessions."""
    prompt_ms: Millis = 0.02
    """Time to read one token of a prompt."""
    max_step_tokens: Positive = 512
    """Prompt tokens read between two rounds at most."""
    rtt_ms: Millis = 0.5
    """Network time to a verifier and back."""
    rtt_spread: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """How far pairs differ from that, as a share of it."""
    max_sessions: Positive = 1024
    """Sessions open at once; more are refused."""
    lead_tokens: Annotated[int, Field(ge=0, le=MAX_CHAIN - 16)] = 16
    """Tokens drafted ahead by a drafter that nobody waits for."""
    scaling: Scaling | None = None
    """By default their number stays."""


class Routers(Section):
    """Router replicas; each sees the cluster in its own way."""

    count: Positive = 2
    """Requests are spread over them evenly, by their own random choice."""
    network_ms: Millis = 0.5
    """One way between client and verifier."""
    admission: AdmissionConfig = AdmissionConfig()
    """How much each takes, as a router is configured."""
    path_policy: PathPolicyConfig = PathPolicyConfig()
    """When requests are drafted for, as a router is configured; an arm sets its mode."""


class Arm(Section):
    """A way to run the cluster over the same requests."""

    name: Annotated[str, Field(min_length=1, max_length=40)]
    """As the report calls it."""
    mode: Literal["auto", "on", "off"]
    """Of the path policy."""
    planner: Literal["goodput", "fixed"] = "goodput"
    """As `speculation.planner` of a verifier; fixed verifies and waits for every draft."""


class Scenario(Section):
    """A simulation."""

    description: str = ""
    """One line for the reader of the report."""
    seed: Natural = 0
    """Everything that is random follows from it."""
    duration_s: FiniteSeconds
    """Simulated time; what runs then is counted as running."""
    warmup_s: Seconds = 0.0
    """Requests that come earlier are served and not reported."""
    traffic: Annotated[dict[str, Kind], Field(min_length=1)]
    """Kinds of traffic by name."""
    load: Annotated[RateLoad | TraceLoad, Field(discriminator="kind")]
    """When requests come."""
    verifiers: Verifiers
    """What decodes."""
    drafters: Drafters = Drafters(count=0)
    """What drafts."""
    routers: Routers = Routers()
    """What decides."""
    slo: Slo = Slo()
    """Bounds for goodput."""
    arms: Annotated[tuple[Arm, ...], Field(min_length=1)] = (
        Arm(name="auto", mode="auto"),
        Arm(name="always on", mode="on", planner="fixed"),
        Arm(name="always off", mode="off"),
    )
    """Run one after another over the same requests."""

    @field_validator("arms")
    @classmethod
    def _arms_are_distinct(cls, arms: tuple[Arm, ...]) -> tuple[Arm, ...]:
        if len({arm.name for arm in arms}) < len(arms):
            raise ValueError("two arms have one name")
        return arms

    @model_validator(mode="after")
    def _fits_together(self) -> Scenario:
        if self.warmup_s >= self.duration_s:
            raise ValueError("warmup_s must be below duration_s")
        longest = max(k.prompt_tokens.high + k.output_tokens.high for k in self.traffic.values())
        if isinstance(self.load, TraceLoad):
            longest = self.load.max_prompt_tokens + self.load.max_output_tokens
        if longest > self.verifiers.kv_tokens:
            raise ValueError(
                f"verifiers.kv_tokens: a request may need {longest} tokens, give at least as many"
            )
        return self


def load_scenario(name_or_path: str) -> Scenario:
    """The shipped scenario of this name, or the one in this file. Raises CommandError."""
    scenario, folder = load_settings(Scenario, "scenario", SHIPPED, name_or_path)
    return _with_files(scenario, folder)


def shipped_scenarios() -> list[str]:
    """Names that the command takes."""
    return shipped_names(SHIPPED)


def _with_files(scenario: Scenario, folder: Path) -> Scenario:
    verifiers, load = scenario.verifiers, scenario.load
    if verifiers.profile is not None:
        verifiers = verifiers.model_copy(update=_read_profile(folder / verifiers.profile))
    if isinstance(load, TraceLoad):
        load = load.model_copy(update={"trace": folder / load.trace})
    return scenario.model_copy(update={"verifiers": verifiers, "load": load})


def _read_profile(path: Path) -> dict[str, Any]:
    """What `paceline profile` wrote, of the shortest context. Raises CommandError."""
    try:
        profile = json.loads(path.read_text())
        by_context = profile["step_ms"]
        points = by_context[min(by_context, key=int)]
        step_ms = {int(tokens): float(ms) for tokens, ms in points.items()}
        return {"step_ms": step_ms, "prompt_share": float(profile["prompt_share"])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CommandError(
            f"{path} is no profile ({error!r}). Make one with `paceline profile --out {path}`"
        ) from None
