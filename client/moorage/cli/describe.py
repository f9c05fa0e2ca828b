"""moorage describe: one pool, instance, session or class at length."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from moorage.cli import exits, options, show_class, show_instance, show_pool, show_session
from moorage.cli.body import UINT32
from moorage.cli.cells import printable
from moorage.cli.channel import connect
from moorage.cli.emit import emit
from moorage.cli.errors import CliError

_FORMATS = options.output_option("table", "json", "yaml")


@click.group(cls=options.VerbGroup)
def describe() -> None:
    """Show one pool, instance, session or class at length."""


@describe.command()
@_FORMATS
@click.pass_obj
def pool(settings: options.Settings, output: str) -> None:
    """Show the pool: load, mixture, configuration."""
    from moorage.v1.inspector_pb2 import GetPoolRequest

    with connect(settings) as api:
        answer = api.call(api.inspector.GetPool, GetPoolRequest(pool=settings.pool))
        # A pressure of 0 means nothing where no instance has a hit rate.
        unsure = not answer.pressure and output == options.TABLE
        instances = api.instances().instances if unsure else []
    emit(answer, output, lambda: show_pool.details(answer, instances))


@describe.command()
@click.argument("name", metavar="INSTANCE")
@click.option("--rank", "dp_rank", type=UINT32, help="One data-parallel rank [default: all].")
@_FORMATS
@click.pass_obj
def instance(settings: options.Settings, name: str, dp_rank: int | None, output: str) -> None:
    """Show INSTANCE: load, caps, signals. JSON is a ListInstances answer with its ranks."""
    from moorage.v1.inspector_pb2 import ListInstancesResponse

    with connect(settings) as api:
        found = [
            item
            for item in api.instances().instances
            if item.snapshot.instance_id == name and dp_rank in (None, item.snapshot.dp_rank)
        ]
    if not found:
        raise _missing("instance", name, settings, "instances")

    def lines() -> list[str]:
        blocks = [show_instance.details(item) for item in found]
        return [line for block in blocks for line in (*block, "")][:-1]

    emit(ListInstancesResponse(instances=found), output, lines)


@describe.command()
@click.argument("session_id", metavar="SESSION")
@_FORMATS
@click.pass_obj
def session(settings: options.Settings, session_id: str, output: str) -> None:
    """Show SESSION: class, home, lease, cost, hold, history."""
    from moorage.v1.inspector_pb2 import GetSessionRequest

    with connect(settings) as api:
        answer = api.call(api.inspector.GetSession, GetSessionRequest(pool=settings.pool, session_id=session_id))
    emit(answer, output, lambda: show_session.details(answer, datetime.now(UTC)))


@describe.command("class")
@click.argument("name", metavar="CLASS")
@_FORMATS
@click.pass_obj
def workload_class(settings: options.Settings, name: str, output: str) -> None:
    """Show CLASS: load, estimates, configuration. JSON is a ListClasses answer with this class."""
    from moorage.v1.inspector_pb2 import GetPoolRequest, ListClassesResponse

    with connect(settings) as api:
        found = [item for item in api.classes().classes if item.workload_class == name]
        if not found:
            raise _missing("class", name, settings, "classes")
        config = api.call(api.inspector.GetPool, GetPoolRequest(pool=settings.pool)).config
    emit(ListClassesResponse(classes=found), output, lambda: show_class.details(found[0], config))


def _missing(kind: str, name: str, settings: options.Settings, noun: str) -> CliError:
    message = f"NOT_FOUND: no {kind} {printable(name)!r} in pool {printable(settings.pool)!r}"
    return CliError(message, exits.NOT_FOUND, [f"hint: `moorage get {noun}` lists them"])
