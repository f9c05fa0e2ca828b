"""What operators can change in a live control plane."""

from __future__ import annotations

import uuid
from types import MappingProxyType
from typing import Any

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask

from moorage.v1 import inspector_pb2 as ipb
from moorage.v1 import operator_pb2 as opb
from moorage.v1 import scheduler_pb2 as pb
from moorage_server.core.config import ClassConfig, PoolConfig

STATIC = PoolConfig(policy="static", static_cap=4, classes=MappingProxyType({"a": ClassConfig(target_share=1.0)}))


def configure(mask: list[str] | None = None, request_id: str = "", pool: str = "", **config: Any) -> Any:
    request = opb.ConfigurePoolRequest(pool=pool, request_id=request_id, config=opb.PoolConfig(**config))
    if mask:
        request.update_mask.CopyFrom(FieldMask(paths=mask))
    return request


async def config_of(w: Any, pool: str = "") -> Any:
    return (await w.inspector.GetPool(ipb.GetPoolRequest(pool=pool))).config


async def test_configure_names_a_pool(world: Any) -> None:
    async with world() as w:
        answer = await w.operator.ConfigurePool(configure(pool="p {x}", static_cap=3))
        assert answer.config.static_cap == 3
        assert answer.config.headroom == PoolConfig().headroom
        assert await config_of(w, "p {x}") == answer.config


async def test_configure_replaces_or_takes_masked_fields(world: Any) -> None:
    async with world({"default": STATIC}) as w:
        masked = await w.operator.ConfigurePool(configure(["headroom"], headroom=0.5, static_cap=9))
        assert (masked.config.headroom, masked.config.static_cap) == (0.5, 4)
        assert set(masked.config.classes) == {"a"}
        whole = await w.operator.ConfigurePool(configure(headroom=0.25))
        assert (whole.config.headroom, whole.config.static_cap) == (0.25, PoolConfig().static_cap)
        assert not whole.config.classes


async def test_masked_changes_of_several_operators_all_hold(world: Any) -> None:
    async with world({"default": STATIC}) as w:
        calls = [
            w.operator.ConfigurePool(configure([f"classes.c{n}"], classes={f"c{n}": opb.ClassConfig(target_share=1)}))
            for n in range(4)
        ]
        for call in calls:
            await call
        assert set((await config_of(w)).classes) == {"a", "c0", "c1", "c2", "c3"}


async def test_configure_is_idempotent(world: Any, refusal: Any) -> None:
    async with world({"default": STATIC}) as w:
        request_id = str(uuid.uuid4())
        await w.operator.ConfigurePool(configure(["static_cap"], request_id, static_cap=9))
        await w.operator.ConfigurePool(configure(["static_cap"], static_cap=7))
        await w.operator.ConfigurePool(configure(["static_cap"], request_id, static_cap=9))
        assert (await config_of(w)).static_cap == 7, "a repeat changes nothing"
        failure = await refusal(w.operator.ConfigurePool(configure(["static_cap"], request_id, static_cap=8)))
        assert failure.reason == "REQUEST_ID_REUSED"


async def test_configure_checks_bounds(world: Any, refusal: Any) -> None:
    async with world({"default": STATIC}) as w:
        failure = await refusal(w.operator.ConfigurePool(configure(["headroom"], headroom=1.5)))
        assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        assert failure.metadata["field"] == "config.headroom"
        assert (await config_of(w)).headroom == STATIC.headroom


async def test_a_configuration_binds_the_next_decisions(world: Any, eventually: Any) -> None:
    async with world({"default": STATIC}) as w:
        await w.instance("i")
        refused = {"a": opb.ClassConfig(target_share=1, refused=True)}
        await w.operator.ConfigurePool(configure(["classes.a"], classes=refused))
        numbers = iter(range(1_000))

        async def is_refused() -> bool:
            answer = await w.admit(f"s{next(numbers)}", workload_class="a")
            return bool(answer.decision == pb.DECISION_REJECT)

        await eventually(is_refused)


