"""Prefix knowledge at work: looks prompts up before they are placed, and notes where they went."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType

from moorage_server.core import prefixes
from moorage_server.core.view import EVENTS, Pool
from moorage_server.errors import MoorageFailure
from moorage_server.runtime.arrivals import Arrival
from moorage_server.store.base import Store
from moorage_server.store.records import Placed

#: What was found for a caller that waits near the head of its queue is good for so long, seconds.
_GOOD_S = 1.0


class Prefixes:
    """Of one pool."""

    def __init__(self, store: Store, pool: str) -> None:
        self._store = store
        self._pool = pool

    async def look_up(self, view: Pool, arrival: Arrival) -> None:
        """Tells ``arrival.ask`` what instances hold of its prompt: one round trip, and none without hashes to find."""
        arrival.looked_up, arrival.found = asyncio.get_running_loop().time(), {}
        asked = prefixes.searched(view, arrival.ask, len(arrival.hashes)) if arrival.hashes else []
        if asked:
            positions = prefixes.probes(len(arrival.hashes))
            probes = pack([arrival.hashes[n] for n in positions])
            counts = await self._store.prefix_lookup(self._pool, [i.key for i in asked], probes)
            for instance, count in zip(asked, counts, strict=True):
                if count:
                    arrival.found[instance.key] = (positions[count - 1] + 1) * instance.block_size
        tell(view, arrival)

    async def look_up_heads(self, view: Pool, arrival_here: Callable[[str], Arrival | None]) -> None:
        """Tells the view what is known of the sessions at the heads of its queues whose callers wait here.

        Nobody else is looked up: their turn is far, and by then other blocks are cached.
        """
        places = [(q, n, arrival_here(h.ask.session_id)) for q in view.queues.values() for n, h in enumerate(q.heads)]
        near = [(queue, n, arrival) for queue, n, arrival in places if arrival is not None]
        now = asyncio.get_running_loop().time()
        old = [a for _, _, a in near if a.hashes and (a.looked_up is None or now - a.looked_up > _GOOD_S)]
        # Calls that are made at once go in one round trip.
        await asyncio.gather(*(self.look_up(view, a) for a in old))
        for queue, n, arrival in near:
            tell(view, arrival)
            head = queue.heads[n]
            queue.heads[n] = replace(head, ask=replace(head.ask, reusable=arrival.ask.reusable))

    async def note(self, view: Pool, placed: Placed, hashes: Sequence[int], *, arrived: bool) -> None:
        """Notes what an instance is sent whose engine does not tell itself; what is not noted is only not known.

        Of a prompt that ``arrived`` all is noted, of a later turn's only what is new: most was there before.
        """
        instance = view.instances.get(placed.instance)
        if instance is None or instance.incarnation != placed.incarnation or instance.prefixes.source == EVENTS:
            return
        with contextlib.suppress(MoorageFailure):
            first = 0
            if not arrived:
                positions = prefixes.probes(len(hashes))
                probes = pack([hashes[n] for n in positions])
                (count,) = await self._store.prefix_lookup(self._pool, [placed.instance], probes)
                first = positions[count - 1] + 1 if count else 0
            new = pack(hashes[first:])
            most = prefixes.most_hashes(instance)
            await self._store.prefix_note(self._pool, placed.instance, placed.incarnation, new, most, first)


def tell(view: Pool, arrival: Arrival) -> None:
    """Puts what is known of the session's prompt into what it asks: what was found, and what it left itself."""
    known = dict(arrival.found)
    former = arrival.former
    if former is not None:
        home = view.instances.get(former.instance)
        if home is not None and home.incarnation == former.incarnation:
            known[former.instance] = max(former.tokens, known.get(former.instance, 0))
    if known or arrival.ask.reusable:
        arrival.ask = replace(arrival.ask, reusable=MappingProxyType(known))


def pack(hashes: Sequence[int]) -> bytes:
    """Hashes as the ledger keeps them: eight bytes each, end to end."""
    return struct.pack(f"<{len(hashes)}Q", *hashes)
