"""Every metric of the cluster, and how a member writes what it measured.

The table says name, type, meaning, labels and buckets; a service keeps its numbers in recorders of
its own and adds them to an :class:`Exposition` when it is asked. So there is no registry, nothing
global, and a number that exists already is read where it is kept. Every series also carries the
labels `application`, `deployment` and `replica` of the member that measured it.

Label values are words of ours, or names from the configuration, never what a client sent: the
number of series is bounded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client.core import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.utils import floatToGoString

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""Of the text that an Exposition writes."""


class Kind(StrEnum):
    """What a metric's number means, in Prometheus' words."""

    COUNTER = "counter"
    """Only grows, from 0 at the member's start."""
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the table."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    """Besides those of the member."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, ascending; the last, without a bound, is implied."""


# --- buckets, in seconds or tokens --------------------------------------------------------------

_REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)
_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_DRAFT_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)

# --- the table: routers -------------------------------------------------------------------------

REQUESTS = Metric(
    "paceline_requests_total",
    Kind.COUNTER,
    "Generation requests that ended. path: none if refused before a path was chosen. reason: why "
    "that path. status: HTTP status, or that of the error that ended a stream; 499: client left.",
    ("path", "reason", "status"),
)
TTFT = Metric(
    "paceline_ttft_seconds",
    Kind.HISTOGRAM,
    "From a request's arrival to its first token.",
    buckets=_FIRST_TOKEN_S,
)
INTER_TOKEN = Metric(
    "paceline_inter_token_seconds",
    Kind.HISTOGRAM,
    "Time per token after the first chunk: the gap before a chunk over its tokens, once per token.",
    buckets=_TOKEN_S,
)
INTER_CHUNK = Metric(
    "paceline_inter_chunk_seconds",
    Kind.HISTOGRAM,
    "Gap between two chunks of a choice. A block of accepted tokens is one chunk.",
    buckets=_TOKEN_S,
)
TPOT = Metric(
    "paceline_tpot_seconds",
    Kind.HISTOGRAM,
    "Per finished choice of at least two tokens: (last - first) / (tokens - 1).",
    buckets=_TOKEN_S,
)
E2E = Metric(
    "paceline_e2e_seconds",
    Kind.HISTOGRAM,
    "From a request's arrival to the end of its answer, of requests that were answered whole.",
    buckets=_REQUEST_S,
)
PATH_MODE = Metric(
    "paceline_path_mode",
    Kind.GAUGE,
    "1 for the path that auto requests take now at this router, 0 for the other.",
    ("path",),
)
PATH_SWITCHES = Metric(
    "paceline_path_switches_total",
    Kind.COUNTER,
    "Times that the mode of auto requests changed.",
    ("to", "reason"),
)
ADMISSION_REJECTIONS = Metric(
    "paceline_admission_rejections_total",
    Kind.COUNTER,
    "Requests refused for want of room (429, 503) before anything ran for them.",
    ("reason",),
)
RESUMES = Metric(
    "paceline_resumes_total",
    Kind.COUNTER,
    "Generations that went on at another verifier.",
)
SCRAPE_ERRORS = Metric(
    "paceline_scrape_errors_total",
    Kind.COUNTER,
    "Members that did not tell their metrics in time; their series are missing from that scrape.",
    ("role",),
)

# --- the table: verifiers -----------------------------------------------------------------------

