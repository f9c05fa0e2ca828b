"""Page tokens: opaque to callers, the place after which the next page begins to us."""

from __future__ import annotations

import base64
import binascii

from moorage_server.errors import InvalidField


def encode(after: str) -> str:
    """The token of a page that begins after ``after``; empty for none."""
    return base64.urlsafe_b64encode(after.encode()).decode() if after else ""


def decode(token: str) -> str:
    """The reverse of :func:`encode`. Raises InvalidField for what no answer ever held."""
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise InvalidField("page_token", token, "a next_page_token of an earlier answer") from None
