"""moorage place: where the next request of a living session goes."""

from __future__ import annotations

from typing import IO, Any

import click

from moorage.cli import exits, options
from moorage.cli.body import COUNT, UINT32, address, fill, hash_value, read_body, require
from moorage.cli.cells import seconds
from moorage.cli.channel import connect
from moorage.cli.emit import emit
from moorage.cli.holds import decision_line


@click.command(cls=options.Verb)
@click.argument("session_id", metavar="SESSION", required=False)
@options.file_option("PlaceRequest")
@click.option("--lease-token", metavar="TOKEN", help="Token of the session's lease, as admit printed it.")
@click.option("--turn", type=UINT32, help="Number of this turn, from 0.")
@click.option("--prompt-tokens", type=COUNT, help="Tokens of this turn's whole prompt.")
@click.option("--prefix-hash", "prefix_hashes", type=hash_value, multiple=True, help="Hash of a full block; repeat.")
@click.option("--max-wait", type=options.duration, help="Wait up to this long where the session has to move.")
@click.option("--request-id", metavar="UUID", help="Makes a repeat of the call safe [default: a fresh one].")
@options.output_option("table", "json", "yaml", "name")
@click.pass_obj
def place(settings: options.Settings, /, file: IO[bytes] | None, output: str, **fields: Any) -> None:
    """Ask where the next request of SESSION goes.

    Exits with 0 where it is placed, 3 where it is held; -o name prints the instance.
    """
    from moorage.v1.scheduler_pb2 import DECISION_PLACE, PlaceRequest

    request = read_body(file, PlaceRequest())
    fill(request, **fields)
    address(request, settings)
    require(request, session_id="SESSION", lease_token="--lease-token")
    with connect(settings) as api:
        answer = api.call(api.scheduler.Place, request, wait=seconds(request.max_wait))
    placed = answer.decision == DECISION_PLACE
    verb = "moved" if answer.moved else "placed"
    emit(
        answer,
        output,
        lambda: [decision_line(request.session_id, answer, verb)],
        lambda: [answer.placement.instance_id] if placed else [],
    )
    if not placed:
        click.get_current_context().exit(exits.REFUSED)
