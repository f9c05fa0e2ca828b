"""The limits of the wire, in one place (contract.md, *Sizes* and *Errors*). Inclusive, unless a name says otherwise."""

from __future__ import annotations

#: Any id: pool, session, instance, class, group, tenant, incarnation, token.
ID_BYTES = 256
#: Tokens, blocks and gauges of requests.
QUANTITY = 2**40
#: Cumulative counters, sequence numbers and epochs.
COUNTER = 2**63 - 1

#: Of one prompt, and stored and removed in one update of an instance's prefix cache.
PREFIX_HASHES = 16_384
HEARTBEAT_ITEMS = 1_000
#: Not items of a Heartbeat: one engine may hold more sessions than one call has items.
RESIDENT_SESSIONS = 16_384

#: Of one frame of a stream.
DISPATCH_ITEMS = 1_000

LABELS = 64
LABEL_BYTES = 256

LEASE_TTL_LEAST_S = 1
LEASE_TTL_MOST_S = 24 * 3600
MAX_WAIT_S = 600

PAGE_SIZE = 1_000
PAGE_SIZE_DEFAULT = 100
#: Opaque to callers; leaves room for an escaped id.
PAGE_TOKEN_BYTES = 4_096

ENDPOINT_BYTES = 2_048
#: EvictSession's words for the session's history.
REASON_BYTES = 1_024

CLASSES = 256
ALIASES = 64
MASK_PATHS = 512

MESSAGE_BYTES = 4 * 1024 * 1024