RUNNING = Metric("paceline_running_sequences", Kind.GAUGE, "Sequences that hold a place in steps.")
WAITING = Metric("paceline_waiting_sequences", Kind.GAUGE, "Sequences that wait for a place.")
KV_BLOCKS = Metric("paceline_kv_blocks", Kind.GAUGE, "Blocks of the KV cache.", ("state",))
PREFIX_CACHE_HITS = Metric(
    "paceline_prefix_cache_hits_total",
    Kind.COUNTER,
    "Tokens of admitted sequences whose KV was there already.",
)
PREFIX_CACHE_QUERIES = Metric(
    "paceline_prefix_cache_queries_total",
    Kind.COUNTER,
    "Tokens of admitted sequences.",
)
PREEMPTIONS = Metric(
    "paceline_preemptions_total",
    Kind.COUNTER,
    "Sequences that lost their place, to be computed again.",
)
VERIFY_STEP = Metric(
    "paceline_verify_step_seconds",
    Kind.HISTOGRAM,
    "Time of an engine step, without the wait for drafts before it.",
    buckets=_STEP_S,
)
STEP_TOKENS = Metric(
    "paceline_step_tokens",
    Kind.HISTOGRAM,
    "Tokens in an engine step: decoded, drafted and prompt together.",
    buckets=_STEP_TOKENS,
)
DRAFT_TOKENS = Metric(
    "paceline_draft_tokens_total", Kind.COUNTER, "Draft tokens that were verified.", ("drafter",)
)
ACCEPTED_TOKENS = Metric(
    "paceline_accepted_tokens_total",
    Kind.COUNTER,
    "Draft tokens that were accepted and emitted.",
    ("drafter",),
)
ACCEPTED_PER_POSITION = Metric(
    "paceline_accepted_tokens_per_position_total",
    Kind.COUNTER,
    "Accepted draft tokens by their position in the block, from 0.",
    ("position",),
)
WASTED_TOKENS = Metric(
    "paceline_wasted_tokens_total",
    Kind.COUNTER,
    "Draft tokens that were verified for nothing: draft tokens less accepted tokens.",
)
DRAFT_PRICE = Metric(
    "paceline_draft_price",
    Kind.GAUGE,
    "What a draft for each sequence lengthens a step by, as a share: the path policy goes by it.",
)
DRAFT_GAIN = Metric(
    "paceline_draft_gain",
    Kind.GAUGE,
    "Tokens that drafts gain a sequence in a step, after their cost; absent while none is known.",
)
DRAFT_TAX = Metric(
    "paceline_draft_tax",
    Kind.GAUGE,
    "What drafter replicas at work lengthen a step by, as a share, besides the rows of drafts.",
)
DRAFTERS_REST = Metric(
    "paceline_drafters_rest",
    Kind.GAUGE,
    "1 while drafter replicas are not asked, since they cost more than they bring; else 0.",
)
DRAFT_WAIT = Metric(
    "paceline_draft_wait_seconds",
    Kind.HISTOGRAM,
    "How long a step waited for drafts, of steps that waited.",
    buckets=_DRAFT_S,
)
DRAFT_RTT = Metric(
    "paceline_draft_rtt_seconds",
    Kind.HISTOGRAM,
    "From sending commits to the arrival of their draft.",
    buckets=_DRAFT_S,
)
DRAFT_OUTCOMES = Metric(
    "paceline_draft_outcomes_total",
    Kind.COUNTER,
    "Drafts that arrived, by what became of them.",
    ("outcome",),
)
FALLBACKS = Metric(
    "paceline_fallbacks_total",
    Kind.COUNTER,
    "Times that a sequence that wants a replica's drafts went on without.",
    ("reason",),
)
BREAKER_STATE = Metric(
    "paceline_drafter_breaker_state",
    Kind.GAUGE,
    "Drafters by the state of this verifier's link to them; lost, refused, distrusted: left alone.",
    ("state",),
)

# --- the table: drafters, and both sides of leases ----------------------------------------------

DRAFTER_SESSIONS = Metric(
    "paceline_drafter_sessions", Kind.GAUGE, "Sessions that are open at the drafter."
)
LEASES_EXPIRED = Metric(
    "paceline_leases_expired_total",
    Kind.COUNTER,
    "Requests (at a verifier) and sessions (at a drafter) freed since their owner fell silent.",
)

# --- the table: the names that load tools difference --------------------------------------------

