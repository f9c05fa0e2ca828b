"""The store on Redis or Valkey (or an in-process fakeredis): one script per transition, one round trip per call."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from time import perf_counter
from typing import Any

from redis import exceptions
from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

from moorage_server.core.config import PoolConfig
from moorage_server.core.view import Pool
from moorage_server.errors import (
    RequestIdReused,
    StoreUnavailable,
)
from moorage_server.store import keys, parse, records, scripts, wire
from moorage_server.store.batch import Batcher
from moorage_server.store.cluster import ClusterClient
from moorage_server.store.meter import ScriptMeter
from moorage_server.store.parse import text
from moorage_server.store.redis_prefixes import RedisPrefixes
from moorage_server.store.redis_sessions import RedisSessions
from moorage_server.store.wire import blank

#: Heads of each class's queue that a view carries.
_HEADS = 8
#: Block size to count with while an instance has not reported one, tokens.
UNKNOWN_BLOCK_SIZE = 16
#: The store is away, or there and not fit to keep a ledger: failing over, read only, full.
_AWAY = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ClusterError,
    exceptions.NoPermissionError,
    exceptions.OutOfMemoryError,
    exceptions.ReadOnlyError,
    exceptions.TryAgainError,
)
#: The same, where the library has no class for it.
_NOT_NOW = ("BUSY", "MISCONF", "NOREPLICAS", "UNKILLABLE")
#: Seconds after which a pool in use is named again.
_TOUCH_S = 10.0
#: Sessions that a script call says something of, or moves: a script blocks the whole store while it runs.
_RELABEL_BATCH = 50


#: Nothing comes after this one, and the store refuses to look.
_LAST_EVENT = f"{2**64 - 1}-{2**64 - 1}"


class RedisStore(RedisSessions, RedisPrefixes):
    """Implements :class:`moorage_server.store.base.Store`.

    ``client`` must not retry by itself (a mutation without request id would run twice) and must return bytes.
    """

    def __init__(
        self, client: Redis | ClusterClient, subscriber: Redis | ClusterClient, prefix: str = "moorage"
    ) -> None:
        self._client: Any = client
        self._scripts = client if isinstance(client, ClusterClient) else Batcher(client)
        self.meter = ScriptMeter()
        self._subscriber = subscriber
        self._prefix = prefix
        self._shas = {name: hashlib.sha1(scripts.source(name).encode()).hexdigest() for name in scripts.names()}
        self._touched: dict[str, float] = {}

    async def ping(self) -> None:
        """Raises StoreUnavailable where the store does not answer."""
        try:
            await self._client.ping()
        except (RedisError, OSError) as error:
            raise _unavailable(error) from error

    async def close(self) -> None:
        await self._client.aclose()
        await self._subscriber.aclose()

    def _names(self, pool: str) -> tuple[str, str]:
        prefix = keys.pool_prefix(self._prefix, pool)
        return prefix, prefix + "pool"

    async def _run(self, name: str, pool: str, *args: Any) -> Any:
        """Runs a script on a pool. The script cache is volatile: it is filled again whenever it is found empty."""
        prefix, pool_key = self._names(pool)
        started = perf_counter()
        try:
            try:
                return await self._scripts.evalsha(self._shas[name], pool_key, prefix, *args)
            except NoScriptError:
                await self._scripts.load(scripts.source(name), pool_key)
                return await self._scripts.evalsha(self._shas[name], pool_key, prefix, *args)
        except (*_AWAY, OSError) as error:
            self.meter.failed(error)
            raise _unavailable(error) from error
        except exceptions.ResponseError as error:
            self.meter.failed(error)
            if str(error).startswith(_NOT_NOW):
                raise _unavailable(error) from error
            raise
        finally:
            self.meter.took(name, perf_counter() - started)

    async def _command(self, *command: Any) -> Any:
        """Runs a plain command on the key that is its first argument."""
        try:
            return await self._client.execute_command(*command)
        except (RedisError, OSError) as error:
            raise _unavailable(error) from error

    async def _touch(self, pool: str) -> None:
        """Remembers that the pool exists, for the controllers; now and then again, as the store may forget it."""
        now = asyncio.get_running_loop().time()
        if now - self._touched.get(pool, -math.inf) < _TOUCH_S:
            return
        await self._command("SADD", keys.pools_key(self._prefix), pool)
        self._touched[pool] = now

    async def pools(self) -> list[str]:
        return sorted(text(m) for m in await self._command("SMEMBERS", keys.pools_key(self._prefix)))

    async def name(self, pool: str) -> None:
        await self._touch(pool)
        await self._run("name", pool)

    async def retire(self, pool: str) -> bool:
        if not await self._run("retire", pool):
            return False
        self._touched.pop(pool, None)
        await self._command("SREM", keys.pools_key(self._prefix), pool)
        return True

    async def view(self, pool: str, default: PoolConfig) -> Pool:
        return parse.pool(pool, await self._run("view", pool, _HEADS), default)

    async def admit(
        self, pool: str, request: records.Request, admission: records.Admission
    ) -> records.Placed | records.OnHold | records.Refused | records.Resumed:
        await self._touch(pool)
        a, ask = admission, admission.ask
        args: list[Any] = [
            request.request_id, request.body, ask.session_id, ask.workload_class, a.declared_class, ask.group_id,
            blank(ask.policy_version), a.tokens, ask.encode(), a.lease_ttl_ms, secrets.token_hex(8), a.reason,
            a.detail, a.retry_ms, a.patience_ms, a.present_ms, int(a.observe), a.step, a.credit,
            "REJECT" if a.rejected else "", wire.label(a), a.group_size, a.ticket, int(a.waiting),
            int(a.told), len(a.candidates),
        ]  # fmt: skip
        for c in a.candidates:
            numbers = (c.cap, c.shared, c.prefill, c.expected_cached)
            args += [c.instance, c.incarnation, *map(wire.vector, (numbers, c.asks, c.limits))]
        reply = await self._run("admit", pool, *args)
        kind = text(reply[0])
        if kind in ("PLACED", "LIVE"):
            return wire.placed(reply, fresh=kind == "PLACED")
        if kind == "HELD":
            _, reason, retry, position, ahead, since, detail, name = reply
            return records.OnHold(
                text(reason), int(retry), int(position), int(ahead), int(since), text(detail), text(name)
            )
        if kind == "REJECTED":
            return records.Refused(text(reply[1]), int(reply[2]), text(reply[3]), text(reply[4]))
        if kind == "RESUMED":
            return records.Resumed(text(reply[1]), text(reply[2]), int(reply[3]))
        raise RequestIdReused(request.request_id)

    async def snapshot(self, pool: str, snapshot: records.Snapshot) -> str:
        await self._touch(pool)
        s = snapshot
        reply = await self._run(
            "snapshot", pool, s.instance, s.incarnation, f"{s.sequence:020d}", s.state, blank(s.block_size),
            UNKNOWN_BLOCK_SIZE, s.raw, s.age_ms, s.weight_version, blank(s.policy_version), blank(s.cache_epoch),
        )  # fmt: skip
        kind = text(reply[0])
        return "NEW" if kind == "OK" and int(reply[1]) else kind

    async def keep(self, pool: str, session_ids: Sequence[str], present_ms: int, patience_ms: int) -> list[str]:
        states = await self._run("keep", pool, present_ms, patience_ms, len(session_ids), *session_ids)
        return [text(state) for state in states]

    async def mark(self, pool: str, instance: str, mark: str) -> tuple[bool, int]:
        known, sessions = await self._run("mark", pool, instance, mark)
        return bool(known), int(sessions)

    async def weights(self, pool: str, instance: str, update: records.WeightUpdate) -> bool:
        u = update
        return bool(
            await self._run(
                "weights", pool, instance, "begin" if u.begin else "end", u.version, blank(u.policy_version),
                "hold" if u.hold else "open", "1" if u.cleared else "", u.reason, int(u.told),
            )
        )  # fmt: skip

    async def configure(self, pool: str, request: records.Request, config: str, version: int | None) -> bool:
        await self._touch(pool)
        reply = await self._run("configure", pool, request.request_id, request.body, config, blank(version))
        kind = text(reply[0])
        if kind == "REUSED":
            raise RequestIdReused(request.request_id)
        return kind == "OK"

    async def tick(self, pool: str, owner: str, lease_ms: int, grace_ms: int, quiet_ms: int) -> records.Tick:
        holder, now, grace = await self._run("tick", pool, owner, lease_ms, grace_ms, quiet_ms, 0)
        return records.Tick(bool(holder), int(now), int(grace))

    async def resign(self, pool: str, owner: str) -> None:
        await self._run("tick", pool, owner, 0, 0, 0, 1)

    async def changes(self, pool: str, owner: str, since: int, limit: int) -> records.Changes | None:
        reply = await self._run("changes", pool, owner, since, limit)
        if text(reply[0]) == "FENCED":
            return None
        rows = [
            records.Change(text(sid), wire.row(now, wire.NOW), wire.row(ended, wire.ENDED))
            for sid, now, ended in reply[3]
        ]
        return records.Changes(int(float(reply[1])), bool(reply[2]), rows)

    async def state(self, pool: str) -> str:
        prefix, _ = self._names(pool)
        return text(await self._command("GET", prefix + "state") or b"")

    async def publish(
        self,
        pool: str,
        owner: str,
        policy: str | None,
        state: str | None,
        epoch: bool,
        updates: Sequence[records.InstanceUpdate],
    ) -> bool:
        args: list[Any] = [owner, policy or "", state or "", int(epoch), len(updates)]
        for u in updates:
            args += [u.instance, u.incarnation, u.added, ",".join(map(str, u.need)), len(u.fields)]
            for name, value in u.fields.items():
                args += [name, value]
        return text(await self._run("publish", pool, *args)) == "OK"

    async def expire(self, pool: str, per_second: int, most: int, excused_ms: int) -> int:
        return int(await self._run("expire", pool, per_second, most, excused_ms))

    async def relabel(
        self, pool: str, owner: str, items: Sequence[records.Relabel], contradicted: int
    ) -> list[bool] | None:
        moved: list[bool] = []
        for start in range(0, max(1, len(items)), _RELABEL_BATCH):
            batch = items[start : start + _RELABEL_BATCH]
            args: list[Any] = [owner, 0 if start else contradicted, len(batch)]
            for i in batch:
                args += [i.session_id, i.was, i.to, i.inferred.name, f"{i.inferred.confidence:.3f}"]
                args += [int(i.contradicted), i.step_was, i.step_to, i.credit]
            kind, *flags = await self._run("relabel", pool, *args)
            if text(kind) == "FENCED":
                return None
            moved += [bool(flag) for flag in flags]
        return moved

    async def gone(self, pool: str, instance: str, gone_ms: int, forget_ms: int) -> str:
        return text((await self._run("gone", pool, instance, gone_ms, forget_ms))[0])

    async def session(self, pool: str, session_id: str) -> tuple[int, records.SessionRecord | None]:
        now, _, rows = await self._run("inspect", pool, "one", session_id, 1)
        return int(now), wire.record(rows[0]) if rows else None

    async def sessions(self, pool: str, after: str, limit: int) -> tuple[int, str, list[records.SessionRecord]]:
        now, following, rows = await self._run("inspect", pool, "page", after, limit)
        return int(now), text(following), [wire.record(row) for row in rows]

    async def history(self, pool: str, session_id: str) -> list[tuple[int, str, str, str]]:
        prefix, _ = self._names(pool)
        rows = await self._command("LRANGE", f"{prefix}h:{session_id}", 0, -1)
        return [(int(at), kind, reason, instance) for at, kind, reason, instance in map(json.loads, rows)]

    async def events(self, pool: str, after: str, limit: int) -> list[records.Event]:
        key = self._names(pool)[0] + "events"
        if after == _LAST_EVENT:
            return []
        try:
            if after == "$":
                rows = await self._client.execute_command("XREVRANGE", key, "+", "-", "COUNT", 1)
            else:
                first = "-" if after == "0" else f"({after}"
                rows = await self._client.execute_command("XRANGE", key, first, "+", "COUNT", limit)
        except (*_AWAY, OSError) as error:
            raise _unavailable(error) from error
        return [
            records.Event(text(token), {text(k): text(v) for k, v in (row or {}).items()}) for token, row in rows or ()
        ]

    async def listen(self, on_wake: Callable[[str, str], None]) -> AsyncIterator[None]:
        head, tail = f"{self._prefix}:{keys.SCHEMA}:{{", "}:wake"
        try:
            to = self._subscriber
            to = await to.subscriber() if isinstance(to, ClusterClient) else to
            async with to.pubsub(ignore_subscribe_messages=True) as channel:
                await channel.psubscribe(_glob(head) + "*" + tail)
                yield
                while True:
                    message = await channel.get_message(timeout=5.0)
                    if message is not None:
                        name = text(message["channel"]).removeprefix(head).removesuffix(tail)
                        on_wake(keys.unescape(name), text(message["data"]))
                    else:
                        await asyncio.sleep(0)
        except (RedisError, OSError) as error:
            raise _unavailable(error) from error


def _unavailable(error: Exception) -> StoreUnavailable:
    return StoreUnavailable(message=f"the store is unreachable ({type(error).__name__})")


def _glob(literal: str) -> str:
    """``literal`` with the characters that a subscription pattern gives a meaning escaped."""
    return "".join("\\" + c if c in "*?[]\\" else c for c in literal)
