"""moorage completion: the script that completes verbs and flags in a shell."""

from __future__ import annotations

import click

_SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a completion script, for SHELL to evaluate.

    bash and zsh: eval "$(moorage completion bash)"; fish: moorage completion fish | source
    """
    from click.shell_completion import BashComplete, FishComplete, ZshComplete

    script = dict(zip(_SHELLS, (BashComplete, ZshComplete, FishComplete), strict=True))[shell]
    click.echo(script(ctx.find_root().command, {}, "moorage", "_MOORAGE_COMPLETE").source())
