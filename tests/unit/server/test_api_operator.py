"""What operators can change in a live control plane."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask

from moorage.v1 import inspector_pb2 as ipb
from moorage.v1 import operator_pb2 as opb
from moorage.v1 import scheduler_pb2 as pb
from moorage_server.api.times import to_duration
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


async def test_a_weight_update_holds_new_sessions_and_keeps_the_others(world: Any) -> None:
    async with world({"default": STATIC}) as w:
        await w.instance("i")
        await w.instance("j")
        lives = await w.admit("lives", policy_version=3)
        begun = await w.operator.BeginWeightUpdate(opb.BeginWeightUpdateRequest(weight_version="4"))
        assert begun.changed == 2
        assert (await w.operator.BeginWeightUpdate(opb.BeginWeightUpdateRequest(weight_version="4"))).changed == 0
        held = await w.admit("new")
        assert (held.decision, held.hold.reason) == (pb.DECISION_HOLD, pb.HOLD_REASON_WEIGHT_UPDATE)
        assert "of 2 instances 2 load weights" in held.hold.detail
        place = pb.PlaceRequest(session_id="lives", lease_token=lives.lease.token)
        assert (await w.scheduler.Place(place)).decision == pb.DECISION_PLACE
        shown = (await w.inspector.ListInstances(ipb.ListInstancesRequest())).instances
        assert all(i.updating_weights for i in shown)
        assert (await w.operator.EndWeightUpdate(opb.EndWeightUpdateRequest(weight_version="4"))).changed == 2
        placed = await w.admit("new")
        assert (placed.decision, placed.placement.policy_version) == (pb.DECISION_PLACE, 4)
        assert (await w.scheduler.Place(place)).placement.policy_version == 4
        assert (await w.inspector.GetPool(ipb.GetPoolRequest())).policy_version == 4


async def test_one_instance_after_the_other_can_be_updated(world: Any) -> None:
    async with world({"default": STATIC}) as w:
        await w.instance("i")
        await w.instance("j")
        begin = opb.BeginWeightUpdateRequest(weight_version="step-9", instance_id="i")
        assert (await w.operator.BeginWeightUpdate(begin)).changed == 1
        assert {(await w.admit(f"s{n}")).placement.instance_id for n in range(4)} == {"j"}
        end = opb.EndWeightUpdateRequest(weight_version="step-9", policy_version=9, instance_id="i")
        assert (await w.operator.EndWeightUpdate(end)).changed == 1
        versions = [i.policy_version for i in (await w.inspector.ListInstances(ipb.ListInstancesRequest())).instances]
        assert versions == [9, 0]
        assert not (await w.inspector.ListInstances(ipb.ListInstancesRequest())).instances[1].HasField("policy_version")


async def test_a_session_too_stale_to_be_useful_is_rejected(world: Any) -> None:
    """At admission, and while it waits: versions that pass in the queue count."""
    async with world({"default": replace(STATIC, max_policy_lag=1)}) as w:
        await w.instance("i", weight_version="10")
        late = await w.admit("late", policy_version=8)
        assert (late.decision, late.hold.reason) == (pb.DECISION_REJECT, pb.HOLD_REASON_STALENESS_LIMIT)
        assert "policy version 8 is 2 behind 10, at most 1 are allowed" in late.hold.detail
        assert (await w.admit("fits", policy_version=9)).decision == pb.DECISION_PLACE
        assert (await w.admit("unknown")).decision == pb.DECISION_PLACE
        await w.operator.CordonInstance(opb.CordonInstanceRequest(instance_id="i"))
        waiting = asyncio.create_task(w.admit("waits", policy_version=9, max_wait=to_duration(10)))
        async with asyncio.timeout(5):
            while not (await w.inspector.GetPool(ipb.GetPoolRequest())).held_sessions:  # noqa: ASYNC110 - not announced
                await asyncio.sleep(0.02)
        await w.instance("i", weight_version="11")
        answer = await waiting
        assert (answer.decision, answer.hold.reason) == (pb.DECISION_REJECT, pb.HOLD_REASON_STALENESS_LIMIT)


@pytest.mark.parametrize(
    ("call", "request_", "field"),
    [
        ("BeginWeightUpdate", opb.BeginWeightUpdateRequest(), "weight_version"),
        ("BeginWeightUpdate", opb.BeginWeightUpdateRequest(weight_version="v" * 257), "weight_version"),
        ("BeginWeightUpdate", opb.BeginWeightUpdateRequest(weight_version="v", dp_rank=1), "dp_rank"),
        ("EndWeightUpdate", opb.EndWeightUpdateRequest(instance_id="i" * 257), "instance_id"),
    ],
)
async def test_weight_updates_are_checked(world: Any, refusal: Any, call: str, request_: Any, field: str) -> None:
    async with world({"default": STATIC}) as w:
        failure = await refusal(getattr(w.operator, call)(request_))
        assert (failure.reason, failure.metadata["field"]) == ("INVALID_FIELD", field)


async def test_weights_of_an_instance_or_a_pool_that_nobody_knows(world: Any, refusal: Any) -> None:
    async with world({"default": STATIC}) as w:
        await w.instance("i")
        nobody = opb.BeginWeightUpdateRequest(weight_version="v", instance_id="j")
        assert (await refusal(w.operator.BeginWeightUpdate(nobody))).reason == "INSTANCE_UNKNOWN"
        nowhere = opb.EndWeightUpdateRequest(pool="other", weight_version="v")
        assert (await refusal(w.operator.EndWeightUpdate(nowhere))).reason == "POOL_UNKNOWN"


async def _held(w: Any, number: int) -> None:
    async with asyncio.timeout(5):
        while (await w.inspector.GetPool(ipb.GetPoolRequest())).held_sessions < number:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.02)


async def test_observe_frees_those_who_wait_already(world: Any) -> None:
    """An emergency exit that new callers alone may take is none."""
    async with world({"default": replace(STATIC, static_cap=1)}) as w:
        await w.instance("i")
        await w.admit("lives")
        waiting = [asyncio.create_task(w.admit(f"w{n}", max_wait=to_duration(30))) for n in range(3)]
        await _held(w, 3)
        await w.operator.ConfigurePool(configure(["mode"], mode=opb.MODE_OBSERVE))
        async with asyncio.timeout(5):
            answers = await asyncio.gather(*waiting)
        assert [a.decision for a in answers] == [pb.DECISION_PLACE] * 3


async def test_who_waits_in_the_middle_hears_at_once_that_it_is_too_stale(world: Any) -> None:
    async with world({"default": replace(STATIC, static_cap=1, max_policy_lag=1)}) as w:
        await w.instance("i", weight_version="10")
        await w.admit("lives")
        head = asyncio.create_task(w.admit("head", max_wait=to_duration(30)))
        await _held(w, 1)
        behind = asyncio.create_task(w.admit("behind", policy_version=9, max_wait=to_duration(30)))
        await _held(w, 2)
        await w.instance("i", weight_version="11")
        async with asyncio.timeout(5):
            answer = await behind
        assert (answer.decision, answer.hold.reason) == (pb.DECISION_REJECT, pb.HOLD_REASON_STALENESS_LIMIT)
        assert not head.done()
        head.cancel()
