"""The grammar of a whole message: reasoning, then text, calls of functions, or what the client
wants the answer to look like.

So calls are valid by construction, be they required or the model's own idea, and a grammar that a
client gives begins where the reasoning ends, to the token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from cluster.grammar import GrammarKind, GrammarSpec
from cluster.grammar_matcher import lark
from router.thinking import END_THINK, THINK, Thinking
from router.tools.call_format import CallFormat
from router.tools.tool_use import Function, ToolUse

_TEXT = "/(?s:.*)/"
_SPACE = r"[\x20\x0A\x0D\x09]"


def message_grammar(
    answer: GrammarSpec | None,
    use: ToolUse | None,
    form: CallFormat,
    thinking: Thinking,
    special: Collection[str],
) -> GrammarSpec | None:
    """None allows any text. `special` are the texts of the vocabulary's special tokens."""
    if use is None and (answer is None or thinking is Thinking.NONE):
        return answer
    rules = _Rules(form, special)
    if use is not None:
        rules.add_calls(use)
    if answer is not None:
        rules.add("answer", _nested(answer))
    rules.add_start(answer, use, thinking)
    return GrammarSpec(GrammarKind.LARK, rules.text)


class _Rules:
    """Rules in Lark's notation."""

    def __init__(self, form: CallFormat, special: Collection[str]) -> None:
        self._form = form
        self._special = special
        self._rules: list[str] = []

    @property
    def text(self) -> str:
        return "\n".join(self._rules) + "\n"

    def add(self, name: str, definition: str) -> None:
        self._rules.append(f"{name}: {definition}")

    def add_start(
        self, answer: GrammarSpec | None, use: ToolUse | None, thinking: Thinking
    ) -> None:
        """The rule of the whole. The rules `calls` and `answer` are there."""
        body = self._add_body("body", answer, use, excluded=())
        if thinking is Thinking.NONE:
            self.add("start", body)
            return
        self.add("GAP", f"/{_SPACE}{{1,8}}/")
        self._add_text_up_to("reasoning", END_THINK)
        self.add("thought", f"reasoning (GAP? {body})")
        if thinking is Thinking.OPEN:
            self.add("start", "thought")
        elif THINK in self._special:
            self.add("start", f"{THINK} thought | {body}")
        else:
            begin = f"{_SPACE}*{_escaped(THINK)}"
            bare = self._add_body("bare", answer, use, excluded=(begin,))
            self.add("start", f"/{begin}/ thought | {bare}")

    def _add_body(
        self, name: str, answer: GrammarSpec | None, use: ToolUse | None, excluded: Collection[str]
    ) -> str:
        """A rule for all but the reasoning. Free text does not begin with what is excluded."""
        if use is None:
            return "answer"
        if use.required:
            return "calls"
        if answer is not None:
            return "calls | answer"
        return self._add_text_and_calls(name, use, excluded)

    def add_calls(self, use: ToolUse) -> None:
        """Rules `calls`, and `call` and `more_calls` to begin with another marker."""
        form = self._form
        prefix = f"{form.special_prefix}? " if form.special_prefix in self._special else ""
        marker = self._spelled(form.marker)
        num_more = use.max_calls - 1 if form.separator else 0
        more = f"({_literal(form.separator)} {marker} call){{0,{num_more}}}" if num_more else '""'
        self.add("calls", f"{prefix}{marker} call more_calls")
        self.add("more_calls", more)
        self.add("call", " | ".join(f"call_{i}" for i in range(len(use.functions))))
        for index, function in enumerate(use.functions):
            self.add(f"call_{index}", self._call(function))

    def _call(self, function: Function) -> str:
        # Up to the end of the name in one piece: there, and no sooner, free text must end. Without
        # a marker that is so for the white space before it too.
        form = self._form
        name_end, rest = form.before_arguments[:1], form.before_arguments[1:]
        head = form.before_name + function.name + name_end
        begin = _literal(head) if form.marker else f"/{_SPACE}{{0,8}}{_escaped(head)}/"
        arguments = _nested(function.arguments)
        return f"{begin} {_literal(rest)} {arguments} {self._spelled(form.end)}"

    def _add_text_and_calls(self, name: str, use: ToolUse, excluded: Collection[str]) -> str:
        form = self._form
        if form.marker:
            self._add_text(f"{name}_text", _TEXT, excluded)
            self._add_text_up_to(f"{name}_begin", form.marker, excluded)
            self.add(name, f"{name}_text | {name}_begin call more_calls")
        else:
            self._add_text(f"{name}_text", _TEXT, [*excluded, _beginning(form, use)])
            self.add(name, f"calls | {name}_text")
        return name

    def _add_text_up_to(self, name: str, marker: str, excluded: Collection[str] = ()) -> None:
        """A rule for any text that ends with the first of these markers."""
        if marker in self._special:
            self._add_text(f"{name}_text", _TEXT, excluded)
            self.add(name, f"{name}_text {marker}")
        else:
            self._add_text(name, f"/(?s:.*){_escaped(marker)}/", excluded, lazy=True)

    def _add_text(
        self, name: str, regex: str, excluded: Collection[str], *, lazy: bool = False
    ) -> None:
        self.add(f"{name}[lazy]" if lazy else name, name.upper())
        without = "".join(f" & ~/{beginning}(?s:.*)/" for beginning in excluded)
        self.add(name.upper(), regex + without)

    def _spelled(self, text: str) -> str:
        """A text with its special tokens."""
        special = "|".join(re.escape(token) for token in self._special if token in text)
        pieces = re.split(f"({special})", text) if special else [text]
        return " ".join(p if p in self._special else _literal(p) for p in pieces if p)


def _nested(spec: GrammarSpec) -> str:
    return f"%lark {{\n{lark(spec)}\n}}"


def _literal(text: str) -> str:
    return json.dumps(text)


def _beginning(form: CallFormat, use: ToolUse) -> str:
    """How a text begins that is read as a call."""
    words = [_escaped(word) for word in re.split(r"\s+", form.before_name)]
    names = "|".join(map(_escaped, use.names))
    return rf"{_SPACE}*{f'{_SPACE}*'.join(words)}({names})" + _escaped(form.before_arguments[:1])


def _escaped(text: str) -> str:
    """As a part of a regular expression between slashes."""
    return "".join(char if char.isalnum() else f"\\x{ord(char):02X}" for char in text)
