"""Checks of single fields. Each appends a violation to ``bad``, and formats nothing while all is well."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from moorage_server import limits
from moorage_server.errors import Violation, shorten

Violations = list[Violation]

_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
# Position of an event in the store's stream: milliseconds and a number, both 64 bits.
_EVENT = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
# UTF-8 takes at most four bytes a character, so text this short needs no encoding to be measured.
_SURELY_SHORT = limits.ID_BYTES // 4

_NANOS = 1_000_000_000
_DURATION_SECONDS = 315_576_000_000
_TIMESTAMP_SECONDS = (-62_135_596_800, 253_402_300_799)


def is_id(value: str) -> bool:
    """Whether a text is an id: 1 to 256 bytes of UTF-8, any character."""
    return 0 < len(value) <= _SURELY_SHORT or (value != "" and len(value.encode()) <= limits.ID_BYTES)


def required_id(bad: Violations, field: str, value: str) -> None:
    """An id that must be there."""
    if not is_id(value):
        bad.append(Violation.of(field, value, f"1 to {limits.ID_BYTES} bytes of UTF-8"))


def optional_id(bad: Violations, field: str, value: str) -> None:
    """An id that may be absent (empty)."""
    if len(value) > _SURELY_SHORT and len(value.encode()) > limits.ID_BYTES:
        bad.append(Violation.of(field, value, f"at most {limits.ID_BYTES} bytes of UTF-8"))


def token(bad: Violations, field: str, value: str, *, required: bool) -> None:
    """A lease token; errors show its size only."""
    if required and not value:
        bad.append(Violation.of(field, "", "given: the token of the session's lease"))
    elif len(value) > _SURELY_SHORT and (size := len(value.encode())) > limits.ID_BYTES:
        bad.append(Violation.of(field, f"<{size} bytes>", f"at most {limits.ID_BYTES} bytes of UTF-8"))


def text(bad: Violations, field: str, value: str, most: int) -> None:
    """Free text of at most ``most`` bytes."""
    if 4 * len(value) > most and len(value.encode()) > most:
        bad.append(Violation.of(field, value, f"at most {most} bytes of UTF-8"))


def request_id(bad: Violations, value: str) -> None:
    """A UUID in its canonical form, or absent (empty)."""
    if value and _UUID.fullmatch(value) is None:
        bad.append(Violation.of("request_id", value, "a UUID such as 123e4567-e89b-42d3-a456-426614174000"))


def resume_token(bad: Violations, value: str) -> None:
    """The resume_token of an event, "0" for the oldest one kept, or absent (empty)."""
    if value in ("", "0"):
        return
    if _EVENT.fullmatch(value) is None or any(int(part) >= 2**64 for part in value.split("-")):
        bad.append(Violation.of("resume_token", value, "the resume_token of an event, or 0 for the oldest one kept"))


def quantity(bad: Violations, field: str, value: int) -> None:
    """Tokens, blocks, or requests at one moment: 0 to 2^40."""
    if value > limits.QUANTITY:
        bad.append(Violation.of(field, value, "at most 2^40"))


def counter(bad: Violations, field: str, value: int) -> None:
    """A cumulative counter or a sequence number: 0 to 2^63-1."""
    if value > limits.COUNTER:
        bad.append(Violation.of(field, value, "at most 2^63-1"))


def size(bad: Violations, field: str, count: int, most: int, what: str) -> None:
    """The length of a repeated field."""
    if count > most:
        bad.append(Violation.of(field, f"{count} {what}", f"at most {most} {what}"))


def finite(bad: Violations, field: str, value: float) -> None:
    """A finite number, 0 or more."""
    if not (math.isfinite(value) and value >= 0):
        bad.append(Violation.of(field, value, "a finite number, 0 or more"))


def enum(bad: Violations, field: str, value: int, known: Mapping[int, str]) -> None:
    """One of the ``known`` numbers; the open enums of proto3 let any number through."""
    if value not in known:
        bad.append(Violation.of(field, value, "one of " + ", ".join(known.values())))


def labels(bad: Violations, values: Mapping[str, str]) -> None:
    """At most 64 labels; key and value of at most 256 bytes each, the key not empty."""
    size(bad, "labels", len(values), limits.LABELS, "labels")
    for key, value in values.items():
        required_id(bad, "labels key", key)
        text(bad, f"labels[{shorten(key)}]", value, limits.LABEL_BYTES)


def duration(bad: Violations, field: str, value: Duration, least_s: int, most_s: int, limit: str) -> None:
    """A well-formed duration within ``least_s`` and ``most_s`` seconds, inclusive, exact to the nanosecond."""
    if well_formed_duration(bad, field, value):
        nanos = value.seconds * _NANOS + value.nanos
        if not least_s * _NANOS <= nanos <= most_s * _NANOS:
            bad.append(Violation.of(field, value.ToJsonString(), limit))


def well_formed_duration(bad: Violations, field: str, value: Duration) -> bool:
    """Whether a duration follows the rules of its type: seconds within 10,000 years, nanos of the same sign."""
    seconds, nanos = value.seconds, value.nanos
    if abs(seconds) <= _DURATION_SECONDS and abs(nanos) < _NANOS and seconds * nanos >= 0:
        return True
    bad.append(
        Violation.of(
            field,
            f"seconds {seconds}, nanos {nanos}",
            "a well-formed Duration: seconds within 10,000 years, nanos below 10^9 and of the same sign",
        )
    )
    return False


def timestamp(bad: Violations, field: str, value: Timestamp) -> None:
    """A point in time that follows the rules of its type: years 1 to 9999, nanos below 10^9."""
    first, last = _TIMESTAMP_SECONDS
    if not (first <= value.seconds <= last and 0 <= value.nanos < _NANOS):
        bad.append(
            Violation.of(
                field,
                f"seconds {value.seconds}, nanos {value.nanos}",
                "a well-formed Timestamp: years 1 to 9999, nanos from 0 and below 10^9",
            )
        )
