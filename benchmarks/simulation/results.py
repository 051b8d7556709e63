"""results.json: what a simulation found. Changing it means a new `schema_version`."""

from __future__ import annotations

from typing import Any, Literal

from benchmarks.loadtest.statistics import Distribution
from cluster.config import Section

RESULTS = "results.json"
REPORT = "report.html"


class Timeline(Section):
    """The run in steps of equal length; lists of one length, each value of the step that begins at
    `at_s`, or of its end where it is a state."""

    at_s: tuple[float, ...]
    arrived_per_s: tuple[float, ...]
    """Requests; the same in every arm."""
    good_per_s: tuple[float, ...]
    """Those of them that were to end within every bound of the SLO."""
    speculative: tuple[int, ...]
    """Sequences on this path, waiting ones included."""
    plain: tuple[int, ...]
    mode_share: tuple[float, ...]
    """Of routers whose mode is speculative."""
    output_tokens_per_s: tuple[float, ...]
    refused_per_s: tuple[float, ...]
    drafters_busy: tuple[float, ...]
    """Share of the drafters' time spent on drafts that were owed and on prompts."""
    verifiers: tuple[int, ...]
    drafters: tuple[int, ...]


class KindResult(Section):
    """One kind of traffic."""

    kind: str
    requests: int
    """Reported ones."""
    good: int
    tpot_p50_ms: float | None
    accepted_share: float | None
    """Of verified drafts."""


class ArmResult(Section):
    """One arm."""

    name: str
    mode: str
    planner: str
    outcomes: dict[str, int]
    """Of all requests, those of the warm-up too."""
    output_tokens_per_s: float
    """Drawn by the verifiers, over the whole run."""
    goodput_rps: float
    """Reported requests that ended within every bound of the SLO, per second."""
    attainment: float | None
    """Their share of reported requests."""
    ttft_ms: Distribution | None
    """Of reported requests that were done."""
    tpot_ms: Distribution | None
    e2e_ms: Distribution | None
    speculative_share: float | None
    """Of reported requests: those that began on the speculative path."""
    accepted_share: float | None
    """Of verified drafts."""
    tokens_per_step: float | None
    """1 + accepted drafts, per sequence and step with drafts; None without drafts."""
    switches: dict[str, int]
    """Changes of the routers' mode, by new mode and reason; of all routers together."""
    num_steps: int
    waited_share: float
    """Of the verifiers' time: waiting for drafts."""
    verifiers_busy: float
    """Share of their time in steps."""
    drafters_busy: float
    num_late: int
    """Sequences that a step waited for in vain."""
    num_preemptions: int
    oldest_report_s: float
    """Oldest report that a path policy saw of a verifier with requests of its router."""
    kinds: tuple[KindResult, ...]
    timeline: Timeline
    cpu_s: float
    """What simulating it took of one core. The only figure that differs between two runs."""


class Results(Section):
    """A simulation."""

    schema_version: Literal[2] = 2
    scenario: dict[str, Any]
    """With all its defaults."""
    name: str
    arms: tuple[ArmResult, ...]

    @property
    def digest_form(self) -> str:
        """All that follows from the scenario, as one text: equal for equal seeds."""
        arms = [arm.model_copy(update={"cpu_s": 0.0}) for arm in self.arms]
        return self.model_copy(update={"arms": tuple(arms)}).model_dump_json()
