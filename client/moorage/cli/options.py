"""Options shared by the verbs: where the server is, which pool, how to print.

Global options are accepted before and after the verb; the last one given wins. Flags go over environment over defaults.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from moorage.credentials import Proof

DEFAULT_SERVER = "127.0.0.1:50061"
DEFAULT_POOL = "default"
DEFAULT_TIMEOUT = 10.0

TABLE, WIDE, JSON, YAML, NAME = "table", "wide", "json", "yaml", "name"

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0}
_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


@dataclass
class Settings:
    """What the global options say; `given` holds the names of those on the command line. Timeout in seconds."""

    server: str = DEFAULT_SERVER
    pool: str = DEFAULT_POOL
    timeout: float = DEFAULT_TIMEOUT
    token: str | None = field(default=None, repr=False)
    token_file: str | None = None
    plaintext_token: bool = False
    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    given: set[str] = field(default_factory=set)

    def proof(self) -> Proof:
        """What to prove oneself with. A flag goes over the environment, also where the two are of different kinds."""
        from moorage.credentials import Proof

        token, token_file = self.token, self.token_file
        if token is not None and token_file is not None and not {"token", "token_file"} <= self.given:
            token, token_file = (None, token_file) if "token_file" in self.given else (token, None)
        if (self.cert is None) != (self.key is None):
            raise click.UsageError("--cert and --key go together")
        proof = Proof(token, token_file, self.tls, self.ca, self.cert, self.key, self.plaintext_token)
        try:
            return proof.resolved({})
        except ValueError as error:
            raise click.UsageError(str(error)) from None


def duration(value: str | float) -> float:
    """Type of options that take a time span: a number of seconds, or one with a unit (500ms, 30s, 5m, 2h, 1d)."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|m|h|d|)", str(value).strip())
    if match is None:
        raise click.BadParameter(f"{value!r} is no duration such as 30, 500ms, 30s, 5m or 2h")
    return float(match[1]) * _UNITS[match[2]]


class GlobalOption(click.Option):
    """An option that every verb takes; it fills Settings instead of being passed to the verb."""


def _store(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    settings = ctx.find_root().ensure_object(Settings)
    source = ctx.get_parameter_source(str(param.name))
    if source not in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT):
        return
    setattr(settings, str(param.name), value)
    if source is ParameterSource.COMMANDLINE:
        settings.given.add(str(param.name))


def _global_options(root: bool) -> list[click.Parameter]:
    """Only the root reads the environment: a variable must not overrule a flag given before the verb."""

    def option(*names: str, env: str | None = None, **attrs: Any) -> click.Option:
        return GlobalOption(
            names, expose_value=False, callback=_store, default=None, envvar=env if root else None, **attrs
        )

    file = click.Path(exists=True, dir_okay=False)
    return [
        option(
            "--server",
            env="MOORAGE_SERVER",
            metavar="HOST:PORT",
            help=f"Server to call [env MOORAGE_SERVER, default {DEFAULT_SERVER}].",
        ),
        option(
            "-p", "--pool", env="MOORAGE_POOL", metavar="POOL", help=f"Pool [env MOORAGE_POOL, default {DEFAULT_POOL}]."
        ),
        option("--timeout", type=duration, help=f"Deadline of one call [default {DEFAULT_TIMEOUT:g}s]."),
        option("--token", env="MOORAGE_TOKEN", metavar="TOKEN", help="Bearer token [env MOORAGE_TOKEN]."),
        option(
            "--token-file",
            env="MOORAGE_TOKEN_FILE",
            type=file,
            help="File that holds the token, read again when it changes [env MOORAGE_TOKEN_FILE].",
        ),
        option(
            "--plaintext-token",
            env="MOORAGE_PLAINTEXT_TOKEN",
            is_flag=True,
            help="Send the token without TLS to other machines too [env MOORAGE_PLAINTEXT_TOKEN].",
        ),
        option("--tls", env="MOORAGE_TLS", is_flag=True, help="Use TLS; implied by --ca and --cert [env MOORAGE_TLS]."),
        option("--ca", env="MOORAGE_CA", type=file, help="CA certificates to trust, PEM [env MOORAGE_CA]."),
        option(
            "--cert", env="MOORAGE_CERT", type=file, help="Client certificate, PEM (with --key) [env MOORAGE_CERT]."
        ),
        option("--key", env="MOORAGE_KEY", type=file, help="Client key, PEM (with --cert) [env MOORAGE_KEY]."),
    ]


class _TakesGlobals(click.Command):
    """Adds the global options to a command, in a help section of their own."""

    def __init__(self, *args: Any, root: bool = False, **attrs: Any) -> None:
        super().__init__(*args, **attrs)
        self.params += _global_options(root)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verb's own options first."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": [], "Global options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                sections["Global options" if isinstance(param, GlobalOption) else "Options"].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
        if isinstance(self, click.Group):
            self.format_commands(ctx, formatter)


class Verb(_TakesGlobals):
    """A command that calls the server."""


class VerbGroup(_TakesGlobals, click.Group):
    """A group of such commands."""

    command_class = Verb


def output_option(*formats: str) -> Callable[[_Decorated], _Decorated]:
    """The option `-o`, passed as `output`; the first format is the default."""
    return click.option(
        "-o", "--output", type=click.Choice(formats), default=formats[0], help=f"Output format [default {formats[0]}]."
    )


def file_option(message: str) -> Callable[[_Decorated], _Decorated]:
    """The option `-f`, passed as `file`: a request in protobuf JSON; flags go over it."""
    return click.option(
        "-f", "--file", type=click.File("rb"), help=f"{message} in protobuf JSON; - reads stdin. Flags go over it."
    )
