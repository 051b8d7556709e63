"""Both protocols' messages through the wire and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.draft_law import LAW_TOTAL, DraftLaw, could_have_drawn
from cluster.errors import InvalidRequestError
from cluster.grammar import GrammarKind, GrammarSpec
from cluster.load import DrafterLoad, DrafterState, LocalDrafterLoad, VerifierLoad
from cluster.protocol import codec, drafting_pb2, generation_pb2
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
    GenerationRequest,
    Path,
    PromptLogprobsEvent,
    SamplingParams,
    SpeculationStats,
    TokenLogprobs,
    TokensEvent,
)
from verifier_service.draft_trie import DraftOutcome, DraftTrie

# --- values of every field, over the whole range of its wire type --------------------------------

texts = st.text(max_size=12)
uint32 = st.integers(0, (1 << 32) - 1)
int32 = st.integers(-(1 << 31), (1 << 31) - 1)
uint64 = st.integers(0, (1 << 64) - 1)
doubles = st.floats(allow_nan=False)
floats = st.floats(allow_nan=False, width=32)
paths = st.sampled_from(Path)


def tuples_of(values: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(values, max_size=4).map(tuple)


ids = tuples_of(uint32)
sampling = st.builds(
    SamplingParams,
    doubles,
    uint32,
    *([doubles] * 5),
    tuples_of(st.tuples(uint32, doubles)),
    tuples_of(ids),
    uint32,
)
requests = st.builds(
    GenerationRequest,
    request_id=texts,
    request_key=uint64,
    prompt_ids=ids,
    sampling=sampling,
    max_tokens=uint32,
    resumed_ids=ids,
    stop_token_ids=st.frozensets(uint32, max_size=4),
    ignore_eos=st.booleans(),
    path=paths,
    num_speculative_tokens=uint32,
    drafter=st.text(min_size=1, max_size=12),
    prediction_ids=ids,
    deadline_ms=uint32,
    cache_salt=texts,
    priority=int32,
    num_top_logprobs=st.none() | uint32,
    num_prompt_logprobs=st.none() | uint32,
    grammar=st.none() | st.builds(GrammarSpec, st.sampled_from(GrammarKind), texts),
)
router_batches = st.builds(
    RouterBatch,
    hello=st.none() | st.builds(RouterHello, texts, texts, uint32, uint32),
    submits=tuples_of(requests),
    cancels=tuples_of(texts),
    set_paths=tuples_of(st.builds(SetPath, texts, paths)),
    load_interval_ms=uint32,
)

logprobs = st.builds(TokenLogprobs, floats, ids, tuples_of(floats))
prompt_logprobs = st.builds(PromptLogprobsEvent, texts, uint32, tuples_of(logprobs))
tokens = st.builds(
    TokensEvent,
    texts,
    uint32,
    ids,
    tuples_of(st.booleans()),
    uint32,
    ids,
    uint32,
    tuples_of(logprobs),
    tuples_of(st.builds(DraftRun, texts, uint32)),
    tuples_of(st.booleans()),
    uint32,
)
stats = st.builds(SpeculationStats, texts, uint32, ids, ids)
finishes = st.builds(FinishEvent, texts, st.sampled_from(FinishReason), stats)
failures = st.builds(ErrorEvent, texts, texts, texts, texts)
drafter_loads = st.builds(
    DrafterLoad,
    texts,
    st.sampled_from(DrafterState),
    uint32,
    floats,
    floats,
    floats,
    uint64,
    uint64,
    texts,
)
verifier_loads = st.builds(
    VerifierLoad,
    *([uint32] * 4),
    floats,
    floats,
    uint32,
    *([uint64] * 3),
    uint32,
    uint32,
    floats,
    st.none() | floats,
    floats,
    floats,
    st.booleans(),
    tuples_of(drafter_loads),
    tuples_of(st.builds(LocalDrafterLoad, texts, uint64, uint64)),
)
verifier_batches = st.builds(
    VerifierBatch,
    hello=st.none() | st.builds(VerifierHello, texts, texts, uint32, uint32),
    # The order of kinds within one message.
    events=st.tuples(*map(tuples_of, (prompt_logprobs, tokens, finishes, failures))).map(
        lambda kinds: sum(kinds, ())
    ),
    load=st.none() | verifier_loads,
    drain=st.booleans(),
)

target_batches = st.builds(
    TargetBatch,
    hello=st.none() | st.builds(TargetHello, texts, texts, texts, *([uint32] * 3)),
    opens=tuples_of(
        st.builds(
            OpenSession,
            *(uint64, uint32, ids, uint32, uint64, sampling, uint32, texts),
            st.booleans(),
        )
    ),
    commits=tuples_of(st.builds(CommitTokens, uint64, uint32, ids)),
    pauses=tuples_of(uint64),
    resumes=tuples_of(uint64),
    closes=tuples_of(uint64),
    least_survival=floats,
)

laws = st.builds(DraftLaw, token_ids=ids, weights=ids)
drafts = st.builds(
    Draft,
    uint32,
    uint64,
    tuples_of(st.tuples(uint32, int32, floats).map(lambda node: DraftNode(*node)))
    | tuples_of(st.tuples(uint32, int32, floats, laws).map(lambda node: DraftNode(*node))),
    st.none() | uint32,
)
drafter_batches = st.builds(
    DrafterBatch,
    hello=st.none()
    | st.builds(
        DrafterHello,
        *([texts] * 3),
        *([uint32] * 3),
        texts,
        st.booleans(),
        uint32,
        uint32,
    ),
    drafts=tuples_of(st.builds(SessionDraft, uint64, uint32, drafts)),
    errors=tuples_of(st.builds(SessionError, uint64, uint32, texts, texts)),
    load=st.none() | st.builds(DrafterReport, uint32, floats, floats),
    drain=st.booleans(),
)


# --- there and back -------------------------------------------------------------------------------


@given(router_batches)
def test_what_a_router_says(batch):
    wire = codec.encode_router_batch(batch).SerializeToString()
    assert codec.decode_router_batch(generation_pb2.RouterBatch.FromString(wire)) == batch


@given(verifier_batches)
def test_what_a_verifier_says(batch):
    wire = codec.encode_verifier_batch(batch).SerializeToString()
    assert codec.decode_verifier_batch(generation_pb2.VerifierBatch.FromString(wire)) == batch


@given(target_batches)
def test_what_a_verifier_says_to_a_drafter(batch):
    wire = codec.encode_target_batch(batch).SerializeToString()
    assert codec.decode_target_batch(drafting_pb2.TargetBatch.FromString(wire)) == batch


@given(drafter_batches)
def test_what_a_drafter_says(batch):
    wire = codec.encode_drafter_batch(batch).SerializeToString()
    assert codec.decode_drafter_batch(drafting_pb2.DrafterBatch.FromString(wire)) == batch


@pytest.mark.parametrize(
    ("empty", "encode"),
    [
        (RouterBatch(), codec.encode_router_batch),
        (VerifierBatch(), codec.encode_verifier_batch),
        (TargetBatch(), codec.encode_target_batch),
        (DrafterBatch(), codec.encode_drafter_batch),
    ],
)
def test_nothing_to_say_takes_no_bytes(empty, encode):
    assert encode(empty).SerializeToString() == b""


# --- what the types cannot say -----------------------------------------------------------------


def test_the_events_of_a_message_are_put_in_order():
    error, end = ErrorEvent("a", "InternalError", "x"), FinishEvent("b", FinishReason.STOP)
    said = TokensEvent("b", 0, (1,), (False,))
    message = codec.encode_verifier_batch(VerifierBatch(events=(error, end, said)))
    assert codec.decode_verifier_batch(message).events == (said, end, error)


def test_a_request_that_names_no_drafter_takes_any():
    message = generation_pb2.RouterBatch(submits=[generation_pb2.Submit(request_id="a")])
    assert codec.decode_router_batch(message).submits[0].drafter == "auto"


lists = st.lists(st.integers(0, 9), max_size=4)


@given(lists, lists, lists)
def test_node_lists_of_different_lengths_are_a_malformed_draft(token_ids, parents, confidences):
    message = drafting_pb2.DrafterBatch(
        drafts=[
            drafting_pb2.SessionDraft(
                session=7,
                epoch=3,
                token_ids=token_ids,
                parents=parents,
                confidences=map(float, confidences),
            ),
            drafting_pb2.SessionDraft(session=8),
        ]
    )
    first, second = codec.decode_drafter_batch(message).drafts
    assert (first.session, first.epoch) == (7, 3)
    assert second == SessionDraft(8, 0, Draft(0, 0))
    if not len(token_ids) == len(parents) == len(confidences):
        assert DraftTrie([1, 2], vocab_size=10).insert(first.draft) is DraftOutcome.MALFORMED


@pytest.mark.parametrize("num_laws", [1, 3])
def test_laws_that_are_not_one_for_each_node_are_none(num_laws):
    message = drafting_pb2.DrafterBatch(
        drafts=[
            drafting_pb2.SessionDraft(
                token_ids=[1, 2],
                parents=[-1, 0],
                confidences=[0.5, 0.5],
                laws=[drafting_pb2.DraftLaw(token_ids=[1], weights=[1])] * num_laws,
            )
        ]
    )
    [item] = codec.decode_drafter_batch(message).drafts
    assert item.draft.nodes == (DraftNode(1, -1, 0.5), DraftNode(2, 0, 0.5))


def test_a_node_without_a_law_beside_one_with_has_an_empty_one():
    """Which is none that could be: its draft is verified by coupling."""
    law = DraftLaw((1,), (LAW_TOTAL,))
    nodes = (DraftNode(1, -1, 0.5, law), DraftNode(2, 0, 0.5))
    batch = DrafterBatch(drafts=(SessionDraft(1, 1, Draft(0, 0, nodes)),))
    [item] = codec.decode_drafter_batch(codec.encode_drafter_batch(batch)).drafts
    first, second = item.draft.nodes
    assert first.law == law
    assert not could_have_drawn(second.law, 2, vocab_size=9)


@pytest.mark.parametrize("token_ids", [(), (0,), (9,), (3, 0, 9)])
def test_ids_within_the_vocabulary_are_taken(token_ids):
    codec.check_token_ids(token_ids, 10, "prompt_ids")


@pytest.mark.parametrize("token_ids", [(-1,), (10,), (0, 10), (1 << 32,)])
def test_ids_outside_the_vocabulary_are_refused_by_field(token_ids):
    with pytest.raises(InvalidRequestError) as raised:
        codec.check_token_ids(token_ids, 10, "prompt_ids")
    assert raised.value.param == "prompt_ids"
