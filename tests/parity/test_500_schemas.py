"""Five hundred JSON Schemas through router and verifier: every document is valid, and the same with
drafts as without.

The model is a tiny random one with the embedded model's vocabulary: what it would say is never
valid, so that validity is the grammar's doing alone.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from engine.embedded import embedded_model_folder
from tests.parity.combinations import COMPLETIONS_PATH, Fields
from tests.parity.replies import Reply
from tests.parity.systems import System, system
from tests.support.hard_schemas import HARD
from tests.support.json_schemas import random_schema
from tests.support.tiny_models import make_tiny_model

NUM_SCHEMAS = 500
VOCAB_SIZE = 49152
AT_ONCE = 32
BIASES = {'"}]': 12, ",": 6}
"""Of the tokens that close something and of those that end a number: so that strings, lists and
numbers without a bound come to an end."""


def schemas() -> list[Any]:
    # OpenAI's field takes objects only; an empty one says as much as true.
    hard = [{} if schema is True else schema for schema, _, _ in HARD.values()]
    return hard + [random_schema(seed) for seed in range(NUM_SCHEMAS - len(hard))]


def test_there_are_500_schemas_of_which_20_are_hard():
    assert len(schemas()) == NUM_SCHEMAS
    assert len(HARD) >= 20


@pytest.mark.long
async def test_500_schemas_give_500_valid_documents_that_are_the_same_with_drafts(tmp_path):
    bias = closing_bias()
    async with system(babbler(tmp_path / "model"), "float32") as asked:
        requests = [request(number, schema, bias) for number, schema in enumerate(schemas())]
        off: list[Fields] = [{"speculation": {"mode": "off"}}] * NUM_SCHEMAS
        plain = await all_replies(asked, requests, off)
        drafted = await all_replies(asked, requests, [drafting(reply) for reply in plain])

    pairs = [(schema, reply["choices"][0]) for schema, reply in zip(schemas(), plain, strict=True)]
    assert not [pair for pair in pairs if pair[1]["finish_reason"] != "stop"]
    for schema, choice in pairs:
        Draft202012Validator(schema).validate(json.loads(choice["text"]))
    # With every token and its log probability.
    assert [reply["choices"] for reply in drafted] == [reply["choices"] for reply in plain]
    accepted = sum(reply["speculation"]["num_accepted_tokens"] for reply in drafted)
    proposed = sum(reply["speculation"]["num_draft_tokens"] for reply in drafted)
    tokens = sum(reply["usage"]["completion_tokens"] for reply in plain)
    print(f"{len(plain)} valid documents of {tokens} tokens; {accepted} of {proposed} drafts right")
    assert tokens / 8 < accepted < proposed


def babbler(folder: Path) -> str:
    """The model."""
    make_tiny_model(folder, vocab_size=VOCAB_SIZE, max_position_embeddings=4096)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_model_folder() / file, folder)
    return str(folder)


def request(number: int, schema: Any, bias: Fields) -> Fields:
    """Every third one greedy."""
    form = {"name": "document", "strict": True, "schema": schema}
    return {
        "prompt": f"JSON document number {number}:",
        "response_format": {"type": "json_schema", "json_schema": form},
        "temperature": (0, 0.7, 1.0)[number % 3],
        "seed": number,
        "max_tokens": 600,
        "logit_bias": bias,
        "logprobs": 0,
    }


def closing_bias() -> Fields:
    vocab = json.loads((embedded_model_folder() / "tokenizer.json").read_text())["model"]["vocab"]
    return {
        str(token_id): bias
        for text, token_id in vocab.items()
        for characters, bias in BIASES.items()
        if set(text) <= set(characters)
    }


def drafting(reply: Reply) -> Fields:
    """With the plain answer as a prediction, wrong at every twentieth character."""
    text = list(reply["choices"][0]["text"])
    text[19::20] = "#" * len(text[19::20])
    prediction = {"type": "content", "content": "".join(text)}
    return {"speculation": {"mode": "on"}, "prediction": prediction}


async def all_replies(asked: System, requests: list[Fields], more: list[Fields]) -> list[Reply]:
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(fields: Fields) -> Reply:
        async with turns:
            return await asked.ask(COMPLETIONS_PATH, fields)

    pairs = zip(requests, more, strict=True)
    return await asyncio.gather(*(one(fields | extra) for fields, extra in pairs))
