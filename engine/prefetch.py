"""Brings models into the cache before a replica needs them: python -m engine.prefetch JSON ...

Each argument is a ModelConfig as JSON. A model of the hub is fetched, one that is kept in another
form is converted; replicas find it there as if they had done it themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cluster.config import ModelConfig
from engine.loader import model_folder


def main(arguments: Sequence[str]) -> None:
    """Raises pydantic's ValidationError, UnsupportedModelError, and what the hub raises."""
    configs = [ModelConfig.model_validate_json(argument) for argument in arguments]
    for config in configs:
        print(f"{config.source} is in {model_folder(config)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
