"""What is asked. A prompt is a function of the seed and its index alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Protocol

from benchmarks.loadtest.arrivals import Arrival
from benchmarks.loadtest.profile import Family, GeneratedPrompts, PromptFile
from cluster.commands.command_error import CommandError

TOKENS_PER_WORD = 1.3
"""Of English in common vocabularies. Sizes of prompts are aims; the server's count is reported."""
SESSIONS_AT_ONCE = 64
"""So many conversations take turns, so that a turn comes well after the one before."""

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request's question."""

    messages: tuple[Message, ...]
    max_tokens: int
    family: str
    session: str | None = None
    """Sent as x-session-affinity, where the prompt belongs to a conversation."""

    @property
    def text(self) -> str:
        """For the completions endpoint."""
        return "\n\n".join(message["content"] for message in self.messages)


class PromptSource(Protocol):
    """Gives prompts by index."""

    def prompt(self, index: int, arrival: Arrival | None) -> Prompt:
        """The prompt, with the lengths of the arrival where it has any."""
        ...


def make_prompts(config: GeneratedPrompts | PromptFile, seed: int) -> PromptSource:
    """Raises CommandError if a file is unusable."""
    if isinstance(config, PromptFile):
        return FilePrompts(config)
    return PromptGenerator(config, seed)


class FilePrompts:
    """Rows of a JSONL file."""

    def __init__(self, config: PromptFile) -> None:
        self._rows = _read_rows(config)

    def prompt(self, index: int, arrival: Arrival | None) -> Prompt:
        return self._rows[index % len(self._rows)]


def _read_rows(config: PromptFile) -> list[Prompt]:
    rows: list[Prompt] = []
    try:
        lines = [line for line in config.path.read_text().splitlines() if line.strip()]
        for line in lines:
            rows.append(_row(json.loads(line), config))
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"cannot read the prompts {config.path} ({error})") from None
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise CommandError(
            f"{config.path}: row {len(rows) + 1} is no prompt ({error!r}). A row needs `prompt` "
            "(text), `messages` or `turns` (a list of texts)"
        ) from None
    if not rows:
        raise CommandError(f"{config.path} holds no prompts")
    return rows


def _row(row: dict[str, Any], config: PromptFile) -> Prompt:
    messages = row.get("messages")
    if messages is None:
        messages = [_user(str(row["prompt"] if "prompt" in row else row["turns"][0]))]
    return Prompt(
        messages=tuple({"role": str(m["role"]), "content": str(m["content"])} for m in messages),
        max_tokens=int(row.get("output_tokens", config.output_tokens)),
        family=str(row.get("family", row.get("category", "file"))),
    )


