"""The epoch's lease, what its holder reads and publishes, and a pool's configuration."""

from __future__ import annotations

import asyncio

import pytest

from moorage_server.core.config import ClassConfig, PoolConfig
from moorage_server.errors import RequestIdReused
from moorage_server.store.parse import encode_config
from moorage_server.store.records import InstanceUpdate, Request
from tests.contract.steps import I0, NOON, Steps, request


async def test_one_holder_at_a_time(steps: Steps) -> None:
    assert (await steps.tick("me")).holder
    assert not (await steps.tick("you")).holder
    assert (await steps.tick("me")).now_ms == NOON
    await steps.store.resign(steps.pool, "you")
    assert not (await steps.tick("you")).holder
    await steps.store.resign(steps.pool, "me")
    assert (await steps.tick("you")).holder


async def test_a_holder_that_is_lost_is_replaced_when_its_lease_ends(steps: Steps) -> None:
    assert (await steps.tick("me", lease_ms=150)).holder
    assert not (await steps.tick("you", lease_ms=150)).holder
    await asyncio.sleep(0.2)
    assert (await steps.tick("you")).holder


async def test_who_does_not_hold_the_epoch_reads_and_publishes_nothing(steps: Steps) -> None:
    await steps.tick("me")
    assert await steps.store.changes(steps.pool, "you", 0, 10) is None
    assert not await steps.store.publish(steps.pool, "you", "{}", "mine", True, [])
    assert await steps.store.state(steps.pool) == ""
    assert (await steps.books()).pool.get("epochs") is None


async def test_changes_are_read_once_and_ended_sessions_last(steps: Steps) -> None:
    await steps.tick()
    tokens = {sid: (await steps.placed(sid, tokens=160)).token for sid in ("a", "b", "c")}
    await steps.held("waits")
    first = await steps.store.changes(steps.pool, "me", 0, 3)
    assert first is not None
    assert ([c.session_id for c in first.rows], first.more) == (["a", "b", "c"], True)
    rest = await steps.store.changes(steps.pool, "me", first.revision, 3)
    assert rest is not None
    assert ([c.session_id for c in rest.rows], rest.more) == (["waits"], False)
    await steps.backend.clock.advance(2_000)
    await steps.release("b", tokens["b"], context=320)
    await steps.release("waits")
    await steps.progress("c", tokens["c"], context_tokens=480)
    last = await steps.store.changes(steps.pool, "me", rest.revision, 10)
    assert last is not None
    rows = {c.session_id: c for c in last.rows}
    assert list(rows) == ["b", "waits", "c"]
    assert rows["b"].now is None
    assert rows["b"].ended is not None
    assert (rows["b"].ended["outcome"], rows["b"].ended["ctx"], rows["b"].ended["z"]) == ("COMPLETED", "320", "20000")
    assert (rows["waits"].now, rows["waits"].ended) == (None, None)
    assert rows["c"].now is not None
    assert (rows["c"].now["st"], rows["c"].now["ctx"]) == ("live", "480")
    anew = await steps.store.changes(steps.pool, "me", 0, 10)
    assert anew is not None
    assert {c.session_id for c in anew.rows} == {"a", "c"}


async def test_a_paused_session_reads_as_ended(steps: Steps) -> None:
    await steps.tick()
    placed = await steps.placed("s")
    await steps.release("s", placed.token, "PAUSED")
    changes = await steps.store.changes(steps.pool, "me", 0, 10)
    assert changes is not None
    (row,) = changes.rows
    assert row.now is None
    assert row.ended is not None
    assert row.ended["outcome"] == "PAUSED"


async def test_what_is_published_is_seen(steps: Steps) -> None:
    await steps.tick()
    update = InstanceUpdate(I0, "1", "", (1, 2, 3), {"cap": "7", "budget": "900", "caps": '{"a": 4}', "brake": "0.5"})
    assert await steps.store.publish(steps.pool, "me", None, "state", True, [update])
    view = await steps.store.view(steps.pool, PoolConfig())
    instance = view.instances[I0]
    assert (instance.need, instance.cap, instance.budget, instance.brake) == ((1, 2, 3), 7, 900, 0.5)
    assert dict(instance.class_caps) == {"a": 4}
    assert view.epochs == 1
    assert await steps.store.state(steps.pool) == "state"


