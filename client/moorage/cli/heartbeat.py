"""moorage heartbeat: report an instance or a session by hand, or a whole request from a file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

import click

from moorage.cli import exits, options
from moorage.cli.body import COUNT, UINT32, address, fill, read_body
from moorage.cli.cells import cell, printable
from moorage.cli.channel import connect
from moorage.cli.emit import emit

if TYPE_CHECKING:
    from moorage.v1.scheduler_pb2 import HeartbeatRequest, HeartbeatResponse

_STATES = ["serving", "draining", "paused", "sleeping", "stopped"]
_OF_INSTANCE = (
    "endpoint", "dp_rank", "incarnation", "sequence", "block_size", "total_blocks", "used_blocks", "cached_blocks",
    "running", "waiting", "waiting_capacity", "max_context_tokens", "weight_version",
)  # fmt: skip
_OF_SESSION = ("lease_token", "turn", "context_tokens", "cached_tokens", "output_tokens")


@click.command(cls=options.Verb)
@options.file_option("HeartbeatRequest")
@click.option("--instance", "instance_id", metavar="INSTANCE", help="Report a snapshot of this instance.")
@click.option("--endpoint", metavar="URL", help="Instance: where callers send requests.")
@click.option("--rank", "dp_rank", type=UINT32, help="Instance: data-parallel rank.")
@click.option("--incarnation", metavar="ID", help="Instance: changes whenever the engine restarts; required.")
@click.option("--sequence", type=COUNT, help="Instance: grows with every snapshot [default: milliseconds since 1970].")
@click.option("--state", type=click.Choice(_STATES, case_sensitive=False), help="Instance: what it can do.")
@click.option("--block-size", type=COUNT, help="Instance: tokens per block.")
@click.option("--total-blocks", type=COUNT, help="Instance: usable blocks.")
@click.option("--used-blocks", type=COUNT, help="Instance: blocks referenced by running requests.")
@click.option("--cached-blocks", type=COUNT, help="Instance: blocks cached but unreferenced.")
@click.option("--running", type=COUNT, help="Instance: requests in execution.")
@click.option("--waiting", type=COUNT, help="Instance: requests waiting.")
@click.option("--waiting-capacity", type=COUNT, help="Instance: requests waiting for capacity.")
@click.option("--max-context-tokens", type=COUNT, help="Instance: largest context it takes.")
@click.option("--weight-version", metavar="VERSION", help="Instance: weights it serves.")
@click.option("--session", "session_id", metavar="SESSION", help="Report progress of this session, renew its lease.")
@click.option("--lease-token", metavar="TOKEN", help="Session: token of its lease; required.")
@click.option("--phase", type=click.Choice(["running", "tool-wait"], case_sensitive=False), help="Session: its phase.")
@click.option("--turn", type=UINT32, help="Session: number of the turn, from 0.")
@click.option("--context-tokens", type=COUNT, help="Session: context so far.")
@click.option("--cached-tokens", type=COUNT, help="Session: prompt tokens of the finished turn from the cache.")
@click.option("--output-tokens", type=COUNT, help="Session: tokens generated so far.")
@options.output_option("table", "json", "yaml")
@click.pass_obj
def heartbeat(settings: options.Settings, /, file: IO[bytes] | None, output: str, **fields: Any) -> None:
    """Report instances and sessions.

    One of each by flags, or many with -f; prints a line per item. Exits with 3 where an item was not taken; the
    others were.
    """
    from moorage.v1.scheduler_pb2 import HeartbeatRequest

    request = read_body(file, HeartbeatRequest())
    _add_instance(request, fields)
    _add_session(request, fields)
    if not request.instances and not request.sessions:
        raise click.UsageError("nothing to report: give --instance, --session or -f")
    address(request, settings)
    with connect(settings) as api:
        answer = api.call(api.scheduler.Heartbeat, request)
    emit(answer, output, lambda: _lines(answer))
    if not all(ack.accepted for ack in answer.instances) or not all(ack.known for ack in answer.sessions):
        click.get_current_context().exit(exits.REFUSED)


def _add_instance(request: HeartbeatRequest, fields: dict[str, Any]) -> None:
    from moorage.v1.scheduler_pb2 import InstanceState

    values, state = {name: fields[name] for name in _OF_INSTANCE}, fields["state"]
    if fields["instance_id"] is None:
        _refuse_orphans("--instance", state=state, **values)
        return
    if not values["incarnation"]:
        raise click.UsageError("--instance needs --incarnation")
    snapshot = request.instances.add(instance_id=fields["instance_id"], sequence=time.time_ns() // 1_000_000)
    snapshot.observed_time.GetCurrentTime()
    snapshot.state = InstanceState.Value(f"INSTANCE_STATE_{(state or 'serving').upper()}")
    fill(snapshot, **values)


def _add_session(request: HeartbeatRequest, fields: dict[str, Any]) -> None:
    from moorage.v1.scheduler_pb2 import Phase

    values, phase = {name: fields[name] for name in _OF_SESSION}, fields["phase"]
    if fields["session_id"] is None:
        _refuse_orphans("--session", phase=phase, **values)
        return
    if not values["lease_token"]:
        raise click.UsageError("--session needs --lease-token")
    progress = request.sessions.add(session_id=fields["session_id"])
    progress.phase = Phase.Value(f"PHASE_{(phase or 'running').replace('-', '_').upper()}")
    fill(progress, **values)


def _refuse_orphans(owner: str, **values: Any) -> None:
    """A flag of an item that is not reported would be lost without a word."""
    names = {"dp_rank": "rank"}
    orphans = ["--" + names.get(name, name).replace("_", "-") for name, value in values.items() if value is not None]
    if orphans:
        raise click.UsageError(f"{', '.join(orphans)} needs {owner}")


def _lines(answer: HeartbeatResponse) -> Iterator[str]:
    for instance in answer.instances:
        result = "accepted" if instance.accepted else f"refused: {printable(instance.reason) or 'no reason given'}"
        again = ", register again" if instance.reregister else ""
        yield f"instance/{cell(instance.instance_id)} rank={instance.dp_rank} {result}{again}"
    for session in answer.sessions:
        result = (
            "renewed" if session.known else f"refused: {printable(session.reason) or 'unknown, over, or stale token'}"
        )
        yield f"session/{cell(session.session_id)} {result}"
