"""A Dockerfile, read instruction by instruction."""

from __future__ import annotations

import fnmatch
import io
import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).parents[3]
DOCKERFILE = ROOT / "cluster" / "docker" / "Dockerfile"


@dataclass(frozen=True)
class Instruction:
    """One instruction, with the stage that it belongs to."""

    stage: int
    name: str
    value: str

    @property
    def words(self) -> list[str]:
        """Arguments without flags, in either of the two forms."""
        if self.value.startswith("["):
            words: list[str] = json.loads(self.value)
            return words
        return [word for word in shlex.split(self.value) if not word.startswith("--")]

    @property
    def flags(self) -> dict[str, str]:
        """--flag=value before the arguments."""
        found = {}
        for word in self.value.split():
            if not word.startswith("--"):
                break
            name, _, value = word.removeprefix("--").partition("=")
            found[name] = value
        return found

    @property
    def command(self) -> str:
        """Of a RUN, what the shell is given."""
        words = self.value.split(" ")
        while words[0].startswith("--"):
            words.pop(0)
        return " ".join(words)


def instructions(text: str) -> list[Instruction]:
    """Of the whole file, without comments."""
    parser = DockerfileParser(fileobj=io.BytesIO(text.encode()))
    found, stage = [], -1
    for entry in parser.structure:
        if entry["instruction"] == "COMMENT":
            continue
        stage += entry["instruction"] == "FROM"
        found.append(Instruction(stage, entry["instruction"], entry["value"]))
    return found


def is_sent(path: str, patterns: list[str]) -> bool:
    """Whether a file of the context reaches the build, as a .dockerignore says: the last pattern
    that takes the file or a folder above it decides."""
    sent = True
    for pattern in patterns:
        rule = pattern.removeprefix("!")
        parts = Path(path).parts
        heads = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        if any(_takes(rule, head) for head in heads):
            sent = pattern.startswith("!")
    return sent


def _takes(rule: str, path: str) -> bool:
    if rule.startswith("**/"):
        return fnmatch.fnmatch(path.rpartition("/")[2], rule.removeprefix("**/"))
    return path.count("/") == rule.count("/") and fnmatch.fnmatch(path, rule)
