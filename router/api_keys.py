"""API keys: who asks, and what share of the router is theirs.

The file is YAML, and holds hashes, never keys:

    keys:
      - tenant: search-team          # whose key it is; several keys may name one tenant
        sha256: 9f86d081884c7d65...  # printf %s "$KEY" | sha256sum
        max_concurrent_requests: 32  # of this tenant at each router; all that is free by default
        admin: false                 # may read /v1/cluster, /metrics and the status page

Make a key of at least 128 random bits: `openssl rand -hex 24`.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from cluster.config import Section
from cluster.errors import AuthenticationError
from cluster.member_auth import ConfigurationError

logger = logging.getLogger("paceline.router")

REFRESH_S = 1.0
"""Between two looks at the file."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who a request is for."""

    name: str
    admin: bool
    max_concurrent_requests: int | None = None
    """At one router; None is all that is free."""

    def cache_salt(self, client_salt: str) -> str:
        """What separates this tenant's cached KV, and whatever else is remembered, from others'.
        A client's own salt separates further, and can reach no other tenant."""
        return f"{len(self.name)}:{self.name}:{client_salt}" if self.name else client_salt


ANYONE = Tenant("", admin=True)
"""Everyone, where there are no keys."""


class KeyEntry(Section):
    """One key."""

    tenant: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")]
    """Whose it is."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Of the key, in hexadecimal."""
    max_concurrent_requests: Annotated[int, Field(ge=1)] | None = None
    """Generations in flight at one router."""
    admin: bool = False
    """May see the cluster."""


class KeyFile(Section):
    """The whole file."""

    keys: Annotated[tuple[KeyEntry, ...], Field(min_length=1)]
    """In any order."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        limits: dict[str, int | None] = {}
        for entry in self.keys:
            limit = limits.setdefault(entry.tenant, entry.max_concurrent_requests)
            if limit != entry.max_concurrent_requests:
                raise ValueError(f"the keys of tenant {entry.tenant} name different limits")
        if len({entry.sha256 for entry in self.keys}) < len(self.keys):
            raise ValueError("one hash stands there twice")
        return self


class ApiKeys:
    """The keys of one file. Raises ConfigurationError if it cannot be used at the start; a file
    that is broken later leaves the keys as they were, and a line in the log."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._seen = self._stamp()
        self._tenants = self._read()
        self._looked_at = 0.0

    def authenticate(self, authorization: str | None) -> Tenant:
        """Whose key an Authorization header shows. Raises AuthenticationError.

        Takes as long for a wrong key as for a right one.
        """
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise AuthenticationError(
                "send your API key as the header Authorization: Bearer KEY", code="missing_api_key"
            )
        shown = hashlib.sha256(key.strip().encode()).digest()
        found = [tenant for digest, tenant in self._tenants if hmac.compare_digest(digest, shown)]
        if not found:
            raise AuthenticationError("this API key is not known here", code="invalid_api_key")
        return found[0]

    def refresh(self, now: float) -> None:
        """Read the file again if it has changed. Cheap enough to call at every turn."""
        if now - self._looked_at < REFRESH_S:
            return
        self._looked_at = now
        try:
            stamp = self._stamp()
            if stamp != self._seen:
                self._seen = stamp
                self._tenants = self._read()
                logger.info("API keys: read %s again, %d keys", self._path, len(self._tenants))
        except ConfigurationError as error:
            logger.error("the API keys stay as they were: %s", error)

    def _stamp(self) -> tuple[int, int, int]:
        """Changes when the file does, a link to another file included."""
        try:
            state = self._path.stat()
        except OSError as error:
            raise ConfigurationError(
                f"auth.keys_file: cannot read {self._path}: {error.strerror}"
            ) from error
        return state.st_ino, state.st_mtime_ns, state.st_size

    def _read(self) -> list[tuple[bytes, Tenant]]:
        try:
            entries = KeyFile.model_validate(yaml.safe_load(self._path.read_text())).keys
        except OSError as error:
            raise ConfigurationError(
                f"auth.keys_file: cannot read {self._path}: {error.strerror}"
            ) from error
        except (yaml.YAMLError, ValidationError) as error:
            raise ConfigurationError(
                f"auth.keys_file: {self._path} is not a file of keys: {_without_input(error)}"
            ) from error
        return [
            (
                bytes.fromhex(entry.sha256),
                Tenant(entry.tenant, entry.admin, entry.max_concurrent_requests),
            )
            for entry in entries
        ]


def _without_input(error: Exception) -> str:
    """What is wrong, without the values: a key that was put there in clear stays out of the log."""
    if not isinstance(error, ValidationError):
        return "it is no YAML"
    details = error.errors(include_input=False, include_url=False, include_context=False)
    return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in details)
