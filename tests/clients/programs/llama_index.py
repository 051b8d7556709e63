"""LlamaIndex's OpenAILike. Arguments: base URL, model."""

from __future__ import annotations

import json
import sys
from typing import Any

sys.path.pop(0)  # this file has the package's name

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

url, model = sys.argv[1:]
told: dict[str, Any] = {}


def llm(*, is_chat_model: bool) -> OpenAILike:
    return OpenAILike(
        model=model,
        api_base=f"{url}/v1",
        api_key="none",
        is_chat_model=is_chat_model,
        temperature=0.0,
        max_tokens=24,
        max_retries=0,
    )


hello = [ChatMessage(role="user", content="say la la la la")]
told["chat"] = llm(is_chat_model=True).chat(hello).message.content
streamed = llm(is_chat_model=True).stream_chat(hello)
assert "".join(part.delta or "" for part in streamed) == told["chat"]
told["complete"] = llm(is_chat_model=False).complete("la la la").text
streamed_text = llm(is_chat_model=False).stream_complete("la la la")
assert "".join(part.delta or "" for part in streamed_text) == told["complete"]
print(json.dumps(told))
