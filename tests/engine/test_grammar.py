"""What a grammar lets through is what the client asked for, and speculation does not show."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from jsonschema import Draft202012Validator, ValidationError
from llguidance import LLParserLimits

from cluster import grammar_matcher
from cluster.grammar import GrammarError, GrammarKind, GrammarSpec
from cluster.types import ModelCard
from engine.embedded import embedded_model_folder
from engine.grammar import GrammarCompiler, GrammarState, apply_mask
from router.tokenizer import Tokenizer
from tests.support.grammar_walk import allowed_ids, random_walk
from tests.support.hard_schemas import HARD
from tests.support.hostile_grammars import REFUSED, SERVED
from tests.support.json_schemas import random_schema
from tests.support.tiny_models import save_tokenizer

EOS_ID = 2
GROWING = "(.|\n)*a(.|\n){25}c"
"""Has more states than anybody could visit."""
VOCAB_SIZE = 49152 + 100
"""The embedded model's vocabulary, and rows behind it as padded models have them."""


@dataclass(frozen=True)
class Language:
    """A tokenizer and the grammars over it."""

    compiler: GrammarCompiler
    tokenizer: Tokenizer

    def compile(self, kind: GrammarKind, text: str = "") -> GrammarState:
        return self.compiler.compile(GrammarSpec(kind, text))

    def schema(self, schema: object) -> GrammarState:
        return self.compile(GrammarKind.JSON_SCHEMA, json.dumps(schema))

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def takes(self, state: GrammarState, text: str) -> bool:
        """Whether the whole text, and its end, may be generated from the start."""
        token_ids = [*self.ids(text), EOS_ID]
        if state.valid_prefix_len(token_ids) < len(token_ids):
            return False
        try:
            state.commit(token_ids)
        except GrammarError:
            return False
        return state.finished


def language(tokenizer_json: str, vocab_size: int) -> Language:
    card = ModelCard(
        name="model",
        max_model_len=4096,
        vocab_size=vocab_size,
        vocabulary="",
        fingerprint="",
        eos_token_ids=(EOS_ID,),
        tokenizer_json=tokenizer_json,
        chat_template="",
    )
    return Language(GrammarCompiler(tokenizer_json, vocab_size, (EOS_ID,)), Tokenizer(card))


@pytest.fixture(scope="module")
def embedded_language() -> Iterator[Language]:
    made = language((embedded_model_folder() / "tokenizer.json").read_text(), VOCAB_SIZE)
    yield made
    made.compiler.close()


@pytest.fixture(scope="module")
def tiny_language(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Language]:
    """One character is one token, and the tokenizer's kind is none that llguidance knows."""
    folder: Path = tmp_path_factory.mktemp("tiny")
    save_tokenizer(folder, 128)
    made = language((folder / "tokenizer.json").read_text(), 128)
    yield made
    made.compiler.close()


def closing_ids(lang: Language) -> list[int]:
    return [EOS_ID, *(lang.ids(text)[0] for text in ('"', "}", "]", ",", '"}', '"]'))]


# --- what comes out is what was asked for -------------------------------------------------------


@pytest.mark.parametrize("first_seed", range(0, 60, 10))
def test_random_generation_under_random_schemas_is_valid(
    embedded_language: Language, first_seed: int
) -> None:
    closing = closing_ids(embedded_language)
    for seed in range(first_seed, first_seed + 10):
        schema = random_schema(seed)
        rng = random.Random(seed)
        token_ids = random_walk(embedded_language.schema(schema), rng, closing)
        document = json.loads(embedded_language.tokenizer.decode(token_ids))
        Draft202012Validator(schema).validate(document)


def test_random_generation_with_single_characters_is_valid(tiny_language: Language) -> None:
    schema = {
        "properties": {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 9}},
        "required": ["n", "s"],
        "additionalProperties": False,
    }
    for seed in range(20):
        state, rng = tiny_language.schema(schema), random.Random(seed)
        token_ids = random_walk(state, rng, closing_ids(tiny_language))
        document = json.loads(tiny_language.tokenizer.decode(token_ids))
        Draft202012Validator(schema).validate(document)


def test_the_validator_would_notice() -> None:
    with pytest.raises(ValidationError):
        Draft202012Validator(random_schema(0)).validate([])


