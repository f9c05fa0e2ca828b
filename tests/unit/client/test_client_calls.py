from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import uuid
from collections.abc import Callable

import grpc
import pytest

from moorage import AsyncClient, Client, Decision, Outcome, Phase, SessionProgress, Unavailable, Usage
from moorage.channel import channel_options, resolve_target, service_config
from moorage.v1 import inspector_pb2, operator_pb2
from moorage.v1 import scheduler_pb2 as pb
from tests.unit.client.fake_scheduler import FakeScheduler, fail, serve, until


def test_a_session_by_hand(fake: FakeScheduler, sync_client: Client) -> None:
    admitted = sync_client.admit(
        "s", workload_class="rlvr", prompt_tokens=0, policy_version=None, prefix_hashes=[1, 2**64 - 1], lease_ttl=1.5
    )
    assert admitted.decision == Decision.DECISION_PLACE
    placed = sync_client.place("s", lease_token=admitted.lease.token, turn=0, prompt_tokens=7)
    assert placed.placement.endpoint == "http://engine-0"
    beat = sync_client.heartbeat(
        sessions=[SessionProgress(session_id="s", lease_token=placed.lease.token, phase=Phase.PHASE_RUNNING)]
    )
    assert [ack.known for ack in beat.sessions] == [True]
    released = sync_client.release(
        "s", lease_token=placed.lease.token, outcome=Outcome.OUTCOME_COMPLETED, usage=Usage(output_tokens=5)
    )
    assert released.released

    admit = fake.calls["Admit"][0]
    assert admit.pool == "default"
    assert admit.HasField("prompt_tokens")
    assert not admit.HasField("policy_version")
    assert not admit.HasField("max_wait")
    assert admit.lease_ttl.ToTimedelta().total_seconds() == 1.5
    assert list(admit.prefix_hashes) == [1, 2**64 - 1]
    assert fake.calls["Place"][0].HasField("turn")
    assert fake.calls["Release"][0].usage == Usage(output_tokens=5)


async def test_a_session_by_hand_on_asyncio(fake: FakeScheduler, client: AsyncClient) -> None:
    admitted = await client.admit("s", pool="other")
    placed = await client.place("s", lease_token=admitted.lease.token, pool="other")
    beat = await client.heartbeat(sessions=[SessionProgress(session_id="s", lease_token="old")], pool="other")
    assert [ack.known for ack in beat.sessions] == [False]
    assert (await client.release("s", lease_token=placed.lease.token, outcome="ABORTED", pool="other")).released
    assert {r.pool for method in fake.calls for r in fake.calls[method]} == {"other"}


def test_every_mutation_has_a_uuid_of_its_own(fake: FakeScheduler, sync_client: Client) -> None:
    token = sync_client.admit("s").lease.token
    sync_client.place("s", lease_token=token)
    sync_client.release("s", lease_token=token, outcome="COMPLETED")
    sync_client.admit("s", request_id="mine")
    ids = [fake.calls[method][0].request_id for method in ("Admit", "Place", "Release")]
    assert len(set(ids)) == 3
    assert {uuid.UUID(request_id).version for request_id in ids} == {4}
    assert fake.calls["Admit"][1].request_id == "mine"


@pytest.mark.parametrize(("failures", "reached"), [(2, True), (4, True), (5, False)])
def test_the_service_config_retries_unavailable_four_times_with_the_same_request_id(
    fake: FakeScheduler, target: str, failures: int, reached: bool
) -> None:
    for _ in range(failures):  # a pushback keeps the test short, and shows that it is honoured
        fake.before["Admit"].append(lambda _, context: fail(context, grpc.StatusCode.UNAVAILABLE, pushback="5"))
    with Client(target) as client:
        if reached:
            assert client.admit("s").decision == Decision.DECISION_PLACE
        else:
            with pytest.raises(Unavailable):
                client.admit("s")
    assert len(fake.calls["Admit"]) == min(failures + 1, 5)
    assert len({request.request_id for request in fake.calls["Admit"]}) == 1


async def test_asyncio_retries_by_the_same_service_config(fake: FakeScheduler, target: str) -> None:
    fake.fail_next("Admit", 2, grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE")
    async with AsyncClient(target) as client:
        assert (await client.admit("s")).decision == Decision.DECISION_PLACE
    assert len(fake.calls["Admit"]) == 3


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ABORTED])
def test_nothing_else_is_retried(fake: FakeScheduler, target: str, code: grpc.StatusCode) -> None:
    fake.fail_next("Admit", 1, code)
    with Client(target) as client, pytest.raises(Exception, match=code.name):
        client.admit("s")
    assert len(fake.calls["Admit"]) == 1


