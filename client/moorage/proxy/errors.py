"""Errors as OpenAI's clients know them: a status, Retry-After where it helps, and one JSON object."""

from __future__ import annotations

import json
import math

from aiohttp import web

from moorage.errors import (
    Held,
    InvalidArgument,
    MoorageError,
    Rejected,
    ResourceExhausted,
    Unavailable,
)

#: Seconds to wait where nobody named a time.
DEFAULT_RETRY_AFTER_S = 1.0


class ProxyError(Exception):
    """A request that the proxy answers itself.

    Attributes:
        status: HTTP status.
        message: what happened, for people.
        kind: OpenAI's `type`.
        code: OpenAI's `code`: stable, for programs.
        retry_after: seconds; None where trying again does not help.
    """

    def __init__(self, status: int, message: str, *, kind: str, code: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.retry_after = retry_after

    def body(self) -> bytes:
        """The JSON object."""
        error = {"message": self.message, "type": self.kind, "param": None, "code": self.code}
        return json.dumps({"error": error}).encode()

    def response(self) -> web.Response:
        """The answer."""
        headers = {} if self.retry_after is None else {"Retry-After": str(max(1, math.ceil(self.retry_after)))}
        return web.Response(
            status=self.status, body=self.body(), headers=headers, content_type="application/json", charset="utf-8"
        )


def invalid(message: str, *, status: int = 400, code: str = "invalid_request") -> ProxyError:
    """The request is at fault."""
    return ProxyError(status, message, kind="invalid_request_error", code=code)


def from_moorage(error: MoorageError) -> ProxyError:
    """What the client is told when the control plane does not place its session."""
    code = error.reason or type(error).__name__.upper()
    retry_after = DEFAULT_RETRY_AFTER_S if error.retry_after is None else error.retry_after
    if isinstance(error, (Held, ResourceExhausted)):
        return ProxyError(429, str(error), kind="rate_limit_error", code=code, retry_after=retry_after)
    if isinstance(error, Rejected):
        return invalid(str(error), status=422, code=code)
    if isinstance(error, InvalidArgument):
        return invalid(str(error), code=code)
    if isinstance(error, Unavailable):
        return ProxyError(503, str(error), kind="service_unavailable_error", code=code, retry_after=retry_after)
    # The proxy's own credentials, or a server that answers what this version does not know.
    return ProxyError(502, str(error), kind="api_error", code=code)
