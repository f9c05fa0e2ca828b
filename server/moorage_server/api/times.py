"""Seconds to well-known types and back."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

_NANOS = 1_000_000_000


def to_seconds(value: Duration) -> float:
    """A duration in seconds."""
    return value.seconds + value.nanos / _NANOS


def to_duration(seconds: float) -> Duration:
    """Seconds, 0 or more, as a Duration, to the nanosecond."""
    whole, nanos = divmod(round(seconds * _NANOS), _NANOS)
    return Duration(seconds=whole, nanos=nanos)


def to_timestamp(seconds: float) -> Timestamp:
    """Seconds since the epoch as a Timestamp, to the microsecond: a float of that size holds no more."""
    whole, micros = divmod(round(seconds * 1_000_000), 1_000_000)
    return Timestamp(seconds=whole, nanos=micros * 1_000)
