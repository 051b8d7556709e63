"""Reads the protobuf in which helm writes the Secrets that hold its releases.

Of Kubernetes' messages only the fields that helm sets are declared here, by their public numbers.
"""

from __future__ import annotations

import base64
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

MAGIC = b"k8s\x00"
"""Before every object in this form."""

_STRING = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
_BYTES = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
_MESSAGE = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
_OPTIONAL = descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL
_REPEATED = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED

_Field = tuple[str, int, str]
_MESSAGES: dict[str, list[_Field]] = {
    "TypeMeta": [("api_version", 1, "string"), ("kind", 2, "string")],
    "Unknown": [("type_meta", 1, "TypeMeta"), ("raw", 2, "bytes")],
    "ObjectMeta": [
        ("name", 1, "string"),
        ("namespace", 3, "string"),
        ("uid", 5, "string"),
        ("resource_version", 6, "string"),
        ("labels", 11, "repeated StringEntry"),
        ("annotations", 12, "repeated StringEntry"),
    ],
    "StringEntry": [("key", 1, "string"), ("value", 2, "string")],
    "BytesEntry": [("key", 1, "string"), ("value", 2, "bytes")],
    "Secret": [
        ("metadata", 1, "ObjectMeta"),
        ("data", 2, "repeated BytesEntry"),
        ("type", 3, "string"),
    ],
}


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="kubernetes.proto", package="fake")
    file.syntax = "proto3"
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, number, declared in fields:
            kind = declared.removeprefix("repeated ")
            label = _REPEATED if declared != kind else _OPTIONAL
            field = message.field.add(name=field_name, number=number, label=label)
            field.type = {"string": _STRING, "bytes": _BYTES}.get(kind, _MESSAGE)
            if field.type == _MESSAGE:
                field.type_name = f".fake.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"fake.{name}"))
        for name in _MESSAGES
    }


_CLASSES = _classes()


def decode(content: bytes) -> dict[str, Any]:
    """The Secret, as it would be in JSON. Raises ValueError for another kind."""
    envelope = _CLASSES["Unknown"].FromString(content.removeprefix(MAGIC))
    if envelope.type_meta.kind != "Secret":
        raise ValueError(f"{envelope.type_meta.kind} is not expected in protobuf")
    secret = _CLASSES["Secret"].FromString(envelope.raw)
    metadata: dict[str, Any] = {
        "name": secret.metadata.name,
        "namespace": secret.metadata.namespace,
    }
    for name in ("labels", "annotations"):
        entries = {entry.key: entry.value for entry in getattr(secret.metadata, name)}
        if entries:
            metadata[name] = entries
    data = {entry.key: base64.b64encode(entry.value).decode() for entry in secret.data}
    return {
        "apiVersion": envelope.type_meta.api_version,
        "kind": "Secret",
        "metadata": metadata,
        "type": secret.type,
        "data": data,
    }
