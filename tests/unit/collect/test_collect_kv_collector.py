"""The whole collector with publishers of KV events: what the server comes to know."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest
import zmq.asyncio

from moorage.collect import kv_follower, kv_subscriber
from moorage.collect.kv_record import CacheRecord
from moorage.collect.kv_subscriber import open_context
from moorage.collect.runner import CollectorSettings, run
from moorage.hashes import prefix_hashes
from tests.unit.collect.fakes import FakeEngine, FakeScheduler, StartEngine, crafted, hang, recording
from tests.unit.collect.kv_fakes import CLEARED, FakePublisher, batch, free_pair, removed, stored

BLOCK = 32
PROMPT = list(range(4 * BLOCK))
HASHES = prefix_hashes(PROMPT, BLOCK)


def turn(start: int, end: int, **fields: object) -> dict[str, object]:
    """Blocks `start` to `end` of the prompt, stored."""
    parent = start - 1 if start else None
    tokens = PROMPT[start * BLOCK : end * BLOCK]
    return stored(range(start, end), tokens, parent, block_size=BLOCK, **fields)


@asynccontextmanager
async def collecting(*urls: str, server: FakeScheduler, **settings: object) -> AsyncIterator[None]:
    stop = asyncio.Event()
    told = CollectorSettings(urls, server=server.address, interval=0.1, **settings)  # type: ignore[arg-type]
    task = asyncio.create_task(run(told, stop=stop))
    try:
        yield
    finally:
        stop.set()
        async with asyncio.timeout(5):
            await task
        assert server.ledger.complaints == []


StartPublisher = Callable[..., Awaitable[FakePublisher]]


@pytest.fixture
async def publish(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StartPublisher]:
    """Starts publishers; all end with the test. Nobody waits long for anything."""
    monkeypatch.setattr(kv_subscriber, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(kv_subscriber, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(kv_subscriber, "AUDIT_SECONDS", 0.4)
    monkeypatch.setattr(kv_follower, "LOOK_SECONDS", 0.3)
    monkeypatch.setattr(kv_follower, "RETRY_SECONDS", 0.2)
    async with AsyncExitStack() as stack:
        context: zmq.asyncio.Context = await stack.enter_async_context(open_context())

        async def start(**arguments: object) -> FakePublisher:
            publisher = FakePublisher(context, **arguments)  # type: ignore[arg-type]
            stack.push_async_callback(publisher.close)
            return publisher

        yield start


def sources(*publishers: FakePublisher, host: str = "*") -> str:
    """What vLLM's GET /kv_event_sources answers."""
    told = {
        str(rank): {
            "publisher": "zmq",
            "endpoint": f"tcp://{host}:{publisher.port}",
            "replay_endpoint": f"tcp://{host}:{publisher.replay_port}" if publisher.replay_port else None,
            "topic": publisher.topic.decode(),
        }
        for rank, publisher in enumerate(publishers)
    }
    return json.dumps(told)


async def engine_with(start_engine: StartEngine, *publishers: FakePublisher, page: str = "lifecycle_06") -> FakeEngine:
    return await start_engine({"/metrics": recording(page), "/kv_event_sources": sources(*publishers)})


async def knows(server: FakeScheduler, hashes: list[int], instance: str = "a", rank: int = 0) -> None:
    """Waits until the server knows exactly these blocks."""

    def check() -> bool:
        cache = server.ledger.cache(instance, rank)
        return cache is not None and not cache.behind and cache.hashes == set(hashes)

    await server.until(check)


async def is_behind(server: FakeScheduler, instance: str = "a") -> None:
    await server.until(lambda: (cache := server.ledger.cache(instance)) is not None and cache.behind)