def test_any_object(embedded_language: Language) -> None:
    rng = random.Random(5)
    closing = closing_ids(embedded_language)
    for _ in range(5):
        state = embedded_language.compile(GrammarKind.JSON_OBJECT)
        text = embedded_language.tokenizer.decode(random_walk(state, rng, closing))
        assert isinstance(json.loads(text), dict)


# --- hard schemas, by hand ----------------------------------------------------------------------


@pytest.mark.parametrize("name", HARD)
def test_hard_schemas(embedded_language: Language, name: str) -> None:
    schema, valid, invalid = HARD[name]
    for text in valid:
        assert embedded_language.takes(embedded_language.schema(schema), text), text
    for text in invalid:
        assert not embedded_language.takes(embedded_language.schema(schema), text), text


def test_whitespace_is_allowed_and_bounded(embedded_language: Language) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for text in ('{"a":1}', '{ "a": 1 }', '{\n  "a": 1\n}', '{\n\t"a"\t:\r\n1}'):
        assert embedded_language.takes(embedded_language.schema(schema), text), text
    for text in (' {"a":1}', '{"a":1}\n', '{"a":' + " " * 33 + "1}"):
        assert not embedded_language.takes(embedded_language.schema(schema), text), text


# --- other kinds ---------------------------------------------------------------------------------

SQL = """root ::= "SELECT " column " FROM " table
column ::= "one" | "two" # either
table ::= [a-z]+ ("_" [0-9]{1,2})?
"""
AWKWARD = ["a", "ab", 'q"uote', "new\nline", "back\\slash", "é😀", "/x/", "\x01", "a{2}", "# c", ""]


@pytest.mark.parametrize(
    ("kind", "text", "valid", "invalid"),
    [
        (GrammarKind.REGEX, r"(foo|bar)+\d", ["foo1", "barfoo2"], ["foo", "1", "foo1x"]),
        (GrammarKind.REGEX, r"^a/b$", ["a/b"], ["^a/b$", "xa/b"]),
        (GrammarKind.REGEX, r"\d\w\s", ["1a "], ["٣a ", "1é ", "1a\u00a0"]),
        (GrammarKind.REGEX, r"[^a]", ["é", "😀", "\n"], ["a", "bb"]),
        (GrammarKind.REGEX, "(?i)yes|no", ["YES", "No"], ["maybe"]),
        (GrammarKind.LARK, 'start: "(" start ")" | "x"', ["x", "((x))"], ["((x)", ""]),
        (GrammarKind.LARK, 'start: %json {"const": 1} "!"', ["1!"], ["1", "2!"]),
        (GrammarKind.LARK, SQL, ["SELECT one FROM t", "SELECT two FROM a_12"], ["SELECT x"]),
        (GrammarKind.CHOICE, json.dumps(AWKWARD), AWKWARD, ["b", "abc", "new", "aab"]),
    ],
)
def test_other_kinds(
    embedded_language: Language, kind: GrammarKind, text: str, valid: list[str], invalid: list[str]
) -> None:
    for sample in valid:
        assert embedded_language.takes(embedded_language.compile(kind, text), sample), sample
    for sample in invalid:
        assert not embedded_language.takes(embedded_language.compile(kind, text), sample), sample


# --- speculation does not show ------------------------------------------------------------------


def drafts(lang: Language, token_ids: list[int], rng: random.Random) -> list[int]:
    """Some of what comes next, then perhaps something else."""
    draft_ids = token_ids[: rng.randint(0, 6)]
    return draft_ids + rng.choices(range(VOCAB_SIZE), k=rng.choice([0, 0, 1, 3]))


@pytest.mark.parametrize("seed", range(12))
def test_masks_along_drafts_are_those_of_single_steps(
    embedded_language: Language, seed: int
) -> None:
    spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(random_schema(seed)))
    compile_spec = embedded_language.compiler.compile
    rng = random.Random(seed)
    token_ids = random_walk(compile_spec(spec), rng, closing_ids(embedded_language))
    single, expected = compile_spec(spec), []
    for token_id in token_ids:
        expected.append(single.masks([])[0])
        single.commit([token_id])

    state, position = compile_spec(spec), 0
    while position < len(token_ids):
        draft_ids = drafts(embedded_language, token_ids[position:], rng)
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


