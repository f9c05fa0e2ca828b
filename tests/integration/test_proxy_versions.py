"""Policy versions through the proxy: what a request began with is judged, what served it is told."""

from __future__ import annotations

import asyncio

from moorage.v1 import operator_pb2 as opb
from tests.integration.openai_engine import OpenAIEngine, beating
from tests.integration.processes import PATIENCE_S, Server
from tests.integration.proxies import COMPLETIONS, Ledger, proxied

#: Placements go by a view of the pool that is at most this old, in seconds.
VIEW_S = 0.3


async def _weights(server: Server, pool: str, version: int) -> None:
    request = opb.EndWeightUpdateRequest(pool=pool, weight_version=f"step-{version}", policy_version=version)
    server.api.operator.EndWeightUpdate(request, timeout=PATIENCE_S)
    await asyncio.sleep(VIEW_S)


async def test_a_request_learns_its_version_and_a_stale_one_is_refused(shared_server: Server, pool: str) -> None:
    engine, ledger = OpenAIEngine("engine-0"), Ledger(shared_server, pool)
    async with beating(shared_server, pool, engine), proxied(shared_server.address, pool) as caller:
        assert "X-Moorage-Policy-Version" not in (await caller.post(COMPLETIONS, "before")).headers
        config = opb.PoolConfig(max_policy_lag=1)
        request = opb.ConfigurePoolRequest(pool=pool, config=config)
        request.update_mask.paths.append("max_policy_lag")
        shared_server.api.operator.ConfigurePool(request, timeout=PATIENCE_S)
        await _weights(shared_server, pool, 6)
        fresh = await caller.post(COMPLETIONS, "fresh", headers={"X-Policy-Version": "6"})
        assert (fresh.status, fresh.headers["X-Moorage-Policy-Version"]) == (200, "6")
        assert ledger.session("fresh").policy_version == 6  # type: ignore[union-attr]
        await caller.post(COMPLETIONS, "paused", headers={"X-Policy-Version": "6"})
        await caller.http.post("/finish_session?session_id=paused&outcome=PAUSED")

        await _weights(shared_server, pool, 8)
        inside = await caller.post(COMPLETIONS, "fresh", headers={"X-Policy-Version": "6"})
        assert (inside.status, inside.headers["X-Moorage-Policy-Version"]) == (200, "8"), "who is inside stays"
        for name in ("paused", "new"):
            stale = await caller.post(COMPLETIONS, name, headers={"X-Policy-Version": "6"})
            assert (stale.status, stale.json["error"]["code"]) == (422, "STALENESS_LIMIT")
            assert "Retry-After" not in stale.headers
            assert ledger.session(name) is None
        assert (await caller.post(COMPLETIONS, "unknown version")).status == 200
        wrong = await caller.post(COMPLETIONS, "wrong", headers={"X-Policy-Version": "seven"})
        assert wrong.status == 400
        assert "X-Policy-Version" in wrong.json["error"]["message"]
