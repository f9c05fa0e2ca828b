"""Prefix indexes on Redis: hashes go in parts, because a script blocks the whole store while it runs."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from moorage_server.store import records
from moorage_server.store.parse import text

#: Bytes of one hash, and hashes that one script call takes at most.
HASH_BYTES, PART = 8, 1_024
#: Instances that one script call looks into at most.
_LOOKUP = 64


class RedisPrefixes(ABC):
    """The part of :class:`moorage_server.store.base.Store` that knows prefix caches."""

    @abstractmethod
    async def _run(self, name: str, pool: str, *args: Any) -> Any:
        """Runs a script on a pool."""

    async def prefix_update(self, pool: str, change: records.PrefixChange, most: int) -> str:
        c = change
        removed, stored = list(_parts(c.removed)), list(_parts(c.stored))
        parts = [*((part, b"") for part in removed), *((b"", part) for part in stored)] or [(b"", b"")]
        names = (c.instance, c.incarnation, c.stream, f"{c.sequence:020d}", f"{c.sequence - 1:020d}")
        for n, (gone, here) in enumerate(parts):
            flags = (int(c.reset and n == 0), int(c.behind), int(n == len(parts) - 1))
            status = text(await self._run("prefix_update", pool, *names, *flags, most, gone, here))
            if status != "OK":
                return status
        return "OK"

    async def prefix_note(
        self, pool: str, instance: str, incarnation: str, hashes: bytes, most: int, first: int = 0
    ) -> bool:
        for n, part in enumerate(_parts(hashes)):
            if not await self._run("prefix_note", pool, instance, incarnation, most, first + n * PART, part):
                return False
        return True

    async def prefix_lookup(self, pool: str, instances: Sequence[str], hashes: bytes) -> list[int]:
        chunks = [instances[at : at + _LOOKUP] for at in range(0, len(instances), _LOOKUP)]
        # Calls that are made at once go in one round trip.
        found = await asyncio.gather(*(self._run("prefix_lookup", pool, hashes, *chunk) for chunk in chunks))
        return [int(count) for counts in found for count in counts]


def _parts(hashes: bytes) -> Iterator[bytes]:
    size = PART * HASH_BYTES
    return (hashes[at : at + size] for at in range(0, len(hashes), size))
