"""The table of metrics, and expositions made, split and joined."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families

from cluster.metrics import (
    DRAFT_OUTCOMES,
    KV_BLOCKS,
    METRICS,
    REQUESTS,
    RUNNING,
    STEP_TOKENS,
    TTFT,
    Distribution,
    Exposition,
    Kind,
    MemberLabels,
    merge_families,
    split_families,
)
from tests.support.expositions import Series, series_of

LABELS = MemberLabels("Verifier", "replica-1", "verifier")


def test_names_are_sound():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.name.startswith(("paceline_", "vllm:spec_decode_"))
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric.name
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.help.endswith(".")
        assert not set(metric.labels) & {"application", "deployment", "replica", "le"}


def test_every_series_names_its_member_and_its_type():
    exposition = Exposition(LABELS)
    exposition.add(REQUESTS, 3, "plain", "low_load", "200")
    exposition.add(KV_BLOCKS, 5, "used")
    exposition.add(KV_BLOCKS, 7, "free")
    exposition.add(RUNNING, 2)
    text = exposition.text()
    member = {"application": "verifier", "deployment": "Verifier", "replica": "replica-1"}
    assert series_of(text) == {
        Series.of(
            "paceline_requests_total", **member, path="plain", reason="low_load", status="200"
        ): 3,
        Series.of("paceline_kv_blocks", **member, state="used"): 5,
        Series.of("paceline_kv_blocks", **member, state="free"): 7,
        Series.of("paceline_running_sequences", **member): 2,
    }
    # aiperf takes a counter for untyped, and adds up its series, where this line lacks _total.
    assert "# TYPE paceline_requests_total counter\n" in text
    assert "# TYPE paceline_kv_blocks gauge\n" in text
    assert text.count("# TYPE paceline_kv_blocks ") == 1
    assert "_created" not in text


def test_labels_are_as_in_the_table():
    exposition = Exposition(LABELS)
    with pytest.raises(ValueError, match="zip"):
        exposition.add(REQUESTS, 1, "plain")


@given(st.lists(st.one_of(st.floats(0, 100), st.sampled_from(TTFT.buckets)), max_size=30))
def test_a_distribution_counts_as_prometheus_does(values):
    ours, registry = Distribution(TTFT), CollectorRegistry()
    theirs = Histogram("h", "h", buckets=TTFT.buckets, registry=registry)
    for value in values:
        ours.observe(value)
        theirs.observe(value)
    exposition = Exposition(LABELS)
    exposition.add_distribution(TTFT, ours)
    told = series_of(exposition.text())
    for family in registry.collect():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                name = sample.name.replace("h_", "paceline_ttft_seconds_", 1)
                member = {"application": "verifier", "deployment": "Verifier"}
                series = Series.of(name, **sample.labels, **member, replica="replica-1")
                assert told.pop(series) == pytest.approx(sample.value)
    assert not told


def test_one_observation_may_count_for_many():
    distribution = Distribution(STEP_TOKENS)
    distribution.observe(3, times=4)
    assert (distribution.count, distribution.sum) == (4, 12)
    assert distribution.counts[STEP_TOKENS.buckets.index(4)] == 4


@given(st.text(max_size=40), st.text(max_size=40))
def test_texts_of_many_members_join_into_one(first, second):
    """Whatever the label values hold: quotes, newlines, something that looks like a header."""
    texts = []
    for replica, outcome in ((first, "# HELP x y\n# TYPE x counter"), (second + "!", second)):
        exposition = Exposition(MemberLabels("Verifier", replica))
        exposition.add(DRAFT_OUTCOMES, 1, outcome)
        exposition.add_distribution(TTFT, Distribution(TTFT))
        exposition.add(RUNNING, 4)
        texts.append(exposition.text())
    router = Exposition(MemberLabels("Router", "r"))
    router.add(REQUESTS, 1, "plain", "low_load", "200")
    texts.append(router.text())
    merged = merge_families(map(split_families, texts))
    families = [family.name for family in text_string_to_metric_families(merged)]
    assert len(families) == len(set(families)) == 4
    expected = [sample for text in texts for sample in series_of(text).items()]
    assert series_of(merged) == dict(expected)


def test_one_text_alone_stays_as_it_is():
    exposition = Exposition(LABELS)
    exposition.add(RUNNING, 1)
    exposition.add(KV_BLOCKS, 5, "used")
    assert merge_families([split_families(exposition.text())]) == exposition.text()
    assert merge_families([split_families("")]) == ""


@pytest.mark.parametrize(
    "text", ["x", "<html>", "# HELP a b\na 1\n", "# HELP a b\n# TYPE c counter"]
)
def test_what_is_no_exposition_is_refused(text):
    with pytest.raises(ValueError, match="no exposition"):
        split_families(text)
