"""Reads every key of a pool straight from Redis and says where its books do not balance (contract.md, *Invariants*).

It knows the key layout of ``moorage_server.store.keys`` and shares no code with the scripts that keep the books.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, cast

from redis.asyncio import Redis

from moorage_server.store import keys
from moorage_server.store.parse import text

Hash = dict[str, str]

#: Cumulative and current counters; none may fall below zero.
_CLASS_COUNTERS = ("act", "held", "rel", "done", "adm", "blk", "z", "d", "gap", "gapn", "hexp", "hgot", "rl", "vt")
_INSTANCE_COUNTERS = ("ses", "blocks", "shared", "backlog", "ep", "clears")


@dataclass
class Books:
    """All that the ledger holds of one pool."""

    pool: Hash = field(default_factory=dict)
    classes: Hash = field(default_factory=dict)
    instances: dict[str, Hash] = field(default_factory=dict)
    groups: dict[str, Hash] = field(default_factory=dict)
    homes: dict[str, set[str]] = field(default_factory=dict)
    sessions: dict[str, Hash] = field(default_factory=dict)
    listed: set[str] = field(default_factory=set)
    leases: dict[str, float] = field(default_factory=dict)
    held: dict[str, float] = field(default_factory=dict)
    queues: dict[str, dict[str, float]] = field(default_factory=dict)
    queue_names: set[str] = field(default_factory=set)
    instance_names: set[str] = field(default_factory=set)
    #: Milliseconds to live of keys that belong to one session, and of prefix indexes; None is for ever.
    lifetimes: dict[str, int | None] = field(default_factory=dict)

    def state(self, name: str) -> dict[str, Hash]:
        """Sessions that are 'live', 'held' or 'paused'."""
        return {sid: row for sid, row in self.sessions.items() if row["st"] == name}

    def counter(self, name: str, workload_class: str) -> int:
        """One counter of a class."""
        return int(self.classes.get(f"{name}:{workload_class}", 0))


async def read(client: Redis, prefix: str, pool: str) -> Books:
    """The books of a pool under a store's prefix."""
    root = keys.pool_prefix(prefix, pool)
    books = Books()

    async def fields(name: str) -> Hash:
        return {text(k): text(v) for k, v in (await cast(Any, client.hgetall(name))).items() if k != b"snap"}

    async def members(name: str) -> set[str]:
        return {text(m) for m in await cast(Any, client.smembers(name))}

    async def scores(name: str) -> dict[str, float]:
        return {text(m): score for m, score in await cast(Any, client.zrange(name, 0, -1, withscores=True))}

    pattern = "".join("\\" + c if c in "*?[]\\" else c for c in root) + "*"
    async for raw in client.scan_iter(match=pattern, count=1000):
        full = text(raw)
        kind, mark, rest = full.removeprefix(root).partition(":")
        if kind == "pool":
            books.pool = await fields(full)
        elif kind == "classes":
            books.classes = await fields(full)
        elif kind == "i":
            books.instances[rest] = await fields(full)
        elif kind == "g":
            books.groups[rest] = await fields(full)
        elif kind == "home":
            books.homes[rest] = await members(full)
        elif kind == "s":
            if row := await fields(full):
                books.sessions[rest] = row
        elif kind == "q":
            books.queues[rest] = await scores(full)
        elif kind in ("sessions", "leases", "held"):
            found = await scores(full)
            if kind == "sessions":
                books.listed = set(found)
            else:
                setattr(books, kind, found)
        elif kind == "queues":
            books.queue_names = await members(full)
        elif kind == "instances":
            books.instance_names = await members(full)
        if mark and kind in ("s", "done", "h", "r", "gr", "x"):
            left = await client.pttl(full)
            books.lifetimes[f"{kind}:{rest}"] = None if left == -1 else left
    return books


async def audit(client: Redis, prefix: str, pool: str) -> list[str]:
    """All discrepancies in a pool's books, in words; none where they balance."""
    return discrepancies(await read(client, prefix, pool))