async def test_a_cache_from_its_first_block_on(
    start_engine: StartEngine, scheduler: FakeScheduler, publish: StartPublisher
) -> None:
    publisher = await publish()
    engine = await engine_with(start_engine, publisher)
    async with collecting(f"a={engine.url}", server=scheduler):
        await publisher.subscribed()
        await knows(scheduler, [])
        await publisher.publish(turn(0, 2, session_id="s-1"))
        await publisher.publish(turn(2, 4, session_id="s-2"), removed(3))
        await knows(scheduler, HASHES[:3])
        await publisher.publish(removed(2))
        await knows(scheduler, HASHES[:2])
        told = len(scheduler.requests)
        await scheduler.until(lambda: len(scheduler.requests) >= told + 3)
        # Each heartbeat of an engine that is followed carries an update, changes or not.
        assert all(len(request.prefixes) == 1 for request in scheduler.requests[told:])
        await publisher.publish(CLEARED, turn(0, 1))
        await knows(scheduler, HASHES[:1])
    assert {update.incarnation for update in scheduler.ledger.log} == {scheduler.snapshots("a")[0].incarnation}
    found = [snapshot for snapshot in scheduler.snapshots("a") if snapshot.resident_sessions]
    assert (found[0].resident_sessions[0].session_id, found[0].resident_sessions[0].blocks) == ("s-1", 2)
    last = scheduler.snapshots("a")[-1]
    assert last.HasField("cached_blocks")
    assert last.cached_blocks == max(0, 1 - last.used_blocks)


@pytest.mark.parametrize("topic_frame", [True, False])
async def test_a_collector_that_starts_late_catches_up(
    start_engine: StartEngine, scheduler: FakeScheduler, publish: StartPublisher, topic_frame: bool
) -> None:
    publisher = await publish()
    publisher.topic_frame = topic_frame
    for number in range(4):
        await publisher.publish(turn(number, number + 1), lose=True)
    engine = await engine_with(start_engine, publisher)
    async with collecting(f"a={engine.url}", server=scheduler):
        await knows(scheduler, HASHES)
    assert publisher.asked[0] == 0


async def test_a_replay_that_is_cut_again_and_again(
    start_engine: StartEngine, scheduler: FakeScheduler, publish: StartPublisher
) -> None:
    publisher = await publish()
    publisher.cut = 1
    for number in range(4):
        await publisher.publish(turn(number, number + 1), lose=True)
    engine = await engine_with(start_engine, publisher)
    async with collecting(f"a={engine.url}", server=scheduler):
        await knows(scheduler, HASHES)
    # The last answer has batch 3 in its place, but no end.
    assert publisher.asked[:4] == [0, 1, 2, 4]


async def test_a_gap_is_filled_and_a_lost_last_batch_is_found(
    start_engine: StartEngine, scheduler: FakeScheduler, publish: StartPublisher
) -> None:
    publisher = await publish()
    engine = await engine_with(start_engine, publisher)
    async with collecting(f"a={engine.url}", server=scheduler):
        await publisher.subscribed()
        await publisher.publish(turn(0, 1))
        await knows(scheduler, HASHES[:1])
        await publisher.publish(turn(1, 2), lose=True)
        await publisher.publish(turn(2, 3))
        await knows(scheduler, HASHES[:3])
        await publisher.publish(turn(3, 4), lose=True)
        await knows(scheduler, HASHES)
    assert 1 in publisher.asked


async def test_without_a_replay_a_gap_lasts_until_the_cache_is_cleared(
    start_engine: StartEngine, scheduler: FakeScheduler, publish: StartPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "moorage.collect")
    publisher = await publish(replay_port=None)
    engine = await engine_with(start_engine, publisher)
    async with collecting(f"a={engine.url}", server=scheduler):
        await publisher.subscribed()
        await is_behind(scheduler)
        await publisher.publish(turn(0, 1))
        await knows(scheduler, HASHES[:1])
        await scheduler.until(lambda: "state=following" in caplog.text)
        await publisher.publish(turn(1, 2), lose=True)
        await publisher.publish(turn(2, 3))
        await is_behind(scheduler)
        await scheduler.until(lambda: "reason='missed batches 1 to 1' lasts=" in caplog.text)
        seen = len(scheduler.snapshots("a"))
        await scheduler.more("a")
        await scheduler.more("a")
        assert not any(snapshot.HasField("cached_blocks") for snapshot in scheduler.snapshots("a")[seen + 1 :])
        await publisher.publish(CLEARED, turn(0, 2))
        await knows(scheduler, HASHES[:2])
    assert "state=behind was=following reason='missed batches 1 to 1' lasts=" in caplog.text
    assert "with a replay_endpoint in --kv-events-config it catches up" in caplog.text


