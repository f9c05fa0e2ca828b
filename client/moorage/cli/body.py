"""Building a request from a JSON body and flags, for the verbs that scripts call."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

from moorage.cli.options import Settings

if TYPE_CHECKING:
    from google.protobuf.message import Message

_Request = TypeVar("_Request", bound="Message")

#: Largest value of the counters and sizes of the API; narrower limits are the server's to tell.
MAX_COUNT = 2**63 - 1
COUNT = click.IntRange(0, MAX_COUNT)
UINT32 = click.IntRange(0, 2**32 - 1)
INT64 = click.IntRange(-(2**63), MAX_COUNT)


def hash_value(value: str) -> int:
    """Type of options that take a block hash: an unsigned 64-bit number, decimal or 0x-hexadecimal."""
    try:
        number = int(value, 0)
    except ValueError:
        number = -1
    if not 0 <= number < 2**64:
        raise click.BadParameter(f"{value!r} is no unsigned 64-bit number")
    return number


def read_body(file: IO[bytes] | None, request: _Request) -> _Request:
    """Fill `request` from protobuf JSON, where a file is given. Raises UsageError for anything else."""
    from google.protobuf.json_format import Parse, ParseError

    if file is None:
        return request
    try:
        return Parse(file.read(), request)
    except (ParseError, UnicodeDecodeError) as error:
        name = getattr(file, "name", "stdin")
        raise click.UsageError(f"{name} is no {request.DESCRIPTOR.name} in protobuf JSON: {error}") from None


def fill(message: Message, **values: Any) -> None:
    """Set fields from flags; None, () and {} were not given. Seconds (float) fill a Duration; lists replace."""
    from google.protobuf.duration_pb2 import Duration

    for name, value in values.items():
        if value is None or value in ((), {}):
            continue
        field = getattr(message, name)
        if isinstance(field, Duration):
            field.FromNanoseconds(round(value * 1e9))
        elif isinstance(value, tuple):
            message.ClearField(name)
            getattr(message, name).extend(value)
        elif isinstance(value, Mapping):
            field.update(value)
        else:
            setattr(message, name, value)


def address(request: Message, settings: Settings) -> None:
    """Set the pool (a flag goes over the body, the body over environment and default) and a fresh request id."""
    if "pool" in settings.given or not request.pool:  # type: ignore[attr-defined]
        request.pool = settings.pool  # type: ignore[attr-defined]
    if "request_id" in request.DESCRIPTOR.fields_by_name and not request.request_id:  # type: ignore[attr-defined]
        request.request_id = str(uuid.uuid4())  # type: ignore[attr-defined]


def require(request: Message, **flags: str) -> None:
    """Refuse a request without the fields named, each with the flag or argument that would give it."""
    missing = [flag for name, flag in flags.items() if not getattr(request, name)]
    if missing:
        raise click.UsageError(f"missing {', '.join(missing)} (or give the request with -f)")


def key_values(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Callback of options and arguments of the form KEY=VALUE."""
    split = [value.partition("=") for value in values]
    for (key, equals, _), value in zip(split, values, strict=True):
        if not key or not equals:
            raise click.BadParameter(f"{value!r} is not of the form KEY=VALUE", ctx, param)
    return {key: value for key, _, value in split}