def test_the_service_config_is_what_other_languages_can_use() -> None:
    config = json.loads(service_config())
    assert config["loadBalancingConfig"] == [{"round_robin": {}}]
    assert set(config["retryThrottling"]) == {"maxTokens", "tokenRatio"}
    (method_config,) = config["methodConfig"]
    services = {name["service"].rpartition(".")[2] for name in method_config["name"]}
    assert services == {"SchedulerService", "InspectorService", "OperatorService"}
    assert method_config["retryPolicy"]["retryableStatusCodes"] == ["UNAVAILABLE"]
    assert method_config["retryPolicy"]["maxAttempts"] == 5


def test_options_of_the_caller_win() -> None:
    assert dict(channel_options())["grpc.service_config"] == service_config()
    changed = dict(channel_options([("grpc.keepalive_time_ms", 1), ("grpc.new", 2)]))
    assert (changed["grpc.keepalive_time_ms"], changed["grpc.new"]) == (1, 2)


@pytest.mark.parametrize(("max_wait", "deadline"), [(0.0, 2.0), (30.0, 32.0)])
async def test_the_deadline_is_the_wait_plus_the_timeout(
    fake: FakeScheduler, target: str, max_wait: float, deadline: float
) -> None:
    seen: list[float] = []
    for method in ("Admit", "Place"):
        fake.before[method].append(lambda _, context: seen.append(context.time_remaining()))
    async with AsyncClient(target, timeout=2.0) as client:
        token = (await client.admit("s", max_wait=max_wait)).lease.token
        await client.place("s", lease_token=token, max_wait=max_wait)
    assert len(seen) == 2
    assert seen == pytest.approx([deadline, deadline], abs=0.5)


async def test_the_token_travels_with_every_call_and_raw_stub(fake: FakeScheduler, target: str) -> None:
    async with AsyncClient(target, token="secret") as client:
        await client.admit("a")
        await client.scheduler.Admit(pb.AdmitRequest(session_id="b"), timeout=5)
        with pytest.raises(asyncio.CancelledError):
            await _cancel_a_wait(fake, client)
    with Client(target, token="secret") as sync_client:
        sync_client.admit("c")
        sync_client.scheduler.Admit(pb.AdmitRequest(session_id="d"), timeout=5)
    assert [value for key, value in fake.metadata if key == "authorization"] == ["Bearer secret"] * 5


async def _cancel_a_wait(fake: FakeScheduler, client: AsyncClient) -> None:
    fake.capacity = 0
    waiting = asyncio.create_task(client.admit("w", max_wait=30))
    await until(lambda: "w" in fake.held)
    waiting.cancel()
    await until(lambda: "w" not in fake.held)
    fake.grow(10)
    await waiting


async def test_calls_travel_over_secure_channels(fake: FakeScheduler) -> None:
    local = grpc.local_channel_credentials()
    with serve(fake, credentials=grpc.local_server_credentials()) as target:
        async with AsyncClient(target, credentials=local, token="secret") as client:
            assert (await client.admit("a")).decision == Decision.DECISION_PLACE
        with Client(target, credentials=local) as sync_client:
            assert sync_client.admit("b").decision == Decision.DECISION_PLACE
    assert [value for key, value in fake.metadata if key == "authorization"] == ["Bearer secret"]


async def test_streams_carry_the_token_too(fake: FakeScheduler, target: str) -> None:
    def watch(call: Callable[[], object]) -> grpc.StatusCode:
        with pytest.raises(grpc.RpcError) as caught:
            call()
        return caught.value.code()

    with Client(target, token="secret") as client:
        code = watch(lambda: next(client.inspector.WatchEvents(inspector_pb2.WatchEventsRequest(), timeout=5)))
        assert code is grpc.StatusCode.UNIMPLEMENTED
    async with AsyncClient(target, token="secret") as aio_client:
        stream = aio_client.inspector.WatchEvents(inspector_pb2.WatchEventsRequest(), timeout=5)
        assert await stream.code() is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
            await aio_client.operator.CordonInstance(operator_pb2.CordonInstanceRequest(), timeout=5)


def test_the_target_comes_from_the_caller_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOORAGE_SERVER", raising=False)
    assert resolve_target() == "127.0.0.1:50061"
    monkeypatch.setenv("MOORAGE_SERVER", "moorage:50061")
    assert resolve_target() == "moorage:50061"
    with Client("elsewhere:1", pool="p") as client:
        assert (client.target, client.pool) == ("elsewhere:1", "p")


@pytest.mark.parametrize("wrong", [{"timeout": 0}, {"on_unavailable": "shrug"}])
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Client("127.0.0.1:1", **wrong)  # type: ignore[arg-type]


def test_settings_do_not_show_the_token() -> None:
    with Client("127.0.0.1:1", token="secret") as client:
        assert "secret" not in repr(client._settings)


def test_a_client_made_before_the_loop_works_in_it(target: str) -> None:
    client = AsyncClient(target)

    async def use() -> pb.AdmitResponse:
        async with client:
            return await client.admit("s")

    assert asyncio.run(use()).decision == Decision.DECISION_PLACE


def test_importing_the_package_does_not_load_grpc() -> None:
    code = "import sys, moorage; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
