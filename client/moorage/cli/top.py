"""moorage top: a pool, live. The frame itself is drawn by `render`, which is pure."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING

import click

from moorage.cli import first as first_in_line
from moorage.cli import options
from moorage.cli.channel import Api, connect
from moorage.cli.errors import RpcFailure
from moorage.cli.frame import render

if TYPE_CHECKING:
    from moorage.v1.inspector_pb2 import Session

__all__ = ["render", "top"]

#: Held sessions looked at for their reasons: one page, so that a long queue costs no more than a short one.
_HELD_SAMPLE = 200
_HOME, _CLEAR, _END_OF_LINE, _BELOW = "\x1b[H", "\x1b[2J", "\x1b[K", "\x1b[J"
_COLOURS = {"YES": "red", "OFF TARGET": "red", "NEAR": "yellow", "UNKNOWN": "yellow"}


@click.command(cls=options.Verb)
@click.option("--interval", type=options.duration, default=1.0, help="Time between two frames [default 1s].")
@click.option("--iterations", type=click.IntRange(min=1), help="Leave after that many frames.")
@click.option("--once", is_flag=True, help="One frame, the same as --iterations 1.")
@click.pass_obj
def top(settings: options.Settings, interval: float, iterations: int | None, once: bool) -> None:
    """Show the pool live.

    The headline says whether it is thrashing, who is waiting and why, and whether the mixture is as asked. In a
    terminal the frame is redrawn in place; elsewhere frames are printed one after the other.
    """
    count = 1 if once else iterations
    live = count != 1 and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    with connect(settings) as api:
        for number in range(count) if count else itertools.count():
            if number:
                time.sleep(interval)
            if live:
                _redraw(_frame_or_error(api, first=number == 0), first=number == 0)
            else:
                for line in _frame(api) if number == 0 else ["", *_frame(api)]:
                    click.echo(_paint(line))


def _frame(api: Api) -> list[str]:
    """Ask for everything a frame needs, and render it."""
    from moorage.v1.inspector_pb2 import GetPoolRequest

    pool = api.call(api.inspector.GetPool, GetPoolRequest(pool=api.pool))
    held = _held_sample(api) if pool.held_sessions else []
    first = first_in_line.choose(_look_at(api, first_in_line.candidates(held)))
    width = shutil.get_terminal_size((100, 24)).columns
    return render(pool, api.instances(), api.classes(), width, datetime.now(), held, first)


def _held_sample(api: Api) -> list[Session]:
    """One page of held sessions; a page may come back short, or empty."""
    from moorage.v1.inspector_pb2 import ListSessionsRequest

    request = ListSessionsRequest(pool=api.pool, held=True, page_size=_HELD_SAMPLE)
    return list(api.call(api.inspector.ListSessions, request).sessions)


def _look_at(api: Api, sessions: list[Session]) -> Iterator[Session]:
    """Sessions as they are now; those that entered or went in the meantime are left out."""
    from moorage.v1.inspector_pb2 import GetSessionRequest

    for session in sessions:
        try:
            yield api.call(
                api.inspector.GetSession, GetSessionRequest(pool=api.pool, session_id=session.session_id)
            ).session
        except RpcFailure as error:
            if error.status != "NOT_FOUND":
                raise


def _frame_or_error(api: Api, first: bool) -> list[str]:
    """A live view outlasts failures of the server, once it saw it."""
    try:
        return _frame(api)
    except RpcFailure as error:
        if first:
            raise
        return [f"{datetime.now():%H:%M:%S}  {error.message}", *error.details]


def _redraw(lines: list[str], first: bool) -> None:
    """Draw over the last frame, without scrolling: as many lines as the terminal has."""
    height = shutil.get_terminal_size((100, 24)).lines
    shown = lines if len(lines) < height else [*lines[: height - 2], f"... {len(lines) - height + 2} more lines"]
    body = "".join(f"{_paint(line)}{_END_OF_LINE}\n" for line in shown)
    # click.echo would drop the cursor movements together with colours.
    sys.stdout.write((_CLEAR if first else "") + _HOME + body + _BELOW)
    sys.stdout.flush()


def _paint(line: str) -> str:
    """Colour the verdict of a headline, where colours are wanted."""
    if os.environ.get("NO_COLOR") or not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return line
    label, question, rest = line.partition("?")
    if question and label in ("Thrashing", "Waiting", "Mixture"):
        answer = rest.lstrip()
        for verdict, colour in _COLOURS.items():
            if answer.startswith(verdict):
                return f"{label}?{rest.replace(verdict, click.style(verdict, fg=colour, bold=True), 1)}"
    return line
