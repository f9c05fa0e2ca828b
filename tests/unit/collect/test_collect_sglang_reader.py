"""SglangReader against an HTTP server that answers with crafted pages."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from moorage.collect.reader import EngineUnreachable, EngineUnreadable
from moorage.collect.sglang_reader import SglangReader
from moorage.collect.targets import Target
from tests.unit.collect.fakes import FakeEngine, StartEngine, crafted, hang


class Clock:
    """Monotonic seconds that stand still unless told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def engine(start_engine: StartEngine) -> FakeEngine:
    return await start_engine(
        {
            "/metrics": crafted("one_01_busy.txt"),
            "/v1/loads": crafted("loads_one_01_busy.json"),
            "/model_info": '{"model_path":"tiny","weight_version":"default"}',
        }
    )


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def reader(engine: FakeEngine, clock: Clock) -> AsyncIterator[SglangReader]:
    async with httpx.AsyncClient(trust_env=False) as http:
        yield SglangReader(Target("a", engine.url), http, clock=clock)


async def test_metrics_loads_and_version_make_a_snapshot(engine: FakeEngine, reader: SglangReader) -> None:
    reading = await reader.read(2.0)
    [snapshot] = reading.snapshots
    assert (snapshot.instance_id, snapshot.endpoint, snapshot.weight_version) == ("a", engine.url, "default")
    assert (snapshot.running, snapshot.waiting, snapshot.total_blocks) == (13, 5, 6400)
    assert snapshot.prefill_tokens_per_second == pytest.approx(5000)
    assert reading.remarks == frozenset()


async def test_loads_are_asked_each_time_and_the_version_rarely(
    engine: FakeEngine, reader: SglangReader, clock: Clock
) -> None:
    for _ in range(3):
        await reader.read(2.0)
        clock.now += 1
    assert [engine.asked.count(path) for path in ("/v1/loads", "/model_info")] == [3, 1]
    clock.now += 30
    await reader.read(2.0)
    assert engine.asked.count("/model_info") == 2


@pytest.mark.parametrize(
    "change",
    [
        crafted("one_04_new_weights.txt"),
        crafted("one_01_busy.txt")
        + 'sglang:http_responses_total{endpoint="/update_weight_version",method="POST",status_code="200"} 1.0\n',
    ],
)
async def test_new_weights_make_it_ask_for_their_version_at_once(
    engine: FakeEngine, reader: SglangReader, change: str
) -> None:
    await reader.read(2.0)
    engine.answers |= {"/metrics": change, "/model_info": '{"weight_version":"step-1"}'}
    [snapshot] = (await reader.read(2.0)).snapshots
    assert snapshot.weight_version == "step-1"
    await reader.read(2.0)
    assert engine.asked.count("/model_info") == 2


async def test_a_version_that_changed_and_can_not_be_read_is_unknown(engine: FakeEngine, reader: SglangReader) -> None:
    await reader.read(2.0)
    engine.answers |= {"/metrics": crafted("one_04_new_weights.txt"), "/model_info": "not json"}
    [snapshot] = (await reader.read(2.0)).snapshots
    assert snapshot.weight_version == ""


async def test_a_restart_makes_it_ask_everything_again(engine: FakeEngine, reader: SglangReader) -> None:
    del engine.answers["/v1/loads"]
    await reader.read(2.0)
    await reader.read(2.0)
    assert engine.asked.count("/v1/loads") == 1
    engine.answers |= {
        "/metrics": crafted("one_05_restarted.txt"),
        "/v1/loads": crafted("loads_one_01_busy.json"),
        "/model_info": '{"weight_version":"v2"}',
    }
    assert (await reader.read(2.0)).snapshots[0].weight_version == "v2"
    assert (await reader.read(2.0)).snapshots[0].running == 13


async def test_what_is_not_there_is_said(engine: FakeEngine, reader: SglangReader) -> None:
    del engine.answers["/v1/loads"], engine.answers["/model_info"]
    reading = await reader.read(2.0)
    assert reading.remarks == {"no answer from GET /v1/loads", "no answer from GET /model_info"}
    assert (reading.snapshots[0].running, reading.snapshots[0].weight_version) == (12, "")
    assert not reading.snapshots[0].HasField("prefill_tokens_per_second")


async def test_loads_of_other_ranks_or_without_prefill_are_said(engine: FakeEngine, reader: SglangReader) -> None:
    engine.answers["/v1/loads"] = '{"loads":[{"dp_rank":1,"max_total_num_tokens":9}]}'
    assert (await reader.read(2.0)).remarks == {
        "missing in /v1/loads: rank 0",
        "missing in /v1/loads: total_prefill_uncached_tokens or total_prefill_busy_us",
    }


async def test_hanging_endpoints_do_not_keep_the_metrics_back(engine: FakeEngine, reader: SglangReader) -> None:
    engine.answers |= {"/v1/loads": hang, "/model_info": hang}
    async with asyncio.timeout(1.5):
        [snapshot] = (await reader.read(0.4)).snapshots
    assert (snapshot.running, snapshot.generation_tokens_total) == (12, 52_000)


async def test_loads_that_stop_coming_are_not_used_any_more(engine: FakeEngine, reader: SglangReader) -> None:
    await reader.read(2.0)
    engine.answers["/v1/loads"] = "<html>"
    [snapshot] = (await reader.read(2.0)).snapshots
    assert (snapshot.running, snapshot.waiting) == (12, 4)
    assert snapshot.prefill_tokens_per_second == pytest.approx(5000)


async def test_pages_that_can_not_be_read(engine: FakeEngine, reader: SglangReader) -> None:
    engine.answers["/metrics"] = "<html>"
    with pytest.raises(EngineUnreadable):
        await reader.read(2.0)
    del engine.answers["/metrics"]
    with pytest.raises(EngineUnreadable, match=r"404 .*--enable-metrics"):
        await reader.read(2.0)
    engine.answers["/metrics"] = hang
    with pytest.raises(EngineUnreachable):
        await reader.read(0.1)
