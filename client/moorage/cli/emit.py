"""Printing an answer in the format asked for: protobuf JSON, YAML of the same, names, or the verb's own lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from moorage.cli import options
from moorage.cli.cells import printable

if TYPE_CHECKING:
    from google.protobuf.message import Message


def to_json(message: Message, *, one_line: bool = False) -> str:
    """Protobuf JSON. Zero values are spelled out; fields with presence stay out while unknown."""
    from google.protobuf.json_format import MessageToJson

    return MessageToJson(message, indent=None if one_line else 2, always_print_fields_with_no_presence=True)


def to_yaml(message: Message, *, only_set: bool = False) -> str:
    """The same in YAML, without a final newline; `only_set` leaves zero values out and names fields as the API does."""
    import yaml
    from google.protobuf.json_format import MessageToDict

    fields: dict[str, Any] = MessageToDict(
        message, always_print_fields_with_no_presence=not only_set, preserving_proto_field_name=only_set
    )
    text: str = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)
    return text.rstrip("\n")


def emit(
    message: Message,
    output: str,
    lines: Callable[[], Iterable[str]],
    names: Callable[[], Iterable[str]] = tuple,
) -> None:
    """Print `message` in the format `output`; `lines` and `names` are asked only where the format wants them."""
    if output == options.JSON:
        click.echo(to_json(message))
    elif output == options.YAML:
        click.echo(to_yaml(message))
    elif output == options.NAME:
        for name in names():
            click.echo(printable(name))
    else:
        for line in lines():
            click.echo(line)
