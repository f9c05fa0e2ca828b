"""Hostile requests: random messages of any type with values at and beyond every limit, and bytes that are none."""

from __future__ import annotations

import math
import random
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

#: Stands in text until the message is bytes: then it becomes what is no UTF-8.
MARK = "\u2603\u2603"
NO_UTF8 = b"\xff\xfe\xc3\x28\xed\xa0"

TEXTS = (
    "", "s", "i", "p", "default", "s-1", "\0", "a\0b", "{p}", "}{", "*", "[a", "\\", ":", "a:b", "é" * 128, "x" * 256,
    "x" * 257, "\u202e", "\U0010ffff", "%s%n", "../..", "\r\nSET a b\r\n", "classes.", "classes.\0", "-1", "nan",
    "9" * 400, "12345678-1234-4234-8234-123456789012", "misa-t", "static", MARK,
)  # fmt: skip
INTEGERS = (0, 1, 2, 3, 15, 16, 255, 2**31 - 1, 2**32 - 1, 2**40, 2**40 + 1, 2**53, 2**63 - 1, 2**64 - 1)
FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e-320, 1e308, math.inf, -math.inf, math.nan)

_F = FieldDescriptor
_UNSIGNED = {_F.CPPTYPE_UINT32: 2**32, _F.CPPTYPE_UINT64: 2**64}
_SIGNED = {_F.CPPTYPE_INT32: 2**31, _F.CPPTYPE_INT64: 2**63}
_FLOATING = (_F.CPPTYPE_FLOAT, _F.CPPTYPE_DOUBLE)
_DEEPEST = 6

#: Values that get somewhere, by the name of the field, then by its kind.
_TAME_TEXTS = {
    "pool": ("p", "p", "", "{p}", "a\0b", "*"),
    "request_id": ("", "12345678-1234-4234-8234-123456789012"),
    "paths": ("headroom", "mode", "classes.s", "static_cap", "forecast_margin"),
    "policy": ("static", "session", "misa", "misa-t"),
    "resume_token": ("", "0"),
    "page_token": ("",),
}
_TAME_TEXT = ("s", "i", "s-1", "s-2", "s-3", "a\0b", "{p}", "*")


class Sender:
    """Makes requests from one seed. ``leases``: pool, session and token of those granted, to be used again."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.leases: list[tuple[str, str, str]] = []
        self._wild = 0.5

    def encoded(self, descriptor: Descriptor) -> bytes:
        """A message as bytes; some text in it is no UTF-8, and now and then a few bytes are others."""
        rng = self.rng
        # Were all values wild, no request would get past the validation of its fields.
        self._wild = rng.choice((0.0, 0.02, 0.1, 0.5))
        data = bytearray(self.message(descriptor).SerializeToString().replace(MARK.encode(), NO_UTF8))
        if data and rng.random() < self._wild:
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(data)

    def rubbish(self) -> bytes:
        """Random bytes."""
        return self.rng.randbytes(self.rng.choice((0, 1, 2, 7, 50, 1000)))

    def metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """Random headers that gRPC lets a client send."""
        rng = self.rng
        names = ("x", "authorization", "x-bin", "grpc-previous-rpc-attempts", "traceparent", "x-request-id")
        pairs: list[tuple[str, str | bytes]] = []
        for name in rng.sample(names, rng.randint(0, 4)):
            text = "".join(chr(rng.randint(0x20, 0x7E)) for _ in range(rng.choice((0, 1, 50, 2000))))
            pairs.append((name, rng.randbytes(30) if name.endswith("-bin") else text))
        return tuple(pairs)

    def message(self, descriptor: Descriptor, depth: int = 0) -> Message:
        """A message of a type, half of its fields set."""
        made = message_factory.GetMessageClass(descriptor)()
        for field in descriptor.fields:
            needed = field.name in ("pool", "session_id", "instance_id", "lease_token")
            if depth < _DEEPEST and self.rng.random() < (0.95 if needed else 0.5):
                self._fill(made, field, depth)
        if self.leases and "lease_token" in descriptor.fields_by_name and self.rng.random() < 0.7:
            pool, session, token = self.rng.choice(self.leases)
            self._set(made, pool=pool, session_id=session, lease_token=token)
        return made

    def _set(self, made: Any, **values: str) -> None:
        for name, value in values.items():
            if name in made.DESCRIPTOR.fields_by_name:
                setattr(made, name, value)

    def _fill(self, made: Message, field: FieldDescriptor, depth: int) -> None:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            self._fill_map(getattr(made, field.name), field.message_type, depth)
        elif field.is_repeated:
            items: Any = getattr(made, field.name)
            for _ in range(self.rng.choice((1, 1, 2, 3))):
                if field.message_type is None:
                    items.append(self._scalar(field))
                else:
                    items.add().CopyFrom(self.message(field.message_type, depth + 1))
        elif field.message_type is not None:
            getattr(made, field.name).CopyFrom(self.message(field.message_type, depth + 1))
        else:
            setattr(made, field.name, self._scalar(field))

    def _fill_map(self, target: Any, entry: Descriptor, depth: int) -> None:
        key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
        for _ in range(self.rng.choice((1, 2, 70))):
            name = self._scalar(key)
            if value.message_type is None:
                target[name] = self._scalar(value)
            else:
                target[name].CopyFrom(self.message(value.message_type, depth + 2))

    def _scalar(self, field: FieldDescriptor) -> Any:
        return self._wild_scalar(field) if self.rng.random() < self._wild else self._tame_scalar(field)

    def _tame_scalar(self, field: FieldDescriptor) -> Any:
        rng, kind = self.rng, field.cpp_type
        if kind == _F.CPPTYPE_STRING:
            return rng.choice(_TAME_TEXTS.get(field.name, _TAME_TEXT))
        if kind == _F.CPPTYPE_BOOL:
            return rng.random() < 0.5
        if kind in _FLOATING:
            return rng.choice((0.1, 0.5, 1.0))
        if kind == _F.CPPTYPE_ENUM:
            return rng.choice((0, 1, 2))
        return rng.choice((0, 1, 2, 3, 16))

    def _wild_scalar(self, field: FieldDescriptor) -> Any:
        rng, kind = self.rng, field.cpp_type
        if kind == _F.CPPTYPE_STRING:
            return rng.choice(TEXTS)
        if kind == _F.CPPTYPE_BOOL:
            return rng.random() < 0.5
        if kind in _FLOATING:
            return rng.choice(FLOATS)
        if kind == _F.CPPTYPE_ENUM:
            return rng.choice((0, 1, 2, 3, 4, 99, 2**31 - 1, -1, -(2**31)))
        number = rng.choice(INTEGERS)
        if kind in _UNSIGNED:
            return number % _UNSIGNED[kind]
        return number % _SIGNED[kind] * rng.choice((1, 1, -1))
