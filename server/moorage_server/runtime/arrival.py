"""A session that wants in."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from moorage_server.core.view import Ask
from moorage_server.store.base import Request, Resumed


@dataclass(slots=True)
class Arrival:
    """A session that wants in, with what the ledger keeps of it."""

    ask: Ask
    request: Request
    declared_class: str = ""
    group_size: int = 0
    lease_ttl_ms: int = 60_000
    label: str = ""
    #: Names this call in the ledger, so that what it alone brought about can be taken back.
    ticket: str = field(default_factory=lambda: secrets.token_hex(8))
    #: One hash per full block of the prompt.
    hashes: Sequence[int] = ()
    #: Where a session that was paused was at home, once the ledger told.
    former: Resumed | None = None
    #: When its hashes were last looked up, on the event loop's clock, and what came of it: tokens by instance.
    looked_up: float | None = None
    found: dict[str, int] = field(default_factory=dict)
