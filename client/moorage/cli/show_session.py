"""Printers for sessions."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING

from moorage.cli import holds, show_label
from moorage.cli.cells import NONE, cell, clock_time, duration, enum_name, optional, printable, since
from moorage.cli.tables import indented, labelled, table

if TYPE_CHECKING:
    from moorage.v1.inspector_pb2 import GetSessionResponse, HistoryEntry, Session
    from moorage.v1.scheduler_pb2 import Hold

_HEADERS = ("NAME", "CLASS", "PHASE", "INSTANCE", "RESERVED", "CONTEXT", "TURN", "HOLD", "AGE")
_WIDE = (
    "GROUP",
    "DECLARED",
    "BEHAVES-LIKE",
    "RANK",
    "INCARNATION",
    "BLOCK-SECONDS",
    "LEASE-EXPIRES",
    "POSITION",
    "AHEAD",
)


def rows(sessions: Iterable[Session], wide: bool, now: datetime) -> list[str]:
    """One row per session; AGE is the time since admission, or since first arrival while held."""
    body = []
    for session in sessions:
        held = session.HasField("hold")
        homed = bool(session.instance_id)
        row = [
            cell(session.session_id), cell(session.workload_class), enum_name(session, "phase"),
            cell(session.instance_id), str(session.reserved_blocks), optional(session, "context_tokens"),
            optional(session, "turn"), holds.reason(session.hold) if held else NONE,
        ]  # fmt: skip
        if wide:
            row += [
                cell(session.group_id), cell(session.declared_class), show_label.behaviour(session),
                str(session.dp_rank) if homed else NONE, cell(session.incarnation), f"{session.block_seconds:.0f}",
                clock_time(session.lease, "expire_time") if session.HasField("lease") else NONE,
                str(session.hold.position) if held else NONE, str(session.hold.ahead) if held else NONE,
            ]  # fmt: skip
        body.append([*row, age(session, now)])
    return table((*_HEADERS[:-1], *_WIDE, _HEADERS[-1]) if wide else _HEADERS, body)


def age(session: Session, now: datetime) -> str:
    """Time since admission, or since first arrival while held."""
    if session.HasField("hold") and session.hold.HasField("held_since"):
        return since(session.hold, "held_since", now)
    return since(session, "admitted_time", now)


def details(answer: GetSessionResponse, now: datetime) -> list[str]:
    """One session at length: class, home, lease, cost, hold, history."""
    session = answer.session
    lease = session.lease
    ends = f"ends {clock_time(lease, 'expire_time')}, ttl {duration(lease, 'ttl')}"
    home = f"{cell(session.instance_id)} rank {session.dp_rank}, incarnation {cell(session.incarnation)}"
    declared = cell(session.declared_class)
    lines = labelled(
        [
            ("Name", cell(session.session_id)),
            ("Class", f"{cell(session.workload_class)} (declared: {declared})"),
            ("Behaves like", show_label.behaviour(session)),
            ("Group", cell(session.group_id)),
            ("Phase", enum_name(session, "phase")),
            ("Home", home if session.instance_id else NONE),
            ("Admitted", _admitted(session, now)),
            ("Lease", ends if session.HasField("lease") else NONE),
            ("Reserved blocks", str(session.reserved_blocks)),
            ("Context tokens", optional(session, "context_tokens")),
            ("Turn", optional(session, "turn")),
            ("Block-seconds", f"{session.block_seconds:.0f}"),
        ]
    )
    hold = hold_of(answer)
    if hold is not None:
        lines += ["Hold:", *indented(hold_lines(hold, now))]
    return [*lines, "History:", *indented(history(answer.history))]


def _admitted(session: Session, now: datetime) -> str:
    if not session.HasField("admitted_time"):
        return NONE
    return f"{clock_time(session, 'admitted_time')} ({since(session, 'admitted_time', now)} ago)"


def hold_of(answer: GetSessionResponse) -> Hold | None:
    """The hold of a session that is held."""
    if answer.HasField("hold"):
        return answer.hold
    return answer.session.hold if answer.session.HasField("hold") else None


def hold_lines(hold: Hold, now: datetime) -> list[str]:
    """A hold, labelled: why, since when, behind whom, until what."""
    name = holds.reason(hold)
    meaning, release = holds.REASONS.get(name, ("a reason this version does not know", "see the detail"))
    fields = [
        ("Reason", f"{name}: {meaning}"),
        ("Held for", since(hold, "held_since", now)),
        ("Place", f"{hold.position} in the queue of its class; {hold.ahead} go first in all"),
        ("Until", release),
        ("Detail", printable(hold.detail) or NONE),
        ("Ask again", f"in {duration(hold, 'retry_after')}"),
    ]
    return labelled(fields)


def history(entries: Iterable[HistoryEntry]) -> list[str]:
    """What happened, oldest first."""
    body = [[clock_time(entry, "time"), cell(entry.kind), cell(entry.instance_id), _reason(entry)] for entry in entries]
    return table(("TIME", "KIND", "INSTANCE", "REASON"), body)


def _reason(entry: HistoryEntry) -> str:
    # An entry that let the session in has a reason only in OBSERVE: what ENFORCE would have held it for.
    if entry.kind in ("admit", "move") and entry.reason:
        return f"observed: would have been held, {printable(entry.reason)}"
    return printable(entry.reason) or NONE
