"""Exit codes of the command `moorage`, for scripts to tell the main failures apart."""

from __future__ import annotations

OK = 0
#: Anything without a code of its own.
ERROR = 1
#: Wrong flags or arguments, an unreadable request file, INVALID_ARGUMENT.
USAGE = 2
#: HOLD or REJECT, an item of a heartbeat not taken, FAILED_PRECONDITION, ABORTED.
REFUSED = 3
#: NOT_FOUND: unknown session, pool, instance or class.
NOT_FOUND = 4
#: UNAVAILABLE: no server, no store behind it, or not ready.
UNAVAILABLE = 5
#: DEADLINE_EXCEEDED.
DEADLINE = 6
#: Ctrl-C.
INTERRUPTED = 130

#: Exit code by the name of a gRPC status code; all others are ERROR.
BY_STATUS = {
    "INVALID_ARGUMENT": USAGE,
    "FAILED_PRECONDITION": REFUSED,
    "ABORTED": REFUSED,
    "NOT_FOUND": NOT_FOUND,
    "UNAVAILABLE": UNAVAILABLE,
    "DEADLINE_EXCEEDED": DEADLINE,
}
