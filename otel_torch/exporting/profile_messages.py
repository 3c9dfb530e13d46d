"""The messages of pprof's profile.proto, made by protobuf from a table of their fields.

https://github.com/google/pprof/blob/main/proto/profile.proto; what no export writes is left out.
"""

from __future__ import annotations

import functools
from typing import Any

_PACKAGE = "perftools.profiles"
# message -> its fields as `number type name`; `*`: repeated
_FIELDS = {
    "Profile": (
        "1 ValueType* sample_type", "2 Sample* sample", "4 Location* location",
        "5 Function* function", "6 string* string_table", "9 int64 time_nanos",
        "10 int64 duration_nanos", "14 int64 default_sample_type",
    ),
    "ValueType": ("1 int64 type", "2 int64 unit"),
    "Sample": ("1 uint64* location_id", "2 int64* value", "3 Label* label"),
    "Label": ("1 int64 key", "3 int64 num"),
    "Location": ("1 uint64 id", "4 Line* line"),
    "Line": ("1 uint64 function_id",),
    "Function": ("1 uint64 id", "2 int64 name", "3 int64 system_name"),
}  # fmt: skip


@functools.cache
def new_profile() -> type[Any]:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="otel_torch/profile.proto", package=_PACKAGE, syntax="proto3"
    )
    for message, fields in _FIELDS.items():
        described = file.message_type.add(name=message)
        for number, kind, name in map(str.split, fields):
            label = kinds.LABEL_REPEATED if kind.endswith("*") else kinds.LABEL_OPTIONAL
            field = described.field.add(number=int(number), name=name, label=label)
            kind = kind.removesuffix("*")
            if kind in _FIELDS:
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                field.type = getattr(kinds, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    profile = pool.FindMessageTypeByName(f"{_PACKAGE}.Profile")
    made: type[Any] = message_factory.GetMessageClass(profile)
    return made
