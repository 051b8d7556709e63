"""What a load test does: a YAML file, checked before anything is sent.

Frozen, unknown keys refused. Paths in a profile are relative to its file.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from benchmarks.settings_file import load_settings, shipped_names
from cluster.config import FiniteMillis, FiniteSeconds, Section

SHIPPED = Path(__file__).parent / "profiles"
RESERVED_FIELDS = frozenset(
    {"model", "messages", "prompt", "stream", "stream_options", "max_tokens", "n"}
)
"""Of a request's body: the load test sets these itself."""

Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0, le=100_000, allow_inf_nan=False)]
Factor = Annotated[float, Field(gt=0, le=1_000, allow_inf_nan=False)]


class Family(StrEnum):
    """A kind of prompt that the generator writes, by how well its answer can be foreseen."""

    CHAT = "chat"
    """A short question."""
    CODE = "code"
    """A function to complete."""
    COPY = "copy"
    """A text to repeat with one word changed."""
    JSON = "json"
    """Records to write as JSON."""
    PROSE = "prose"
    """A story to tell."""
    SHARED_PREFIX = "shared_prefix"
    """A question on one of a few long documents: requests share their beginning."""
    SESSION = "session"
    """The next turn of a conversation; its earlier turns are written by the generator."""


class TokenRange(Section):
    """A length, drawn evenly for each request."""

    low: Positive
    """Fewest tokens."""
    high: Positive
    """Most tokens."""

    @model_validator(mode="after")
    def _ordered(self) -> TokenRange:
        if self.low > self.high:
            raise ValueError("low must not be above high")
        return self


class GeneratedPrompts(Section):
    """Prompts that the load test writes from the seed."""

    kind: Literal["generated"]
    families: dict[Family, Factor] = Field(default_factory=lambda: {Family.CHAT: 1.0}, min_length=1)
    """Shares of the requests, as weights."""
    prompt_tokens: TokenRange | None = None
    """Prompts are filled up to about so many tokens; by default they are as long as they are."""
    output_tokens: TokenRange = TokenRange(low=64, high=64)
    """max_tokens of a request."""
    shared_prefixes: Positive = 8
    """Documents of the family shared_prefix."""
    shared_prefix_tokens: Positive = 256
    """Length of such a document, about."""
    session_turns: Positive = 4
    """Turns of a conversation of the family session."""


class PromptFile(Section):
    """Prompts of a JSONL file, used in its order and from the start again."""

    kind: Literal["file"]
    path: Path
    """Rows with `prompt` (text), `messages` or `turns` (texts, of which the first is used); they
    may hold `output_tokens` and `family`."""
    output_tokens: Positive = 64
    """max_tokens of a row without its own."""


class ClosedLoad(Section):
    """So many users; each sends its next request when the last one has ended."""

    kind: Literal["closed"]
    concurrency: Annotated[tuple[Positive, ...], Field(min_length=1)]
    """Users, one level each."""
    duration_s: FiniteSeconds | None = None
    """Seconds of a level; requests under way then are waited for, and their latencies count."""
    requests: Positive | None = None
    """Requests of a level, instead of a duration."""

    @model_validator(mode="after")
    def _one_end(self) -> ClosedLoad:
        if (self.duration_s is None) == (self.requests is None):
            raise ValueError("give either duration_s or requests")
        return self


class SwingLoad(Section):
    """A closed load whose number of users jumps between two values."""

    kind: Literal["swing"]
    low: Positive = 1
    """Users in the first half of a cycle."""
    high: Positive = 32
    """Users in its second half."""
    hold_s: FiniteSeconds = 10.0
    """Seconds of a half."""
    cycles: Positive = 3
    """How often; a last half at `low` follows, which shows the return."""


