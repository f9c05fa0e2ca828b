"""Log lines as `event key=value ...`, as the collector writes them."""

import logging

from moorage.collect.logs import line

__all__ = ["line", "logger"]

logger = logging.getLogger("moorage.proxy")
