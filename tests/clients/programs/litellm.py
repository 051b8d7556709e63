"""litellm by three of its providers. Arguments: base URL, model."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
sys.path.pop(0)  # this file has the package's name

import litellm

url, model = sys.argv[1:]
told: dict[str, Any] = {}
fields: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none", "max_retries": 0}
hello = [{"role": "user", "content": "say la la la la"}]

for provider in ("openai", "hosted_vllm"):
    reply = litellm.completion(
        model=f"{provider}/{model}", messages=hello, max_tokens=24, temperature=0, **fields
    )
    told[provider] = reply.choices[0].message.content
    assert reply.usage.completion_tokens <= 24
    chunks = list(
        litellm.completion(
            model=f"{provider}/{model}",
            messages=hello,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            **fields,
        )
    )
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == told[provider]
text = litellm.text_completion(
    model=f"text-completion-openai/{model}",
    prompt="la la la",
    max_tokens=12,
    temperature=0,
    **fields,
)
told["text"] = text.choices[0].text
print(json.dumps(told))
