"""What goes into the engine loop and what comes out of it: plain values, nothing else crosses.

The engine runs in a thread of its own and may become a process of its own; so nothing here holds a
socket, a callback or a tensor. Sequences are named by `seq`, an integer the engine's owner chooses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.config import SchedulerConfig, SpeculationConfig
from cluster.load import VerifierLoad
from cluster.types import Draft, GenerationEvent, GenerationRequest, Path, SamplingParams
from engine.grammar import GrammarState

# --- inbox -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submitted:
    """A router submitted a generation."""

    seq: int
    request: GenerationRequest
    grammar: GrammarState | None = None
    """Of request.grammar, behind the resumed tokens; handed over, never shared."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The consumer left; free everything."""

    seq: int


@dataclass(frozen=True, slots=True)
class PathChanged:
    """The router changed a request's path."""

    seq: int
    path: Path


@dataclass(frozen=True, slots=True)
class DraftSessionLive:
    """A drafter took the session; drafts will come."""

    seq: int
    drafter: str
    """Name of the drafter, for the reply's statistics."""
    incarnation: str
    tells_laws: bool = False
    """The session asked for laws, and this drafter tells them."""


@dataclass(frozen=True, slots=True)
class DraftSessionLost:
    """No drafter serves the session now; the draft client looks for another by itself."""

    seq: int


class DraftArrived(NamedTuple):
    """A drafter's proposal for a live session, its epoch already checked. A tuple, since a step may
    bring hundreds."""

    seq: int
    draft: Draft
    arrived_at: float = 0.0
    """time.monotonic() when it came, since the engine may be busy then; 0 is unknown."""


@dataclass(frozen=True, slots=True)
class Reconfigured:
    """Other limits and depth from now on; requests that run keep their depth."""

    scheduler: SchedulerConfig
    speculation: SpeculationConfig


@dataclass(frozen=True, slots=True)
class Stopped:
    """End the loop."""


EngineInput = (
    Submitted
    | Cancelled
    | PathChanged
    | DraftSessionLive
    | DraftSessionLost
    | DraftArrived
    | Reconfigured
    | Stopped
)

# --- outbox ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DraftOpen:
    """Find a drafter for this sequence and open a session there."""

    seq: int
    token_ids: tuple[int, ...]
    """All committed tokens."""
    num_prompt_tokens: int
    request_key: int
    sampling: SamplingParams
    num_speculative_tokens: int
    drafter: str = "auto"
    cache_salt: str = ""
    wants_laws: bool = False
    """Where the drafter can, its drafts shall come with their laws."""


@dataclass(frozen=True, slots=True)
class DraftCommit:
    """Tokens that this step made final."""

    seq: int
    position: int
    """Of the first id, counted from the first prompt token."""
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DraftOrders:
    """What the draft client shall tell the drafters after one step. Applied in field order."""

    opens: tuple[DraftOpen, ...] = ()
    commits: tuple[DraftCommit, ...] = ()
    resyncs: tuple[int, ...] = ()
    """Sequences whose drafts named an unknown anchor: open again with the committed tokens."""
    malformed: tuple[int, ...] = ()
    """Sequences whose drafts were malformed, once per draft: a drafter that goes on is dropped."""
    pauses: tuple[int, ...] = ()
    resumes: tuple[int, ...] = ()
    closes: tuple[int, ...] = ()
    least_survival: float = 0.0
    """A draft that is less likely to be accepted is not worth making."""


@dataclass(frozen=True, slots=True)
class SequenceEvent:
    """A generation event and the sequence it belongs to."""

    seq: int
    event: GenerationEvent


@dataclass(frozen=True, slots=True)
class Foresight:
    """What was in the trie when a verdict landed."""

    corrected: bool
    """A draft was refused; else all were accepted and the target's next token came behind them."""
    is_ready: bool
    """The drafter had foreseen the target's own token and has gone on from there: the next step
    needs no round trip."""


@dataclass(frozen=True, slots=True)
class DraftVerdict:
    """How the drafts of one drafter fared in one step of a sequence."""

    incarnation: str
    num_draft_tokens: int
    num_accepted_tokens: int
    foresight: Foresight | None = None
    """None where the sequence ended."""


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """Everything one step says."""

    events: tuple[SequenceEvent, ...] = ()
    orders: DraftOrders = field(default_factory=DraftOrders)
    verdicts: tuple[DraftVerdict, ...] = ()
    load: VerifierLoad = field(default_factory=VerifierLoad)
    """Without the drafters, which the draft client knows."""
