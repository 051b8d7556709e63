"""The only place that knows the generated classes: messages.py to the wire and back.

Decoding checks what the types cannot: a malformed message raises InvalidRequestError naming the
field, so that the caller can drop one request or one session and go on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import repeat

from cluster.draft_law import DraftLaw
from cluster.errors import InvalidRequestError
from cluster.grammar import GrammarKind, GrammarSpec
from cluster.load import DrafterLoad, DrafterState, LocalDrafterLoad, VerifierLoad
from cluster.protocol import drafting_pb2, generation_pb2, sampling_pb2
from cluster.protocol.messages import (
    CommitTokens,
    DrafterBatch,
    DrafterHello,
    DrafterReport,
    OpenSession,
    RouterBatch,
    RouterHello,
    SessionDraft,
    SessionError,
    SetPath,
    TargetBatch,
    TargetHello,
    VerifierBatch,
    VerifierHello,
)
from cluster.types import (
    Draft,
    DraftNode,
    DraftRun,
    ErrorEvent,
    FinishEvent,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    Path,
    PromptLogprobsEvent,
    SamplingParams,
    SpeculationStats,
    TokenLogprobs,
    TokensEvent,
)


def _path(speculative: bool) -> Path:
    return Path.SPECULATIVE if speculative else Path.PLAIN


# --- generation ------------------------------------------------------------------------------


def encode_router_batch(batch: RouterBatch) -> generation_pb2.RouterBatch:
    message = generation_pb2.RouterBatch(
        load_interval_ms=batch.load_interval_ms,
        submits=[_encode_submit(request) for request in batch.submits],
        cancels=batch.cancels,
        set_paths=[
            generation_pb2.SetPath(
                request_id=change.request_id, speculative=change.path is Path.SPECULATIVE
            )
            for change in batch.set_paths
        ],
    )
    if batch.hello is not None:
        message.hello.protocol_version = batch.hello.protocol_version
        message.hello.router_id = batch.hello.router_id
        message.hello.lease_ms = batch.hello.lease_ms
        message.hello.fingerprint = batch.hello.fingerprint
    return message


def decode_router_batch(message: generation_pb2.RouterBatch) -> RouterBatch:
    hello = None
    if message.HasField("hello"):
        hello = RouterHello(
            router_id=message.hello.router_id,
            fingerprint=message.hello.fingerprint,
            lease_ms=message.hello.lease_ms,
            protocol_version=message.hello.protocol_version,
        )
    return RouterBatch(
        hello=hello,
        load_interval_ms=message.load_interval_ms,
        submits=tuple(_decode_submit(submit) for submit in message.submits),
        cancels=tuple(message.cancels),
        set_paths=tuple(SetPath(s.request_id, _path(s.speculative)) for s in message.set_paths),
    )


def _encode_submit(request: GenerationRequest) -> generation_pb2.Submit:
    return generation_pb2.Submit(
        request_id=request.request_id,
        request_key=request.request_key,
        prompt_ids=request.prompt_ids,
        resumed_ids=request.resumed_ids,
        sampling=_encode_sampling(request.sampling),
        max_tokens=request.max_tokens,
        stop_token_ids=sorted(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        speculative=request.path is Path.SPECULATIVE,
        num_speculative_tokens=request.num_speculative_tokens,
        drafter=request.drafter,
        prediction_ids=request.prediction_ids,
        num_top_logprobs=request.num_top_logprobs,
        num_prompt_logprobs=request.num_prompt_logprobs,
        grammar=_encode_grammar(request.grammar),
        deadline_ms=request.deadline_ms,
        cache_salt=request.cache_salt,
        priority=request.priority,
    )


def _decode_submit(submit: generation_pb2.Submit) -> GenerationRequest:
    return GenerationRequest(
        request_id=submit.request_id,
        request_key=submit.request_key,
        prompt_ids=tuple(submit.prompt_ids),
        resumed_ids=tuple(submit.resumed_ids),
        sampling=_decode_sampling(submit.sampling),
        max_tokens=submit.max_tokens,
        stop_token_ids=frozenset(submit.stop_token_ids),
        ignore_eos=submit.ignore_eos,
        path=_path(submit.speculative),
        num_speculative_tokens=submit.num_speculative_tokens,
        drafter=submit.drafter or "auto",
        prediction_ids=tuple(submit.prediction_ids),
        grammar=_decode_grammar(submit.grammar) if submit.HasField("grammar") else None,
        num_top_logprobs=(submit.num_top_logprobs if submit.HasField("num_top_logprobs") else None),
        num_prompt_logprobs=(
            submit.num_prompt_logprobs if submit.HasField("num_prompt_logprobs") else None
        ),
        deadline_ms=submit.deadline_ms,
        cache_salt=submit.cache_salt,
        priority=submit.priority,
    )


def _encode_grammar(spec: GrammarSpec | None) -> generation_pb2.Grammar | None:
    return None if spec is None else generation_pb2.Grammar(kind=spec.kind, text=spec.text)


def _decode_grammar(message: generation_pb2.Grammar) -> GrammarSpec:
    try:
        return GrammarSpec(GrammarKind(message.kind), message.text)
    except ValueError:
        raise InvalidRequestError(
            f"there is no kind of grammar {message.kind!r}", param="grammar"
        ) from None


def encode_verifier_batch(batch: VerifierBatch) -> generation_pb2.VerifierBatch:
    message = generation_pb2.VerifierBatch(drain=batch.drain)
    if batch.hello is not None:
        message.hello.protocol_version = batch.hello.protocol_version
        message.hello.noise_version = batch.hello.noise_version
        message.hello.incarnation = batch.hello.incarnation
        message.hello.fingerprint = batch.hello.fingerprint
    for event in batch.events:
        _add_event(message, event)
    if batch.load is not None:
        message.load.CopyFrom(_encode_load(batch.load))
    return message


def _add_event(message: generation_pb2.VerifierBatch, event: GenerationEvent) -> None:
    if isinstance(event, TokensEvent):
        message.tokens.add(
            request_id=event.request_id,
            position=event.position,
            token_ids=event.token_ids,
            drafted=event.drafted,
            num_draft_tokens=event.num_draft_tokens,
            refused_ids=event.refused_ids,
            num_cached_prompt_tokens=event.num_cached_prompt_tokens,
            logprobs=_encode_logprobs(event.logprobs),
            draft_runs=[
                generation_pb2.DraftRun(drafter=run.drafter, num_tokens=run.num_tokens)
                for run in event.draft_runs
            ],
            predicted=event.predicted,
            num_resyncs=event.num_resyncs,
        )
    elif isinstance(event, PromptLogprobsEvent):
        message.prompt_logprobs.add(
            request_id=event.request_id,
            position=event.position,
            logprobs=_encode_logprobs(event.logprobs),
        )
    elif isinstance(event, FinishEvent):
        message.finishes.add(
            request_id=event.request_id,
            reason=event.reason.value,
            stats=generation_pb2.SpeculationStats(
                drafter=event.stats.drafter,
                num_steps=event.stats.num_steps,
                drafted_per_position=event.stats.drafted_per_position,
                accepted_per_position=event.stats.accepted_per_position,
            ),
        )
    else:
        message.errors.add(
            request_id=event.request_id, kind=event.kind, message=event.message, param=event.param
        )


def _encode_logprobs(logprobs: Iterable[TokenLogprobs]) -> list[generation_pb2.TokenLogprobs]:
    return [
        generation_pb2.TokenLogprobs(
            logprob=one.logprob, top_ids=one.top_ids, top_logprobs=one.top_logprobs
        )
        for one in logprobs
    ]


def _decode_logprobs(messages: Iterable[generation_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(one.logprob, tuple(one.top_ids), tuple(one.top_logprobs)) for one in messages
    )


def decode_verifier_batch(message: generation_pb2.VerifierBatch) -> VerifierBatch:
    hello = None
    if message.HasField("hello"):
        hello = VerifierHello(
            incarnation=message.hello.incarnation,
            fingerprint=message.hello.fingerprint,
            protocol_version=message.hello.protocol_version,
            noise_version=message.hello.noise_version,
        )
    return VerifierBatch(
        hello=hello,
        events=_decode_events(message),
        load=_decode_load(message.load) if message.HasField("load") else None,
        drain=message.drain,
    )


def _decode_events(message: generation_pb2.VerifierBatch) -> tuple[GenerationEvent, ...]:
    events: list[GenerationEvent] = [
        PromptLogprobsEvent(p.request_id, p.position, _decode_logprobs(p.logprobs))
        for p in message.prompt_logprobs
    ]
    events += [
        TokensEvent(
            t.request_id,
            t.position,
            tuple(t.token_ids),
            tuple(t.drafted),
            t.num_draft_tokens,
            tuple(t.refused_ids),
            t.num_cached_prompt_tokens,
            _decode_logprobs(t.logprobs),
            tuple(DraftRun(run.drafter, run.num_tokens) for run in t.draft_runs),
            tuple(t.predicted),
            t.num_resyncs,
        )
        for t in message.tokens
    ]
    events += [
        FinishEvent(
            f.request_id,
            FinishReason(f.reason),
            SpeculationStats(
                f.stats.drafter,
                f.stats.num_steps,
                tuple(f.stats.drafted_per_position),
                tuple(f.stats.accepted_per_position),
            ),
        )
        for f in message.finishes
    ]
    events += [ErrorEvent(e.request_id, e.kind, e.message, e.param) for e in message.errors]
    return tuple(events)


def _encode_load(load: VerifierLoad) -> generation_pb2.VerifierLoad:
    return generation_pb2.VerifierLoad(
        running=load.running,
        waiting=load.waiting,
        kv_blocks_used=load.kv_blocks_used,
        kv_blocks_total=load.kv_blocks_total,
        step_ms=load.step_ms,
        step_tokens=load.step_tokens,
        knee_tokens=load.knee_tokens,
        prefix_cache_hit_tokens=load.prefix_cache_hit_tokens,
        prefix_cache_query_tokens=load.prefix_cache_query_tokens,
        num_preemptions=load.num_preemptions,
        max_running=load.max_running,
        max_waiting=load.max_waiting,
        place_s=load.place_s,
        draft_gain=load.draft_gain,
        draft_price=load.draft_price,
        draft_tax=load.draft_tax,
        drafters_rest=load.drafters_rest,
        drafters=[
            generation_pb2.DrafterLink(
                incarnation=d.incarnation,
                state=d.state.value,
                sessions=d.sessions,
                tokens_per_s=d.tokens_per_s,
                queue_ms=d.queue_ms,
                rtt_ms=d.rtt_ms,
                num_draft_tokens=d.num_draft_tokens,
                num_accepted_tokens=d.num_accepted_tokens,
                kind=d.kind,
                num_accepted_chains=d.num_accepted_chains,
                num_ahead_hits=d.num_ahead_hits,
                num_corrections=d.num_corrections,
                num_correction_hits=d.num_correction_hits,
                num_branches=d.num_branches,
            )
            for d in load.drafters
        ],
        local_drafters=[
            generation_pb2.LocalDrafter(
                kind=d.kind,
                num_draft_tokens=d.num_draft_tokens,
                num_accepted_tokens=d.num_accepted_tokens,
            )
            for d in load.local_drafters
        ],
    )


def _decode_load(load: generation_pb2.VerifierLoad) -> VerifierLoad:
    return VerifierLoad(
        running=load.running,
        waiting=load.waiting,
        kv_blocks_used=load.kv_blocks_used,
        kv_blocks_total=load.kv_blocks_total,
        step_ms=load.step_ms,
        step_tokens=load.step_tokens,
        knee_tokens=load.knee_tokens,
        prefix_cache_hit_tokens=load.prefix_cache_hit_tokens,
        prefix_cache_query_tokens=load.prefix_cache_query_tokens,
        num_preemptions=load.num_preemptions,
        max_running=load.max_running,
        max_waiting=load.max_waiting,
        place_s=load.place_s,
        draft_gain=load.draft_gain if load.HasField("draft_gain") else None,
        draft_price=load.draft_price,
        draft_tax=load.draft_tax,
        drafters_rest=load.drafters_rest,
        drafters=tuple(
            DrafterLoad(
                incarnation=d.incarnation,
                state=DrafterState(d.state),
                sessions=d.sessions,
                tokens_per_s=d.tokens_per_s,
                queue_ms=d.queue_ms,
                rtt_ms=d.rtt_ms,
                num_draft_tokens=d.num_draft_tokens,
                num_accepted_tokens=d.num_accepted_tokens,
                kind=d.kind,
                num_accepted_chains=d.num_accepted_chains,
                num_ahead_hits=d.num_ahead_hits,
                num_corrections=d.num_corrections,
                num_correction_hits=d.num_correction_hits,
                num_branches=d.num_branches,
            )
            for d in load.drafters
        ),
        local_drafters=tuple(
            LocalDrafterLoad(d.kind, d.num_draft_tokens, d.num_accepted_tokens)
            for d in load.local_drafters
        ),
    )


# --- sampling --------------------------------------------------------------------------------


def _encode_sampling(sampling: SamplingParams) -> sampling_pb2.Sampling:
    return sampling_pb2.Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        logit_bias=[sampling_pb2.LogitBias(token_id=i, value=v) for i, v in sampling.logit_bias],
        bad_words=[sampling_pb2.TokenSequence(token_ids=word) for word in sampling.bad_words],
        min_tokens=sampling.min_tokens,
    )


def _decode_sampling(message: sampling_pb2.Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        logit_bias=tuple((bias.token_id, bias.value) for bias in message.logit_bias),
        bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
        min_tokens=message.min_tokens,
    )


# --- drafting --------------------------------------------------------------------------------


def encode_target_batch(batch: TargetBatch) -> drafting_pb2.TargetBatch:
    message = drafting_pb2.TargetBatch(
        opens=[
            drafting_pb2.OpenSession(
                session=o.session,
                epoch=o.epoch,
                token_ids=o.token_ids,
                num_prompt_tokens=o.num_prompt_tokens,
                request_key=o.request_key,
                sampling=_encode_sampling(o.sampling),
                num_speculative_tokens=o.num_speculative_tokens,
                cache_salt=o.cache_salt,
                wants_laws=o.wants_laws,
            )
            for o in batch.opens
        ],
        commits=[
            drafting_pb2.CommitTokens(session=c.session, position=c.position, token_ids=c.token_ids)
            for c in batch.commits
        ],
        pauses=batch.pauses,
        resumes=batch.resumes,
        closes=batch.closes,
        least_survival=batch.least_survival,
    )
    if batch.hello is not None:
        message.hello.protocol_version = batch.hello.protocol_version
        message.hello.noise_version = batch.hello.noise_version
        message.hello.incarnation = batch.hello.incarnation
        message.hello.target_model = batch.hello.target_model
        message.hello.vocabulary = batch.hello.vocabulary
        message.hello.lease_ms = batch.hello.lease_ms
    return message


def decode_target_batch(message: drafting_pb2.TargetBatch) -> TargetBatch:
    hello = None
    if message.HasField("hello"):
        hello = TargetHello(
            incarnation=message.hello.incarnation,
            target_model=message.hello.target_model,
            vocabulary=message.hello.vocabulary,
            lease_ms=message.hello.lease_ms,
            protocol_version=message.hello.protocol_version,
            noise_version=message.hello.noise_version,
        )
    return TargetBatch(
        hello=hello,
        opens=tuple(
            OpenSession(
                session=o.session,
                epoch=o.epoch,
                token_ids=tuple(o.token_ids),
                num_prompt_tokens=o.num_prompt_tokens,
                request_key=o.request_key,
                sampling=_decode_sampling(o.sampling),
                num_speculative_tokens=o.num_speculative_tokens,
                cache_salt=o.cache_salt,
                wants_laws=o.wants_laws,
            )
            for o in message.opens
        ),
        commits=tuple(
            CommitTokens(c.session, c.position, tuple(c.token_ids)) for c in message.commits
        ),
        pauses=tuple(message.pauses),
        resumes=tuple(message.resumes),
        closes=tuple(message.closes),
        least_survival=message.least_survival,
    )


def encode_drafter_batch(batch: DrafterBatch) -> drafting_pb2.DrafterBatch:
    message = drafting_pb2.DrafterBatch(
        drafts=[_encode_draft(draft) for draft in batch.drafts],
        errors=[
            drafting_pb2.SessionError(
                session=e.session, epoch=e.epoch, kind=e.kind, message=e.message
            )
            for e in batch.errors
        ],
        drain=batch.drain,
    )
    if batch.hello is not None:
        message.hello.protocol_version = batch.hello.protocol_version
        message.hello.noise_version = batch.hello.noise_version
        message.hello.incarnation = batch.hello.incarnation
        message.hello.drafter = batch.hello.drafter
        message.hello.vocabulary = batch.hello.vocabulary
        message.hello.max_sessions = batch.hello.max_sessions
        message.hello.max_speculative_tokens = batch.hello.max_speculative_tokens
        message.hello.max_context_len = batch.hello.max_context_len
        message.hello.kind = batch.hello.kind
        message.hello.tells_laws = batch.hello.tells_laws
    if batch.load is not None:
        message.load.sessions = batch.load.sessions
        message.load.tokens_per_s = batch.load.tokens_per_s
        message.load.queue_ms = batch.load.queue_ms
        message.load.num_branches = batch.load.num_branches
    return message


def decode_drafter_batch(message: drafting_pb2.DrafterBatch) -> DrafterBatch:
    """A draft whose node fields differ in length, or that has over MAX_DRAFT_NODES, keeps no nodes
    and is marked by parent -2, so that the trie counts it as malformed and the session goes on."""
    hello = None
    if message.HasField("hello"):
        hello = DrafterHello(
            incarnation=message.hello.incarnation,
            drafter=message.hello.drafter,
            vocabulary=message.hello.vocabulary,
            max_sessions=message.hello.max_sessions,
            max_speculative_tokens=message.hello.max_speculative_tokens,
            max_context_len=message.hello.max_context_len,
            kind=message.hello.kind,
            tells_laws=message.hello.tells_laws,
            protocol_version=message.hello.protocol_version,
            noise_version=message.hello.noise_version,
        )
    load = None
    if message.HasField("load"):
        load = DrafterReport(
            message.load.sessions,
            message.load.tokens_per_s,
            message.load.queue_ms,
            message.load.num_branches,
        )
    return DrafterBatch(
        hello=hello,
        drafts=tuple(_decode_draft(draft) for draft in message.drafts),
        errors=tuple(SessionError(e.session, e.epoch, e.kind, e.message) for e in message.errors),
        load=load,
        drain=message.drain,
    )


def _encode_draft(item: SessionDraft) -> drafting_pb2.SessionDraft:
    nodes = item.draft.nodes
    return drafting_pb2.SessionDraft(
        answers=item.draft.answers,
        session=item.session,
        epoch=item.epoch,
        anchor_position=item.draft.anchor_position,
        anchor_hash=item.draft.anchor_hash,
        token_ids=[node.token_id for node in nodes],
        parents=[node.parent for node in nodes],
        confidences=[node.confidence for node in nodes],
        laws=_encode_laws(nodes),
    )


def _encode_laws(nodes: Sequence[DraftNode]) -> list[drafting_pb2.DraftLaw]:
    """One per node, an empty one where it has none; nothing where no node has one."""
    if all(node.law is None for node in nodes):
        return []
    laws = [node.law or DraftLaw((), ()) for node in nodes]
    return [drafting_pb2.DraftLaw(token_ids=law.token_ids, weights=law.weights) for law in laws]


def _decode_laws(laws: Sequence[drafting_pb2.DraftLaw], num_nodes: int) -> list[DraftLaw | None]:
    """One per node; nothing is said where they are not as many."""
    if len(laws) != num_nodes:
        return [None] * num_nodes
    return [DraftLaw(tuple(law.token_ids), tuple(law.weights)) for law in laws]


def _decode_draft(item: drafting_pb2.SessionDraft) -> SessionDraft:
    # Each copied as a whole: what protobuf hands out one by one costs as much again.
    token_ids, parents, confidences = item.token_ids[:], item.parents[:], item.confidences[:]
    num_nodes = len(token_ids)
    if len(parents) == num_nodes == len(confidences) and num_nodes <= MAX_DRAFT_NODES:
        laws = _decode_laws(item.laws, num_nodes) if item.laws else repeat(None)
        nodes = tuple(map(DraftNode, token_ids, parents, confidences, laws))
    else:
        nodes = (DraftNode(0, MALFORMED_PARENT, 0.0),)
    answers = item.answers if item.HasField("answers") else None
    return SessionDraft(
        item.session, item.epoch, Draft(item.anchor_position, item.anchor_hash, nodes, answers)
    )


MAX_DRAFT_NODES = 1_024
"""In one draft; a longer one is not worth its decoding."""
MALFORMED_PARENT = -2
"""No node has this parent; a draft that holds it is malformed."""


def check_sampling(sampling: SamplingParams, vocab_size: int | None = None) -> None:
    """Raise InvalidRequestError where a field has no meaning (NaN fails every comparison)."""
    for field, (low, high) in _SAMPLING_RANGES.items():
        if not low <= getattr(sampling, field) <= high:
            raise InvalidRequestError(f"{field} must be in [{low:g}, {high:g}]", param=field)
    if sampling.top_p == 0 or sampling.repetition_penalty == 0:
        field = "top_p" if sampling.top_p == 0 else "repetition_penalty"
        raise InvalidRequestError(f"{field} must be above 0", param=field)
    if not all(math.isfinite(value) for _, value in sampling.logit_bias):
        raise InvalidRequestError("logit_bias must be finite", param="logit_bias")
    if not all(sampling.bad_words):
        raise InvalidRequestError("bad_words holds an empty sequence", param="bad_words")
    if vocab_size is not None:
        check_token_ids(tuple(i for i, _ in sampling.logit_bias), vocab_size, "logit_bias")
        for word in sampling.bad_words:
            check_token_ids(word, vocab_size, "bad_words")


_SAMPLING_RANGES = {
    "temperature": (0.0, 1e6),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 1e6),
    "frequency_penalty": (-1e6, 1e6),
    "presence_penalty": (-1e6, 1e6),
}


def check_token_ids(token_ids: tuple[int, ...], vocab_size: int, field: str) -> None:
    """Raise InvalidRequestError if an id is outside the vocabulary."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        raise InvalidRequestError(
            f"{field} holds a token id outside [0, {vocab_size})", param=field
        )
