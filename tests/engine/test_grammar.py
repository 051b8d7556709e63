"""Masks: speculation does not show in them, they end where the text may, and what goes wrong is an
error of one request."""

from __future__ import annotations

import json
import random

import pytest
import tokenizers
import torch
from llguidance import LLParserLimits

from cluster import grammar_matcher
from cluster.grammar import GrammarError, GrammarKind, GrammarSpec
from engine import grammar
from engine.embedded import embedded_model_folder
from engine.grammar import GrammarCompiler, GrammarState, apply_mask
from engine.grammar_vocabulary import GrammarVocabulary
from tests.support.grammar_language import (
    EOS_ID,
    VOCAB_SIZE,
    Language,
    embedded_language,
    tiny_language,
)
from tests.support.grammar_walk import allowed_ids, random_walk
from tests.support.hostile_grammars import REFUSED, SERVED
from tests.support.json_schemas import random_schema
from tests.support.scripted_verifier import make_card, sentencepiece_tokenizer_json

GROWING = "(.|\n)*a(.|\n){25}c"
"""Has more states than anybody could visit."""


@pytest.fixture(scope="module")
def language() -> Language:
    return embedded_language()


@pytest.fixture(scope="module")
def tiny() -> Language:
    return tiny_language()


# --- speculation does not show ------------------------------------------------------------------


def drafts(token_ids: list[int], rng: random.Random) -> list[int]:
    """Some of what comes next, then perhaps something else."""
    draft_ids = token_ids[: rng.randint(0, 6)]
    return draft_ids + rng.choices(range(VOCAB_SIZE), k=rng.choice([0, 0, 1, 3]))


@pytest.mark.parametrize("seed", range(12))
def test_masks_along_drafts_are_those_of_single_steps(language: Language, seed: int) -> None:
    spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(random_schema(seed)))
    compile_spec = language.compiler.compile
    rng = random.Random(seed)
    token_ids = random_walk(compile_spec(spec), rng, language.closing_ids)
    single, expected = compile_spec(spec), []
    for token_id in token_ids:
        expected.append(single.masks([])[0])
        single.commit([token_id])

    state, position = compile_spec(spec), 0
    while position < len(token_ids):
        draft_ids = drafts(token_ids[position:], rng)
        num_valid = state.valid_prefix_len(draft_ids)
        rows = state.masks(draft_ids)
        assert len(rows) - 1 <= num_valid <= len(draft_ids)
        for offset, row in enumerate(rows):
            if draft_ids[:offset] == token_ids[position : position + offset] and (
                position + offset < len(token_ids)
            ):
                assert torch.equal(row, expected[position + offset])
        for row, draft_id in zip(rows[:-1], draft_ids, strict=False):
            assert draft_id in allowed_ids(row)
        if len(rows) <= len(draft_ids):
            assert draft_ids[len(rows) - 1] not in allowed_ids(rows[-1])
        num_new = rng.randint(1, max(1, min(len(rows), len(token_ids) - position)))
        state.commit(token_ids[position : position + num_new])
        position += num_new
    assert state.finished


def test_masks_behind_every_draft(language: Language) -> None:
    """Also behind drafts that were refused: rows of a state that did commit them."""
    rng = random.Random(1)
    state = language.schema(random_schema(4))
    for _ in range(30):
        draft_ids = []
        for _ in range(3):
            row = state.masks(draft_ids)[-1]
            draft_ids.append(rng.choice(allowed_ids(row)))
        rows = state.masks(draft_ids)
        other = language.schema(random_schema(4))
        other.commit(state._committed)
        for row, draft_id in zip(rows, [*draft_ids, EOS_ID], strict=False):
            assert torch.equal(row, other.masks([])[0])
            if draft_id == EOS_ID:
                break
            other.commit([draft_id])
        if EOS_ID in draft_ids:
            break
        state.commit(draft_ids[: rng.randint(0, 2)])


def test_a_state_is_made_anew_from_its_tokens(language: Language) -> None:
    for seed in range(5):
        schema, rng = random_schema(seed), random.Random(seed)
        state = language.schema(schema)
        token_ids = random_walk(state, rng, language.closing_ids)
        cut = rng.randint(0, len(token_ids) - 1)
        anew, other = language.schema(schema), language.schema(schema)
        anew.commit(token_ids[:cut])
        for token_id in token_ids[:cut]:
            other.masks(token_ids[:3])
            other.commit([token_id])
        assert torch.equal(anew.masks(token_ids[cut:]), other.masks(token_ids[cut:]))
        assert anew.accepting == other.accepting


