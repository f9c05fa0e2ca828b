"""``moorage serve``: from configuration to a running server, and to its end."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping

import structlog

from moorage_server.runtime.logs import configure_logging
from moorage_server.runtime.settings_sources import SettingsError, load_settings

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_CONFIGURATION = 2
EXIT_INTERRUPTED = 130

_log = structlog.get_logger(component="server")


def serve(overrides: Mapping[str, object], config_file: str | None) -> int:
    """Runs a server until SIGTERM or SIGINT; returns the exit code of the process.

    ``overrides`` holds what flags set: listen, redis_url, embedded, log_format, log_level, reflection. A second signal
    ends the process without grace.
    """
    try:
        settings = load_settings(config_file, overrides, os.environ)
    except SettingsError as error:
        print("moorage serve: unusable configuration", *error.problems, sep="\n  ", file=sys.stderr)
        return EXIT_CONFIGURATION
    configure_logging(settings.log)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_run(settings))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
