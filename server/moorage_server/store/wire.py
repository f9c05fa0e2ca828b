"""Arguments of scripts and their replies: how values go to the store and come back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from moorage_server.store import records
from moorage_server.store.parse import optional_int, pairs, text

NOW = (
    "st", "class", "inst", "ctx", "ctx_at", "shr", "phase", "admitted", "ask", "group", "turn", "since", "declared",
    "gapn", "gap", "inf", "conf", "mis", "moves",
)  # fmt: skip
_SECRET = ("token", "ticket")
ENDED = ("class", "outcome", "duration", "z", "ctx", "admitted", "ask", "declared", "turn", "gapn", "gap", "mis")


def label(a: records.Admission) -> str:
    """What the label is worth, as label.lua reads it."""
    confidence = f"{a.inferred.confidence:.3f}"
    flags = (str(int(a.by_inference)), str(int(a.contradicted)))
    return json.dumps([a.label, a.inferred.name, confidence, *flags, -1 if a.room is None else a.room, a.fallback])


def row(values: Any, names: Iterable[str]) -> dict[str, str] | None:
    """The named fields that are there; None for no row at all."""
    if not values:
        return None
    return {name: text(value) for name, value in zip(names, values, strict=True) if value is not None}


def record(found: Any) -> records.SessionRecord:
    """A session as ``inspect.lua`` reads it."""
    sid, flat, position, ahead = found
    # What a session is fenced with is nobody's to read.
    fields = {k: "hidden" if k in _SECRET else text(v) for k, v in pairs(flat).items()}
    return records.SessionRecord(text(sid), fields, int(position), int(ahead))


def placed(reply: Any, *, fresh: bool) -> records.Placed:
    """A placement, from the reply of ``admit.lua`` or ``place.lua``."""
    _, instance, incarnation, token, ttl, expires, cached, moved, *name = reply
    return records.Placed(
        text(instance),
        text(incarnation),
        text(token),
        int(ttl),
        int(expires),
        optional_int(cached),
        bool(int(moved)),
        fresh,
        text(name[0]) if name else "",
    )


def vector(numbers: Iterable[int]) -> str:
    """Numbers as one argument: packing many small ones is what a call costs most."""
    return ",".join(map(str, numbers))


def blank(value: int | None) -> int | str:
    """A number, or nothing where it is not known."""
    return "" if value is None else value
