"""What the moorage router tells a control plane, over a real channel, and what it does with the answers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from bench.moorage_router import MoorageRouter
from bench.routers import Progress
from bench.workload import Workload
from moorage import AsyncClient
from moorage.v1 import scheduler_pb2 as pb
from moorage.v1 import scheduler_pb2_grpc

ENDPOINT = "http://127.0.0.1:8101/"


class FakeScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Places everything on one engine and keeps the requests."""

    def __init__(self) -> None:
        self.admits: list[pb.AdmitRequest] = []
        self.places: list[pb.PlaceRequest] = []
        self.releases: list[pb.ReleaseRequest] = []

    async def Admit(self, request: pb.AdmitRequest, context: object) -> pb.AdmitResponse:
        self.admits.append(request)
        return pb.AdmitResponse(
            decision=pb.DECISION_PLACE, placement=pb.Placement(instance_id="e", endpoint=ENDPOINT), lease=_lease()
        )

    async def Place(self, request: pb.PlaceRequest, context: object) -> pb.PlaceResponse:
        self.places.append(request)
        placement = pb.Placement(instance_id="e", endpoint=ENDPOINT)
        return pb.PlaceResponse(decision=pb.DECISION_PLACE, placement=placement, lease=_lease())

    async def Release(self, request: pb.ReleaseRequest, context: object) -> pb.ReleaseResponse:
        self.releases.append(request)
        return pb.ReleaseResponse(released=True)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: object) -> pb.HeartbeatResponse:
        return pb.HeartbeatResponse(
            sessions=[pb.SessionAck(session_id=s.session_id, known=True) for s in request.sessions]
        )


def _lease() -> pb.Lease:
    lease = pb.Lease(token="token-1")
    lease.ttl.FromSeconds(30)
    return lease


@asynccontextmanager
async def router(fake: FakeScheduler) -> AsyncIterator[MoorageRouter]:
    server = grpc.aio.server()
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            yield MoorageRouter(client, max_context=7_000, block_size=32, run_id="run")
    finally:
        await server.stop(None)


async def test_a_session_declares_itself_reports_and_is_released() -> None:
    fake = FakeScheduler()
    plan = Workload(seed=1).session("agentic", 0)
    prompt = len(plan.prompt)
    async with router(fake) as under_test, under_test.session(plan) as session:
        assert await session.place(0, plan.prompt) == ENDPOINT.rstrip("/")
        session.report(Progress(0, prompt, 5))
        session.report(Progress(0, prompt, 9, turn_done=True, cached_tokens=0))
        assert await session.place(1, [1] * (prompt + 40)) == ENDPOINT.rstrip("/")
        session.report(Progress(1, prompt + 40, 4, turn_done=True, cached_tokens=prompt))
    admit = fake.admits[0]
    assert (admit.session_id, admit.group_id, admit.group_size) == ("run/agentic-00000-0", "run/agentic-00000", 4)
    assert (admit.workload_class, admit.prompt_tokens, admit.max_context_tokens) == ("agentic", prompt, 7_000)
    assert len(admit.prefix_hashes) == prompt // 32
    assert not admit.HasField("expected_output_tokens")
    assert [place.turn for place in fake.places][-1] == 1
    release = fake.releases[0]
    assert release.outcome == pb.OUTCOME_COMPLETED
    assert (release.usage.output_tokens, release.usage.context_tokens) == (13, prompt + 44)
    assert (release.usage.prompt_tokens, release.usage.cached_tokens) == (2 * prompt + 40, prompt)


async def test_samples_of_a_group_declare_the_same_prefix() -> None:
    fake = FakeScheduler()
    workload = Workload(seed=1)
    async with router(fake) as under_test:
        for index in (0, 1):
            async with under_test.session(workload.session("agentic", index)):
                pass
    assert fake.admits[0].prefix_hashes == fake.admits[1].prefix_hashes
    assert fake.admits[0].session_id != fake.admits[1].session_id


async def test_a_failed_rollout_is_released_as_failed() -> None:
    fake = FakeScheduler()
    async with router(fake) as under_test:
        with pytest.raises(ConnectionError):
            async with under_test.session(Workload(seed=1).session("rlvr", 0)):
                raise ConnectionError("engine gone")
    assert [release.outcome for release in fake.releases] == [pb.OUTCOME_FAILED]
