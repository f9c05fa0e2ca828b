"""moorage explain: why a session is held and until what, or what happened to it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from moorage.cli import holds, options, show_label, show_session
from moorage.cli.cells import cell, clock_time, enum_name, since
from moorage.cli.channel import connect
from moorage.cli.emit import emit
from moorage.cli.tables import indented

if TYPE_CHECKING:
    from moorage.v1.inspector_pb2 import GetSessionResponse, Session

#: What a phase means for a session that is not held.
_PHASES = {
    "PLACED": "was placed; nothing was reported of it yet",
    "RUNNING": "is running: the engine works on a request of it",
    "TOOL_WAIT": "waits for a tool; its KV stays resident",
    "PAUSED": "was released as paused: its KV is free, its next admit keeps its seniority",
}


@click.command(cls=options.Verb)
@click.argument("session_id", metavar="SESSION")
@options.output_option("table", "json", "yaml")
@click.pass_obj
def explain(settings: options.Settings, session_id: str, output: str) -> None:
    """Say why SESSION is held, and until what.

    Of a session that is not held it says where it is. Either way: what happened to it.
    """
    from moorage.v1.inspector_pb2 import GetSessionRequest

    with connect(settings) as api:
        answer = api.call(api.inspector.GetSession, GetSessionRequest(pool=settings.pool, session_id=session_id))
    emit(answer, output, lambda: explanation(answer, datetime.now(UTC)))


def explanation(answer: GetSessionResponse, now: datetime) -> Iterator[str]:
    """A sentence, the hold where there is one, and the history."""
    session = answer.session
    name = f"session/{cell(session.session_id)}"
    hold = show_session.hold_of(answer)
    phase = enum_name(session, "phase")
    if hold is not None and phase in ("HELD", "<unknown>"):
        yield f"{name} (class {cell(session.workload_class)}) is held: {holds.reason(hold)}"
        yield from indented(show_session.hold_lines(hold, now))
        yield from _label(session)
    else:
        yield f"{name} (class {cell(session.workload_class)}) {_PHASES.get(phase, f'is in phase {phase}')}"
        yield from indented(_home(session, now))
        yield from _label(session)
        if hold is not None:
            yield f"  in mode ENFORCE it would be held: {holds.hold_pairs(hold)}"
    yield "history:"
    yield from indented(show_session.history(answer.history))


def _label(session: Session) -> Iterator[str]:
    if text := show_label.label(session):
        yield f"  {text}"


def _home(session: Session, now: datetime) -> Iterator[str]:
    if session.instance_id:
        home = f"instance {cell(session.instance_id)} rank {session.dp_rank}"
        yield f"on {home}, {session.reserved_blocks} blocks reserved"
    if session.HasField("admitted_time"):
        yield f"admitted {since(session, 'admitted_time', now)} ago"
    if session.HasField("lease"):
        yield f"lease until {clock_time(session.lease, 'expire_time')}"
