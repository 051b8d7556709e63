"""What clients ask for, by name. Every field that shapes an answer is there alone and together with
others."""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]
Request = tuple[str, str, Fields]
"""(what it is called, path, fields)."""

CHAT_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"
PROMPTS = ("ab ab ab ab ab", "The quick brown fox", "{}")
MAX_TOKENS = 24

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
JSON_SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "person", "strict": True, "schema": PERSON},
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME = {
    "type": "function",
    "function": {"name": "time", "parameters": {"type": "object", "properties": {}}},
}
NAMED = {"type": "function", "function": {"name": "weather"}}
ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "required", "tools": [NAMED]},
}

CHAT: dict[str, Fields] = {
    "greedy": {"temperature": 0},
    "defaults": {},
    "cool": {"temperature": 0.3},
    "hot": {"temperature": 1.7},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
    "top_p and top_k": {"top_p": 0.9, "top_k": 20, "temperature": 0.8},
    "every truncation": {"top_p": 0.9, "top_k": 30, "min_p": 0.02, "temperature": 1.2},
    "presence penalty": {"presence_penalty": 1.5},
    "presence penalty, greedy": {"presence_penalty": 1.5, "temperature": 0},
    "negative presence penalty": {"presence_penalty": -1.5},
    "frequency penalty": {"frequency_penalty": 1.0, "temperature": 0},
    "negative frequency penalty": {"frequency_penalty": -0.5},
    "repetition penalty": {"repetition_penalty": 1.3, "temperature": 0},
    "repetition reward": {"repetition_penalty": 0.8},
    "every penalty": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.1,
        "temperature": 0.9,
    },
    "banned by bias": {"logit_bias": {"40": -100, "41": -100, "42": -100}, "temperature": 0},
    "pushed by bias": {"logit_bias": {"50": 6, "60": 4}},
    "forced by bias": {"logit_bias": {"70": 100}},
    "bad words": {"bad_words": ["e", "th", " a"], "temperature": 0},
    "bad words, hot": {"bad_words": ["a", "b", "c"], "temperature": 1.3},
    "min_tokens": {"min_tokens": 10, "logit_bias": {"2": 8}},
    "min_tokens is max_tokens": {"min_tokens": 24, "max_tokens": 24, "logit_bias": {"2": 9}},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {"2": 8}},
    "ends by itself": {"logit_bias": {"2": 4}},
    "stop token ids": {"stop_token_ids": [50, 60, 70, 80]},
    "stop token ids and min_tokens": {"stop_token_ids": [50, 60, 70, 80], "min_tokens": 9},
    "a stop string": {"stop": "e"},
    "a stop string of two": {"stop": ["th", "he"], "logit_bias": {"75": 3, "87": 3}},
    "four stop strings": {"stop": ["ab", "q", "zz", "~"], "temperature": 1.2},
    "a stop string that comes late": {"stop": "e", "min_tokens": 12},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2, "temperature": 0},
    "long": {"max_tokens": 60},
    "n": {"n": 3},
    "n with penalties": {"n": 2, "frequency_penalty": 0.6, "temperature": 1.1},
    "another seed": {"seed": 99},
    "seed 0": {"seed": 0},
    "large seed": {"seed": 2**62 + 5},
    "logprobs": {"logprobs": True},
    "top logprobs": {"logprobs": True, "top_logprobs": 5, "temperature": 0},
    "top logprobs with everything": {
        "logprobs": True,
        "top_logprobs": 3,
        "presence_penalty": 0.5,
        "logit_bias": {"44": 2},
        "top_p": 0.9,
    },
    "logprobs and n": {"logprobs": True, "top_logprobs": 1, "n": 2},
    "json object": {"response_format": {"type": "json_object"}, "max_tokens": 40},
    "json schema": {"response_format": JSON_SCHEMA, "max_tokens": 60},
    "json schema, greedy": {"response_format": JSON_SCHEMA, "temperature": 0, "max_tokens": 60},
    "json schema with penalties": {
        "response_format": JSON_SCHEMA,
        "max_tokens": 60,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
    },
    "json schema with logprobs": {
        "response_format": JSON_SCHEMA,
        "max_tokens": 60,
        "logprobs": True,
        "top_logprobs": 2,
    },
    "regex": {"structured_outputs": {"regex": "[a-c]{4,20}(x|y)"}},
    "choice": {"structured_outputs": {"choice": ["yes", "no", "perhaps not"]}},
    "tools, none called": {"tools": [WEATHER, TIME], "tool_choice": "none"},
    "tools, auto": {"tools": [WEATHER, TIME]},
    "tools, required": {"tools": [WEATHER, TIME], "tool_choice": "required", "max_tokens": 140},
    "tools, named": {"tools": [WEATHER, TIME], "tool_choice": NAMED, "max_tokens": 140},
    "one tool at a time": {
        "tools": [WEATHER, TIME],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 140,
    },
    "tools, allowed": {"tools": [WEATHER, TIME], "tool_choice": ALLOWED, "max_tokens": 140},
    "tools, named, greedy": {
        "tools": [WEATHER],
        "tool_choice": NAMED,
        "temperature": 0,
        "max_tokens": 140,
    },
    "prediction": {"prediction": {"type": "content", "content": "abc abc abc def"}},
    "service tier": {"service_tier": "flex"},
}

COMPLETIONS: dict[str, Fields] = {
    "greedy": {"temperature": 0},
    "echo": {"echo": True},
    "echo and stop": {"echo": True, "stop": "e"},
    "logprobs": {"logprobs": 3},
    "logprobs 0": {"logprobs": 0},
    "echo with logprobs": {"echo": True, "logprobs": 2, "max_tokens": 5},
    "scored and nothing more": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "n and best_of": {"n": 2, "best_of": 2},
    "token ids": {"prompt": [40, 41, 42, 43, 44, 45]},
    "several prompts": {"prompt": ["one two", "three", "four five six"]},
    "several prompts with logprobs": {"prompt": [[50, 51], [60, 61, 62]], "logprobs": 1},
    "everything": {
        "temperature": 0.9,
        "top_p": 0.9,
        "frequency_penalty": 0.3,
        "logit_bias": {"66": 1.5},
        "min_tokens": 3,
        "stop": ["zq"],
        "logprobs": 2,
        "n": 2,
    },
}


def _requests() -> list[Request]:
    made = []
    for number, (name, fields) in enumerate(CHAT.items()):
        prompt = PROMPTS[number % len(PROMPTS)]
        base = {"messages": [{"role": "user", "content": prompt}], "max_tokens": MAX_TOKENS}
        made.append((f"chat: {name}", CHAT_PATH, base | {"seed": 7} | fields))
    for number, (name, fields) in enumerate(COMPLETIONS.items()):
        base = {"prompt": PROMPTS[number % len(PROMPTS)], "max_tokens": MAX_TOKENS}
        made.append((f"completions: {name}", COMPLETIONS_PATH, base | {"seed": 7} | fields))
    return made


REQUESTS = _requests()
