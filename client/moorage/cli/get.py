"""moorage get: pools, instances, sessions and classes as tables."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from moorage.cli import options, show_class, show_instance, show_pool, show_session
from moorage.cli.channel import connect
from moorage.cli.emit import emit

_FORMATS = options.output_option("table", "wide", "json", "yaml", "name")
_PHASES = ["held", "placed", "running", "tool-wait", "paused"]


@click.group(cls=options.VerbGroup)
def get() -> None:
    """Show a pool, its instances, sessions or classes."""


@get.command()
@_FORMATS
@click.pass_obj
def pool(settings: options.Settings, output: str) -> None:
    """Show the pool: load, cap, pressure, mixture."""
    from moorage.v1.inspector_pb2 import GetPoolRequest

    with connect(settings) as api:
        answer = api.call(api.inspector.GetPool, GetPoolRequest(pool=settings.pool))
        # A pressure of 0 means nothing where no instance has a hit rate.
        unsure = not answer.pressure and output in (options.TABLE, options.WIDE)
        instances = api.instances().instances if unsure else []
    emit(answer, output, lambda: show_pool.rows(answer, instances, output == options.WIDE), lambda: [answer.pool])


@get.command()
@_FORMATS
@click.pass_obj
def instances(settings: options.Settings, output: str) -> None:
    """Show the instances of the pool, one row per rank."""
    with connect(settings) as api:
        answer = api.instances()
    names = dict.fromkeys(instance.snapshot.instance_id for instance in answer.instances)
    emit(answer, output, lambda: show_instance.rows(answer.instances, output == options.WIDE), lambda: names)


@get.command()
@click.option("--class", "workload_class", default="", metavar="CLASS", help="Only this class.")
@click.option("--instance", "instance_id", default="", metavar="INSTANCE", help="Only this instance.")
@click.option("--phase", type=click.Choice(_PHASES, case_sensitive=False), help="Only this phase.")
@click.option("--held/--not-held", default=None, help="Only held ones, or only others.")
@click.option("--limit", type=click.IntRange(min=1), help="Stop after that many [default: all].")
@_FORMATS
@click.pass_obj
def sessions(
    settings: options.Settings,
    workload_class: str,
    instance_id: str,
    phase: str | None,
    held: bool | None,
    limit: int | None,
    output: str,
) -> None:
    """Show the sessions of the pool, held ones included."""
    from moorage.v1.inspector_pb2 import ListSessionsRequest
    from moorage.v1.scheduler_pb2 import Phase

    request = ListSessionsRequest(pool=settings.pool, workload_class=workload_class, instance_id=instance_id, held=held)
    if phase is not None:
        request.phase = Phase.Value(f"PHASE_{phase.replace('-', '_').upper()}")
    with connect(settings) as api:
        answer = api.sessions(request, limit)
    now = datetime.now(UTC)
    emit(
        answer,
        output,
        lambda: show_session.rows(answer.sessions, output == options.WIDE, now),
        lambda: [session.session_id for session in answer.sessions],
    )


@get.command()
@_FORMATS
@click.pass_obj
def classes(settings: options.Settings, output: str) -> None:
    """Show what the policy believes of each class."""
    with connect(settings) as api:
        answer = api.classes()
    emit(
        answer,
        output,
        lambda: show_class.rows(answer.classes, output == options.WIDE),
        lambda: [item.workload_class for item in answer.classes],
    )
