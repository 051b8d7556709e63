"""What a router counts and times of its requests, and tells to whoever scrapes the cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from cluster.errors import OverloadedError, PacelineError, TenantOverloadedError, error_row
from cluster.metrics import (
    ADMISSION_REJECTIONS,
    E2E,
    INTER_CHUNK,
    INTER_TOKEN,
    PATH_MODE,
    PATH_SWITCHES,
    REQUESTS,
    RESUMES,
    SCRAPE_ERRORS,
    TPOT,
    TTFT,
    Distribution,
    Exposition,
    MemberLabels,
)
from cluster.types import Path
from router.choice import Delta
from router.generation_client import Clock
from router.path_policy import PathPolicy
from router.reply import Reply

CLIENT_LEFT = 499
"""Status of a request whose client was gone before its answer was whole."""


class RequestMetrics:
    """Over all generation requests of this router."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, str]] = Counter()
        """By path, reason and status."""
        self.rejections: Counter[str] = Counter()
        """By the code of the error."""
        self.ttft = Distribution(TTFT)
        self.inter_token = Distribution(INTER_TOKEN)
        self.inter_chunk = Distribution(INTER_CHUNK)
        self.tpot = Distribution(TPOT)
        self.e2e = Distribution(E2E)


class RequestRecord:
    """One request, from its arrival, which is now, to its end."""

    def __init__(self, metrics: RequestMetrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._arrived = clock()
        self._reply: Reply | None = None
        self._status: int | None = None
        self._is_first = True
        self._choices: dict[int, _ChoiceTimes] = {}

    def opened(self, reply: Reply) -> None:
        """It was admitted and has a path."""
        self._reply = reply

    def saw(self, delta: Delta) -> None:
        """A step of one of its choices goes to the client."""
        now = self._clock()
        if delta.num_tokens:
            if self._is_first:
                self._is_first = False
                self._metrics.ttft.observe(now - self._arrived)
            if (times := self._choices.get(delta.index)) is None:
                self._choices[delta.index] = _ChoiceTimes(now, delta.num_tokens)
            else:
                times.add(delta.num_tokens, now, self._metrics)
        if delta.finish_reason is not None and delta.index in self._choices:
            self._choices.pop(delta.index).finish(self._metrics)

    def answered(self, status: int) -> None:
        """The answer's head was sent."""
        self._status = self._status or status

    def failed(self, error: PacelineError) -> None:
        """It ends with this error, before or after the answer's head."""
        self._status = error_row(error).http_status
        refused = isinstance(error, OverloadedError | TenantOverloadedError)
        if refused and self._reply is None:
            self._metrics.rejections[error.code or "overloaded"] += 1

    def left(self) -> None:
        """The client was gone before the answer was whole."""
        self._status = CLIENT_LEFT

    def ended(self) -> None:
        """Nothing follows. To be called once."""
        status = self._status or CLIENT_LEFT
        decision = self._reply.decision if self._reply is not None else None
        path, reason = (decision.path, decision.code) if decision else ("none", "none")
        self._metrics.requests[path, reason, str(status)] += 1
        if status == 200:
            self._metrics.e2e.observe(self._clock() - self._arrived)


class _ChoiceTimes:
    """When the tokens of one choice came."""

    def __init__(self, now: float, num_tokens: int) -> None:
        self._first = self._last = now
        self._num_tokens = num_tokens

    def add(self, num_tokens: int, now: float, metrics: RequestMetrics) -> None:
        """A chunk after the first."""
        gap = now - self._last
        metrics.inter_chunk.observe(gap)
        metrics.inter_token.observe(gap / num_tokens, num_tokens)
        self._last = now
        self._num_tokens += num_tokens

    def finish(self, metrics: RequestMetrics) -> None:
        if self._num_tokens > 1:
            metrics.tpot.observe((self._last - self._first) / (self._num_tokens - 1))


def router_metrics_text(
    labels: MemberLabels,
    requests: RequestMetrics,
    policy: PathPolicy,
    num_resumes: int,
    scrape_errors: Mapping[str, int],
) -> str:
    """A router's exposition of this moment. `scrape_errors`: by role of the silent member."""
    exposition = Exposition(labels)
    for (path, reason, status), count in sorted(requests.requests.items()):
        exposition.add(REQUESTS, count, path, reason, status)
    exposition.add_distribution(TTFT, requests.ttft)
    exposition.add_distribution(INTER_TOKEN, requests.inter_token)
    exposition.add_distribution(INTER_CHUNK, requests.inter_chunk)
    exposition.add_distribution(TPOT, requests.tpot)
    exposition.add_distribution(E2E, requests.e2e)
    for path in Path:
        exposition.add(PATH_MODE, path is policy.mode, path)
    for (to, why), count in sorted(policy.switches.items()):
        exposition.add(PATH_SWITCHES, count, to, why)
    for code, count in sorted(requests.rejections.items()):
        exposition.add(ADMISSION_REJECTIONS, count, code)
    exposition.add(RESUMES, num_resumes)
    for role, count in sorted(scrape_errors.items()):
        exposition.add(SCRAPE_ERRORS, count, role)
    return exposition.text()