def test_states_of_one_grammar_are_independent(language: Language) -> None:
    spec = GrammarSpec(GrammarKind.REGEX, "(ab|cd)+")
    one, two = (language.compiler.compile(spec) for _ in range(2))
    before = two.masks([])
    one.commit(language.ids("ab"))
    assert torch.equal(two.masks([]), before)
    assert one.accepting
    assert not two.accepting


def test_drafts_that_exhaust_an_automaton_fail_no_request(
    language: Language, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each branch makes an automaton larger, up to a limit; then there is a new one."""
    limits = LLParserLimits(verbose_errors=False, max_lexer_states=4000)
    monkeypatch.setattr(grammar_matcher, "_LIMITS", limits)
    state, other = (language.compile(GrammarKind.REGEX, GROWING) for _ in range(2))
    state.commit(language.ids("A start"))
    expected = state.masks([])
    first_automaton, rng = state._matcher, random.Random(0)
    for _ in range(40):
        state.masks(rng.choices(allowed_ids(expected[0]), k=6))
        assert torch.equal(state.masks([]), expected)
    assert state._matcher is not first_automaton, "it was never exhausted"
    assert len(other.masks([])) == 1


def test_what_was_committed_long_ago_does_not_count_against_a_request(
    language: Language, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = LLParserLimits(verbose_errors=False, max_lexer_states=4000)
    monkeypatch.setattr(grammar_matcher, "_LIMITS", limits)
    state, rng = language.compile(GrammarKind.REGEX, GROWING), random.Random(0)
    first_automaton = state._matcher
    for _ in range(40):
        state.commit([rng.choice(allowed_ids(state.masks([])[0])[1:])])
    assert state._matcher is not first_automaton, "it was never exhausted"


def test_a_grammar_that_no_automaton_can_follow_is_an_error_of_its_masks(
    language: Language, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = language.compile(GrammarKind.REGEX, GROWING)
    state.commit(language.ids("A start"))
    limits = LLParserLimits(verbose_errors=False, max_lexer_states=10)
    monkeypatch.setattr(grammar_matcher, "_LIMITS", limits)
    state._rebuild()
    for _ in range(2):
        with pytest.raises(GrammarError, match="too many"):
            state.masks([])
        assert state.valid_prefix_len(language.ids(" that goes on")) <= 3


# --- the end ------------------------------------------------------------------------------------


def test_the_end_is_allowed_where_the_text_is_complete(language: Language) -> None:
    state = language.compile(GrammarKind.REGEX, "(ab)*c?")
    for text, complete in (("", True), ("a", False), ("b", True), ("a", False), ("b", True)):
        state.commit(language.ids(text))
        assert state.accepting is complete
        assert (EOS_ID in allowed_ids(state.masks([])[0])) is complete
    state.commit(language.ids("c"))
    assert allowed_ids(state.masks([])[0]) == [EOS_ID]
    assert not state.finished
    state.commit([EOS_ID])
    assert state.finished


def test_drafts_end_with_the_end(language: Language) -> None:
    state = language.compile(GrammarKind.CHOICE, '["yes"]')
    [yes] = language.ids("yes")
    draft_ids = [yes, EOS_ID, yes, yes]
    assert state.valid_prefix_len(draft_ids) == 2
    rows = state.masks(draft_ids)
    assert [allowed_ids(row) for row in rows[1:]] == [[EOS_ID], [EOS_ID]]
    state.commit(draft_ids[:2])
    assert state.valid_prefix_len([EOS_ID]) == 0
    assert len(state.masks([EOS_ID])) == 1
    state.commit([EOS_ID])
    with pytest.raises(GrammarError):
        state.commit([yes])


def test_an_end_too_early_is_refused(language: Language) -> None:
    state = language.compile(GrammarKind.REGEX, "ab")
    with pytest.raises(GrammarError, match="ends"):
        state.commit([*language.ids("a"), EOS_ID])


def test_a_grammar_may_name_its_last_token(language: Language) -> None:
    last, between = 'start: "a" <|im_end|>', 'start: "a" <|im_end|> "b"'
    state = language.compile(GrammarKind.LARK, last)
    state.commit(language.ids("a"))
    assert allowed_ids(state.masks([])[0]) == [EOS_ID]
    state.commit([EOS_ID])
    assert state.finished
    state = language.compile(GrammarKind.LARK, between)
    state.commit(language.ids("a"))
    with pytest.raises(GrammarError, match="nothing"):
        state.masks([])


# --- the vocabulary -----------------------------------------------------------------------------


def test_text_holds_no_special_token_and_no_id_without_a_token(
    language: Language,
) -> None:
    state = language.compile(GrammarKind.REGEX, "(.|\n)*")
    allowed = set(allowed_ids(state.masks([])[0])) - {EOS_ID}
    special = set(language.tokenizer.special_ids.values())
    assert len(allowed) > 49_000
    assert not allowed & special
    assert max(allowed) < 49_152


def test_any_token_is_any_that_there_is(language: Language) -> None:
    state = language.compile(GrammarKind.LARK, "start: <[*]>+")
    assert len(allowed_ids(state.masks([])[0])) == 49_152


def test_a_special_token_may_be_asked_for(language: Language) -> None:
    special_id = language.tokenizer.special_ids["<|im_start|>"]
    state = language.compile(GrammarKind.LARK, 'start: "a" <|im_start|> "b"')
    a_id, b_id = language.ids("a")[0], language.ids("b")[0]
    rows = state.masks([a_id, special_id, b_id])
    assert [allowed_ids(row) for row in rows] == [[a_id], [special_id], [b_id], [EOS_ID]]


def test_a_model_may_have_fewer_rows_than_its_tokenizer_has_tokens() -> None:
    compiler = GrammarCompiler((embedded_model_folder() / "tokenizer.json").read_text(), 1000, (2,))
    state = compiler.compile(GrammarSpec(GrammarKind.REGEX, "(.|\n)*"))
    allowed = allowed_ids(state.masks([])[0])
    assert max(allowed) == 999
    state.commit(allowed[-3:])
    compiler.close()


def test_a_model_without_an_end_cannot_have_grammars() -> None:
    with pytest.raises(ValueError, match="end-of-sequence"):
        GrammarCompiler("{}", 128, ())


# --- where only one text can follow -------------------------------------------------------------


def test_one_token_spells_what_is_forced(language: Language) -> None:
    schema = {"properties": {"fullname": {}}, "required": ["fullname"], "type": "object"}
    state = language.schema(schema)
    assert texts(language, state) == ["{", '{"']  # There may be a space between the two.
    state.commit(language.ids('{"'))
    assert texts(language, state) == ["full"]
    state.commit(language.ids("full"))
    assert texts(language, state) == ["name"]
    state.commit(language.ids("name"))
    assert texts(language, state) == ['"', '":', '":"']


WORDY = {
    "type": "object",
    "properties": {
        "fullname": {"enum": ["undecided", "undefined", "größer", "grö"]},
        "birthplace": {"type": "string", "pattern": "^(North|Northern )?America$"},
        "is_still_alive": {"type": "boolean"},
    },
    "required": ["fullname", "is_still_alive"],
}


def texts(language: Language, state: GrammarState) -> list[str]:
    return [language.tokenizer.decode([i]) for i in allowed_ids(state.masks([])[0])]


def test_only_what_is_forced_is_left_to_one_token(
    language: Language, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a longest token stays alone, all others lead to its text."""
    spec, num_forced = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(WORDY)), 0
    for seed in range(4):
        state, rng = language.compiler.compile(spec), random.Random(seed)
        for token_id in random_walk(language.compiler.compile(spec), rng, language.closing_ids):
            forced = allowed_ids(state.masks([])[0])
            with monkeypatch.context() as patched:
                patched.setattr(grammar, "forced_token", lambda *_: None)
                allowed = allowed_ids(state.masks([])[0])
                if forced != allowed:
                    [forced_id] = forced
                    num_forced += 1
                    text = language.compiler._vocabulary.text(forced_id)
                    for other_id in allowed:
                        other = language.compiler.compile(spec)
                        other.commit([*state._committed, other_id])
                        assert spelled(language, other, [other_id], len(text), rng) == text
            state.commit([token_id])
    assert num_forced > 20


