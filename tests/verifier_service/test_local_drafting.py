"""Drafters inside the verifier: the law holds with each of them and with several together, and the
figures say who proposed what."""

from __future__ import annotations

import random

import pytest

from cluster.config import SchedulerConfig, SpeculationConfig
from cluster.types import DraftNode, FinishReason, Path, SamplingParams
from tests.support.engine_driver import (
    GREEDY,
    EngineDriver,
    chain_draft,
    flaky_drafter,
    oracle_drafter,
)
from tests.support.reference import decode
from tests.support.scripted_target import (
    EOS,
    VOCAB_SIZE,
    ScriptedRunner,
    continuation_law,
    hashed_law,
)
from verifier_service.draft_trie import DraftOutcome, DraftTrie
from verifier_service.events import Cancelled, PathChanged

SAMPLINGS = [
    GREEDY,
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.0, repetition_penalty=1.2),
    SamplingParams(temperature=0.8, frequency_penalty=0.5, presence_penalty=0.3, min_tokens=4),
]
KINDS = ("ngram", "suffix")


def speculation(*kinds: str, **fields: object) -> SpeculationConfig:
    return SpeculationConfig(draft_deadline_ms=1.0, local_drafters=kinds, **fields)


def proposals(driver: EngineDriver, seq: int) -> dict[str, tuple[int, int]]:
    """Drafts and accepted ones by drafter, as the events tell them."""
    found: dict[str, tuple[int, int]] = {}
    for event in driver.results[seq].events:
        num_accepted = sum(event.drafted)
        assert sum(run.num_tokens for run in event.draft_runs) == event.num_draft_tokens
        for run in event.draft_runs:
            drafted, accepted = found.get(run.drafter, (0, 0))
            found[run.drafter] = (
                drafted + run.num_tokens,
                accepted + min(run.num_tokens, num_accepted),
            )
            num_accepted = max(0, num_accepted - run.num_tokens)
    return found


