"""Values as table cells: no spaces, nothing that a terminal acts on, `<none>` and `<unknown>` kept apart from 0."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from google.protobuf.duration_pb2 import Duration
    from google.protobuf.message import Message
    from google.protobuf.timestamp_pb2 import Timestamp

NONE = "<none>"
UNKNOWN = "<unknown>"


def printable(text: str) -> str:
    """Escape control and other unprintable characters: ids come from callers and must not steer the terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def cell(text: str) -> str:
    """A text as one cell: spaces escaped too; `<none>` where empty."""
    return printable(text).replace(" ", "\\x20") or NONE


def enum_name(message: Message, field: str) -> str:
    """The value of an enum field without its prefix, such as TOOL_WAIT for PHASE_TOOL_WAIT; `<unknown>` for zero."""
    enum = message.DESCRIPTOR.fields_by_name[field].enum_type
    number: int = getattr(message, field)
    if enum is None or number == 0:
        return UNKNOWN
    value = enum.values_by_number.get(number)
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return value.name.removeprefix(prefix) if value is not None else str(number)


def optional(message: Message, field: str, spec: str = "") -> str:
    """A scalar field with presence, formatted; `<unknown>` where absent."""
    return format(getattr(message, field), spec) if message.HasField(field) else UNKNOWN


def duration(message: Message, field: str, absent: str = UNKNOWN) -> str:
    """A Duration field as an age; `absent` where it is not set."""
    return age(seconds(getattr(message, field))) if message.HasField(field) else absent


def seconds(value: Duration) -> float:
    """A Duration in seconds."""
    return float(value.seconds + value.nanos / 1e9)


def age(elapsed: float) -> str:
    """A time span as people say it: 350ms, 41s, 12m, 3h5m, 2d4h."""
    if 0 < elapsed < 1:
        return f"{elapsed * 1000:.0f}ms"
    if elapsed < 10:
        return f"{max(elapsed, 0.0):.1f}".removesuffix(".0") + "s"
    minutes, hours, days = int(elapsed // 60), int(elapsed // 3600), int(elapsed // 86400)
    if elapsed < 120:
        return f"{elapsed:.0f}s"
    if hours < 2:
        return f"{minutes}m"
    if days < 2:
        return f"{hours}h{minutes % 60}m"
    return f"{days}d{hours % 24}h"


def since(message: Message, field: str, now: datetime) -> str:
    """Age of a Timestamp field against `now`; `<unknown>` where absent. Clocks differ: never below 0."""
    if not message.HasField(field):
        return UNKNOWN
    return age(max((now - instant(getattr(message, field))).total_seconds(), 0.0))


def instant(value: Timestamp) -> datetime:
    """A Timestamp as an aware datetime, UTC, to the microsecond."""
    return datetime.fromtimestamp(value.seconds + value.nanos / 1e9, tz=UTC)


def clock_time(message: Message, field: str) -> str:
    """A Timestamp field in RFC 3339, to the millisecond; `<unknown>` where absent."""
    if not message.HasField(field):
        return UNKNOWN
    return instant(getattr(message, field)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def percent(share: float | None) -> str:
    """A share of 0..1 in percent; `<unknown>` for None."""
    return UNKNOWN if share is None else f"{share * 100:.1f}%"


def pairs(values: Mapping[str, float | int], spec: str = "") -> str:
    """A map as one cell, such as agentic:9,rlvr:3; `<none>` where empty."""
    return ",".join(f"{cell(key)}:{format(value, spec)}" for key, value in sorted(values.items())) or NONE