def test_masks_behind_every_draft(embedded_language: Language) -> None:
    """Also behind drafts that were refused: rows of a state that did commit them."""
    rng = random.Random(1)
    state = embedded_language.schema(random_schema(4))
    for _ in range(30):
        draft_ids = []
        for _ in range(3):
            row = state.masks(draft_ids)[-1]
            draft_ids.append(rng.choice(allowed_ids(row)))
        rows = state.masks(draft_ids)
        other = embedded_language.schema(random_schema(4))
        other.commit(state._committed)
        for row, draft_id in zip(rows, [*draft_ids, EOS_ID], strict=False):
            assert torch.equal(row, other.masks([])[0])
            if draft_id == EOS_ID:
                break
            other.commit([draft_id])
        if EOS_ID in draft_ids:
            break
        state.commit(draft_ids[: rng.randint(0, 2)])


def test_a_state_is_made_anew_from_its_tokens(embedded_language: Language) -> None:
    for seed in range(8):
        schema, rng = random_schema(seed), random.Random(seed)
        state = embedded_language.schema(schema)
        token_ids = random_walk(state, rng, closing_ids(embedded_language))
        cut = rng.randint(0, len(token_ids) - 1)
        anew, other = embedded_language.schema(schema), embedded_language.schema(schema)
        anew.commit(token_ids[:cut])
        for token_id in token_ids[:cut]:
            other.masks(token_ids[:3])
            other.commit([token_id])
        assert torch.equal(anew.masks(token_ids[cut:]), other.masks(token_ids[cut:]))
        assert anew.accepting == other.accepting


def test_states_of_one_grammar_are_independent(embedded_language: Language) -> None:
    spec = GrammarSpec(GrammarKind.REGEX, "(ab|cd)+")
    one, two = (embedded_language.compiler.compile(spec) for _ in range(2))
    before = two.masks([])
    one.commit(embedded_language.ids("ab"))
    assert torch.equal(two.masks([]), before)
    assert one.accepting
    assert not two.accepting