class PromptGenerator:
    """Writes prompts from words and templates."""

    def __init__(self, config: GeneratedPrompts, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._families = list(config.families)
        self._weights = list(config.families.values())
        self._writers: Mapping[Family, Callable[[Random, int], Prompt]] = {
            Family.CHAT: self._chat,
            Family.CODE: self._code,
            Family.COPY: self._copy,
            Family.JSON: self._json,
            Family.PROSE: self._prose,
            Family.SHARED_PREFIX: self._shared_prefix,
            Family.SESSION: self._session,
        }

    def prompt(self, index: int, arrival: Arrival | None) -> Prompt:
        draw = self._random("prompt", index)
        (family,) = draw.choices(self._families, self._weights)
        written = self._writers[family](draw, index)
        written = replace(written, family=family.value, max_tokens=self._output(draw, arrival))
        aim = self._prompt_tokens(draw, arrival)
        return written if aim is None else _filled(written, aim, draw)

    def _random(self, what: str, index: int) -> Random:
        return Random(f"{self._seed} {what} {index}")

    def _output(self, draw: Random, arrival: Arrival | None) -> int:
        if arrival is not None and arrival.output_tokens is not None:
            return arrival.output_tokens
        return draw.randint(self._config.output_tokens.low, self._config.output_tokens.high)

    def _prompt_tokens(self, draw: Random, arrival: Arrival | None) -> int | None:
        if arrival is not None and arrival.prompt_tokens is not None:
            return arrival.prompt_tokens
        aim = self._config.prompt_tokens
        return None if aim is None else draw.randint(aim.low, aim.high)

    def _chat(self, draw: Random, index: int) -> Prompt:
        return _asked(f"{_question(draw)} My number is {index}.")

    def _code(self, draw: Random, index: int) -> Prompt:
        noun, verb = draw.choice(_NOUNS), draw.choice(_VERBS)
        return _asked(
            f"Complete this Python module.\n\nclass {noun.title()}Store:\n"
            f'    """Version {index}."""\n\n'
            f"    def __init__(self) -> None:\n        self.{noun}s = {{}}\n\n"
            f"    def add_{noun}(self, name: str, {noun}: str) -> None:\n"
            f"        if name in self.{noun}s:\n            raise KeyError(name)\n"
            f"        self.{noun}s[name] = {noun}\n\n"
            f"    def {verb}_{noun}(self, name: str) -> str:\n"
        )

    def _copy(self, draw: Random, index: int) -> Prompt:
        old, new = draw.sample(_NOUNS, 2)
        text = " ".join(_sentence(draw, old) for _ in range(4))
        return _asked(
            f"Repeat the following text word for word, but write {new} for {old}. "
            f"Text {index}:\n\n{text}\n\nThe same text:"
        )

    def _json(self, draw: Random, index: int) -> Prompt:
        names = ", ".join(draw.sample(_NOUNS, 6))
        row = json.dumps({"id": index % 1_000, "name": draw.choice(_NOUNS), "colour": "green"})
        return _asked(
            f"Write a JSON array with one object for each of: {names}. "
            f"Every object looks like this one:\n{row}"
        )

    def _prose(self, draw: Random, index: int) -> Prompt:
        first, second = draw.sample(_NOUNS, 2)
        return _asked(
            f"Write chapter {index % 100} of a story about a {draw.choice(_ADJECTIVES)} {first} "
            f"that wanted to {draw.choice(_VERBS)} a {second}."
        )

    def _shared_prefix(self, draw: Random, index: int) -> Prompt:
        which = draw.randrange(self._config.shared_prefixes)
        document = _text(self._random("document", which), self._config.shared_prefix_tokens)
        return _asked(
            f"Document {which}: {document}\n\nQuestion {index}: what does it say of a "
            f"{draw.choice(_NOUNS)}?"
        )

    def _session(self, draw: Random, index: int) -> Prompt:
        """Turn t of SESSIONS_AT_ONCE sessions, then turn t + 1 of the same."""
        turns = self._config.session_turns
        block, place = divmod(index, SESSIONS_AT_ONCE * turns)
        turn, member = divmod(place, SESSIONS_AT_ONCE)
        number = block * SESSIONS_AT_ONCE + member
        told = self._random("session", number)
        messages: list[Message] = [_user(f"Talk {number}. {_question(told)}")]
        for _ in range(turn):
            messages.append({"role": "assistant", "content": _text(told, 40)})
            messages.append(_user(_question(told)))
        return Prompt(tuple(messages), 0, "", session=f"{self._seed}-{number}")


def _filled(prompt: Prompt, tokens: int, draw: Random) -> Prompt:
    """Of about so many tokens: text goes before the last message's; or earlier messages, and then
    the beginning of the last one, are left out."""
    aim = max(1, round(tokens / TOKENS_PER_WORD))
    last = prompt.messages[-1]
    missing = aim - sum(len(message["content"].split()) for message in prompt.messages)
    if missing > 0:
        content = f"{_text(draw, round(missing * TOKENS_PER_WORD))}\n\n{last['content']}"
        return replace(prompt, messages=(*prompt.messages[:-1], {**last, "content": content}))
    words = re.findall(r"\s*\S+", last["content"])
    content = "".join(words[max(0, len(words) - aim) :]).lstrip()
    return replace(prompt, messages=({**last, "content": content},))


def _asked(text: str) -> Prompt:
    return Prompt((_user(text),), 0, "")


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _question(draw: Random) -> str:
    adjective, verb = draw.choice(_ADJECTIVES), draw.choice(_VERBS)
    return draw.choice(_QUESTIONS).format(adjective=adjective, noun=draw.choice(_NOUNS), verb=verb)


def _text(draw: Random, tokens: int) -> str:
    """Sentences of about so many tokens."""
    words: list[str] = []
    aim = max(1, round(tokens / TOKENS_PER_WORD))
    while len(words) < aim:
        words += _sentence(draw, draw.choice(_NOUNS)).split(" ")
    return " ".join(words[:aim])


def _sentence(draw: Random, noun: str) -> str:
    other = draw.choice(_NOUNS)
    return (
        f"The {draw.choice(_ADJECTIVES)} {noun} can {draw.choice(_VERBS)} the "
        f"{draw.choice(_ADJECTIVES)} {other} {draw.choice(_PLACES)}."
    )


_QUESTIONS = (
    "What is the best way to {verb} a {noun}?",
    "Explain to a child why a {noun} may be {adjective}.",
    "Give me five tips to {verb} a {adjective} {noun}.",
    "How does a {adjective} {noun} differ from other ones?",
    "I want to {verb} a {noun} tomorrow. What do I need?",
    "Which mistakes do people make when they {verb} a {noun}?",
)
_NOUNS = (
    "bridge", "garden", "letter", "engine", "river", "window", "teacher", "market", "lantern",
    "harbour", "violin", "mountain", "kitchen", "ticket", "forest", "clock", "wheel", "basket",
    "mirror", "tower", "carpet", "needle", "orchard", "helmet", "ladder", "candle", "pocket",
    "saddle", "anchor", "feather", "bottle", "hammer",
)  # fmt: skip
_VERBS = (
    "repair", "paint", "find", "describe", "carry", "measure", "open", "sell", "choose", "protect",
    "clean", "draw", "plan", "move", "store", "name",
)  # fmt: skip
_ADJECTIVES = (
    "quiet", "heavy", "narrow", "bright", "hidden", "gentle", "wooden", "famous", "empty", "round",
    "ancient", "patient", "northern", "simple", "hollow", "golden",
)  # fmt: skip
_PLACES = (
    "behind the station", "before the winter", "near the old mill", "without any help",
    "on the third day", "under a grey sky", "for a small price", "after the concert",
)  # fmt: skip