VLLM_DRAFTS = Metric(
    "vllm:spec_decode_num_drafts_total",
    Kind.COUNTER,
    "Steps of a sequence in which drafts were verified.",
)
VLLM_DRAFT_TOKENS = Metric(
    "vllm:spec_decode_num_draft_tokens_total", Kind.COUNTER, "As paceline_draft_tokens_total."
)
VLLM_ACCEPTED_TOKENS = Metric(
    "vllm:spec_decode_num_accepted_tokens_total", Kind.COUNTER, "As paceline_accepted_tokens_total."
)
VLLM_ACCEPTED_PER_POSITION = Metric(
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    Kind.COUNTER,
    "As paceline_accepted_tokens_per_position_total.",
    ("position",),
)

METRICS: tuple[Metric, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)
"""The whole table."""


class Distribution:
    """The numbers of a histogram. One thread observes; any thread may read, and may then miss the
    newest observation."""

    def __init__(self, metric: Metric) -> None:
        self.bounds = metric.buckets
        self.counts = [0] * (len(metric.buckets) + 1)
        """Observations by bucket; not cumulative. The last one has no bound."""
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` over."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class MemberLabels:
    """Which member measured. Under Serve these are Serve's own names."""

    deployment: str
    replica: str
    application: str = ""


class Exposition:
    """What one member tells when it is asked, in Prometheus' text format.

    Collects families in the order in which they are added; made anew for each answer.
    """

    def __init__(self, labels: MemberLabels) -> None:
        self._member = {
            "application": labels.application,
            "deployment": labels.deployment,
            "replica": labels.replica,
        }
        self._families: dict[str, Family] = {}

    def add(self, metric: Metric, value: float, *labels: str) -> None:
        """One series; `labels` are values in the table's order."""
        self._family(metric).add_sample(metric.name, self._labels(metric, labels), value)

    def add_distribution(self, metric: Metric, distribution: Distribution) -> None:
        """All series of a histogram."""
        family, labels = self._family(metric), self._labels(metric, ())
        total = 0
        bounds = [*map(floatToGoString, metric.buckets), "+Inf"]
        for bound, count in zip(bounds, distribution.counts, strict=True):
            total += count
            family.add_sample(f"{metric.name}_bucket", {**labels, "le": bound}, total)
        family.add_sample(f"{metric.name}_count", labels, total)
        family.add_sample(f"{metric.name}_sum", labels, distribution.sum)

    def collect(self) -> Iterable[Family]:
        """For prometheus_client, which writes the text."""
        return self._families.values()

    def text(self) -> str:
        return generate_latest(self).decode()

    def _family(self, metric: Metric) -> Family:
        if metric.name not in self._families:
            name = metric.name.removesuffix("_total")
            self._families[metric.name] = Family(name, metric.help, metric.kind)
        return self._families[metric.name]

    def _labels(self, metric: Metric, values: Sequence[str]) -> dict[str, str]:
        return self._member | dict(zip(metric.labels, values, strict=True))


def split_families(text: str) -> dict[str, tuple[str, str]]:
    """(HELP and TYPE lines, series) of each family of an exposition, by name. Raises ValueError if
    the text is none. Splits at lines, so that a fleet's texts are joined at little cost."""
    families = {}
    for block in ("\n" + text).removesuffix("\n").split("\n# HELP ")[1:]:
        help_line, _, rest = block.partition("\n")
        type_line, _, series = rest.partition("\n")
        name = help_line.partition(" ")[0]
        if not type_line.startswith(f"# TYPE {name} "):
            raise ValueError(f"no exposition: {block[:80]!r}")
        families[name] = f"# HELP {help_line}\n{type_line}\n", series
    if text and not families:
        raise ValueError(f"no exposition: {text[:80]!r}")
    return families


def merge_families(members: Iterable[dict[str, tuple[str, str]]]) -> str:
    """One exposition of many: the series of a family stand together under one HELP and TYPE."""
    heads: dict[str, str] = {}
    bodies: dict[str, list[str]] = {}
    for families in members:
        for name, (head, series) in families.items():
            heads.setdefault(name, head)
            if series:
                bodies.setdefault(name, []).append(series)
    parts = (head + "\n".join([*bodies.get(name, ()), ""]) for name, head in heads.items())
    return "".join(parts)
