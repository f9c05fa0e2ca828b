"""A store that comes back with an old snapshot: sessions of the past, and a fencing generation that went back."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from redis.asyncio import Redis

from moorage import Client, LeaseLost, SessionUnknown
from moorage.v1 import inspector_pb2 as ipb
from moorage.v1 import scheduler_pb2 as pb
from tests.conftest import RedisServer
from tests.integration.engines import Engines
from tests.integration.processes import PATIENCE_S, Api, Start, eventually
from tests.ledger_audit import discrepancies, read

POOLS = "{default: {policy: static, static_cap: 8, lease_ttl_s: 3, epoch_interval_s: 0.2}}"
PREFIX = "restore"


def _placed(api: Api, session: str) -> str:
    answer = eventually(lambda: a if (a := api.admit(session)).decision == pb.DECISION_PLACE else None)
    return answer.lease.token


async def test_an_old_snapshot_re_issues_no_token_and_its_ghosts_end(
    start: Start, own_redis_server: RedisServer
) -> None:
    server = start("--redis-url", own_redis_server.url, MOORAGE_REDIS_KEY_PREFIX=PREFIX, MOORAGE_POOLS=POOLS)
    api = server.api
    eventually(api.ready)
    with Engines(api, "engine-0"), Client(server.address) as client:
        first = {sid: _placed(api, sid) for sid in ("again", "over")}
        async with Redis.from_url(own_redis_server.url) as redis:
            await redis.save()
        # What the snapshot does not know: a session that ended, one that came back under a new token, and new ones.
        for sid, token in first.items():
            assert api.release(sid, token).released
        later = {sid: _placed(api, sid) for sid in ("again", "new-0", "new-1", "new-2")}
        own_redis_server.stop()
        own_redis_server.start()
        eventually(api.ready)

        with pytest.raises(SessionUnknown):
            client.place("new-0", lease_token=later["new-0"])
        with pytest.raises(LeaseLost):
            client.place("again", lease_token=later["again"])
        # Who asks again has one home, under the token that the store knows.
        assert client.admit("again").lease.token == first["again"]
        assert client.place("again", lease_token=first["again"]).decision == pb.DECISION_PLACE
        # The numbers begin again where the snapshot was, and yet no token comes twice: a part of each is random.
        repeated = {sid: client.admit(sid, max_wait=10).lease.token for sid in later if sid != "again"}
        issued = {*first.values(), *later.values()}
        numbers = {token.partition(".")[0] for token in issued}
        assert {token.partition(".")[0] for token in repeated.values()} <= numbers
        assert issued.isdisjoint(repeated.values())
        assert _stale(api, "new-0", later["new-0"]) is grpc.StatusCode.ABORTED
        # Nobody renews what was over already: its lease ends. The others are renewed meanwhile.
        held = repeated | {"again": first["again"]}
        eventually(lambda: _living(api, held) == set(held))
    assert server.terminate() == 0
    async with Redis.from_url(own_redis_server.url) as redis:
        books = await read(redis, PREFIX, "default")
    assert discrepancies(books) == []
    assert {sid: row["token"] for sid, row in books.state("live").items()} == held


def _stale(api: Api, session: str, token: str) -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        api.scheduler.Place(pb.PlaceRequest(session_id=session, lease_token=token), timeout=PATIENCE_S)
    return caught.value.code()


def _living(api: Api, held: dict[str, str]) -> set[str]:
    """Sessions that live, once those held are renewed."""
    progress = [pb.SessionProgress(session_id=sid, lease_token=token) for sid, token in held.items()]
    api.scheduler.Heartbeat(pb.HeartbeatRequest(sessions=progress), timeout=PATIENCE_S)
    answer = api.inspector.ListSessions(ipb.ListSessionsRequest(), timeout=PATIENCE_S)
    return {session.session_id for session in answer.sessions}