def spelled(
    language: Language,
    state: GrammarState,
    token_ids: list[int],
    num_bytes: int,
    rng: random.Random,
) -> bytes:
    """The first bytes of these tokens and of random ones behind them."""
    text = b""
    while True:
        text += language.compiler._vocabulary.text(token_ids[-1])
        if len(text) >= num_bytes:
            return text[:num_bytes]
        token_ids = [*token_ids, rng.choice(allowed_ids(state.masks([])[0]))]
        state.commit(token_ids[-1:])


# --- what cannot go on --------------------------------------------------------------------------


def test_a_position_without_any_token_is_an_error(tiny: Language) -> None:
    """The grammar wants a character that the vocabulary lacks."""
    state = tiny.compile(GrammarKind.REGEX, "a?bé")
    b_id = tiny.ids("b")[0]
    assert len(state.masks([b_id])) == 1
    assert allowed_ids(state.masks([])[0]) == sorted(tiny.ids("ab"))
    state.commit([b_id])
    with pytest.raises(GrammarError, match="nothing"):
        state.masks([])


def test_a_token_that_is_not_allowed_is_an_error(language: Language) -> None:
    state = language.compile(GrammarKind.JSON_OBJECT)
    with pytest.raises(GrammarError, match="not allow"):
        state.commit(language.ids("Sure"))


