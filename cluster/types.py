"""Values that every member of the cluster agrees on. Pure data: no torch, no Ray, no wire."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from cluster.draft_law import DraftLaw
from cluster.grammar import GrammarSpec


class Path(StrEnum):
    """Which way a request is decoded."""

    SPECULATIVE = "speculative"
    PLAIN = "plain"


class FinishReason(StrEnum):
    """Why a generation ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What shapes the target distribution. The defaults are OpenAI's."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 is off."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose mass reaches this; 1 is off."""
    min_p: float = 0.0
    """Keep tokens at least this times as likely as the most likely one; 0 is off."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or completion."""
    frequency_penalty: float = 0.0
    """Is taken off a logit for each time its token was generated."""
    presence_penalty: float = 0.0
    """Is taken off the logit of a token that was generated."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, each once, and what is added to their logits."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that are never completed."""
    min_tokens: int = 0
    """Ids that end the generation are held back until so many were generated."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalizes(self) -> bool:
        """Whether a logit depends on which tokens came before, one by one."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return penalties != (1.0, 0.0, 0.0)

    @property
    def adjusts(self) -> bool:
        """Whether logits change before temperature and truncation."""
        return self.penalizes or bool(self.logit_bias or self.bad_words or self.min_tokens)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation, as a router submits it to a verifier."""

    request_id: str
    """Made by the router, unique in the cluster."""
    request_key: int
    """Key of the coupled noise, unsigned 64 bit; see :func:`make_request_key`."""
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    """Most tokens to generate, `resumed_ids` included; 0 generates nothing."""
    resumed_ids: tuple[int, ...] = ()
    """Generated tokens that the client already has, from a verifier that was lost."""
    stop_token_ids: frozenset[int] = frozenset()
    """End the generation, besides the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    path: Path = Path.PLAIN
    num_speculative_tokens: int = 0
    """Most drafts verified in a step; 0 takes the verifier's own setting."""
    drafter: str = "auto"
    """auto, or the only kind of drafter that may draft."""
    prediction_ids: tuple[int, ...] = ()
    """What the client says the answer will be. Drafted from on either path."""
    grammar: GrammarSpec | None = None
    """What the text must look like; None is any text."""
    num_top_logprobs: int | None = None
    """How many of the likeliest tokens to tell beside each token's own log probability; None tells
    neither."""
    num_prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    deadline_ms: int = 0
    """Time left to finish; 0 is none."""
    cache_salt: str = ""
    """Only requests with the same salt reuse one another's KV."""
    priority: int = 0
    """Lower ones leave the verifier's queue first; equal ones in the order they came."""


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """What speculation did for one request."""

    drafter: str = ""
    """The one of which most tokens were accepted, of equal ones the first; empty if none."""
    num_steps: int = 0
    """Forwards that committed tokens of this request."""
    drafted_per_position: tuple[int, ...] = ()
    """Index j: drafts verified at position j of a block."""
    accepted_per_position: tuple[int, ...] = ()

    @property
    def num_draft_tokens(self) -> int:
        return sum(self.drafted_per_position)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted_per_position)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position, of the model's own distribution: before penalties,
    temperature and truncation."""

    logprob: float
    """Of the token itself."""
    top_ids: tuple[int, ...] = ()
    """The likeliest tokens, descending."""
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobsEvent:
    """Log probabilities of prompt tokens that one step computed. All of a request's come before its
    first token, and before its end."""

    request_id: str
    position: int
    """Of the first, counted from the first prompt token, which has none."""
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class DraftRun:
    """Drafts in a row that one drafter proposed."""

    drafter: str
    """Kind of a drafter inside the verifier, or name of a drafter replica."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TokensEvent:
    """Tokens of one request that one step made final."""

    request_id: str
    position: int
    """Index of the first id, counted from the first generated token."""
    token_ids: tuple[int, ...]
    drafted: tuple[bool, ...]
    """Per id: it was an accepted draft."""
    num_draft_tokens: int = 0
    """Drafts verified in the step that made these ids."""
    refused_ids: tuple[int, ...] = ()
    """Those of them that the target did not draw."""
    num_cached_prompt_tokens: int = 0
    """Prompt tokens whose KV was there already; told at position 0 only."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Per id, where the request asked for them."""
    draft_runs: tuple[DraftRun, ...] = ()
    """Who proposed the drafts of the step, in order."""
    predicted: tuple[bool, ...] = ()
    """Per id: the client's prediction had it next. Empty without one."""
    num_resyncs: int = 0
    """How often, at these ids, an answer that had left the prediction was found in it again."""


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """A generation came to its end by ids or length; nothing follows."""

    request_id: str
    reason: FinishReason
    stats: SpeculationStats = field(default_factory=SpeculationStats)


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """A generation failed; nothing follows."""

    request_id: str
    kind: str
    """Name in the error table of cluster/errors.py."""
    message: str
    param: str = ""