class OpenLoad(Section):
    """Requests at times of their own, whether or not earlier ones have ended."""

    kind: Literal["open"]
    rate: tuple[Rate, ...] = ()
    """Requests per second, one level each."""
    rate_of_capacity: tuple[Factor, ...] = ()
    """Instead: rates as multiples of the capacity, which a closed level measures first."""
    capacity_concurrency: Positive = 32
    """Users of that closed level."""
    arrivals: Literal["poisson", "gamma", "constant"] = "poisson"
    """Law of the gaps between requests."""
    cv: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Standard deviation of gamma gaps over their mean: 1 is Poisson, above it come bursts."""
    duration_s: FiniteSeconds
    """Seconds of a level."""

    @model_validator(mode="after")
    def _consistent(self) -> OpenLoad:
        if bool(self.rate) == bool(self.rate_of_capacity):
            raise ValueError("give either rate or rate_of_capacity")
        if self.arrivals != "gamma" and self.cv != 1.0:
            raise ValueError("cv needs arrivals: gamma")
        return self


class ReplayLoad(Section):
    """The requests of a trace at its times, with its lengths; texts are generated."""

    kind: Literal["replay"]
    trace: Path
    """A .csv with TIMESTAMP, ContextTokens, GeneratedTokens (Azure's form, TIMESTAMP a date or
    seconds), or a .jsonl with timestamp in ms, input_length, output_length (Mooncake's form).
    May be gzipped (.gz)."""
    speed: Annotated[tuple[Factor, ...], Field(min_length=1)] = (1.0,)
    """How many times faster than recorded, one level each."""
    length_scale: Factor = 1.0
    """Factor on all lengths."""
    max_prompt_tokens: Positive = 1_000_000
    """Longer prompts are cut to this, after scaling."""
    max_output_tokens: Positive = 1_000_000
    """Longer outputs are cut to this, after scaling."""
    start_s: Annotated[float, Field(ge=0)] = 0.0
    """Where in the trace to begin, in its own seconds."""
    duration_s: FiniteSeconds
    """Seconds of a level, in the test's time."""


class Arm(Section):
    """A way to ask, to be compared with others in the same run."""

    name: Annotated[str, Field(min_length=1, max_length=40)]
    """As the report calls it."""
    body: dict[str, Any] = Field(default_factory=dict)
    """Fields of its requests, beside those of the profile."""


class Slo(Section):
    """What a request must keep to be good. Bounds that are not given are not asked for."""

    ttft_ms: FiniteMillis | None = None
    """Longest time to the first token."""
    tpot_ms: FiniteMillis | None = None
    """Longest time per output token after the first chunk."""
    e2e_ms: FiniteMillis | None = None
    """Longest time to the end."""


class Profile(Section):
    """A load test."""

    description: str = ""
    """One line for the reader of the report."""
    endpoint: Literal["chat", "completions"] = "chat"
    """Which API is asked."""
    model: str | None = None
    """By default the first that the server lists."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Prompts, lengths, arrivals and the order of the arms follow from it."""
    body: dict[str, Any] = Field(default_factory=lambda: {"temperature": 0})
    """Fields of every request, for example `ignore_eos: true` for outputs of exact length."""
    prompts: Annotated[GeneratedPrompts | PromptFile, Field(discriminator="kind")]
    """What is asked."""
    load: Annotated[ClosedLoad | SwingLoad | OpenLoad | ReplayLoad, Field(discriminator="kind")]
    """When it is asked."""
    arms: Annotated[tuple[Arm, ...], Field(min_length=1)] = (Arm(name="all"),)
    """Run by turns at every level, in an order drawn from the seed, with the same requests."""
    baseline: str | None = None
    """The arm that speed-ups are measured against."""
    repeats: Positive = 1
    """How often every level is run with every arm."""
    slo: Slo = Slo()
    """Bounds for goodput."""
    warmup_requests: Annotated[int, Field(ge=0)] = 4
    """Requests of each arm before the first level that are not counted. One is sent in any case, to
    see that the server accepts it."""
    request_timeout_s: FiniteSeconds = 120.0
    """A request without an end by then has failed."""

    @field_validator("body")
    @classmethod
    def _body_is_free(cls, body: dict[str, Any]) -> dict[str, Any]:
        return _free_of_reserved(body)

    @field_validator("arms")
    @classmethod
    def _arms_are_distinct(cls, arms: tuple[Arm, ...]) -> tuple[Arm, ...]:
        if len({arm.name for arm in arms}) < len(arms):
            raise ValueError("two arms have one name")
        for arm in arms:
            _free_of_reserved(arm.body)
        return arms

    @model_validator(mode="after")
    def _fits_together(self) -> Profile:
        if self.baseline is not None and self.baseline not in {arm.name for arm in self.arms}:
            raise ValueError(f"baseline: there is no arm named {self.baseline!r}")
        if self.load.kind == "replay" and self.prompts.kind == "file":
            raise ValueError("a replay takes lengths from its trace: prompts must be generated")
        return self


def load_profile(name_or_path: str) -> Profile:
    """The shipped profile of this name, or the one in this file. Raises CommandError."""
    profile, folder = load_settings(Profile, "load test profile", SHIPPED, name_or_path)
    return _with_absolute_paths(profile, folder)


def shipped_profiles() -> list[str]:
    """Names that --profile takes."""
    return shipped_names(SHIPPED)


def _free_of_reserved(body: dict[str, Any]) -> dict[str, Any]:
    if taken := sorted(RESERVED_FIELDS & body.keys()):
        raise ValueError(f"{', '.join(taken)}: set by the load test itself, take it out of body")
    return body


def _with_absolute_paths(profile: Profile, folder: Path) -> Profile:
    prompts, load = profile.prompts, profile.load
    if isinstance(prompts, PromptFile):
        prompts = prompts.model_copy(update={"path": folder / prompts.path})
    if isinstance(load, ReplayLoad):
        load = load.model_copy(update={"trace": folder / load.trace})
    return profile.model_copy(update={"prompts": prompts, "load": load})
