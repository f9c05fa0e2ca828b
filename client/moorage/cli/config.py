"""moorage config: how a pool decides; its policy, its bounds, its classes, the trainer's mixture."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING, Any

import click

from moorage.cli import changes, exits, options, show_pool
from moorage.cli.body import COUNT, UINT32, fill, key_values, read_body
from moorage.cli.cells import cell, printable
from moorage.cli.channel import Api, connect
from moorage.cli.emit import emit
from moorage.cli.errors import CliError, RpcFailure

if TYPE_CHECKING:
    from moorage.v1.inspector_pb2 import GetPoolResponse
    from moorage.v1.operator_pb2 import ConfigurePoolResponse, PoolConfig

_SHARE = click.FloatRange(min=0, min_open=True)
_FORMATS = options.output_option("table", "json", "yaml")


@click.group(cls=options.VerbGroup, invoke_without_command=True)
@_FORMATS
@click.pass_context
def config(ctx: click.Context, output: str) -> None:
    """Show the configuration of the pool, or change it."""
    if ctx.invoked_subcommand is None:
        settings = ctx.find_object(options.Settings) or options.Settings()
        with connect(settings) as api:
            pool = _pool(api)
        if pool is None:
            raise CliError(f"NOT_FOUND: pool {printable(settings.pool)!r} is not known", exits.NOT_FOUND)
        current = pool.config
        emit(current, output, lambda: show_pool.config(current))


@config.command("set")
@options.file_option("A whole PoolConfig, which replaces the one in force,")
@click.option("--policy", type=click.Choice(["static", "session", "misa", "misa-t"]), help="How caps are set.")
@click.option("--mode", type=click.Choice(["enforce", "observe"], case_sensitive=False), help="Whether decisions bind.")
@click.option("--default-class", metavar="CLASS", help="Class of callers that declare none, or an unknown one.")
@click.option("--headroom", type=click.FloatRange(0, 1), help="Share of an instance's blocks that may be booked.")
@click.option("--static-cap", type=UINT32, help="Sessions per instance under the policy static.")
@click.option("--min-sessions", "min_sessions_per_instance", type=UINT32, help="Least sessions per instance.")
@click.option("--max-sessions", "max_sessions_per_instance", type=UINT32, help="Most; 0 means no bound.")
@click.option("--lease-ttl", type=options.duration, help="Lease granted where the caller asks for none.")
@click.option("--heartbeat-interval", type=options.duration, help="Time between snapshots.")
@click.option("--gone-after", type=options.duration, help="Silence after which an instance is gone.")
@click.option("--epoch-interval", type=options.duration, help="Length of an epoch of the controller.")
@click.option("--forecast-margin", type=click.FloatRange(min=0), help="Margin of the forecast, standard deviations.")
@click.option("--healthy-hit-rate", type=click.FloatRange(0, 1), help="Hit rate below which the brake acts.")
@click.option("--max-passes", type=UINT32, help="Sessions that may pass a class whose head does not fit.")
@click.option("--max-policy-lag", type=UINT32, help="Most versions a session may lag behind.")
@click.option(
    "--hold-during-weight-update/--admit-during-weight-update",
    default=None,
    help="Whether new sessions keep away from an instance while weights are loaded into it.",
)
@click.option("--weight-update-timeout", type=options.duration, help="Time after which an update is over by itself.")
@click.option(
    "--class-inference", type=click.Choice(["off", "unlabelled", "all"], case_sensitive=False),
    help="Whose class may be told from behaviour.",
)  # fmt: skip
@click.option("--unset", multiple=True, metavar="FIELD", help="Back to the default, such as max-policy-lag; repeat.")
@_FORMATS
@click.pass_obj
def set_(
    settings: options.Settings, /, file: IO[bytes] | None, unset: tuple[str, ...], output: str, **fields: Any
) -> None:
    """Set fields of the configuration; those not named stay as they are."""
    from moorage.v1.operator_pb2 import ClassInference, Mode, PoolConfig

    new = read_body(file, PoolConfig())
    given = [name for name, value in fields.items() if value is not None]
    paths = [*given, *_known_fields(unset, new)]
    if file is not None and unset:
        raise click.UsageError("-f replaces the whole configuration: leave the field out there instead of --unset")
    if file is None and not paths:
        raise click.UsageError("nothing to set: name a field, such as --policy misa-t")
    mode, inference = fields.pop("mode"), fields.pop("class_inference")
    fill(new, **fields)
    if mode is not None:
        new.mode = Mode.Value(f"MODE_{mode.upper()}")
    if inference is not None:
        new.class_inference = ClassInference.Value(f"CLASS_INFERENCE_{inference.upper()}")
    with connect(settings) as api:
        answer = _configure(api, new, [] if file is not None else paths)
    emit(answer, output, lambda: [_line(settings.pool, ["whole"] if file is not None else paths)])


@config.command("class")
@click.argument("name", metavar="CLASS")
@click.option("--target-share", type=_SHARE, help="Share of the trainer's mixture, any positive weight.")
@click.option("--prior-context-tokens", type=COUNT, help="Context of a session, until evidence accrues.")
@click.option("--prior-residency", type=options.duration, help="Admission to release, until evidence accrues.")
@click.option("--refuse/--allow", "refused", default=None, help="Refuse the class, or take it again.")
@click.option("--alias", "aliases", multiple=True, help="Another name callers may use; repeat. Replaces the aliases.")
@click.option("--remove", is_flag=True, help="Forget the configuration of the class.")
@_FORMATS
@click.pass_obj
def class_(settings: options.Settings, /, name: str, remove: bool, output: str, **fields: Any) -> None:
    """Set fields of CLASS, which is added where it is new; those not named stay as they are."""
    from moorage.v1.operator_pb2 import PoolConfig

    given = any(value not in (None, ()) for value in fields.values())
    if given == remove:
        raise click.UsageError("name fields to set, such as --target-share 0.4, or --remove")
    new = PoolConfig()
    with connect(settings) as api:
        pool = _pool(api)
        current = None if pool is None else pool.config
        if not remove:
            entry = new.classes[name]
            if current is not None and name in current.classes:
                entry.CopyFrom(current.classes[name])
            fill(entry, **fields)
        answer = _configure(api, new, [f"classes.{name}"])
    _warn(pool, [name])
    emit(answer, output, lambda: _told(settings.pool, current, answer, [name]))


@config.command()
@click.argument("shares", nargs=-1, required=True, metavar="CLASS=SHARE...", callback=key_values)
@_FORMATS
@click.pass_obj
def mixture(settings: options.Settings, shares: dict[str, str], output: str) -> None:
    """Set the trainer's mixture: all of it, so that classes not named lose their share.

    Any positive weights do, such as agentic=48.6 rlvr=33.1 rlhf=18.2.
    """
    from moorage.v1.operator_pb2 import PoolConfig

    weights = {name: _weight(value) for name, value in shares.items()}
    new = PoolConfig()
    with connect(settings) as api:
        pool = _pool(api)
        current = None if pool is None else pool.config
        for name, entry in (current.classes if current is not None else {}).items():
            if name in weights or entry.HasField("target_share"):
                new.classes[name].CopyFrom(entry)
                new.classes[name].ClearField("target_share")
        for name, weight in weights.items():
            new.classes[name].target_share = weight
        names = sorted(new.classes)
        answer = _configure(api, new, [f"classes.{name}" for name in names])
    _warn(pool, weights)
    emit(answer, output, lambda: _told(settings.pool, current, answer, names))


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = -1.0
    if not 0 < weight < float("inf"):
        raise click.BadParameter(f"{text!r} is no share above 0", param_hint="CLASS=SHARE")
    return weight


def _warn(pool: GetPoolResponse | None, names: Iterable[str]) -> None:
    for text in changes.unknown(pool, names):
        click.echo(f"warning: {text}", err=True)


def _told(pool: str, before: PoolConfig | None, answer: ConfigurePoolResponse, names: Sequence[str]) -> list[str]:
    """What was configured, and what is another one now."""
    return [_line(pool, [f"classes.{name}" for name in names]), *changes.lines(before, answer.config, names)]


def _pool(api: Api) -> GetPoolResponse | None:
    """The pool with the configuration in force; None where it is not known yet: configuring creates it."""
    from moorage.v1.inspector_pb2 import GetPoolRequest

    try:
        return api.call(api.inspector.GetPool, GetPoolRequest(pool=api.pool))
    except RpcFailure as error:
        if error.status == "NOT_FOUND":
            return None
        raise


def _configure(api: Api, new: PoolConfig, paths: Sequence[str]) -> ConfigurePoolResponse:
    """Set the fields of `paths`; all of them where there are none."""
    from moorage.v1.operator_pb2 import ConfigurePoolRequest

    request = ConfigurePoolRequest(pool=api.pool, config=new, request_id=str(uuid.uuid4()))
    if paths:
        request.update_mask.paths.extend(paths)
    return api.call(api.operator.ConfigurePool, request)


def _known_fields(names: Sequence[str], configuration: PoolConfig) -> list[str]:
    fields = [name.replace("-", "_") for name in names]
    unknown = [name for name in fields if name not in configuration.DESCRIPTOR.fields_by_name]
    if unknown:
        known = ", ".join(name.replace("_", "-") for name in configuration.DESCRIPTOR.fields_by_name)
        raise click.UsageError(f"no field {unknown[0]!r} to unset; there are {known}")
    return fields


def _line(pool: str, paths: Sequence[str]) -> str:
    return f"pool/{cell(pool)} configured: {', '.join(printable(path) for path in paths)}"