async def test_cordon_and_uncordon(world: Any, eventually: Any) -> None:
    async with world({"default": STATIC}) as w:
        await w.instance("i", dp_rank=0)
        await w.instance("i", dp_rank=1)
        token = await w.placed("s")
        assert (await w.operator.CordonInstance(opb.CordonInstanceRequest(instance_id="i"))).changed == 2
        assert (await w.operator.CordonInstance(opb.CordonInstanceRequest(instance_id="i"))).changed == 0
        listed = (await w.inspector.ListInstances(ipb.ListInstancesRequest())).instances
        assert [i.cordoned for i in listed] == [True, True]
        numbers = iter(range(1_000))

        async def is_held() -> bool:
            answer = await w.admit(f"n{next(numbers)}")
            return bool(answer.hold.reason == pb.HOLD_REASON_DRAINING)

        await eventually(is_held)
        place = await w.scheduler.Place(pb.PlaceRequest(session_id="s", lease_token=token))
        assert (place.decision, place.moved) == (pb.DECISION_PLACE, False)
        one = await w.operator.UncordonInstance(opb.UncordonInstanceRequest(instance_id="i", dp_rank=1))
        assert one.changed == 1
        listed = (await w.inspector.ListInstances(ipb.ListInstancesRequest())).instances
        assert [i.cordoned for i in listed] == [True, False]


async def test_drain_moves_sessions_at_their_next_place(world: Any) -> None:
    async with world({"default": STATIC}) as w:
        await w.instance("i")
        token = await w.placed("s")
        await w.instance("j")
        answer = await w.operator.DrainInstance(opb.DrainInstanceRequest(instance_id="i"))
        assert (answer.changed, answer.sessions) == (1, 1)
        request = pb.PlaceRequest(session_id="s", lease_token=token)
        request.max_wait.FromSeconds(5)
        place = await w.scheduler.Place(request)
        assert (place.decision, place.moved, place.placement.instance_id) == (pb.DECISION_PLACE, True, "j")
        again = await w.operator.UncordonInstance(opb.UncordonInstanceRequest(instance_id="i"))
        assert again.changed == 1


@pytest.mark.parametrize("verb", ["Cordon", "Uncordon", "Drain"])
async def test_instances_and_ranks_must_be_known(world: Any, refusal: Any, verb: str) -> None:
    async with world({"default": STATIC}) as w:
        await w.instance("i")
        call, request = getattr(w.operator, f"{verb}Instance"), getattr(opb, f"{verb}InstanceRequest")
        failure = await refusal(call(request(instance_id="j")))
        assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "INSTANCE_UNKNOWN")
        failure = await refusal(call(request(instance_id="i", dp_rank=7)))
        assert (failure.reason, failure.metadata["dp_rank"]) == ("INSTANCE_UNKNOWN", "7")
        assert (await refusal(call(request(pool="p", instance_id="i")))).reason == "POOL_UNKNOWN"


async def test_evict_ends_a_session_placed_or_held(world: Any, refusal: Any) -> None:
    async with world({"default": PoolConfig(policy="static", static_cap=1)}) as w:
        await w.instance("i")
        token = await w.placed("s")
        await w.admit("held")
        for session_id in ("s", "held"):
            request = opb.EvictSessionRequest(session_id=session_id, reason="stuck")
            assert (await w.operator.EvictSession(request)).evicted
            assert not (await w.operator.EvictSession(request)).evicted
        failure = await refusal(w.scheduler.Place(pb.PlaceRequest(session_id="s", lease_token=token)))
        assert failure.reason == "SESSION_UNKNOWN"
        pool = await w.inspector.GetPool(ipb.GetPoolRequest())
        assert (pool.active_sessions, pool.held_sessions) == (0, 0)
        call = w.inspector.WatchEvents(ipb.WatchEventsRequest(resume_token="0"))
        events = [await call.read() for _ in range(5)]
        call.cancel()
        assert [(e.kind, e.session_id, e.reason) for e in events][-2:] == [
            ("evict", "s", "stuck"),
            ("evict", "held", "stuck"),
        ]


async def test_evict_in_an_unknown_pool(world: Any, refusal: Any) -> None:
    async with world() as w:
        failure = await refusal(w.operator.EvictSession(opb.EvictSessionRequest(pool="p", session_id="s")))
        assert failure.reason == "POOL_UNKNOWN"
        assert await w.control.store.pools() == []


async def test_weight_updates_are_not_supported(world: Any, refusal: Any) -> None:
    async with world({"default": STATIC}) as w:
        for call, request in (
            (w.operator.BeginWeightUpdate, opb.BeginWeightUpdateRequest),
            (w.operator.EndWeightUpdate, opb.EndWeightUpdateRequest),
        ):
            failure = await refusal(call(request(weight_version="v")))
            assert (failure.code, failure.reason) == (grpc.StatusCode.UNIMPLEMENTED, "NOT_SUPPORTED")
            assert (await refusal(call(request()))).reason == "INVALID_FIELD"
