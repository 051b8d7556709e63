"""Configuration: what is refused at start, so that it cannot go wrong later."""

from __future__ import annotations

import inspect
import math

import pytest
from pydantic import ValidationError

from cluster import config
from cluster.config import (
    AdmissionConfig,
    DrafterConfig,
    KVCacheConfig,
    LimitsConfig,
    ModelConfig,
    NgramConfig,
    PathPolicyConfig,
    RouterConfig,
    RpcConfig,
    SchedulerConfig,
    Section,
    SpeculationConfig,
    VerifierConfig,
)

APPLICATIONS = (RouterConfig, VerifierConfig, DrafterConfig)
SECTIONS = [
    value
    for value in vars(config).values()
    if inspect.isclass(value) and issubclass(value, Section) and value is not Section
]
OPTIONAL = [
    section
    for section in SECTIONS
    if not any(field.is_required() for field in section.model_fields.values())
]
"""Sections that may be left out."""
TIMES = [
    (section, name)
    for section in SECTIONS
    for name in section.model_fields
    if name.endswith(("_s", "_ms"))
]
"""Every field that is a time."""


def test_the_test_sees_every_section_and_time():
    assert set(APPLICATIONS) < set(SECTIONS)
    assert set(APPLICATIONS) < set(OPTIONAL)
    assert len(TIMES) >= 10


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]"])
def test_a_member_is_not_opened_to_every_network_by_accident(host):
    with pytest.raises(ValidationError, match="opens the port to every network"):
        RpcConfig(bind_host=host)
    assert RpcConfig(bind_host=host, token_file="/somewhere").bind_host == host


@pytest.mark.parametrize("section", OPTIONAL)
def test_every_section_has_defaults(section):
    assert section() == section.model_validate({})


def test_changes_are_merged_field_by_field():
    base = VerifierConfig.model_validate(
        {"speculation": {"num_speculative_tokens": 4, "draft_deadline_ms": 7}, "drafter_app": "d"}
    )
    changed = base.merged({"speculation": {"num_speculative_tokens": 2}})
    assert changed.speculation.num_speculative_tokens == 2
    assert changed.speculation.draft_deadline_ms == 7
    assert changed.drafter_app == "d"
    for wrong in ({"speculation": {"no_such_key": 1}}, {"no_such_key": 1}, {"speculation": 3}):
        with pytest.raises(ValidationError):
            base.merged(wrong)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_is_documented(section):
    assert all(field.description for field in section.model_fields.values())


@pytest.mark.parametrize("section", SECTIONS)
def test_an_unknown_key_is_refused_by_name(section):
    with pytest.raises(ValidationError, match="no_such_key"):
        section.model_validate({"no_such_key": 1})


@pytest.mark.parametrize("application", APPLICATIONS)
def test_an_unknown_key_in_a_section_is_refused_by_name(application):
    sections = [name for name, value in application() if isinstance(value, Section)]
    assert sections
    for name in sections:
        with pytest.raises(ValidationError, match=rf"{name}\.no_such_key"):
            application.model_validate({name: {"no_such_key": 1}})


@pytest.mark.parametrize("section", OPTIONAL)
def test_a_configuration_cannot_be_changed(section):
    made = section()
    with pytest.raises(ValidationError, match="frozen"):
        setattr(made, next(iter(section.model_fields)), None)


@pytest.mark.parametrize("value", [-1, 0, math.nan, math.inf, -math.inf, 1e9, "soon"])
@pytest.mark.parametrize(("section", "name"), TIMES)
def test_a_time_that_means_never_or_for_ever_is_refused(section, name, value):
    if (section, name, value) == (PathPolicyConfig, "min_dwell_s", 0):
        return  # No dwell is a choice, not an accident.
    with pytest.raises(ValidationError, match=name):
        section.model_validate({name: value})


@pytest.mark.parametrize(
    ("section", "values"),
    [
        (ModelConfig, {"dtype": "int8"}),
        (ModelConfig, {"max_model_len": 0}),
        (ModelConfig, {"num_threads": 0}),
        (KVCacheConfig, {"block_size": 0}),
        (KVCacheConfig, {"block_size": 257}),
        (KVCacheConfig, {"num_blocks": 0}),
        (KVCacheConfig, {"memory_bytes": 0}),
        (SchedulerConfig, {"max_running_sequences": 0}),
        (SchedulerConfig, {"max_waiting_sequences": -1}),
        (SchedulerConfig, {"max_step_tokens": 0}),
        (SchedulerConfig, {"max_prefill_chunk_tokens": 0}),
        (SpeculationConfig, {"num_speculative_tokens": -1}),
        (SpeculationConfig, {"num_speculative_tokens": 65}),
        (RpcConfig, {"port": 65_536}),
        (RpcConfig, {"port": -1}),
        (NgramConfig, {"min_ngram": 0}),
        (NgramConfig, {"max_ngram": 17}),
        (NgramConfig, {"min_ngram": 5, "max_ngram": 4}),
        (NgramConfig, {"max_ngram": 1}),  # under the default min_ngram
        (DrafterConfig, {"kind": "oracle"}),
        (DrafterConfig, {"kind": "model"}),  # without the section model
        (DrafterConfig, {"max_sessions": 0}),
        (DrafterConfig, {"max_speculative_tokens": 0}),
        (LimitsConfig, {"max_body_bytes": 0}),
        (LimitsConfig, {"max_choices": 129}),
        (LimitsConfig, {"max_prompts": 0}),
        (LimitsConfig, {"max_stop_len": 0}),
        (AdmissionConfig, {"max_concurrent_requests": 0}),
        (PathPolicyConfig, {"mode": "sometimes"}),
        (PathPolicyConfig, {"plain_above_running": 0}),
        (PathPolicyConfig, {"plain_above_running": 8, "speculative_below_running": 9}),
        (PathPolicyConfig, {"speculative_below_running": 8}),  # of no limit
        (PathPolicyConfig, {"plain_above_price": 0}),
        (PathPolicyConfig, {"speculative_above_gain": 0.01}),  # under the default of the other
    ],
)
def test_a_value_without_meaning_is_refused(section, values):
    with pytest.raises(ValidationError):
        section.model_validate(values)


@pytest.mark.parametrize(
    ("section", "values"),
    [
        (NgramConfig, {"min_ngram": 3, "max_ngram": 3}),
        (DrafterConfig, {"kind": "model", "model": {"source": "some/model"}}),
        (PathPolicyConfig, {"plain_above_running": 8, "speculative_below_running": 8}),
        (SpeculationConfig, {"num_speculative_tokens": 0}),
        (SchedulerConfig, {"max_waiting_sequences": 0}),
        (RpcConfig, {"port": 0}),
    ],
)
def test_the_edge_of_what_has_a_meaning_is_taken(section, values):
    section.model_validate(values)


def test_the_default_grace_fits_into_serves_own_timeout():
    assert VerifierConfig().drain_grace_s < 20  # graceful_shutdown_timeout_s of the deployments
    assert DrafterConfig().drain_grace_s < 20
