"""What drafting is worth: the figures that routers choose the path by."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import SpeculationConfig
from cluster.types import DraftNode, Path
from tests.support.engine_driver import GREEDY, EngineDriver, oracle_drafter
from tests.support.scripted_target import VOCAB_SIZE, ScriptedRunner, hashed_law
from verifier_service.draft_planner import DraftPlanner
from verifier_service.draft_trie import DraftTrie
from verifier_service.draft_worth import AVERAGED_S, DraftWorth
from verifier_service.planner import StepProfile
from verifier_service.speculation import Speculation

FLAT = StepProfile({1: 10.0, 64: 10.0, 128: 10.1})
FULL = StepProfile({1: 10.0, 64: 640.0, 128: 1280.0})
LONG = StepProfile(FLAT.ms, context_ms=1.0)
"""Flat but for what the context of the sequences adds."""


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 2), st.floats(-5, 5)), min_size=1))
def test_both_figures_are_averages_of_what_was_seen(steps: list) -> None:
    worth, now = DraftWorth(), 0.0
    for pause_s, price, gained in steps:
        now += pause_s
        worth.observe(now, price, gained, 1)
    prices, gains = [price for _, price, _ in steps], [gained for *_, gained in steps]
    assert min(prices) - 1e-9 <= worth.price <= max(prices) + 1e-9
    assert worth.gain is not None
    assert min(gains) - 1e-9 <= worth.gain <= max(gains) + 1e-9


def test_a_few_probes_tell_as_much_as_all() -> None:
    few, all_of_them = DraftWorth(), DraftWorth()
    for step in range(50):
        few.observe(0.1 * step, 0.5, 2 * 0.3, 2)
        all_of_them.observe(0.1 * step, 0.5, 32 * 0.3, 32)
    assert few.gain == pytest.approx(0.3) == pytest.approx(all_of_them.gain)


def test_a_change_is_followed_within_the_time_constant_whatever_a_step_takes() -> None:
    for step_s in (0.005, 0.05, 0.25):
        worth, now = DraftWorth(), 0.0
        while now < 3.0:
            worth.observe(now, 0.1, 0.0, 1)
            now += step_s
        began = now
        while now < began + AVERAGED_S:
            worth.observe(now, 1.1, 0.0, 1)
            now += step_s
        assert worth.price > 0.1 + (1 - math.exp(-1)) * 0.9


def test_a_gain_that_nobody_shows_any_more_is_forgotten_and_the_price_is_not() -> None:
    worth = DraftWorth()
    assert (worth.price, worth.gain) == (0.0, None)
    worth.observe(0.0, 0.4, 3.0, 1)
    for step in range(1, 100):
        worth.observe(0.1 * step, 0.4, 0.0, 0)
    assert worth.gain is None
    assert worth.price == pytest.approx(0.4)


# --- as an engine tells it -----------------------------------------------------------------------


def repeating(driver: EngineDriver, path: Path, count: int = 4) -> None:
    for _ in range(count):
        driver.submit([3, 4, 5] * 6, max_tokens=60, ignore_eos=True, path=path)


def engine(profile: StepProfile) -> EngineDriver:
    law = hashed_law()
    return EngineDriver(
        ScriptedRunner(law, num_blocks=256),
        drafter=oracle_drafter(law, GREEDY, 1, 4),
        speculation=SpeculationConfig(draft_deadline_ms=1.0, local_drafters=("suffix",)),
        profile=profile,
    )


@pytest.mark.parametrize(
    ("profile", "low", "high"), [(FLAT, 0.0, 0.05), (FULL, 0.9, 1.1), (LONG, 0.7, 1.0)]
)
def test_the_price_says_how_full_the_steps_are(
    profile: StepProfile, low: float, high: float
) -> None:
    driver = engine(profile)
    repeating(driver, Path.PLAIN)
    for _ in range(5):
        driver.step()
    load = driver.engine.load()
    assert low <= load.draft_price <= high
    assert load.draft_gain is None, "nobody is drafted for"


@pytest.mark.parametrize(("profile", "low", "high"), [(FLAT, 1.0, 4.1), (FULL, -0.5, 0.1)])
def test_the_gain_is_what_good_drafts_bring_after_what_they_cost(
    profile: StepProfile, low: float, high: float
) -> None:
    driver = engine(profile)
    repeating(driver, Path.SPECULATIVE)
    for _ in range(8):
        driver.step()
    gain = driver.engine.load().draft_gain
    assert gain is not None
    assert low <= gain <= high


def test_an_idle_verifier_tells_the_price_of_a_first_sequence() -> None:
    assert engine(FULL).engine.load().draft_price == pytest.approx(1.0)
    assert engine(FLAT).engine.load().draft_price == pytest.approx(0.0)


def test_a_trial_of_drafters_that_nobody_takes_part_in_hides_no_load() -> None:
    """All went plain in the middle of one: routers must go on to see what drafts would cost."""
    planner = DraftPlanner(FULL)
    planner._trial.engages = False
    assert planner._trial.is_on
    for step in range(100):
        planner.stepped(8, 0, 90.0, num_drawn=8, drafting_ms=0.0, now=0.1 * step)
    assert planner.price(idle=False) == pytest.approx(1.0)
    assert planner._cost(8) == pytest.approx(90.0, rel=0.02), "nor is T forgotten"


def test_a_prompts_token_counts_for_less() -> None:
    """It gives no logits. Taken for one that does, steps that read would teach that steps are
    quick, and leave no room for drafts."""
    stairs = StepProfile({1: 10.0, 64: 10.0, 70: 200.0, 128: 200.0}, prompt_share=0.5)
    planner = DraftPlanner(stairs)
    for step in range(200):
        took_ms = planner._cost(8 + 50)
        planner.stepped(8, 100, took_ms, num_drawn=8, drafting_ms=0.0, now=0.1 * step)
    assert planner._cost(1) == pytest.approx(10.0)
    assert planner._cost(128) == pytest.approx(200.0)
    for num_read, num_drafts in ((0, 3), (106, 3), (112, 0)):
        speculation = Speculation(4, Path.SPECULATIVE, trie=DraftTrie([1, 2], VOCAB_SIZE))
        assert speculation.trie is not None
        speculation.trie.graft([DraftNode(3 + i, i - 1, 0.99) for i in range(3)], "replica")
        planner.choose([(speculation, 4)], num_base=8, num_prefill=num_read)
        assert len(speculation.chosen) == num_drafts


def test_the_engine_tells_what_it_read_apart(monkeypatch) -> None:
    told = []
    stepped = DraftPlanner.stepped

    def noted(self, num_rows, num_read, *args, **fields):
        told.append((num_rows, num_read))
        stepped(self, num_rows, num_read, *args, **fields)

    monkeypatch.setattr(DraftPlanner, "stepped", noted)
    driver = engine(FLAT)
    driver.submit([3, 4, 5] * 6, max_tokens=4, ignore_eos=True, path=Path.PLAIN)
    driver.run()
    assert told == [(1, 17), (1, 0), (1, 0), (1, 0)]


@pytest.mark.parametrize(("profile", "least"), [(FLAT, 0.0), (FULL, 0.5)])
def test_drafters_are_told_which_drafts_are_worth_making(
    profile: StepProfile, least: float
) -> None:
    driver = engine(profile)
    repeating(driver, Path.SPECULATIVE)
    for _ in range(8):
        driver.step()
    orders = driver.outputs[-1].orders
    assert orders.commits
    assert orders.least_survival == pytest.approx(least, abs=0.05)


def test_what_making_drafts_costs_counts_too() -> None:
    planner = DraftPlanner(FULL)
    planner.stepped(8, 0, 80.0, num_drawn=8, drafting_ms=0.0, now=1.0)
    before = planner.least_survival
    planner._trial._log_tax = math.log(1.3)
    assert planner.least_survival == pytest.approx(before + 0.15)


def test_a_plain_sequence_pays_for_no_draft() -> None:
    driver = engine(FLAT)
    repeating(driver, Path.PLAIN)
    for _ in range(20):
        driver.step()
    assert driver.engine._drafting_s == 0.0
    assert driver.engine._local.num_sequences == 0
    totals = driver.engine.recorder.speculation.totals()
    assert sum(totals.draft_tokens.values()) == 0