async def test_admissions_during_the_computation_stay_on_top_of_it(steps: Steps) -> None:
    await steps.tick()
    await steps.placed("s", asks=(5, 6), limits=(100, 100))
    read = (await steps.store.view(steps.pool, PoolConfig())).instances[I0].added
    await steps.placed("t", asks=(7, 8), limits=(100, 100))
    await steps.store.publish(steps.pool, "me", None, None, False, [InstanceUpdate(I0, "1", read, (50, 60), {})])
    assert (await steps.store.view(steps.pool, PoolConfig())).instances[I0].need == (57, 68)


async def test_nothing_is_published_for_another_incarnation(steps: Steps) -> None:
    await steps.tick()
    await steps.snapshot(inc="2")
    assert await steps.store.publish(
        steps.pool, "me", None, None, False, [InstanceUpdate(I0, "1", "", (1,), {"cap": "7"})]
    )
    assert (await steps.store.view(steps.pool, PoolConfig())).instances[I0].cap is None


async def test_a_configuration_is_kept_for_every_server(steps: Steps) -> None:
    config = PoolConfig(policy="static", static_cap=3, classes={"a": ClassConfig(target_share=0.5, aliases=("x", "y"))})
    assert await steps.store.configure(steps.pool, Request(), encode_config(config), None)
    view = await steps.backend.open().view(steps.pool, PoolConfig())
    assert (view.config, view.config_version) == (config, 1)


async def test_a_configuration_made_from_an_older_one_is_refused(steps: Steps) -> None:
    text = encode_config(PoolConfig())
    assert await steps.store.configure(steps.pool, Request(), text, 0)
    assert not await steps.store.configure(steps.pool, Request(), text, 0)
    assert await steps.store.configure(steps.pool, Request(), text, 1)


async def test_a_configuration_is_replayed(steps: Steps) -> None:
    text, rid = encode_config(PoolConfig()), request()
    assert await steps.store.configure(steps.pool, rid, text, 0)
    assert await steps.store.configure(steps.pool, rid, text, 1)
    assert (await steps.store.view(steps.pool, PoolConfig())).config_version == 1
    with pytest.raises(RequestIdReused):
        await steps.store.configure(steps.pool, Request(rid.request_id, "other"), text, None)


async def test_naming_and_configuring_make_a_pool_known(bare: Steps) -> None:
    assert not (await bare.store.view(bare.pool, PoolConfig())).named
    await bare.store.name(bare.pool)
    assert (await bare.store.view(bare.pool, PoolConfig())).named
    other = Steps(bare.backend, bare.store, "q")
    await other.store.configure("q", Request(), encode_config(PoolConfig()), None)
    assert (await bare.store.view("q", PoolConfig())).named
    assert await bare.store.pools() == ["p", "q"]


async def test_nothing_is_left_of_a_pool_that_was_never_named(bare: Steps) -> None:
    await bare.held("s", reason="NO_INSTANCE")
    assert not await bare.store.retire(bare.pool)
    await bare.release("s")
    await bare.tick()
    assert await bare.store.retire(bare.pool)
    left = [key async for key in bare.backend.client.scan_iter(match=f"{bare.backend.prefix}*")]
    assert [key.rpartition(b":")[0].rpartition(b":")[2] for key in left] == [b"h"]
    assert await bare.store.pools() == []


async def test_a_named_pool_is_never_retired(steps: Steps) -> None:
    assert not await steps.store.retire(steps.pool)


async def test_who_mirrors_what_a_failover_lost_begins_anew(steps: Steps) -> None:
    await steps.placed("s")
    await steps.tick("me")
    changes = await steps.store.changes(steps.pool, "me", 0, 10)
    assert changes is not None
    assert await steps.store.changes(steps.pool, "me", changes.revision, 10) is not None
    assert await steps.store.changes(steps.pool, "me", changes.revision + 1, 10) is None