def discrepancies(books: Books) -> list[str]:
    """See :func:`audit`."""
    bad: list[str] = []

    def same(what: str, found: Any, expected: Any) -> None:
        if found != expected:
            bad.append(f"{what}: {found!r}, but should be {expected!r}")

    _sessions(books, same)
    _classes(books, same)
    _instances(books, same)
    _groups(books, same)
    for name, value in books.classes.items():
        short, _, workload_class = name.partition(":")
        if short in _CLASS_COUNTERS and int(value) < 0:
            bad.append(f"class {workload_class!r}: {short} = {value}")
    for key, row in books.instances.items():
        for name, value in row.items():
            if (name in _INSTANCE_COUNTERS or name.startswith(("c:", "hexp:", "hgot:"))) and int(value) < 0:
                bad.append(f"instance {key!r}: {name} = {value}")
    bad += [f"{name}: lives for ever" for name, left in books.lifetimes.items() if left is None]
    return bad


def _sessions(books: Books, same: Any) -> None:
    """Session records against the sets and the queues that they are members of."""
    live, held, paused = books.state("live"), books.state("held"), books.state("paused")
    homeless = {sid for sid, row in held.items() if row.get("homeless") == "1"}
    same("listed sessions", books.listed, set(books.sessions))
    same("sessions with a lease", set(books.leases), set(live) | homeless | set(paused))
    same("sessions with a place in the queue", set(books.held), set(held) - homeless)
    at_home: dict[str, set[str]] = defaultdict(set)
    for sid, row in live.items():
        at_home[row["inst"]].add(sid)
        same(f"incarnation of {sid!r}", row["inc"], books.instances.get(row["inst"], {}).get("inc"))
        same(f"expiry of {sid!r}", books.leases.get(sid), float(row["exp"]))
        same(f"token of {sid!r}", bool(row.get("token")), True)
    same("homes", {k: v for k, v in books.homes.items() if v}, dict(at_home))
    queues: dict[str, set[str]] = defaultdict(set)
    for sid, row in held.items():
        queues[row["class"]].add(sid)
        lead = 10**12 if sid in homeless else 0
        same(f"rank of {sid!r}", books.queues.get(row["class"], {}).get(sid), float(int(row["rank"]) - lead))
    same("queues", {name: set(members) for name, members in books.queues.items() if members}, dict(queues))
    same("names of queues", books.queue_names, set(queues))


def _classes(books: Books, same: Any) -> None:
    """Counters per class against the session records and the groups' lines."""
    active = Counter(row["class"] for row in books.state("live").values())
    held = Counter(row["class"] for row in books.state("held").values())
    homeless = Counter(row["class"] for row in books.state("held").values() if row.get("homeless") == "1")
    blocks: Counter[str] = Counter()
    for row in books.state("live").values():
        blocks[row["class"]] += int(row["blocks"])
    for lines in books.groups.values():
        for name, value in lines.items():
            if name.startswith("b:"):
                blocks[lines["k:" + name[2:]]] += int(value)
    names = {name.partition(":")[2] for name in books.classes} | set(active) | set(held)
    for name in names:
        same(f"active of class {name!r}", books.counter("act", name), active[name])
        same(f"held of class {name!r}", books.counter("held", name), held[name])
        same(f"blocks of class {name!r}", books.counter("blk", name), blocks[name])
        living = active[name] + homeless[name]
        same(f"admitted less released of {name!r}", books.counter("adm", name) - books.counter("rel", name), living)


def _instances(books: Books, same: Any) -> None:
    """Counters per instance against the session records and the groups' lines."""
    same("instances", books.instance_names, set(books.instances))
    for key, row in books.instances.items():
        mine = [s for s in books.state("live").values() if s["inst"] == key]
        shared = sum(int(v) for name, v in books.groups.get(key, {}).items() if name.startswith("b:"))
        same(f"sessions of instance {key!r}", int(row.get("ses", 0)), len(mine))
        same(f"shared blocks of instance {key!r}", int(row.get("shared", 0)), shared)
        own = sum(int(s["blocks"]) for s in mine)
        same(f"reserved blocks of instance {key!r}", int(row.get("blocks", 0)), own + shared)
        counted = {name[2:]: int(value) for name, value in row.items() if name.startswith("c:") and value != "0"}
        same(f"classes of instance {key!r}", counted, dict(Counter(s["class"] for s in mine)))


def _groups(books: Books, same: Any) -> None:
    """Members of every group's line against the session records."""
    expected: dict[str, Counter[str]] = defaultdict(Counter)
    for row in books.state("live").values():
        if row.get("group"):
            expected[row["inst"]][row["group"]] += 1
    found = {
        key: {name[2:]: int(value) for name, value in lines.items() if name.startswith("n:")}
        for key, lines in books.groups.items()
    }
    same("members of groups", {k: v for k, v in found.items() if v}, {k: dict(v) for k, v in expected.items()})
