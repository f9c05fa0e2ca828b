"""moorage cordon, uncordon, drain, evict, weights: what an operator does to instances, sessions and pools."""

from __future__ import annotations

from collections.abc import Callable

import click

from moorage.cli import options
from moorage.cli.body import UINT32
from moorage.cli.cells import cell
from moorage.cli.channel import connect
from moorage.cli.emit import emit


def _instance_verb(command: Callable[..., None]) -> click.Command:
    """A verb that takes an instance, and one of its ranks or all of them."""
    command = click.pass_obj(command)
    command = options.output_option("table", "json", "yaml", "name")(command)
    command = click.option("--rank", "dp_rank", type=UINT32, help="One data-parallel rank [default: all].")(command)
    command = click.argument("instance_id", metavar="INSTANCE")(command)
    return click.command(cls=options.Verb)(command)


@_instance_verb
def cordon(settings: options.Settings, instance_id: str, dp_rank: int | None, output: str) -> None:
    """Keep new sessions away from INSTANCE; its sessions stay."""
    from moorage.v1.operator_pb2 import CordonInstanceRequest

    request = CordonInstanceRequest(pool=settings.pool, instance_id=instance_id, dp_rank=dp_rank)
    with connect(settings) as api:
        answer = api.call(api.operator.CordonInstance, request)
    emit(answer, output, lambda: [_changed(instance_id, "cordoned", answer.changed)], lambda: [instance_id])


@_instance_verb
def uncordon(settings: options.Settings, instance_id: str, dp_rank: int | None, output: str) -> None:
    """Open INSTANCE to new sessions again; also ends a drain."""
    from moorage.v1.operator_pb2 import UncordonInstanceRequest

    request = UncordonInstanceRequest(pool=settings.pool, instance_id=instance_id, dp_rank=dp_rank)
    with connect(settings) as api:
        answer = api.call(api.operator.UncordonInstance, request)
    emit(answer, output, lambda: [_changed(instance_id, "uncordoned", answer.changed)], lambda: [instance_id])


@_instance_verb
def drain(settings: options.Settings, instance_id: str, dp_rank: int | None, output: str) -> None:
    """Move sessions off INSTANCE, each at its next place; take no new ones."""
    from moorage.v1.operator_pb2 import DrainInstanceRequest

    request = DrainInstanceRequest(pool=settings.pool, instance_id=instance_id, dp_rank=dp_rank)
    with connect(settings) as api:
        answer = api.call(api.operator.DrainInstance, request)

    def line() -> str:
        return f"{_changed(instance_id, 'draining', answer.changed)} sessions-to-move={answer.sessions}"

    emit(answer, output, lambda: [line()], lambda: [instance_id])


def _changed(instance_id: str, verbed: str, ranks: int) -> str:
    name = f"instance/{cell(instance_id)}"
    return f"{name} {verbed} ranks={ranks}" if ranks else f"{name} unchanged: already {verbed}"


@click.command(cls=options.Verb)
@click.argument("session_id", metavar="SESSION")
@click.option("--reason", default="", metavar="TEXT", help="Why, for the session's history.")
@options.output_option("table", "json", "yaml", "name")
@click.pass_obj
def evict(settings: options.Settings, session_id: str, reason: str, output: str) -> None:
    """End SESSION from outside, held or placed.

    Its caller learns of it at the next call. Evicting a session that is unknown or already over says so and exits
    with 0.
    """
    from moorage.v1.operator_pb2 import EvictSessionRequest

    request = EvictSessionRequest(pool=settings.pool, session_id=session_id, reason=reason)
    with connect(settings) as api:
        answer = api.call(api.operator.EvictSession, request)
    done = "evicted" if answer.evicted else "not evicted: unknown or already over"
    emit(answer, output, lambda: [f"session/{cell(session_id)} {done}"], lambda: [session_id])


@click.group(cls=options.VerbGroup)
def weights() -> None:
    """Mark the start and the end of a weight update."""


def _of_instance(command: Callable[..., None]) -> Callable[..., None]:
    """The options that narrow a weight update down to an instance, or one of its ranks."""
    command = options.output_option("table", "json", "yaml")(command)
    command = click.option("--rank", "dp_rank", type=UINT32, help="One data-parallel rank of it [default: all].")(
        command
    )
    return click.option("--instance", "instance_id", metavar="INSTANCE", help="One instance [default: all].")(command)


@weights.command(cls=options.Verb)
@click.argument("version")
@_of_instance
@click.pass_obj
def begin(settings: options.Settings, version: str, instance_id: str | None, dp_rank: int | None, output: str) -> None:
    """Say that weights VERSION are being loaded: new sessions wait, nothing is braked, leases run on."""
    from moorage.v1.operator_pb2 import BeginWeightUpdateRequest

    request = BeginWeightUpdateRequest(
        pool=settings.pool, weight_version=version, instance_id=instance_id or "", dp_rank=dp_rank
    )
    with connect(settings) as api:
        answer = api.call(api.operator.BeginWeightUpdate, request)
    line = f"pool/{cell(settings.pool)} weight update begun version={cell(version)} ranks={answer.changed}"
    emit(answer, output, lambda: [line])


@weights.command(cls=options.Verb)
@click.argument("version", required=False)
@click.option("--policy-version", type=int, help="The trainer's number of VERSION [default: VERSION, if a number].")
@click.option("--cache-cleared", is_flag=True, help="The engines' prefix caches were cleared with it.")
@_of_instance
@click.pass_obj
def end(
    settings: options.Settings,
    version: str | None,
    policy_version: int | None,
    cache_cleared: bool,
    instance_id: str | None,
    dp_rank: int | None,
    output: str,
) -> None:
    """Say that weights VERSION are in force; without VERSION, that the old ones stay."""
    from moorage.v1.operator_pb2 import EndWeightUpdateRequest

    request = EndWeightUpdateRequest(
        pool=settings.pool,
        weight_version=version or "",
        policy_version=policy_version,
        cache_cleared=cache_cleared or None,
        instance_id=instance_id or "",
        dp_rank=dp_rank,
    )
    with connect(settings) as api:
        answer = api.call(api.operator.EndWeightUpdate, request)
    said = f"ended version={cell(version)}" if version else "ended, the old weights stay"
    emit(answer, output, lambda: [f"pool/{cell(settings.pool)} weight update {said} ranks={answer.changed}"])
