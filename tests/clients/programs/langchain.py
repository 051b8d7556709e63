"""langchain-openai. Arguments: base URL, model. Prints what must not depend on drafts."""

from __future__ import annotations

import json
import sys
from typing import Any

from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

url, model = sys.argv[1:]


class Answer(BaseModel):
    """What is asked for."""

    yes: bool
    count: int


def chat(**fields: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=model, base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120, **fields
    )


told: dict[str, Any] = {}
plain = chat(temperature=0, max_tokens=24, logprobs=True, top_logprobs=1)
message = plain.invoke("say la la la la")
told["invoke"] = message.content
assert message.usage_metadata["output_tokens"] <= 24
assert message.response_metadata["logprobs"]["content"]

parts = list(chat(temperature=0, max_tokens=24, stream_usage=True).stream("say la la la la"))
told["stream"] = "".join(part.content for part in parts)
assert told["stream"] == told["invoke"]
assert any(part.usage_metadata for part in parts)

told["batch"] = [m.content for m in chat(max_tokens=12, seed=3).batch(["one", "two", "three"])]

structured = chat(temperature=0, max_tokens=300).with_structured_output(
    Answer.model_json_schema() | {"title": "Answer"}, method="json_schema", strict=True
)
told["structured"] = structured.invoke("Is it?").keys() == {"yes", "count"}

legacy = OpenAI(
    model=model, base_url=f"{url}/v1", api_key="none", max_retries=0, temperature=0, max_tokens=12
)
told["legacy"] = legacy.invoke("la la la")
print(json.dumps(told))