@pytest.mark.parametrize("name", ["references in a chain", "itself", "max_tokens"])
def test_hostile_grammars_do_not_come_near_the_engine(language: Language, name: str) -> None:
    with pytest.raises(GrammarError):
        language.compiler.compile(REFUSED[name])


@pytest.mark.parametrize("name", SERVED)
def test_grammars_that_only_look_hostile_give_masks(language: Language, name: str) -> None:
    state, rng = language.compiler.compile(SERVED[name]), random.Random(0)
    for _ in range(10):
        if state.finished:
            return
        state.commit([rng.choice(allowed_ids(state.masks([])[0]))])


# --- on logits ----------------------------------------------------------------------------------


def test_apply_mask_leaves_what_is_allowed_as_it_is(language: Language) -> None:
    state = language.compile(GrammarKind.CHOICE, '["yes", "no"]')
    [yes] = language.ids("yes")
    masks = state.masks([yes])
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    expected = torch.full_like(logits, -torch.inf)
    for row, mask in enumerate(masks):
        kept = allowed_ids(mask)
        expected[row, kept] = logits[row, kept]
    padded = torch.cat([torch.zeros(1, VOCAB_SIZE), logits, torch.zeros(1, VOCAB_SIZE)])
    apply_mask(padded[1:3], masks)
    assert torch.equal(padded[1:3], expected)
    assert not padded[[0, 3]].any()


def test_apply_mask_keeps_what_is_not_finite_visible(language: Language) -> None:
    masks = language.compile(GrammarKind.JSON_OBJECT).masks([])
    logits = torch.full((1, VOCAB_SIZE), torch.nan)
    apply_mask(logits, masks)
    assert logits.isnan().all()


@pytest.mark.parametrize("family", ["byte level", "sentencepiece"])
def test_an_added_token_is_text_unless_it_is_special(family: str) -> None:
    byte_level = family == "byte level"
    described = make_card().tokenizer_json if byte_level else sentencepiece_tokenizer_json()
    tokenizer = tokenizers.Tokenizer.from_str(described)
    tokenizer.add_tokens(["</think>", "a  a"])
    tokenizer.add_special_tokens(["<|special|>"])
    plain = [tokenizer.token_to_id(text) for text in ("</think>", "a  a")]
    special = tokenizer.token_to_id("<|special|>")
    end = tokenizer.token_to_id("<|im_end|>" if byte_level else "</s>")
    vocabulary = GrammarVocabulary(tokenizer.to_str(), tokenizer.get_vocab_size(), [end])
    assert [vocabulary.text(token_id) for token_id in plain] == [b"</think>", b"a  a"]
    assert vocabulary.text(special) == b""
    state = GrammarState(vocabulary, GrammarSpec(GrammarKind.REGEX, "(?s:.*)"))
    assert set(plain) <= set(allowed_ids(state.masks([])[0]))
    assert special not in allowed_ids(state.masks([])[0])
    state = GrammarState(vocabulary, GrammarSpec(GrammarKind.REGEX, "</think>a"))
    assert plain[0] in allowed_ids(state.masks([])[0])
