"""What a change of classes did, in words: before -> after, and a warning of names that look like slips."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from moorage.cli.cells import NONE, printable

if TYPE_CHECKING:
    from moorage.v1.inspector_pb2 import GetPoolResponse
    from moorage.v1.operator_pb2 import PoolConfig

#: Known classes that a warning lists, at most.
_MOST = 10


def lines(before: PoolConfig | None, after: PoolConfig, names: Iterable[str]) -> Iterator[str]:
    """One line per field of these classes that is another one now."""
    for name in names:
        old, new = ({} if config is None else _fields(config, name) for config in (before, after))
        for key in sorted({*old, *new}):
            if old.get(key) != new.get(key):
                yield f"  {printable(name)}.{key}: {_text(old.get(key))} -> {_text(new.get(key))}"


def unknown(pool: GetPoolResponse | None, names: Iterable[str]) -> Iterator[str]:
    """A warning per class that the pool neither has in its configuration nor ever saw; none while it knows none."""
    if pool is None:
        return
    aliases = {alias: name for name, entry in pool.config.classes.items() for alias in entry.aliases}
    known = {*pool.config.classes, *pool.active_by_class, *pool.held_by_class, *pool.released_by_class}
    listed = ", ".join(printable(name) for name in sorted(known)[:_MOST]) + (", ..." if len(known) > _MOST else "")
    for name in names:
        if name in aliases:
            yield f"{printable(name)!r} is an alias of class {printable(aliases[name])!r}"
        elif known and name not in known:
            yield f"class {printable(name)!r} was never seen in this pool nor configured; it has {listed}"


def _fields(config: PoolConfig, name: str) -> Mapping[str, Any]:
    """The fields that are set. Reading a map of messages would add the class."""
    from google.protobuf.json_format import MessageToDict

    if name not in config.classes:
        return {}
    fields: Mapping[str, Any] = MessageToDict(config.classes[name], preserving_proto_field_name=True)
    return fields


def _text(value: Any) -> str:
    if value is None:
        return NONE
    if isinstance(value, list):
        return ",".join(map(printable, value))
    return str(value).lower() if isinstance(value, bool) else printable(str(value))
