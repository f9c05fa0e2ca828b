"""VllmReader against an HTTP server that replays recordings."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from moorage.collect.reader import EngineUnreachable, EngineUnreadable
from moorage.collect.scraper import MAX_BODY_BYTES
from moorage.collect.targets import Target
from moorage.collect.vllm_reader import VllmReader
from moorage.v1 import scheduler_pb2
from tests.unit.collect.fakes import FakeEngine, StartEngine, hang, recording

MODELS = json.dumps({"data": [{"id": "lora", "max_model_len": None}, {"id": "tiny", "max_model_len": 8192}]})


class Clock:
    """Monotonic seconds that stand still unless told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False) as client:
        yield client


@pytest.fixture
async def engine(start_engine: StartEngine) -> FakeEngine:
    return await start_engine(
        {
            "/metrics": recording("lifecycle_06"),
            "/v1/models": MODELS,
            "/is_paused": '{"is_paused":false}',
            "/weight_info": '{"weight_version":"default"}',
        }
    )


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reader(engine: FakeEngine, http: httpx.AsyncClient, clock: Clock) -> VllmReader:
    return VllmReader(Target("a", engine.url), http, clock=clock)


async def test_metrics_and_facts_make_a_snapshot(engine: FakeEngine, reader: VllmReader) -> None:
    reading = await reader.read(2.0)
    [snapshot] = reading.snapshots
    assert snapshot.endpoint == engine.url
    assert snapshot.state == scheduler_pb2.INSTANCE_STATE_SERVING
    assert snapshot.max_context_tokens == 8192
    assert snapshot.weight_version == "default"
    assert reading.remarks == frozenset()


async def test_pause_is_asked_each_time_weights_and_models_rarely(
    engine: FakeEngine, reader: VllmReader, clock: Clock
) -> None:
    for _ in range(3):
        await reader.read(2.0)
        clock.now += 1
    assert [engine.asked.count(path) for path in ("/is_paused", "/weight_info", "/v1/models")] == [3, 1, 1]
    engine.answers["/is_paused"] = '{"is_paused":true}'
    clock.now += 30
    [snapshot] = (await reader.read(2.0)).snapshots
    assert snapshot.state == scheduler_pb2.INSTANCE_STATE_PAUSED
    assert [engine.asked.count(path) for path in ("/weight_info", "/v1/models")] == [2, 1]


async def test_a_weight_update_makes_it_ask_for_the_version_at_once(engine: FakeEngine, reader: VllmReader) -> None:
    await reader.read(2.0)
    engine.answers["/metrics"] = recording("lifecycle_06") + (
        'vllm:rl_weight_update_operation_duration_seconds_count{operation="finish"} 1.0\n'
    )
    engine.answers["/weight_info"] = '{"weight_version":"step-1"}'
    [snapshot] = (await reader.read(2.0)).snapshots
    assert snapshot.weight_version == "step-1"


async def test_a_version_that_changed_and_can_not_be_read_is_unknown(engine: FakeEngine, reader: VllmReader) -> None:
    await reader.read(2.0)
    engine.answers["/metrics"] = recording("lifecycle_06") + (
        'http_requests_total{handler="/update_weight_version",method="POST",status="2xx"} 1.0\n'
    )
    engine.answers["/weight_info"] = "not json"
    [snapshot] = (await reader.read(2.0)).snapshots
    assert snapshot.weight_version == ""


async def test_without_development_mode_it_asks_once_and_says_so(engine: FakeEngine, reader: VllmReader) -> None:
    del engine.answers["/is_paused"], engine.answers["/weight_info"]
    for _ in range(3):
        reading = await reader.read(2.0)
    assert [engine.asked.count(path) for path in ("/is_paused", "/weight_info")] == [1, 1]
    assert reading.snapshots[0].state == scheduler_pb2.INSTANCE_STATE_SERVING
    assert reading.snapshots[0].weight_version == ""
    assert reading.remarks == {"no answer from GET /is_paused", "no answer from GET /weight_info"}


