"""A Kubernetes API on loopback, as far as helm needs one: discovery, objects, watches.

Objects are checked when they are written, as an API server would. There are no controllers: a pod
has succeeded, and a Job is complete, as soon as it is made.
"""

from __future__ import annotations

import base64
import copy
import http.server
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.helm.chart import NAMESPACE, Manifest
from tests.helm.kubernetes_protobuf import MAGIC, decode

WATCH_TIMEOUT_S = 30.0
SERVER_FIELDS = ("uid", "resourceVersion", "creationTimestamp")

RESOURCES: dict[str, dict[str, str]] = {
    "v1": {
        "configmaps": "ConfigMap",
        "persistentvolumeclaims": "PersistentVolumeClaim",
        "pods": "Pod",
        "secrets": "Secret",
        "serviceaccounts": "ServiceAccount",
        "services": "Service",
    },
    "batch/v1": {"jobs": "Job"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "networking.k8s.io/v1": {"ingresses": "Ingress", "networkpolicies": "NetworkPolicy"},
    "ray.io/v1": {"rayservices": "RayService"},
    "cert-manager.io/v1": {"certificates": "Certificate", "issuers": "Issuer"},
    "monitoring.coreos.com/v1": {
        "podmonitors": "PodMonitor",
        "prometheusrules": "PrometheusRule",
        "servicemonitors": "ServiceMonitor",
    },
}
"""Plural and kind, by API version."""

Check = Callable[[Manifest], str | None]
"""Why an object is refused."""


class ApiError(Exception):
    """An answer that is no success."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "code": code,
            "reason": reason,
            "message": message,
        }


@dataclass(frozen=True)
class Event:
    """A change of one object."""

    type: str
    collection: Collection
    object: Manifest


@dataclass(frozen=True)
class Collection:
    """All objects of one kind in the one namespace that there is."""

    api_version: str
    plural: str

    @property
    def kind(self) -> str:
        return RESOURCES[self.api_version][self.plural]


@dataclass
class Store:
    """What the cluster holds."""

    check: Check
    objects: dict[tuple[Collection, str], Manifest] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def get(self, collection: Collection, name: str) -> Manifest:
        found = self.objects.get((collection, name))
        if found is None:
            raise ApiError(404, "NotFound", f'{collection.plural} "{name}" not found')
        return found

    def list(self, collection: Collection, query: dict[str, str]) -> list[Manifest]:
        return [
            one
            for (held, _), one in list(self.objects.items())
            if held == collection and _is_asked_for(one, query)
        ]

    def create(self, collection: Collection, new: Manifest) -> Manifest:
        name = new["metadata"]["name"]
        if (collection, name) in self.objects:
            raise ApiError(409, "AlreadyExists", f'{collection.plural} "{name}" already exists')
        return self._save(collection, new, "ADDED")

    def replace(self, collection: Collection, name: str, new: Manifest) -> Manifest:
        old = self.get(collection, name)
        kept = {key: old["metadata"][key] for key in SERVER_FIELDS}
        new = {**new, "metadata": {**new["metadata"], **kept}}
        return self._save(collection, new, "MODIFIED")

    def delete(self, collection: Collection, name: str) -> Manifest:
        gone = self.get(collection, name)
        del self.objects[collection, name]
        self._tell(Event("DELETED", collection, gone))
        return gone

    def _save(self, collection: Collection, new: Manifest, change: str) -> Manifest:
        new = _stored(copy.deepcopy(new))
        reason = self.check(_as_written(new))
        if reason is not None:
            raise ApiError(422, "Invalid", reason)
        metadata = new["metadata"]
        metadata.setdefault("uid", str(uuid.uuid4()))
        metadata.setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
        metadata["resourceVersion"] = self.version(1)
        new.update(_STATUS.get(collection.kind, {}))
        self.objects[collection, metadata["name"]] = new
        self._tell(Event(change, collection, new))
        return new

    def version(self, ahead: int = 0) -> str:
        return str(len(self.events) + 1 + ahead)

    def wait_beyond(self, seen: int) -> bool:
        """Until there are more events than `seen`; False if none comes for a while."""
        return self.changed.wait_for(lambda: len(self.events) > seen, WATCH_TIMEOUT_S)

    def _tell(self, event: Event) -> None:
        self.events.append(event)
        self.changed.notify_all()


_STATUS: dict[str, Manifest] = {
    "Pod": {"status": {"phase": "Succeeded"}},
    "Job": {"status": {"succeeded": 1, "conditions": [{"type": "Complete", "status": "True"}]}},
}


def _stored(new: Manifest) -> Manifest:
    """As the API server keeps it: no nulls, and no stringData in Secrets."""
    new = _without_nulls(new)
    if new["kind"] == "Secret" and "stringData" in new:
        encoded = {
            key: base64.b64encode(value.encode()).decode()
            for key, value in new.pop("stringData").items()
        }
        new["data"] = {**new.get("data", {}), **encoded}
    return new


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    return value


def _as_written(new: Manifest) -> Manifest:
    """Without what is the server's."""
    hidden = (*SERVER_FIELDS, "managedFields")
    metadata = {key: value for key, value in new["metadata"].items() if key not in hidden}
    return {**{key: value for key, value in new.items() if key != "status"}, "metadata": metadata}


def _is_asked_for(one: Manifest, query: dict[str, str]) -> bool:
    """Whether label and field selectors take it; only the operators that helm uses are known."""
    labels = one["metadata"].get("labels", {})
    for term in filter(None, query.get("labelSelector", "").split(",")):
        key, _, value = term.replace("==", "=").partition("=")
        if not value or key.endswith("!"):
            raise ApiError(400, "BadRequest", f"the selector {term} is not known here")
        if labels.get(key) != value:
            return False
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        key, _, value = term.partition("=")
        if key != "metadata.name":
            raise ApiError(400, "BadRequest", f"the selector {term} is not known here")
        if one["metadata"]["name"] != value:
            return False
    return True


def merged(old: Any, patch: Any) -> Any:
    """A JSON merge patch. Directives of a strategic one are refused rather than ignored."""
    if not isinstance(patch, dict):
        return patch
    if any(key.startswith("$") for key in patch):
        raise ApiError(415, "UnsupportedMediaType", "strategic directives are not known here")
    result = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


class FakeKubernetes:
    """The API server. Use as a context manager."""

    def __init__(self, check: Check) -> None:
        self.store = Store(check)
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.store = self.store  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def write_kubeconfig(self, file: Path) -> Path:
        """What clients find this server by."""
        address = f"http://127.0.0.1:{self._server.server_port}"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": address}}],
            "users": [{"name": "fake", "user": {"token": "fake"}}],
            "contexts": [
                {
                    "name": "fake",
                    "context": {"cluster": "fake", "user": "fake", "namespace": NAMESPACE},
                }
            ],
        }
        file.write_text(yaml.safe_dump(config))
        return file

    def named(self, kind: str) -> dict[str, Manifest]:
        """All objects of a kind."""
        return {
            name: one
            for (collection, name), one in self.store.objects.items()
            if collection.kind == kind
        }


