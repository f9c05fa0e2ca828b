"""Logging: structlog events to stderr, JSON or console, secrets masked, the standard library's loggers included."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor

from moorage_server.runtime.redaction import redact
from moorage_server.runtime.settings import LogSettings

# Warnings of libraries matter, their chatter does not.
_QUIET_LIBRARIES = ("asyncio", "grpc", "grpc._cython.cygrpc", "redis", "fakeredis")


def configure_logging(settings: LogSettings, stream: TextIO | None = None) -> None:
    """Sets up structlog and the root logger to write to ``stream`` (stderr) from now on."""
    out = stream or sys.stderr
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    final = _final_processors(settings, out)
    structlog.configure(
        processors=[*shared, *final],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *args: _NamedLogger(out, *args),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final],
        )
    )
    logging.basicConfig(handlers=[handler], level=level, force=True)
    for name in _QUIET_LIBRARIES:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))


class _NamedLogger(structlog.WriteLogger):
    """Writes, and knows the name that ``structlog.get_logger`` was given.

    A line is one write: several processes may share the stream.
    """

    def __init__(self, out: TextIO, name: str = "moorage") -> None:
        super().__init__(out)
        self.name = name


def redact_secrets(_: Any, __: str, event_dict: EventDict) -> MutableMapping[str, Any]:
    """Masks secrets in every field of an event, the text of a traceback included."""
    masked: dict[str, Any] = redact(event_dict)
    return masked


def _final_processors(settings: LogSettings, out: TextIO) -> list[Processor]:
    # Tracebacks become text before redaction: exceptions quote what they choked on.
    before: list[Processor] = [structlog.processors.format_exc_info, redact_secrets]
    if settings.format == "json" or (settings.format == "auto" and not out.isatty()):
        return [*before, structlog.processors.JSONRenderer(ensure_ascii=False, default=str)]
    return [*before, structlog.dev.ConsoleRenderer(colors=out.isatty())]
