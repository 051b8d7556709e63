"""OpenAI's Python SDK. Arguments: base URL, model. Prints what must not depend on drafts."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai

url, model = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
told: dict[str, Any] = {}

assert [entry.id for entry in client.models.list()] == [model]
hello: list[Any] = [{"role": "user", "content": "say la la la la"}]

whole = client.chat.completions.create(
    model=model, messages=hello, max_tokens=24, seed=5, n=2, logprobs=True, top_logprobs=2
)
told["choices"] = [choice.message.content for choice in whole.choices]
for choice in whole.choices:
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
told["logprobs"] = [
    [round(entry.logprob, 4) for entry in choice.logprobs.content] for choice in whole.choices
]

stream = client.chat.completions.create(
    model=model,
    messages=hello,
    max_tokens=24,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"ignore_eos": True, "min_tokens": 24},
)
chunks = list(stream)
told["stream"] = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
assert chunks[-1].usage is not None
assert chunks[-1].usage.completion_tokens == 24
told["steps"] = len(chunks) > 1

schema = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}, "colour": {"enum": ["red", "green"]}},
    "required": ["yes", "colour"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model=model,
    messages=hello,
    max_tokens=200,
    temperature=0,
    response_format={
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    },
)
told["object"] = json.loads(answer.choices[0].message.content or "")
assert told["object"].keys() == {"yes", "colour"}

scored = client.completions.create(
    model=model, prompt="scored", max_tokens=1, temperature=0, echo=True, logprobs=1
)
logprobs = scored.choices[0].logprobs
assert logprobs is not None
assert logprobs.token_logprobs is not None
assert logprobs.token_logprobs[0] is None
told["scores"] = [round(value, 4) for value in logprobs.token_logprobs[1:] if value is not None]
assert len(told["scores"]) == len("scored")

try:
    client.completions.create(model=model, prompt="a", suffix="b")
except openai.BadRequestError as error:
    told["refused"] = error.param
print(json.dumps(told))
