"""moorage watch: what happens in a pool, event by event; survives a lost connection without losing events."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from moorage.cli import options
from moorage.cli.cells import clock_time, enum_name
from moorage.cli.channel import Api, connect
from moorage.cli.emit import to_json
from moorage.cli.errors import RpcFailure
from moorage.cli.holds import words

if TYPE_CHECKING:
    from moorage.v1.inspector_pb2 import WatchEventsResponse

#: Resume token of the oldest event kept.
_START = "0"
#: Pause before the stream is opened again, in seconds.
_PAUSE = 0.5
#: gRPC gives up connecting after 20 s, so a stream that lived longer had a connection.
_SURELY_CONNECTED = 25.0


@click.command(cls=options.Verb)
@click.option("--since-start", is_flag=True, help="Begin with the oldest event kept [default: from now on].")
@click.option("--resume", metavar="TOKEN", help="Begin after the event with this resume token.")
@click.option("--limit", type=click.IntRange(min=1), help="Leave after that many events.")
@options.output_option("table", "wide", "json")
@click.pass_obj
def watch(settings: options.Settings, since_start: bool, resume: str | None, limit: int | None, output: str) -> None:
    """Print events as they happen, one line each.

    A lost connection is opened again after the last event printed; only --timeout without success ends the watch.
    -o json prints one object per line, -o wide adds the resume token.
    """
    if since_start and resume is not None:
        raise click.UsageError("--since-start and --resume exclude each other")
    with connect(settings) as api:
        for event in itertools.islice(follow(api, _START if since_start else resume or ""), limit):
            click.echo(to_json(event, one_line=True) if output == options.JSON else line(event, output == options.WIDE))


def follow(api: Api, token: str) -> Iterator[WatchEventsResponse]:
    """Events after `token`, for ever. Raises RpcFailure when the server stays away for the timeout.

    A first stream that fails at once raises at once: that is a wrong address, not a lost connection.
    """
    from moorage.v1.inspector_pb2 import WatchEventsRequest

    request = WatchEventsRequest(pool=api.pool, resume_token=token)
    connected, give_up = False, None
    while True:
        opened, failure = time.monotonic(), None
        try:
            for event in api.stream(api.inspector.WatchEvents, request):
                connected, give_up = True, None
                request.resume_token = event.resume_token
                yield event
            connected = True  # the server ended the stream in good order, as it does before it stops
        except RpcFailure as error:
            failure = error
        now = time.monotonic()
        if now - opened > _SURELY_CONNECTED:
            connected, give_up = True, None
        give_up = give_up or now + api.settings.timeout
        if failure is not None and (failure.status != "UNAVAILABLE" or not connected or now >= give_up):
            raise failure
        advised = failure.retry_after if failure is not None else None
        time.sleep(max(_PAUSE, advised or 0.0))


def line(event: WatchEventsResponse, wide: bool = False) -> str:
    """An event on one line: time, kind, then what is known as key=value."""
    pairs = [
        ("session", event.session_id),
        ("instance", event.instance_id),
        ("decision", enum_name(event, "decision") if event.decision else ""),
        ("reason", event.reason),
    ]
    shown = [f"{key}={words(value)}" for key, value in pairs if value]
    shown += [f"{words(key)}={words(value)}" for key, value in sorted(event.values.items())]
    if wide:
        shown.append(f"resume-token={words(event.resume_token)}")
    return " ".join([clock_time(event, "time"), words(event.kind), *shown])