class _Handler(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"

    @property
    def _store(self) -> Store:
        store: Store = self.server.store  # type: ignore[attr-defined]
        return store

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(lambda: self._store.create(self._collection()[0], self._body()))

    def do_PUT(self) -> None:
        self._answer(lambda: self._store.replace(*self._collection(), self._body()))

    def do_PATCH(self) -> None:
        self._answer(self._patch)

    def do_DELETE(self) -> None:
        self._content()  # Options, of which none matters here.
        self._answer(lambda: self._store.delete(*self._collection()))

    def _answer(self, act: Callable[[], Manifest | None]) -> None:
        try:
            with self._store.changed:
                answer = act()
            if answer is not None:
                self._send(200, answer)
            else:
                self._watch()
        except ApiError as error:
            self._send(error.status["code"], error.status)  # type: ignore[arg-type]

    # --- reading --------------------------------------------------------------------------------

    @property
    def _query(self) -> dict[str, str]:
        return {key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()}

    @property
    def _steps(self) -> list[str]:
        return [step for step in urlsplit(self.path).path.split("/") if step]

    def _collection(self) -> tuple[Collection, str]:
        """What the path names; the name is empty for the whole collection."""
        steps = self._steps
        api_version = steps[1] if steps[0] == "api" else f"{steps[1]}/{steps[2]}"
        rest = steps[2 if steps[0] == "api" else 3 :]
        if rest[:1] == ["namespaces"]:
            rest = rest[2:]
        if not rest or rest[0] not in RESOURCES.get(api_version, {}):
            raise ApiError(404, "NotFound", f"there is no {self.path} here")
        return Collection(api_version, rest[0]), rest[1] if len(rest) > 1 else ""

    def _content(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _body(self) -> Manifest:
        content = self._content()
        if content.startswith(MAGIC):
            return decode(content)
        loaded: Manifest = yaml.safe_load(content)
        return loaded

    def _get(self) -> Manifest | None:
        """None stands for a watch."""
        discovered = _discovery("/".join(self._steps))
        if discovered is not None:
            return discovered
        collection, name = self._collection()
        if name:
            return self._store.get(collection, name)
        if self._query.get("watch") in ("1", "true"):
            return None
        return {
            "kind": f"{collection.kind}List",
            "apiVersion": collection.api_version,
            "metadata": {"resourceVersion": self._store.version()},
            "items": self._store.list(collection, self._query),
        }

    # --- writing --------------------------------------------------------------------------------

    def _patch(self) -> Manifest:
        collection, name = self._collection()
        patch = self._body()
        if "apply-patch" in self.headers["Content-Type"]:
            if (collection, name) not in self._store.objects:
                return self._store.create(collection, patch)
            return self._store.replace(collection, name, patch)  # There is one manager.
        return self._store.replace(
            collection, name, merged(self._store.get(collection, name), patch)
        )

    def _send(self, code: int, answer: Manifest) -> None:
        if answer is _NO_OPENAPI:  # An empty document: clients leave validation to the server.
            kind = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"
            return self._send_bytes(code, kind, b"")
        return self._send_bytes(code, "application/json", json.dumps(answer).encode())

    def _send_bytes(self, code: int, kind: str, content: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _watch(self) -> None:
        """Stream changes, and first what there is if that is asked for, until the client leaves."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.close_connection = True
        try:
            for change, one in self._changes():
                line = json.dumps({"type": change, "object": one}).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
        except (BrokenPipeError, ConnectionResetError):
            pass  # It has seen enough.

    def _changes(self) -> Iterator[tuple[str, Manifest]]:
        collection, _ = self._collection()
        query, store = self._query, self._store
        initial = "sendInitialEvents" in query
        with store.changed:
            there = store.list(collection, query)
            version = query.get("resourceVersion") or "0"
            seen = len(store.events) if initial or version == "0" else int(version) - 1
        if initial or version == "0":
            yield from (("ADDED", one) for one in there)
        if initial:
            yield "BOOKMARK", _bookmark(collection, store.version())
        while True:
            with store.changed:
                if not store.wait_beyond(seen):
                    return
                new, seen = store.events[seen:], len(store.events)
            for event in new:
                if event.collection == collection and _is_asked_for(event.object, query):
                    yield event.type, event.object


def _bookmark(collection: Collection, version: str) -> Manifest:
    metadata = {
        "resourceVersion": version,
        "annotations": {"k8s.io/initial-events-end": "true"},
    }
    return {"kind": collection.kind, "apiVersion": collection.api_version, "metadata": metadata}


_NO_OPENAPI: Manifest = {"openapi": "2"}


def _discovery(path: str) -> Manifest | None:
    """What clients ask to learn what there is."""
    if path == "version":
        return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
    if path == "openapi/v2":
        return _NO_OPENAPI
    if path.startswith("openapi"):
        return {"paths": {}}
    if path == "api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "apis":
        groups = [_group(name) for name in RESOURCES if "/" in name]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    api_version = path.removeprefix("apis/").removeprefix("api/")
    if api_version in RESOURCES:
        return _resources(api_version)
    return None


def _group(api_version: str) -> Manifest:
    name, version = api_version.split("/")
    entry = {"groupVersion": api_version, "version": version}
    return {"name": name, "versions": [entry], "preferredVersion": entry}


def _resources(api_version: str) -> Manifest:
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    resources = [
        {
            "name": plural,
            "singularName": kind.lower(),
            "namespaced": True,
            "kind": kind,
            "verbs": verbs,
        }
        for plural, kind in RESOURCES[api_version].items()
    ]
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": api_version,
        "resources": resources,
    }
