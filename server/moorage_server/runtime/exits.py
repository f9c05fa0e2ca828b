"""Exit codes of ``moorage serve``."""

from __future__ import annotations

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_CONFIGURATION = 2
EXIT_INTERRUPTED = 130
