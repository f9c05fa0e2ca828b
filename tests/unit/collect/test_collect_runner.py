"""The whole collector: engines that replay recordings, a scheduler that takes heartbeats."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from moorage.collect.discovery import Discovery
from moorage.collect.dns import DnsDiscovery
from moorage.collect.heartbeat import MAX_ITEMS, ServerLine, open_channel
from moorage.collect.kubernetes import ClusterAccess
from moorage.collect.runner import CollectorSettings, discoveries_of, run
from moorage.credentials import Proof
from moorage.v1.scheduler_pb2 import InstanceSnapshot
from tests.unit.collect.fakes import FakeScheduler, StartEngine, crafted, hang, recording


@asynccontextmanager
async def collecting(settings: CollectorSettings, *discoveries: Discovery) -> AsyncIterator[None]:
    """Runs the collector, and stops it the polite way."""
    stop = asyncio.Event()
    task = asyncio.create_task(run(settings, stop=stop, discoveries=discoveries))
    try:
        yield
    finally:
        stop.set()
        async with asyncio.timeout(5):
            await task


async def test_two_engines_one_stream_of_heartbeats(start_engine: StartEngine, scheduler: FakeScheduler) -> None:
    first = await start_engine(
        {"/metrics": recording("lifecycle_04"), "/v1/models": '{"data":[{"max_model_len":8192}]}'}
    )
    second = await start_engine({"/metrics": recording("load_00")})
    settings = CollectorSettings(
        [first.url, f"blue={second.url}"], pool="math", server=scheduler.address, interval=0.2, proof=Proof("s3cret")
    )
    name = first.url.removeprefix("http://")
    async with collecting(settings):
        await scheduler.until(lambda: len(scheduler.snapshots(name)) >= 3 and len(scheduler.snapshots("blue")) >= 3)
    assert {request.pool for request in scheduler.requests} == {"math"}
    assert scheduler.metadata[0]["authorization"] == "Bearer s3cret"
    one, other = scheduler.snapshots(name), scheduler.snapshots("blue")
    assert (one[0].running, one[0].max_context_tokens, one[0].endpoint) == (3, 8192, first.url)
    assert (other[0].running, other[0].incarnation) == (6, "start-1796008319.88")
    for snapshots in (one, other):
        sequences = [snapshot.sequence for snapshot in snapshots]
        assert sequences == sorted(set(sequences))
    # One heartbeat carries both, and there is one per interval.
    assert len(scheduler.requests) <= max(len(one), len(other)) + 1


async def test_a_life_with_a_restart(start_engine: StartEngine, scheduler: FakeScheduler) -> None:
    engine = await start_engine({"/metrics": recording("lifecycle_10")})
    settings = CollectorSettings([f"a={engine.url}"], server=scheduler.address, interval=0.1)
    async with collecting(settings):
        for number in ("11", "12", "13"):
            await scheduler.more("a")
            engine.answers["/metrics"] = recording(f"lifecycle_{number}")
        await scheduler.until(lambda: scheduler.snapshots("a")[-1].generation_tokens_total == 8)
    incarnations = list(dict.fromkeys(snapshot.incarnation for snapshot in scheduler.snapshots("a")))
    assert incarnations == ["start-1796013664.68", "start-1796013779.50"]


async def test_sglang_ranks_are_instances(start_engine: StartEngine, scheduler: FakeScheduler) -> None:
    engine = await start_engine({"/metrics": crafted("two_ranks.txt"), "/v1/loads": crafted("loads_two_ranks.json")})
    settings = CollectorSettings([f"a={engine.url}"], server=scheduler.address, interval=0.1, engine="sglang")
    async with collecting(settings):
        await scheduler.until(lambda: len(scheduler.snapshots("a")) >= 4)
    assert {(found.dp_rank, found.running) for found in scheduler.snapshots("a")} == {(0, 7), (1, 5)}


async def test_engines_behind_a_name_come_and_go(
    start_engine: StartEngine, scheduler: FakeScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "moorage.collect")
    given = await start_engine({"/metrics": recording("lifecycle_06")})
    found = await start_engine({"/metrics": recording("load_00")})
    addresses: list[str] = []

    async def resolve(host: str) -> Sequence[str]:
        return addresses

    name = found.url.removeprefix("http://")
    discovery = DnsDiscovery(f"engines.example:{name.rpartition(':')[2]}", resolve)
    settings = CollectorSettings(
        [f"given={given.url}"], server=scheduler.address, interval=0.1, discovery_interval=0.05
    )
    async with collecting(settings, discovery):
        await scheduler.more("given")
        addresses.append("127.0.0.1")
        await scheduler.until(lambda: len(scheduler.snapshots(name)) >= 2)
        addresses[:] = ["127.0.0.2"]
        await scheduler.until(lambda: "engine_left" in caplog.text)
        seen = len(scheduler.snapshots(name))
        await scheduler.more("given")
        await scheduler.more("given")
        assert len(scheduler.snapshots(name)) == seen
    assert f"event=engine_left instance={name} endpoint={found.url}" in caplog.text
    # Before there was an address.
    assert "discovery_state state=fails source='dns engines.example" in caplog.text


async def test_hanging_garbled_and_absent_engines_do_not_touch_a_healthy_one(
    start_engine: StartEngine, scheduler: FakeScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "moorage.collect")
    healthy = await start_engine({"/metrics": recording("lifecycle_06")})
    hanging = await start_engine({"/metrics": hang})
    garbled = await start_engine({"/metrics": "<html>"})
    urls = [f"ok={healthy.url}", f"hang={hanging.url}", f"html={garbled.url}", "gone=http://127.0.0.1:9"]
    started = asyncio.get_running_loop().time()
    async with collecting(CollectorSettings(urls, server=scheduler.address, interval=0.3)):
        await scheduler.until(lambda: len(scheduler.snapshots("ok")) >= 6)
    # Five intervals, although each look at the hanging engine takes 0.24 s.
    assert asyncio.get_running_loop().time() - started < 6 * 0.3 + 0.5
    assert {found.instance_id for request in scheduler.requests for found in request.instances} == {"ok"}
    assert len(hanging.asked) >= 4
    states = [record.getMessage() for record in caplog.records if "event=engine_state" in record.getMessage()]
    assert sorted(text.split(" was=")[0] for text in states) == [
        "event=engine_state instance=gone state=unreachable",
        "event=engine_state instance=hang state=unreachable",
        "event=engine_state instance=html state=unreadable",
        "event=engine_state instance=ok state=reachable",
    ]


async def test_an_engine_that_stops_answering_falls_silent_and_comes_back(
    start_engine: StartEngine, scheduler: FakeScheduler
) -> None:
    engine = await start_engine({"/metrics": recording("lifecycle_06")})
    async with collecting(CollectorSettings([f"a={engine.url}"], server=scheduler.address, interval=0.1)):
        await scheduler.until(lambda: len(scheduler.snapshots("a")) >= 2)
        engine.answers["/metrics"] = "<html>"
        await asyncio.sleep(0.3)
        asked, seen = len(engine.asked), len(scheduler.snapshots("a"))
        await asyncio.sleep(0.5)
        assert len(engine.asked) > asked
        assert len(scheduler.snapshots("a")) == seen
        engine.answers["/metrics"] = recording("lifecycle_06")
        await scheduler.more("a")


async def test_the_servers_interval_is_followed_unless_one_was_given(
    start_engine: StartEngine, scheduler: FakeScheduler
) -> None:
    scheduler.next_seconds = 0.1
    engine = await start_engine({"/metrics": recording("lifecycle_06")})
    urls = [f"a={engine.url}"]
    clock = asyncio.get_running_loop().time
    async with collecting(CollectorSettings(urls, server=scheduler.address)):
        await scheduler.until(lambda: len(scheduler.requests) >= 2)
        started, count = clock(), len(scheduler.requests)
        await scheduler.until(lambda: len(scheduler.requests) >= count + 5)
        assert clock() - started < 1.5
    scheduler.requests.clear()
    async with collecting(CollectorSettings(urls, server=scheduler.address, interval=0.6)):
        await scheduler.until(lambda: len(scheduler.requests) >= 1)
        started = clock()
        await scheduler.until(lambda: len(scheduler.requests) >= 3)
        assert clock() - started > 1.0


async def test_a_server_that_does_not_know_an_instance_sees_it_again_at_once(
    start_engine: StartEngine, scheduler: FakeScheduler
) -> None:
    engine = await start_engine(
        {"/metrics": recording("lifecycle_06"), "/v1/models": '{"data":[{"max_model_len":99}]}'}
    )
    scheduler.strangers.add("a")
    async with collecting(CollectorSettings([f"a={engine.url}"], server=scheduler.address, interval=30.0)):
        await scheduler.until(lambda: len(scheduler.snapshots("a")) >= 2)
    first, second = scheduler.snapshots("a")[:2]
    assert second.sequence > first.sequence
    assert second.max_context_tokens == 99
    assert engine.asked.count("/v1/models") == 2


async def test_scraping_goes_on_without_a_server_and_is_logged_once(
    start_engine: StartEngine, scheduler: FakeScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "moorage.collect")
    scheduler.failure = grpc.StatusCode.UNAVAILABLE
    engine = await start_engine({"/metrics": recording("lifecycle_06")})
    async with collecting(CollectorSettings([f"a={engine.url}"], server=scheduler.address, interval=0.1)):
        await scheduler.until(lambda: len(scheduler.requests) >= 3)
        # Backing off: 0.5 s, 1 s; meanwhile the engine is asked as before.
        assert engine.asked.count("/metrics") >= 9
        scheduler.failure = None
        failed = len(scheduler.requests)
        await scheduler.until(lambda: len(scheduler.requests) > failed + 2)
    states = [record.getMessage() for record in caplog.records if "event=server_state" in record.getMessage()]
    assert [text.split(" was=")[0] for text in states] == [
        "event=server_state state=unreachable",
        "event=server_state state=reachable",
    ]
    # What was observed while nobody listened is not sent late.
    sequences = [snapshot.sequence for snapshot in scheduler.snapshots("a")]
    assert sequences == sorted(set(sequences))


async def test_refused_connections_and_refused_callers(scheduler: FakeScheduler) -> None:
    snapshot = InstanceSnapshot(instance_id="a")
    async with open_channel("127.0.0.1:9") as channel:
        line = ServerLine(channel, "default")
        waits = [(await line.send([snapshot])).retry_after or 0.0 for _ in range(6)]
    assert 0.4 <= waits[0] <= 0.6
    assert 4.0 <= waits[-1] <= 6.0
    scheduler.failure = grpc.StatusCode.UNAUTHENTICATED
    async with open_channel(scheduler.address) as channel:
        beat = await ServerLine(channel, "default").send([snapshot])
    assert beat.retry_after is not None
    assert "authorization" not in scheduler.metadata[0]


async def test_many_snapshots_take_several_calls(scheduler: FakeScheduler) -> None:
    snapshots = [InstanceSnapshot(instance_id=f"i{number}") for number in range(2 * MAX_ITEMS + 1)]
    async with open_channel(scheduler.address) as channel:
        beat = await ServerLine(channel, "default").send(snapshots)
    assert beat.retry_after is None
    assert [len(request.instances) for request in scheduler.requests] == [MAX_ITEMS, MAX_ITEMS, 1]


async def test_refusals_are_logged_when_they_change(scheduler: FakeScheduler, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "moorage.collect")
    async with open_channel(scheduler.address) as channel:
        line = ServerLine(channel, "default")
        for stranger in (True, True, False, False):
            if stranger:
                scheduler.strangers.add("a")
            beat = await line.send([InstanceSnapshot(instance_id="a")])
            assert beat.reregister == ({"a"} if stranger else set())
    logged = [record.getMessage() for record in caplog.records if "snapshot_" in record.getMessage()]
    assert logged == [
        "event=snapshot_refused instance=a dp_rank=0 reregister=True reason='unknown instance'",
        "event=snapshot_accepted_again instance=a dp_rank=0 reregister=False",
    ]


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"engine": "other"}, "unknown engine 'other'"),
        ({"interval": 0.0}, "interval must be a positive"),
        ({"interval": float("nan")}, "interval must be a positive"),
        ({"timeout": -1.0}, "timeout must be a positive"),
        ({"discovery_interval": 0.0}, "discovery interval must be a positive"),
        ({"kube_selector": " "}, "every pod"),
        ({"kube_port": 8000}, "only with a label selector"),
        ({"kube_namespace": "rl"}, "only with a label selector"),
        ({"kube_selector": "a=b", "kube_port": 65536}, "not a port: 65536"),
    ],
)
def test_settings_that_make_no_sense(wrong: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        CollectorSettings(["http://h:1"], **wrong)  # type: ignore[arg-type]


def test_settings_name_discoveries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("token", "t"), ("namespace", "rl")):
        (tmp_path / name).write_text(text)
    access = ClusterAccess("https://10.96.0.1:443", tmp_path)
    monkeypatch.setattr(ClusterAccess, "from_pod", lambda environment: access)
    settings = CollectorSettings(dns=["a.example:8000", "b.example:8000", "a.example:8000"], kube_selector="app=vllm")
    assert [found.name for found in discoveries_of(settings)] == [
        "dns a.example:8000",
        "dns b.example:8000",
        "pods app=vllm in rl",
    ]
    elsewhere = CollectorSettings(kube_selector="app=sglang", kube_namespace="other", engine="sglang")
    assert [found.name for found in discoveries_of(elsewhere)] == ["pods app=sglang in other"]


async def test_urls_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="not an http"):
        await run(CollectorSettings(["ftp://h:1"]))
    with pytest.raises(ValueError, match="no engine"):
        await run(CollectorSettings())
    with pytest.raises(ValueError, match="DNS name and port"):
        await run(CollectorSettings(dns=["engines.example"]))


async def test_a_selector_outside_of_kubernetes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ValueError, match="a selector works inside a pod"):
        await run(CollectorSettings(kube_selector="app=vllm"))


async def test_cancelling_ends_it(start_engine: StartEngine, scheduler: FakeScheduler) -> None:
    engine = await start_engine({"/metrics": hang})
    task = asyncio.create_task(run(CollectorSettings([engine.url], server=scheduler.address)))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(2):
            await task