def test_drafts_that_exhaust_an_automaton_fail_no_request(
    embedded_language: Language, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each branch makes an automaton larger, up to a limit; then there is a new one."""
    limits = LLParserLimits(verbose_errors=False, max_lexer_states=4000)
    monkeypatch.setattr(grammar_matcher, "_LIMITS", limits)
    state, other = (embedded_language.compile(GrammarKind.REGEX, GROWING) for _ in range(2))
    state.commit(embedded_language.ids("A start"))
    expected = state.masks([])
    first_automaton, rng = state._matcher, random.Random(0)
    for _ in range(40):
        state.masks(rng.choices(allowed_ids(expected[0]), k=6))
        assert torch.equal(state.masks([]), expected)
    assert state._matcher is not first_automaton, "it was never exhausted"
    assert len(other.masks([])) == 1


def test_what_was_committed_long_ago_does_not_count_against_a_request(
    embedded_language: Language, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = LLParserLimits(verbose_errors=False, max_lexer_states=4000)
    monkeypatch.setattr(grammar_matcher, "_LIMITS", limits)
    state, rng = embedded_language.compile(GrammarKind.REGEX, GROWING), random.Random(0)
    first_automaton = state._matcher
    for _ in range(40):
        state.commit([rng.choice(allowed_ids(state.masks([])[0])[1:])])
    assert state._matcher is not first_automaton, "it was never exhausted"


# --- the end ------------------------------------------------------------------------------------


def test_the_end_is_allowed_where_the_text_is_complete(embedded_language: Language) -> None:
    state = embedded_language.compile(GrammarKind.REGEX, "(ab)*c?")
    for text, complete in (("", True), ("a", False), ("b", True), ("a", False), ("b", True)):
        state.commit(embedded_language.ids(text))
        assert state.accepting is complete
        assert (EOS_ID in allowed_ids(state.masks([])[0])) is complete
    state.commit(embedded_language.ids("c"))
    assert allowed_ids(state.masks([])[0]) == [EOS_ID]
    assert not state.finished
    state.commit([EOS_ID])
    assert state.finished


def test_drafts_end_with_the_end(embedded_language: Language) -> None:
    state = embedded_language.compile(GrammarKind.CHOICE, '["yes"]')
    [yes] = embedded_language.ids("yes")
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


def test_an_end_too_early_is_refused(embedded_language: Language) -> None:
    state = embedded_language.compile(GrammarKind.REGEX, "ab")
    with pytest.raises(GrammarError, match="ends"):
        state.commit([*embedded_language.ids("a"), EOS_ID])


def test_a_grammar_may_name_its_last_token(embedded_language: Language) -> None:
    last, between = 'start: "a" <|im_end|>', 'start: "a" <|im_end|> "b"'
    state = embedded_language.compile(GrammarKind.LARK, last)
    state.commit(embedded_language.ids("a"))
    assert allowed_ids(state.masks([])[0]) == [EOS_ID]
    state.commit([EOS_ID])
    assert state.finished
    state = embedded_language.compile(GrammarKind.LARK, between)
    state.commit(embedded_language.ids("a"))
    with pytest.raises(GrammarError, match="nothing"):
        state.masks([])


# --- the vocabulary -----------------------------------------------------------------------------


def test_text_holds_no_special_token_and_no_id_without_a_token(
    embedded_language: Language,
) -> None:
    state = embedded_language.compile(GrammarKind.REGEX, "(.|\n)*")
    allowed = set(allowed_ids(state.masks([])[0])) - {EOS_ID}
    special = set(embedded_language.tokenizer.special_ids.values())
    assert len(allowed) > 49_000
    assert not allowed & special
    assert max(allowed) < 49_152


def test_any_token_is_any_that_there_is(embedded_language: Language) -> None:
    state = embedded_language.compile(GrammarKind.LARK, "start: <[*]>+")
    assert len(allowed_ids(state.masks([])[0])) == 49_152


def test_a_special_token_may_be_asked_for(embedded_language: Language) -> None:
    special_id = embedded_language.tokenizer.special_ids["<|im_start|>"]
    state = embedded_language.compile(GrammarKind.LARK, 'start: "a" <|im_start|> "b"')
    a_id, b_id = embedded_language.ids("a")[0], embedded_language.ids("b")[0]
    rows = state.masks([a_id, special_id, b_id])
    assert [allowed_ids(row) for row in rows] == [[a_id], [special_id], [b_id], [EOS_ID]]


def test_a_model_without_an_end_cannot_have_grammars() -> None:
    with pytest.raises(ValueError, match="end-of-sequence"):
        GrammarCompiler("{}", 128, ())


# --- what cannot go on --------------------------------------------------------------------------


def test_a_position_without_any_token_is_an_error(tiny_language: Language) -> None:
    """The grammar wants a character that the vocabulary lacks."""
    state = tiny_language.compile(GrammarKind.REGEX, "a?bé")
    b_id = tiny_language.ids("b")[0]
    assert len(state.masks([b_id])) == 1
    assert allowed_ids(state.masks([])[0]) == sorted(tiny_language.ids("ab"))
    state.commit([b_id])
    with pytest.raises(GrammarError, match="nothing"):
        state.masks([])


def test_a_token_that_is_not_allowed_is_an_error(embedded_language: Language) -> None:
    state = embedded_language.compile(GrammarKind.JSON_OBJECT)
    with pytest.raises(GrammarError, match="not allow"):
        state.commit(embedded_language.ids("Sure"))


def test_text_forced_without_end_is_an_error(embedded_language: Language) -> None:
    state = embedded_language.compile(GrammarKind.REGEX, "b|a{20000}")
    a_id = embedded_language.ids("a")[0]
    assert len(state.masks([a_id])) == 1
    state.commit([a_id])
    with pytest.raises(GrammarError, match="forces"):
        state.masks([])


@pytest.mark.parametrize("name", ["references in a chain", "forced text", "itself", "max_tokens"])
def test_hostile_grammars_do_not_come_near_the_engine(
    embedded_language: Language, name: str
) -> None:
    with pytest.raises(GrammarError):
        embedded_language.compiler.compile(REFUSED[name])


@pytest.mark.parametrize("name", SERVED)
def test_grammars_that_only_look_hostile_give_masks(embedded_language: Language, name: str) -> None:
    state, rng = embedded_language.compiler.compile(SERVED[name]), random.Random(0)
    for _ in range(10):
        if state.finished:
            return
        state.commit([rng.choice(allowed_ids(state.masks([])[0]))])


# --- on logits ----------------------------------------------------------------------------------


def test_apply_mask_leaves_what_is_allowed_as_it_is(embedded_language: Language) -> None:
    state = embedded_language.compile(GrammarKind.CHOICE, '["yes", "no"]')
    [yes] = embedded_language.ids("yes")
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


def test_apply_mask_keeps_what_is_not_finite_visible(embedded_language: Language) -> None:
    masks = embedded_language.compile(GrammarKind.JSON_OBJECT).masks([])
    logits = torch.full((1, VOCAB_SIZE), torch.nan)
    apply_mask(logits, masks)
    assert logits.isnan().all()