async def test_a_replay_endpoint_that_hangs(
    start_engine: StartEngine, scheduler: FakeScheduler, publish: StartPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = await publish()
    publisher.silent = True
    await publisher.publish(turn(0, 1), lose=True)
    engine = await engine_with(start_engine, publisher)
    async with collecting(f"a={engine.url}", server=scheduler):
        await publisher.subscribed()
        await publisher.publish(turn(1, 2))
        await is_behind(scheduler)
        await scheduler.until(lambda: "no answer in time from the replay endpoint" in caplog.text)
        publisher.silent = False
        await publisher.publish(CLEARED, turn(0, 1))
        await knows(scheduler, HASHES[:1])


async def test_a_restart_under_the_same_address(
    start_engine: StartEngine, scheduler: FakeScheduler, publish: StartPublisher
) -> None:
    first = await publish()
    engine = await engine_with(start_engine, first, page="lifecycle_10")
    async with collecting(f"a={engine.url}", server=scheduler):
        await first.subscribed()
        await first.publish(turn(0, 3))
        await knows(scheduler, HASHES[:3])
        before = scheduler.ledger.cache("a")
        told = len(scheduler.ledger.log)
        engine.answers["/metrics"] = "<html>"
        await first.close()
        await asyncio.sleep(0.4)
        # Of an engine that is gone nothing is told.
        assert len(scheduler.ledger.log) <= told + 1
        second = await publish(port=first.port, replay_port=first.replay_port)
        await second.publish(turn(0, 1), lose=True)
        engine.answers["/metrics"] = recording("lifecycle_13")
        await knows(scheduler, HASHES[:1])
        await second.publish(turn(1, 2))
        await knows(scheduler, HASHES[:2])
    after = scheduler.ledger.cache("a")
    assert before is not None
    assert after is not None
    assert before.incarnation != after.incarnation


async def test_events_of_a_new_engine_wait_for_its_incarnation(
    start_engine: StartEngine, scheduler: FakeScheduler, publish: StartPublisher
) -> None:
    publisher = await publish(replay_port=None)
    engine = await engine_with(start_engine, publisher, page="lifecycle_10")
    async with collecting(f"a={engine.url}", server=scheduler):
        await publisher.subscribed()
        await publisher.publish(turn(0, 1))
        await publisher.publish(turn(1, 2))
        await knows(scheduler, HASHES[:2])
        engine.answers["/metrics"] = "<html>"
        await asyncio.sleep(0.3)
        # The publisher of the new engine is there before its metrics are.
        publisher.sequence = 0
        await publisher.publish(turn(0, 1))
        await asyncio.sleep(0.3)
        engine.answers["/metrics"] = recording("lifecycle_13")
        await knows(scheduler, HASHES[:1])
    incarnations = [(update.incarnation, update.stream) for update in scheduler.ledger.log]
    assert len({incarnation for incarnation, _ in incarnations}) == 2
    assert len({stream for _, stream in incarnations if stream == incarnations[-1][1]}) == 1


async def test_a_cleared_cache_of_an_idle_engine_is_doubted(
    start_engine: StartEngine, scheduler: FakeScheduler, publish: StartPublisher
) -> None:
    publisher = await publish()
    engine = await engine_with(start_engine, publisher)
    async with collecting(f"a={engine.url}", server=scheduler):
        await publisher.subscribed()
        await publisher.publish(turn(0, 3))
        await knows(scheduler, HASHES[:3])
        await scheduler.more("a")
        # It was put to sleep: its metrics say so at once, its events with the next step.
        slept = 'vllm:sleep_mode_operation_duration_seconds_count{operation="sleep"} 1.0\n'
        engine.answers["/metrics"] = recording("lifecycle_06") + slept
        await is_behind(scheduler)
        await publisher.publish(CLEARED, turn(0, 1))
        await knows(scheduler, HASHES[:1])


async def test_an_engine_that_connects_to_us(
    start_engine: StartEngine, scheduler: FakeScheduler, publish: StartPublisher
) -> None:
    address = f"tcp://127.0.0.1:{free_pair()}"
    publisher = await publish(connect=address)
    config = {"publisher": "zmq", "endpoint": address, "topic": "kv-events"}
    config["replay_endpoint"] = f"tcp://*:{publisher.replay_port}"
    page = recording("lifecycle_06")
    engine = await start_engine({"/metrics": page, "/kv_event_sources": json.dumps({"0": config})})
    async with collecting(f"a={engine.url}", server=scheduler):
        await publisher.subscribed()
        await publisher.publish(turn(0, 2))
        await knows(scheduler, HASHES[:2])


async def test_addresses_from_the_command_line_and_instances_without_events(
    start_engine: StartEngine, scheduler: FakeScheduler, publish: StartPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = await publish()
    given = await start_engine({"/metrics": recording("lifecycle_06")})
    off, silent, mute, away = [
        await start_engine({"/metrics": recording("lifecycle_06"), "/kv_event_sources": text})
        for text in (sources(publisher), "{}", "<html>", sources(publisher, host="192.0.2.1"))
    ]
    urls = [f"a={given.url}", f"off={off.url}", f"silent={silent.url}", f"mute={mute.url}", f"away={away.url}"]
    where = f"a=tcp://127.0.0.1:{publisher.port},tcp://127.0.0.1:{publisher.replay_port}"
    async with collecting(*urls, server=scheduler, kv_events=[where, "off=off"]):
        await publisher.subscribed()
        await publisher.publish(turn(0, 2))
        await knows(scheduler, HASHES[:2])
        for name in ("off", "silent", "mute", "away"):
            await scheduler.more(name)
        assert set(scheduler.ledger.caches) == {("a", 0)}
    assert "/kv_event_sources" not in off.asked
    assert "instance=silent remark='it publishes no KV events" in caplog.text
    assert "instance=away remark='the engine sends KV events to tcp://192.0.2.1" in caplog.text
    assert caplog.text.count("it publishes no KV events") == 1


async def test_ranks_have_caches_of_their_own(
    start_engine: StartEngine, scheduler: FakeScheduler, publish: StartPublisher
) -> None:
    first = await publish(topic=b"", replay_port=None, port=free_pair())
    ports = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": first.port, "topic": "", "dp_size": 2}
    second = await publish(topic=b"", replay_port=None, port=first.port + 1)
    page = crafted("two_ranks.txt")
    engine = await start_engine({"/metrics": page, "/server_info": json.dumps({"kv_events": ports})})
    [size] = {int(float(line.split()[-1])) for line in page.splitlines() if line.startswith("sglang:page_size{")}
    tokens = list(range(2 * size))
    async with collecting(f"a={engine.url}", server=scheduler, engine="sglang"):
        for publisher, end in ((first, 1), (second, 2)):
            await publisher.subscribed()
            await publisher.publish(stored(range(end), tokens[: end * size], block_size=size, cache_salt="v7"))
        hashes = prefix_hashes(tokens, size, "v7")
        await knows(scheduler, hashes[:1], rank=0)
        await knows(scheduler, hashes, rank=1)


async def test_garbage_and_floods_do_not_touch_anything_else(
    start_engine: StartEngine, scheduler: FakeScheduler, publish: StartPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = await publish(), await publish()
    engines = [await engine_with(start_engine, publisher) for publisher in (good, bad)]
    # Something that is no publisher at all, but accepts connections.
    sink = await start_engine({})
    port = int(sink.url.rpartition(":")[2])
    urls = [f"a={engines[0].url}", f"bad={engines[1].url}", f"sink={engines[1].url}/x"]

    async def flood() -> None:
        while True:
            for frames in ([b""], [b"kv-events", b"short", b"x"], [b"kv-events", bytes(8), b"\xdd\xff\xff\xff\xff"]):
                await bad.send(frames)
            await bad.publish_raw(batch({"type": "Strange"}))
            await asyncio.sleep(0.001)

    async with collecting(*urls, server=scheduler, kv_events=[f"sink=tcp://127.0.0.1:{port}"]):
        await good.subscribed()
        await bad.subscribed()
        task = asyncio.create_task(flood())
        try:
            started = asyncio.get_running_loop().time()
            await good.publish(turn(0, 2))
            await knows(scheduler, HASHES[:2])
            for _ in range(10):
                await scheduler.more("a")
            # Ten readings, each an interval of 0.1 s after the one before, and some room for a busy machine.
            assert asyncio.get_running_loop().time() - started < 5
        finally:
            # Sent by this very loop, the flood also keeps the loop from what is waited for next.
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await scheduler.until(lambda: scheduler.ledger.cache("bad") is not None)
        cache = scheduler.ledger.cache("bad")
        assert cache is not None
        assert cache.behind
        assert scheduler.ledger.cache("sink") is None
    assert "unreadable KV events" in caplog.text
    assert "KV events of unknown type 'Strange'" in caplog.text
    assert caplog.text.count("messages that are no KV events") == 1


async def test_a_server_that_is_away_or_forgets_gets_everything_again(
    start_engine: StartEngine, scheduler: FakeScheduler, publish: StartPublisher
) -> None:
    publisher = await publish()
    engine = await engine_with(start_engine, publisher)
    async with collecting(f"a={engine.url}", server=scheduler):
        await publisher.subscribed()
        await publisher.publish(turn(0, 2))
        await knows(scheduler, HASHES[:2])
        scheduler.failure = grpc.StatusCode.UNAVAILABLE
        seen = len(scheduler.requests)
        await scheduler.until(lambda: len(scheduler.requests) > seen)
        await publisher.publish(turn(2, 3), removed(1))
        scheduler.failure = None
        await knows(scheduler, [HASHES[0], HASHES[2]])
        scheduler.ledger.forget()
        await knows(scheduler, [HASHES[0], HASHES[2]])
        scheduler.ledger.resend.add("a")
        await scheduler.until(lambda: not scheduler.ledger.resend)
        await knows(scheduler, [HASHES[0], HASHES[2]])


async def test_a_record_that_breaks_spoils_nothing(
    start_engine: StartEngine,
    scheduler: FakeScheduler,
    publish: StartPublisher,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    publisher = await publish()
    engine = await engine_with(start_engine, publisher)
    async with collecting(f"a={engine.url}", server=scheduler):
        await publisher.subscribed()
        await publisher.publish(turn(0, 2))
        await knows(scheduler, HASHES[:2])
        for method in ("apply", "largest_sessions", "take_changes"):

            def fail(*arguments: object) -> None:
                raise RuntimeError("bug")

            with monkeypatch.context() as patch:
                patch.setattr(CacheRecord, method, fail)
                await publisher.publish(turn(2, 3))
                await scheduler.until(lambda: "event=kv_events_failed instance=a dp_rank=0" in caplog.text)
                await scheduler.more("a")
            assert "state=unreadable" not in caplog.text
            caplog.clear()
            await publisher.publish(removed(2))
            await knows(scheduler, HASHES[:2])


async def test_an_engine_too_busy_for_its_metrics_is_still_heard(
    start_engine: StartEngine, scheduler: FakeScheduler, publish: StartPublisher
) -> None:
    publisher = await publish()
    engine = await engine_with(start_engine, publisher)
    async with collecting(f"a={engine.url}", server=scheduler):
        await publisher.subscribed()
        await publisher.publish(turn(0, 1))
        await knows(scheduler, HASHES[:1])
        engine.answers["/metrics"] = hang
        seen = len(scheduler.snapshots("a"))
        await publisher.publish(turn(1, 3))
        await knows(scheduler, HASHES[:3])
        assert len(scheduler.snapshots("a")) <= seen + 1
