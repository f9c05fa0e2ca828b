"""moorage admit: ask for a session to enter the pool."""

from __future__ import annotations

from typing import IO, Any

import click

from moorage.cli import exits, options
from moorage.cli.body import COUNT, INT64, UINT32, address, fill, hash_value, key_values, read_body, require
from moorage.cli.cells import seconds
from moorage.cli.channel import connect
from moorage.cli.emit import emit
from moorage.cli.holds import decision_line


@click.command(cls=options.Verb)
@click.argument("session_id", metavar="SESSION", required=False)
@options.file_option("AdmitRequest")
@click.option("--class", "workload_class", metavar="CLASS", help="Workload class; none means unlabelled.")
@click.option("--group", "group_id", metavar="GROUP", help="Group of samples of one prompt.")
@click.option("--group-size", type=UINT32, help="Samples in the group.")
@click.option("--policy-version", type=INT64, help="Policy (weights) version the rollout starts with.")
@click.option("--prompt-tokens", type=COUNT, help="Tokens of the first prompt.")
@click.option("--expected-output-tokens", type=COUNT, help="Tokens the session is expected to add in all its turns.")
@click.option("--expected-turns", type=UINT32, help="Turns expected.")
@click.option("--max-context-tokens", type=COUNT, help="Largest context the session may reach.")
@click.option("--prefix-hash", "prefix_hashes", type=hash_value, multiple=True, help="Hash of a full block; repeat.")
@click.option("--max-wait", type=options.duration, help="Wait up to this long for the session's turn.")
@click.option("--lease-ttl", type=options.duration, help="Lease to grant.")
@click.option("--tenant", metavar="TENANT", help="Tenant.")
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", callback=key_values, help="Label; repeat.")
@click.option("--request-id", metavar="UUID", help="Makes a repeat of the call safe [default: a fresh one].")
@options.output_option("table", "json", "yaml", "name")
@click.pass_obj
def admit(settings: options.Settings, /, file: IO[bytes] | None, output: str, **fields: Any) -> None:
    """Ask for SESSION to enter the pool.

    Exits with 0 where it is placed, 3 where it is held or rejected; the answer says why.
    """
    from moorage.v1.scheduler_pb2 import DECISION_PLACE, AdmitRequest

    request = read_body(file, AdmitRequest())
    fill(request, **fields)
    address(request, settings)
    require(request, session_id="SESSION")
    with connect(settings) as api:
        answer = api.call(api.scheduler.Admit, request, wait=seconds(request.max_wait))
    session_id = request.session_id
    emit(answer, output, lambda: [decision_line(session_id, answer, "admitted")], lambda: [session_id])
    if answer.decision != DECISION_PLACE:
        click.get_current_context().exit(exits.REFUSED)
