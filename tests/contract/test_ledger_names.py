"""Any character is legal in a name, and no name reaches into another's keys."""

from __future__ import annotations

import pytest

from moorage_server.core.config import PoolConfig
from moorage_server.store import keys
from moorage_server.store.records import Placed
from tests.conftest import Backend
from tests.contract.steps import NOON, Steps, request

NAMES = (
    "{a}",
    "}{",
    "{",
    "a b",
    "a:b:c",
    "line\nbreak\r\n",
    "zero\0byte",
    "Größe-数-🛶",
    "100%7B",
    "*?[x]\\",
    "'; return 1 --",
    "0|x",
    "_",
    "é" * 128,
)


@pytest.mark.parametrize("name", NAMES)
async def test_a_whole_life_under_any_name(backend: Backend, name: str) -> None:
    await backend.clock.set(NOON)
    steps = Steps(backend, backend.open(), pool=name)
    instance = keys.instance_key(name, 3)
    await steps.snapshot(instance, inc=name)
    placed = await steps.placed(name, instance, inc=name, workload_class=name, group=name, shared=2, rid=request(name))
    await steps.held(name + "!", workload_class=name, group=name, reason="KV_BUDGET", detail=name)
    assert (placed.instance, placed.incarnation, placed.workload_class) == (instance, name, name)
    assert isinstance(await steps.place(name, placed.token), Placed)
    assert (await steps.progress(name, placed.token, context_tokens=320)).status == "OK"
    view = await steps.store.view(name, PoolConfig())
    assert (list(view.instances), list(view.classes), list(view.queues)) == ([instance], [name], [name])
    assert view.instances[instance].groups == {name: 2}
    assert view.instances[instance].instance_id == name
    _, record = await steps.store.session(name, name)
    assert record is not None
    assert (record.session_id, record.fields["class"], record.fields["group"]) == (name, name, name)
    assert (await steps.store.history(name, name))[0][1:] == ("admit", "", instance)
    events = await steps.store.events(name, "0", 10)
    assert [e.fields["sid"] for e in events if e.fields["kind"] == "hold"] == [name + "!"]
    await steps.release(name, placed.token)
    await steps.release(name + "!")
    assert await steps.store.pools() == [name]
    assert (await steps.books()).sessions == {}


async def test_pools_are_apart(backend: Backend) -> None:
    await backend.clock.set(NOON)
    store = backend.open()
    pools = [Steps(backend, store, pool=name) for name in NAMES]
    for steps in pools:
        await steps.snapshot()
        await steps.placed("s")
    await pools[0].snapshot(inc="2")
    for steps in pools[1:]:
        assert set((await steps.books()).state("live")) == {"s"}
    assert await store.pools() == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_pool_has_one_hash_tag_and_gets_its_name_back(name: str) -> None:
    prefix = keys.pool_prefix("moorage", name)
    assert prefix.count("{") == prefix.count("}") == 1
    tag = prefix[prefix.index("{") + 1 : prefix.index("}")]
    assert tag
    assert keys.unescape(tag) == name


def test_escaped_names_never_meet() -> None:
    tricky = (*NAMES, "%7B", "%257B", "{", "%", "%25", "7B")
    assert len({keys.escape(name) for name in tricky}) == len(set(tricky))


async def test_sessions_are_paged_in_order_whatever_they_are_called(steps: Steps) -> None:
    for name in NAMES:
        await steps.placed(name)
    found: list[str] = []
    after, pages = "", 0
    while True:
        _, after, page = await steps.store.sessions(steps.pool, after, 4)
        found += [record.session_id for record in page]
        pages += 1
        if not after:
            break
    assert found == sorted(NAMES, key=str.encode)
    assert pages == len(NAMES) // 4 + 1


async def test_tokens_are_shown_to_nobody(steps: Steps) -> None:
    placed = await steps.placed("s", ticket="secret")
    _, one = await steps.store.session(steps.pool, "s")
    _, _, page = await steps.store.sessions(steps.pool, "", 10)
    history = await steps.store.history(steps.pool, "s")
    events = await steps.store.events(steps.pool, "0", 100)
    shown = repr((one, page, history, [e.fields for e in events]))
    assert "admit" in shown
    for secret in (placed.token, placed.token.partition(".")[2], "secret"):
        assert secret not in shown