def repeating(num_tokens: int) -> list[int]:
    return [3 + i % 5 for i in range(num_tokens)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kinds", [("ngram",), ("suffix",), KINDS, ()], ids=str)
def test_tokens_are_those_of_decoding_one_by_one(seed, kinds):
    """With predictions right, nearly right and wrong, beside a drafter replica of every humour."""
    rng = random.Random(seed)
    law = hashed_law(salt=f"local {seed}", sharpness=rng.choice([4.0, 30.0]))
    runner = ScriptedRunner(law, num_blocks=rng.choice([20, 64]))
    driver = EngineDriver(
        runner,
        drafter=flaky_drafter(rng, law) if seed % 2 else None,
        scheduler=SchedulerConfig(max_running_sequences=4, max_step_tokens=rng.choice([5, 64])),
        speculation=speculation(*kinds),
    )
    expected = {}
    for _ in range(8):
        prompt = [rng.randrange(3, 7) for _ in range(rng.randrange(1, 20))]
        fields = {
            "max_tokens": rng.randrange(1, 30),
            "sampling": rng.choice(SAMPLINGS),
            "request_key": rng.getrandbits(64),
        }
        answer = decode(law, prompt, **fields)
        prediction = [i if rng.random() < 0.9 else rng.randrange(VOCAB_SIZE) for i in answer]
        seq = driver.submit(
            prompt,
            path=rng.choice(list(Path)),
            prediction_ids=tuple(rng.choice([prediction, prediction[2:], [], answer])),
            cache_salt=rng.choice(["", "us", "them"]),
            **fields,
        )
        expected[seq] = answer
    results = driver.run()
    assert {seq: result.token_ids for seq, result in results.items()} == expected
    assert runner.kv.num_used_blocks == 0
    assert driver.engine._local.num_sequences == 0
    assert not driver.sessions
    assert sum(drafted for seq in results for drafted, _ in proposals(driver, seq).values()) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_repetition_is_drafted_without_any_drafter_replica(kind):
    text = repeating(60)
    runner = ScriptedRunner(continuation_law(text, 1))
    driver = EngineDriver(runner, speculation=speculation(kind))
    seq = driver.submit([3], max_tokens=60, drafter=kind)
    result = driver.run()[seq]
    drafted, accepted = proposals(driver, seq)[kind]
    assert accepted > 30
    assert result.finish.stats.drafter == kind
    assert result.finish.stats.num_accepted_tokens == accepted
    assert not any(output.orders.opens for output in driver.outputs), "a replica was asked"
    [load] = [one for one in driver.engine.load().local_drafters if one.kind == kind]
    assert (load.num_draft_tokens, load.num_accepted_tokens) == (drafted, accepted)


@pytest.mark.parametrize("kind", [*KINDS, "prediction"])
def test_logprobs_and_penalties_are_those_of_plain_decoding(kind):
    law = hashed_law(salt="logprobs", sharpness=8.0)
    sampling = SamplingParams(temperature=0.0, repetition_penalty=1.1)
    told = []
    for path in Path:
        driver = EngineDriver(ScriptedRunner(law), speculation=speculation(*KINDS))
        fields = {"sampling": sampling, "max_tokens": 60, "ignore_eos": True}
        answer = told[0][0] if told else [5] * 60
        seq = driver.submit(
            repeating(40),
            path=path,
            drafter=kind,
            num_top_logprobs=3,
            # Almost right where there is an answer to know; what comes first is wrong throughout.
            prediction_ids=(*answer[:9], 0, *answer[10:]) if kind == "prediction" else (),
            **fields,
        )
        result = driver.run()[seq]
        told.append((result.token_ids, [one for e in result.events for one in e.logprobs]))
    assert told[0] == told[1]
    assert len(told[0][1]) == 60


def test_a_right_prediction_is_used_on_the_plain_path_too():
    text = [3 + i % 30 for i in range(3, 90, 7)] * 3
    law = continuation_law(text, 1)
    for path in Path:
        driver = EngineDriver(ScriptedRunner(law), speculation=speculation())
        seq = driver.submit([3], max_tokens=len(text), path=path, prediction_ids=tuple(text))
        result = driver.run()[seq]
        assert result.token_ids == text
        assert result.finish.stats.num_steps <= 3
        assert result.finish.stats.drafter == "prediction"
        orders = [output.orders for output in driver.outputs]
        assert any(order.opens for order in orders) is (path is Path.SPECULATIVE)


def test_plain_is_plain_without_a_prediction():
    driver = EngineDriver(ScriptedRunner(hashed_law()), speculation=speculation(*KINDS))
    seq = driver.submit(repeating(30), max_tokens=30, path=Path.PLAIN, ignore_eos=True)
    result = driver.run()[seq]
    assert result.finish.stats.num_draft_tokens == 0
    assert driver.engine._local.num_sequences == 0


@pytest.mark.parametrize(
    ("drafter", "used"),
    [
        ("auto", {"prediction", "suffix", "ngram", "scripted"}),
        ("prediction", {"prediction"}),
        ("suffix", {"suffix"}),
        ("ngram", {"ngram"}),
        ("model", {"scripted"}),
    ],
)
def test_only_the_named_kind_drafts(drafter, used):
    """The replica stands for a model."""
    text = repeating(80)
    law = continuation_law(text, 1)
    wrong = [*text[:40], 30, *text[41:]]
    driver = EngineDriver(
        ScriptedRunner(law),
        drafter=oracle_drafter(law, GREEDY, 1, depth=4),
        speculation=speculation(*KINDS),
    )
    seq = driver.submit([3], max_tokens=80, drafter=drafter, prediction_ids=tuple(wrong))
    assert driver.run()[seq].token_ids == text
    found = proposals(driver, seq)
    assert found.keys() <= used
    assert drafter == "auto" or found.keys() == used
    asked = any(output.orders.opens for output in driver.outputs)
    assert asked is ("scripted" in used)


def test_a_remote_draft_and_a_local_one_merge():
    """The replica knows the next two tokens, the suffix drafter what comes behind a repetition: of
    both the chain that is expected to bring more is verified, and each is told of its own."""
    text = [*repeating(40), *range(10, 30), *repeating(40)]
    law = continuation_law(text, 1)
    driver = EngineDriver(
        ScriptedRunner(law),
        drafter=oracle_drafter(law, GREEDY, 1, depth=2),
        speculation=speculation("suffix"),
    )
    seq = driver.submit([3], max_tokens=len(text))
    assert driver.run()[seq].token_ids == text
    found = proposals(driver, seq)
    assert found["suffix"][1] > 20
    assert found["scripted"][1] >= 10
    verdicts = [verdict for output in driver.outputs for verdict in output.verdicts]
    assert sum(v.num_draft_tokens for v in verdicts) == found["scripted"][0]
    assert sum(v.num_accepted_tokens for v in verdicts) == found["scripted"][1]
    assert len(driver.results[seq].events) < 45


def test_a_replica_that_is_called_like_a_drafter_inside_is_told_apart():
    text = list(range(3, 33))
    law = continuation_law(text, 1)
    driver = EngineDriver(
        ScriptedRunner(law),
        drafter=oracle_drafter(law, GREEDY, 1, depth=4),
        speculation=speculation("ngram"),
        replica_name="ngram",
    )
    seq = driver.submit([3], max_tokens=30)
    driver.run()
    assert proposals(driver, seq).keys() == {"ngram replica"}


def test_the_clients_depth_bounds_local_drafts_too():
    text = repeating(60)
    driver = EngineDriver(
        ScriptedRunner(continuation_law(text, 1)), speculation=speculation("suffix")
    )
    seq = driver.submit([3], max_tokens=60, num_speculative_tokens=3, prediction_ids=tuple(text))
    events = driver.run()[seq].events
    assert max(event.num_draft_tokens for event in events) == 3


def test_local_depth_is_its_own_and_a_replica_keeps_to_its_limit():
    text = list(range(3, 39))
    law = continuation_law(text, 1)
    config = speculation(num_speculative_tokens=2, num_local_speculative_tokens=20)
    deep = EngineDriver(ScriptedRunner(law), speculation=config)
    seq = deep.submit([3], max_tokens=36, prediction_ids=tuple(text))
    assert max(event.num_draft_tokens for event in deep.run()[seq].events) == 20
    shallow = EngineDriver(
        ScriptedRunner(law),
        drafter=oracle_drafter(law, GREEDY, 1, depth=9),
        speculation=config,
    )
    seq = shallow.submit([3], max_tokens=36)
    assert max(event.num_draft_tokens for event in shallow.run()[seq].events) == 2


def test_the_counts_of_a_prediction_are_of_what_was_delivered():
    """Of a stop inside a block, only what comes up to it."""
    text = [*range(3, 25), EOS, *range(25, 39)]
    driver = EngineDriver(ScriptedRunner(continuation_law(text, 1)), speculation=speculation())
    prediction = [*text[:10], 39, *text[11:]]
    seq = driver.submit([3], max_tokens=100, prediction_ids=tuple(prediction))
    result = driver.run()[seq]
    assert result.token_ids == text[:23]
    assert result.finish.reason is FinishReason.STOP
    assert all(len(event.predicted) == len(event.token_ids) for event in result.events)
    assert sum(sum(event.predicted) for event in result.events) == 22
    assert sum(event.num_resyncs for event in result.events) == 1


def test_predicted_counts_do_not_depend_on_how_it_was_drafted():
    law = hashed_law(salt="counts")
    answer = decode(
        law, [3, 4], max_tokens=40, sampling=GREEDY, request_key=1, stop_ids=frozenset()
    )
    prediction = (*answer[:12], 5, 5, *answer[14:])
    counts = set()
    for path in Path:
        for depth in (1, 3, 0):
            driver = EngineDriver(ScriptedRunner(law), speculation=speculation("suffix"))
            seq = driver.submit(
                [3, 4],
                max_tokens=40,
                path=path,
                ignore_eos=True,
                num_speculative_tokens=depth,
                prediction_ids=prediction,
            )
            result = driver.run()[seq]
            assert result.token_ids == answer
            flags = [flag for event in result.events for flag in event.predicted]
            counts.add((tuple(flags), sum(event.num_resyncs for event in result.events)))
    [(flags, num_resyncs)] = counts
    assert sum(flags) >= 36
    assert num_resyncs == 1


def test_a_resumed_request_goes_on_in_its_prediction():
    text = [3 + i * 7 % 30 for i in range(40)]
    driver = EngineDriver(ScriptedRunner(continuation_law(text, 1)), speculation=speculation())
    seq = driver.submit(
        [3], max_tokens=40, prediction_ids=tuple(text), resumed_ids=tuple(text[:20])
    )
    driver.results[seq].token_ids += text[:20]
    result = driver.run()[seq]
    assert result.token_ids == text
    assert len(result.events) <= 2


def test_path_changes_turn_local_drafters_on_and_off():
    text = repeating(150)
    driver = EngineDriver(
        ScriptedRunner(continuation_law(text, 1)),
        speculation=speculation("suffix", num_local_speculative_tokens=4),
    )
    seq = driver.submit([3], max_tokens=150, path=Path.PLAIN)
    num_drafted = []
    for path in (Path.PLAIN, Path.SPECULATIVE, Path.PLAIN, Path.SPECULATIVE):
        driver.engine.inbox.put(PathChanged(seq, path))
        before = len(driver.results[seq].events)
        for _ in range(12):
            driver.step()
        events = driver.results[seq].events[before + 1 :]
        num_drafted.append(sum(event.num_draft_tokens for event in events))
    assert num_drafted[0] == num_drafted[2] == 0
    assert min(num_drafted[1], num_drafted[3]) > 10
    assert driver.run()[seq].token_ids == text


def test_a_cancelled_request_is_forgotten():
    driver = EngineDriver(ScriptedRunner(hashed_law()), speculation=speculation(*KINDS))
    seq = driver.submit([3, 4], max_tokens=100, prediction_ids=(5, 6), ignore_eos=True)
    for _ in range(5):
        driver.step()
    assert driver.engine._local.num_sequences == 1
    driver.engine.inbox.put(Cancelled(seq))
    driver.step()
    assert driver.engine._local.num_sequences == 0


def test_one_tenants_answer_speeds_up_its_next_one_and_nobody_elses():
    text = [3 + i * 11 % 31 for i in range(31)]
    law = continuation_law(text, 1)
    driver = EngineDriver(ScriptedRunner(law), speculation=speculation("suffix"))

    def num_steps(salt: str) -> int:
        seq = driver.submit([3], max_tokens=31, cache_salt=salt)
        result = driver.run()[seq]
        assert result.token_ids == text
        return len(result.events)

    assert num_steps("us") == num_steps("them") == num_steps("") == num_steps("") == 31
    assert num_steps("us") < 12


# --- the trie that they share with drafter replicas ----------------------------------------------


def nodes(*proposed: tuple[int, float]) -> tuple[DraftNode, ...]:
    """A chain."""
    return tuple(
        DraftNode(token_id, index - 1, confidence)
        for index, (token_id, confidence) in enumerate(proposed)
    )


def test_the_likelier_of_two_drafters_chains_is_taken_and_each_node_has_its_drafter():
    trie = DraftTrie((1, 2), VOCAB_SIZE)
    trie.graft(nodes((5, 0.5), (6, 0.9)), "suffix")
    trie.graft(nodes((7, 0.9), (8, 0.9)), "ngram")
    assert [(n.token_id, n.drafter) for n in trie.best_path(8)] == [(7, "ngram"), (8, "ngram")]
    worth = {"suffix": 2.0, "ngram": 0.1}
    path = trie.best_path(8, lambda drafter, confidence: min(1.0, worth[drafter] * confidence))
    assert [(n.token_id, n.survival) for n in path] == [(5, 1.0), (6, 1.0)]


def test_one_drafter_goes_on_where_the_other_ends():
    trie = DraftTrie((1, 2), VOCAB_SIZE)
    assert trie.insert(chain_draft((1, 2), (5, 6)), "model") is DraftOutcome.USED
    trie.graft(nodes((5, 0.5), (6, 0.5), (7, 0.8)), "suffix")
    path = [(n.token_id, n.drafter) for n in trie.best_path(8)]
    assert path == [(5, "model"), (6, "model"), (7, "suffix")]


def test_a_node_belongs_to_whom_is_surer_of_it_and_follows_its_latest_word():
    trie = DraftTrie((1, 2), VOCAB_SIZE)

    def after(confidence: float, drafter: str) -> tuple[str, float]:
        trie.graft(nodes((5, confidence)), drafter)
        [node] = trie.best_path(8)
        return node.drafter, node.confidence

    assert after(0.5, "suffix") == ("suffix", 0.5)
    assert after(0.4, "ngram") == ("suffix", 0.5)
    assert after(0.3, "suffix") == ("suffix", 0.3)
    assert after(0.4, "ngram") == ("ngram", 0.4)


def test_local_drafts_answer_for_no_replica_and_take_no_room_from_it():
    trie = DraftTrie((1, 2), VOCAB_SIZE, max_nodes=8)
    for token_id in range(3, 12):
        trie.graft(nodes((token_id, 0.5)), "suffix")
    assert len(trie) == 4
    assert not trie.answered
    assert trie.insert(chain_draft((1, 2), (20, 21, 22, 23)), "model") is DraftOutcome.USED
