"""Settings from a YAML file: one that is shipped, by its name, or any, by its path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from cluster.commands.command_error import CommandError

Settings = TypeVar("Settings", bound=BaseModel)


def load_settings(
    model: type[Settings], what: str, shipped: Path, name_or_path: str
) -> tuple[Settings, Path]:
    """The settings and the folder of their file, which their own paths are relative to. `what` they
    are, in a word, for the errors. Raises CommandError."""
    path = shipped / f"{name_or_path}.yaml"
    if not (name_or_path.isidentifier() and path.is_file()):
        path = Path(name_or_path)
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(
            f"cannot read the {what} {name_or_path} ({error}). Give a YAML file or one of: "
            f"{', '.join(shipped_names(shipped))}"
        ) from None
    except yaml.YAMLError as error:
        raise CommandError(f"{path} is not YAML: {error}") from None
    try:
        return model.model_validate(content), path.resolve().parent
    except ValidationError as error:
        raise CommandError(f"{path} is no {what}:\n{_reasons(error, what)}") from None


def shipped_names(shipped: Path) -> list[str]:
    """Names that stand for a file of this folder."""
    return sorted(path.stem for path in shipped.glob("*.yaml"))


def _reasons(error: ValidationError, what: str) -> str:
    return "\n".join(
        f"  {_where(detail['loc'], what)}: {detail['msg'].removeprefix('Value error, ')}"
        for detail in error.errors(include_url=False)
    )


def _where(location: Sequence[int | str], what: str) -> str:
    return ".".join(map(str, location)) or what