GenerationEvent = PromptLogprobsEvent | TokensEvent | FinishEvent | ErrorEvent


class DraftNode(NamedTuple):
    """One proposed token in a draft's trie. A tuple, since a step may bring hundreds."""

    token_id: int
    parent: int
    """Index of the parent node in the same draft; -1 is the anchor."""
    confidence: float = 1.0
    """Estimated chance of acceptance given that the parent was accepted."""
    law: DraftLaw | None = None
    """That the token was drawn from, in a session that asked for laws."""


class Draft(NamedTuple):
    """A small trie that hangs on a prefix, appended to what was drafted before. Empty `nodes` is
    legal: nothing new. A tuple, as its nodes are."""

    anchor_position: int
    """Number of tokens before the first node."""
    anchor_hash: int
    """Prefix hash of those tokens; see cluster/protocol/prefix_hash.py."""
    nodes: tuple[DraftNode, ...] = ()
    answers: int | None = None
    """The drafter has said all that it was asked for behind this many committed tokens: its chain
    from there is as long as was wanted, or ends. None: more is to come, or this was not asked
    for."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a router must know of the target to serve it; a verifier tells it over its handle."""

    name: str
    """As clients name it."""
    max_model_len: int
    """Most tokens of prompt and completion together."""
    vocab_size: int
    vocabulary: str
    """Fingerprint of the vocabulary."""
    fingerprint: str
    """Everything the output depends on: model, revision, dtype, kernel class, vocabulary."""
    eos_token_ids: tuple[int, ...]
    tokenizer_json: str
    """The text of tokenizer.json."""
    chat_template: str
    """Jinja source; empty if the model has none."""
    bos_token: str = ""
    eos_token: str = ""
    pad_token: str = ""
    decoder: str = ""
    """How the model is run: native, torch or transformers."""


@dataclass(frozen=True, slots=True)
class Member:
    """A replica as the others find it: Serve's metadata of it."""

    incarnation: str
    """Random name of this life of the replica."""
    address: str
    """host:port of its gRPC server."""
    replica_id: str = ""
    node_id: str = ""
    pid: int = 0
    model: str = ""
    fingerprint: str = ""
    decoder: str = ""
    """As in ModelCard; empty without a model."""


Members = Mapping[str, Member]
"""The replicas of one deployment, by incarnation."""


def make_request_key(secret: bytes, choice: int, prompt_ids: tuple[int, ...]) -> int:
    """Key of the coupled noise of one choice of one request, unsigned 64 bit.

    `secret` is the client's seed (as bytes) or fresh randomness. Choices and prompts enter too, so
    that n > 1 and one seed used over many prompts do not share noise.
    """
    digest = hashlib.blake2b(digest_size=8, person=b"paceline-key-v1")
    digest.update(len(secret).to_bytes(8, "little") + secret)
    digest.update(choice.to_bytes(8, "little"))
    for token_id in prompt_ids:
        digest.update(token_id.to_bytes(4, "little"))
    return int.from_bytes(digest.digest(), "little")
