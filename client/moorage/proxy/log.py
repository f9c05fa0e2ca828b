"""Log lines as `event key=value ...`, as the collector writes them."""

import logging

from aiohttp.http_exceptions import HttpProcessingError

from moorage.collect.logs import line

__all__ = ["line", "logger", "tell_bad_requests_in_a_line"]

logger = logging.getLogger("moorage.proxy")


def tell_bad_requests_in_a_line() -> None:
    """Keeps tracebacks for failures of ours: SGLang's gateway asks in HTTP/2 first, to see who speaks it."""
    logging.getLogger("aiohttp.server").addFilter(_is_our_failure)


def _is_our_failure(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, HttpProcessingError):
        return True
    logger.info(line("not_understood", error=error.message.strip().splitlines()[0]))
    return False
