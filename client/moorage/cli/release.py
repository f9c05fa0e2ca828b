"""moorage release: end a session, or take a held one out of the queue."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any

import click

from moorage.cli import options
from moorage.cli.body import COUNT, address, fill, read_body, require
from moorage.cli.cells import cell, duration
from moorage.cli.channel import connect
from moorage.cli.emit import emit

if TYPE_CHECKING:
    from moorage.v1.scheduler_pb2 import ReleaseResponse

_USAGE = ("prompt_tokens", "cached_tokens", "output_tokens", "context_tokens")


@click.command(cls=options.Verb)
@click.argument("session_id", metavar="SESSION", required=False)
@options.file_option("ReleaseRequest")
@click.option("--lease-token", metavar="TOKEN", help="Token of the session's lease; a held session has none.")
@click.option(
    "--outcome",
    type=click.Choice(["completed", "aborted", "failed", "paused"], case_sensitive=False),
    help="How it ended; required. paused keeps its seniority for its next admit.",
)
@click.option("--prompt-tokens", type=COUNT, help="Prompt tokens of all turns.")
@click.option("--cached-tokens", type=COUNT, help="Of these, tokens from the prefix cache.")
@click.option("--output-tokens", type=COUNT, help="Tokens generated in all turns.")
@click.option("--context-tokens", type=COUNT, help="Final context.")
@click.option("--request-id", metavar="UUID", help="Makes a repeat of the call safe [default: a fresh one].")
@options.output_option("table", "json", "yaml", "name")
@click.pass_obj
def release(
    settings: options.Settings, /, file: IO[bytes] | None, outcome: str | None, output: str, **fields: Any
) -> None:
    """End SESSION.

    Idempotent: releasing a session that is unknown or already over says so and exits with 0.
    """
    from moorage.v1.scheduler_pb2 import Outcome, ReleaseRequest

    request = read_body(file, ReleaseRequest())
    usage = {name: fields.pop(name) for name in _USAGE}
    fill(request, **fields)
    fill(request.usage, **usage)
    if outcome is not None:
        request.outcome = Outcome.Value(f"OUTCOME_{outcome.upper()}")
    address(request, settings)
    require(request, session_id="SESSION", outcome="--outcome")
    with connect(settings) as api:
        answer = api.call(api.scheduler.Release, request)
    session_id = request.session_id
    emit(answer, output, lambda: [_line(session_id, answer)], lambda: [session_id])


def _line(session_id: str, answer: ReleaseResponse) -> str:
    name = f"session/{cell(session_id)}"
    done = "released" if answer.released else "not released: unknown or already over"
    if not answer.HasField("residency"):
        return f"{name} {done}"
    cost = answer.residency
    held = duration(cost, "duration")
    return f"{name} {done} residency={held} block-seconds={cost.block_seconds:.0f} peak-blocks={cost.peak_blocks}"