async def test_a_restart_makes_it_ask_everything_again(engine: FakeEngine, reader: VllmReader) -> None:
    del engine.answers["/weight_info"]
    await reader.read(2.0)
    engine.answers |= {"/weight_info": '{"weight_version":"v2"}', "/v1/models": MODELS.replace("8192", "4096")}
    assert (await reader.read(2.0)).snapshots[0].max_context_tokens == 8192
    engine.answers["/metrics"] = recording("lifecycle_12")
    [snapshot] = (await reader.read(2.0)).snapshots
    assert (snapshot.weight_version, snapshot.max_context_tokens) == ("v2", 4096)


async def test_facts_are_asked_again_on_request(engine: FakeEngine, reader: VllmReader) -> None:
    await reader.read(2.0)
    reader.forget_facts()
    await reader.read(2.0)
    assert engine.asked.count("/v1/models") == 2


async def test_hanging_endpoints_do_not_keep_the_metrics_back(engine: FakeEngine, reader: VllmReader) -> None:
    engine.answers |= {"/is_paused": hang, "/weight_info": hang, "/v1/models": hang}
    async with asyncio.timeout(1.0):
        [snapshot] = (await reader.read(0.4)).snapshots
    assert snapshot.generation_tokens_total == 3693
    assert not snapshot.HasField("max_context_tokens")


@pytest.mark.parametrize(
    "answer",
    ["[]", "{}", '{"data":{}}', '{"data":[1]}', '{"is_paused":"yes"}', '{"weight_version":3}', "null", "<html>"],
)
async def test_odd_answers_leave_facts_unknown(engine: FakeEngine, reader: VllmReader, answer: str) -> None:
    engine.answers |= {"/is_paused": answer, "/weight_info": answer, "/v1/models": answer}
    [snapshot] = (await reader.read(2.0)).snapshots
    assert snapshot.state == scheduler_pb2.INSTANCE_STATE_SERVING
    assert snapshot.weight_version == ""
    assert not snapshot.HasField("max_context_tokens")


@pytest.mark.parametrize("page", ["<html>login</html>", "", "up 1\n", '{"detail":"x"}'])
async def test_a_page_that_is_not_metrics_is_an_error(engine: FakeEngine, reader: VllmReader, page: str) -> None:
    engine.answers["/metrics"] = page
    with pytest.raises(EngineUnreadable):
        await reader.read(2.0)


async def test_an_engine_without_metrics_is_an_error(engine: FakeEngine, reader: VllmReader) -> None:
    del engine.answers["/metrics"]
    with pytest.raises(EngineUnreadable, match="404"):
        await reader.read(2.0)


async def answer_500(_: asyncio.StreamReader) -> bytes:
    return b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n"


async def answer_too_much(_: asyncio.StreamReader) -> bytes:
    return b"HTTP/1.1 200 OK\r\n\r\n" + b"x 1\n" * (MAX_BODY_BYTES // 4 + 1)


async def answer_other_protocol(_: asyncio.StreamReader) -> bytes:
    return b"-ERR unknown command\r\n"


async def test_errors_and_floods_are_errors(engine: FakeEngine, reader: VllmReader) -> None:
    engine.answers["/metrics"] = answer_500
    with pytest.raises(EngineUnreadable, match="500"):
        await reader.read(2.0)
    engine.answers["/metrics"] = answer_too_much
    with pytest.raises(EngineUnreadable, match="larger"):
        await reader.read(5.0)


async def test_no_answer_is_unreachable(engine: FakeEngine, reader: VllmReader, http: httpx.AsyncClient) -> None:
    engine.answers["/metrics"] = hang
    with pytest.raises(EngineUnreachable, match="no answer") as silent:
        await reader.read(0.1)
    assert not silent.value.refused
    engine.answers["/metrics"] = answer_other_protocol
    with pytest.raises(EngineUnreachable, match="ProtocolError"):
        await reader.read(2.0)
    with pytest.raises(EngineUnreachable, match="ConnectError") as nobody:
        await VllmReader(Target("nobody", "http://127.0.0.1:9"), http).read(2.0)
    assert nobody.value.refused
