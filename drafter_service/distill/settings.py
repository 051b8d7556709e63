"""What a distillation is asked to do, and the note of it in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.commands.command_error import CommandError

_FILE = "settings.json"


class Settings(BaseModel):
    """The options of `paceline distill` that decide what comes out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str
    """As in `model.source`."""
    num_tokens: Annotated[int, Field(ge=1)]
    """That the target writes or reads."""
    num_passes: Annotated[float, Field(gt=0)]
    """How often each is learned, on average."""
    num_layers: Annotated[int, Field(ge=1)]
    vocabulary_size: Annotated[int, Field(ge=1)]
    """Tokens that the drafter can say, at most."""
    text: str | None
    """Path of a file to learn from."""
    seed: int


GROWING = frozenset({"num_tokens", "num_passes"})
"""May be others when a distillation is resumed: it is then as long as they say now."""


def check_same(folder: Path, settings: Settings) -> None:
    """Note the settings in a new folder. In one that has some, raise CommandError unless these go
    on with what is there."""
    file = folder / _FILE
    if file.is_file():
        try:
            noted = Settings.model_validate_json(file.read_text(encoding="utf-8"))
        except ValidationError as error:
            raise CommandError(f"{file} is not of this version; take another --out") from error
        others = [
            f"{name} {getattr(noted, name)}, not {value}"
            for name, value in settings
            if name not in GROWING and getattr(noted, name) != value
        ]
        if others:
            raise CommandError(
                f"{folder.parent} holds a distillation with {'; '.join(others)}. Take another "
                "--out, or the same options to go on with it."
            )
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(settings.model_dump_json(indent=2) + "\n", encoding="utf-8")
