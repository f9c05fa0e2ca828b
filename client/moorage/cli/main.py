"""The command `moorage`."""

from __future__ import annotations

from typing import Any

import click

from moorage.cli import operate
from moorage.cli.admit import admit
from moorage.cli.collect import collect
from moorage.cli.completion import completion
from moorage.cli.config import config
from moorage.cli.describe import describe
from moorage.cli.errors import Interrupted
from moorage.cli.explain import explain
from moorage.cli.get import get
from moorage.cli.heartbeat import heartbeat
from moorage.cli.options import VerbGroup
from moorage.cli.ping import ping
from moorage.cli.place import place
from moorage.cli.proxy import proxy
from moorage.cli.release import release
from moorage.cli.serve import serve
from moorage.cli.top import top
from moorage.cli.watch import watch


class _Moorage(VerbGroup):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted from None


@click.group(
    cls=_Moorage,
    root=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 ok, 1 error, 2 usage, 3 refused (held, rejected, wrong state), 4 not found, 5 unavailable, "
    "6 deadline, 130 interrupted.",
)
@click.version_option(package_name="moorage", prog_name="moorage")
def cli() -> None:
    """Admit and place RL rollout sessions on pools of LLM inference engines."""


for _verb in (
    serve, collect, proxy, ping, get, describe, explain, watch, top, admit, place, release, heartbeat, config,
    operate.cordon, operate.uncordon, operate.drain, operate.evict, operate.weights, completion,
):  # fmt: skip
    cli.add_command(_verb)


def main() -> None:
    """Entry point: runs the command and leaves the process with its exit code."""
    cli(prog_name="moorage")


if __name__ == "__main__":
    main()
