"""moorage ping: is the server there, and is it ready to decide."""

from __future__ import annotations

import json
import time

import click

from moorage.cli import exits, options
from moorage.cli.channel import Api, connect
from moorage.cli.errors import RpcFailure

#: ServingStatus of grpc.health.v1, by number.
_STATUS = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")
#: Pause between two tries under --wait, in seconds.
_PAUSE = 0.2


@click.command(cls=options.Verb)
@click.option("--wait", type=options.duration, default=0.0, help="Try again for up to this long until it is ready.")
@options.output_option("table", "json")
@click.pass_obj
def ping(settings: options.Settings, wait: float, output: str) -> None:
    """Ask the server whether it is alive and ready.

    Exits with 0 where it is ready, 5 where it is not or there is none.
    """
    with connect(settings) as api:
        live, ready, elapsed = _probe(api, time.monotonic() + wait)
    if output == options.JSON:
        answer = {"server": settings.server, "liveness": live, "readiness": ready, "milliseconds": round(elapsed, 3)}
        click.echo(json.dumps(answer, indent=2))
    else:
        state = "ready" if ready == "SERVING" else f"alive, not ready ({ready})"
        click.echo(f"{settings.server} {state} in {elapsed:.1f}ms")
    if ready != "SERVING":
        click.get_current_context().exit(exits.UNAVAILABLE)


def _probe(api: Api, until: float) -> tuple[str, str, float]:
    """Liveness, readiness and the round trip in milliseconds; tries again until it is ready or time is up."""
    while True:
        try:
            live = _check(api, "liveness")
            started = time.perf_counter()
            ready = _check(api, "readiness")
            elapsed = (time.perf_counter() - started) * 1000
            if ready == "SERVING" or time.monotonic() >= until:
                return live, ready, elapsed
        except RpcFailure as error:
            if error.exit_code not in (exits.UNAVAILABLE, exits.DEADLINE) or time.monotonic() >= until:
                raise
        time.sleep(_PAUSE)


def _check(api: Api, service: str) -> str:
    """grpc.health.v1.Health/Check without its package, which clients need not install.

    On the wire, a HealthCheckRequest is a StringValue and a HealthCheckResponse an Int32Value: field 1, same types.
    """
    from google.protobuf.wrappers_pb2 import Int32Value, StringValue

    method = api.channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=StringValue.SerializeToString,
        response_deserializer=Int32Value.FromString,
    )
    status = api.call(method, StringValue(value=service)).value
    return _STATUS[status] if 0 <= status < len(_STATUS) else str(status)
