"""Prefix knowledge through the API: what engines tell reaches every server's decisions, if it is reliable."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import MappingProxyType
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import MessageToDict

from moorage.v1 import inspector_pb2 as ipb
from moorage.v1 import scheduler_pb2 as pb
from moorage_server.core.config import ClassConfig
from moorage_server.errors import StoreUnavailable
from moorage_server.store import parse
from moorage_server.store.records import Request
from tests.contract.plane import POOL, Plane, capped, eventually, refused

#: A prompt that takes an unknown instance ten seconds to compute.
LONG = {"prompt_tokens": 80_000, "prefix_hashes": range(1, 5_001)}
#: A view from before may be used for so long, seconds.
VIEW_S = 0.3


def update(instance: str = "i", stored: Any = (), **changes: Any) -> pb.PrefixUpdate:
    """The first update of a stream."""
    values: dict[str, Any] = {"incarnation": "1", "stream": f"of {instance}", "sequence": 1, "reset": True, **changes}
    return pb.PrefixUpdate(instance_id=instance, stored=stored, **values)


async def tell(plane: Plane, *updates: pb.PrefixUpdate) -> list[pb.PrefixAck]:
    """Sends updates; returns once no decision rests on a view from before."""
    answer = await plane.stub.Heartbeat(pb.HeartbeatRequest(pool=POOL, prefixes=updates))
    await asyncio.sleep(VIEW_S)
    return list(answer.prefixes)


async def indexes(plane: Plane) -> dict[str, ipb.PrefixIndex]:
    """What the inspector shows, by instance."""
    answer = await plane.inspector.ListInstances(ipb.ListInstancesRequest(pool=POOL))
    return {i.snapshot.instance_id: i.prefix_index for i in answer.instances}


async def some_is_computed(plane: Plane, instance: str) -> None:
    """Returns once the backlog of an instance is less than one long prompt: a sibling gains by waiting for it."""

    async def less() -> bool:
        return (await plane.control.desk(POOL).view()).instances[f"0|{instance}"].backlog_blocks < 4_900

    await eventually(less)


async def home(plane: Plane, sid: str, **fields: Any) -> tuple[str, int]:
    """Where a session that must get in goes, and what it is expected to find there."""
    answer = await plane.admit(sid, **fields)
    assert answer.decision == pb.DECISION_PLACE, answer
    return answer.placement.instance_id, answer.placement.expected_cached_tokens


@pytest.fixture
async def pair(planes: Any) -> list[Plane]:
    """Two servers that know two idle instances."""
    both: list[Plane] = await planes(2, capped(4))
    for name in "ij":
        await both[0].report(name)
    return both


def calls(monkeypatch: pytest.MonkeyPatch, plane: Plane) -> Counter[str]:
    """Counts the script calls of a server from now on, those of its epochs left out."""
    run, made = plane.store._run, Counter[str]()

    async def counted(name: str, *args: Any) -> Any:
        if name.startswith(("admit", "prefix", "place")):
            made[name] += 1
        return await run(name, *args)

    monkeypatch.setattr(plane.store, "_run", counted)
    return made


# Heartbeats


async def test_each_update_is_acknowledged_for_itself(planes: Any) -> None:
    (plane,) = await planes()
    await plane.report("i")
    updates = [
        update("i", [1, 2]),
        update("i", [3], sequence=2, reset=False),
        update("", [1]),
        update("i", range(16_385)),
        update("i", [3], sequence=2, reset=False),
        update("i", [4], sequence=4, reset=False),
        update("i", [4], stream="other", reset=False),
        update("i", [4], incarnation="2"),
        update("nobody", [4], dp_rank=7),
        update("i", [5], sequence=3, reset=False),
    ]
    acks = await tell(plane, *updates)
    assert [(a.instance_id, a.dp_rank) for a in acks] == [(u.instance_id, u.dp_rank) for u in updates]
    assert [a.accepted for a in acks] == [True, True, False, False, True, False, False, False, False, True]
    assert [a.resend for a in acks] == [False, False, False, False, False, True, True, True, True, False]
    assert [bool(a.reason) for a in acks] == [not a.accepted for a in acks]
    assert "instance_id" in acks[2].reason
    assert "16385 stored" in acks[3].reason
    assert "sequence 4" in acks[5].reason
    assert "'2'" in acks[7].reason
    index = (await indexes(plane))["i"]
    assert (index.source, index.blocks, index.behind) == ("events", 4, False)
    assert index.HasField("age")


async def test_an_instance_and_its_cache_register_in_one_call(planes: Any) -> None:
    (plane,) = await planes()
    snapshot = pb.InstanceSnapshot(instance_id="i", incarnation="1", sequence=1, block_size=16, total_blocks=100)
    request = pb.HeartbeatRequest(pool=POOL, instances=[snapshot], prefixes=[update("i", [1])])
    answer = await plane.stub.Heartbeat(request)
    assert (answer.instances[0].accepted, answer.prefixes[0].accepted) == (True, True)


async def test_more_than_an_instance_holds_is_not_kept(planes: Any) -> None:
    (plane,) = await planes()
    await plane.report("i", total_blocks=1_000)
    await tell(plane)
    await tell(plane, update("i", range(5_000)))
    assert (await indexes(plane))["i"].blocks == 1_064


async def test_an_instance_of_which_nothing_is_known_says_so(planes: Any) -> None:
    (plane,) = await planes()
    await plane.report("i")
    assert MessageToDict((await indexes(plane))["i"]) == {"source": "none"}


# Decisions


async def test_a_prompt_goes_where_most_of_it_is_whichever_server_is_asked(pair: list[Plane]) -> None:
    await tell(pair[0], update("i", range(1, 500)), update("j", range(1, 4_001)))
    for n, plane in enumerate(pair):
        name, cached = await home(plane, f"s{n}", **LONG)
        assert name == "j"
        # Short of the truth by less than the distance between two probes.
        assert 64_000 - 16 * 80 <= cached <= 64_000
    assert (await home(pair[1], "other", prompt_tokens=80_000))[1] == 0


async def test_a_short_prompt_is_matched_to_the_block(pair: list[Plane]) -> None:
    await tell(pair[0], update("j", range(1, 51)))
    assert await home(pair[0], "s", prompt_tokens=1_000, prefix_hashes=range(1, 63)) == ("j", 800)


async def test_a_cache_that_is_cleared_or_behind_draws_nobody(pair: list[Plane]) -> None:
    await tell(pair[0], update("i"), update("j", range(1, 5_001)))
    await tell(pair[0], update("j", sequence=2, reset=False, behind=True))
    assert (await indexes(pair[0]))["j"].behind
    assert await home(pair[0], "s", **LONG) == ("i", 0)
    await tell(pair[0], update("j", sequence=3, reset=True))
    assert MessageToDict((await indexes(pair[0]))["j"], preserving_proto_field_name=True).keys() == {"source", "age"}
    assert (await home(pair[0], "t", **LONG))[1] == 0


async def test_behind_the_group_and_the_class_are_still_known(planes: Any) -> None:
    classes = MappingProxyType({"a": ClassConfig(shared_prefix_tokens=1_600)})
    (plane,) = await planes(1, capped(4, classes=classes))
    await plane.report("j")
    await plane.placed("first", group_id="g", prompt_tokens=80_000)
    await plane.report("i")
    await tell(plane, update("i", LONG["prefix_hashes"], behind=True))
    await some_is_computed(plane, "j")
    assert await home(plane, "sibling", group_id="g", prompt_tokens=80_000) == ("j", 80_000)
    assert await home(plane, "classmate", prompt_tokens=8_000) == ("i", 0), "the backlog on j is worth more"
    assert await home(plane, "another", **LONG) == ("i", 1_600)


async def test_events_that_stopped_are_not_relied_on(pair: list[Plane], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moorage_server.core.prefixes._SILENT_S", 0.1)
    monkeypatch.setattr("moorage_server.core.prefixes._SILENT_INTERVALS", 0)
    await tell(pair[0], update("j", LONG["prefix_hashes"]))
    assert (await indexes(pair[0]))["j"].behind
    assert await home(pair[0], "s", **LONG) == ("i", 0)


async def test_without_events_what_was_placed_is_known(pair: list[Plane]) -> None:
    first, _ = await home(pair[0], "s0", **LONG)
    await eventually(lambda: _has_blocks(pair[0], first, 5_000))
    assert (await indexes(pair[0]))[first].source == "placed"
    await some_is_computed(pair[1], first)
    assert await home(pair[1], "s1", **LONG) == (first, 80_000)


async def _has_blocks(plane: Plane, name: str, blocks: int) -> bool:
    return (await indexes(plane))[name].blocks == blocks


async def test_later_turns_are_noted_where_they_go(pair: list[Plane]) -> None:
    token = await pair[0].placed("s", prompt_tokens=1_600, prefix_hashes=range(100))
    answer = await pair[0].place("s", token, prompt_tokens=3_200, prefix_hashes=range(200))
    await eventually(lambda: _has_blocks(pair[0], answer.placement.instance_id, 200))


async def test_a_move_goes_where_most_of_the_prompt_is(planes: Any) -> None:
    (plane,) = await planes(1, capped(4))
    await plane.report("i")
    token = await plane.placed("s", prompt_tokens=80_000)
    for name in "jk":
        await plane.report(name)
    await tell(plane, update("k", LONG["prefix_hashes"]))
    await plane.report("i", state=pb.INSTANCE_STATE_DRAINING)
    answer = await plane.place("s", token, **LONG)
    assert (answer.moved, answer.placement.instance_id) == (True, "k")
    assert answer.placement.expected_cached_tokens == 80_000


async def test_a_caller_that_waits_goes_where_its_prompt_is(planes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both places come free at once. The last of a long line is not looked up: its turn is far."""
    (plane,) = await planes(1, capped(1))
    for name in "ij":
        await plane.report(name)
        await plane.placed(f"first on {name}", prompt_tokens=16)
    await tell(plane, update("j", LONG["prefix_hashes"]))
    waiting = await plane.waits("w", **LONG)
    made = calls(monkeypatch, plane)
    others = [await plane.waits(f"o{n}", prompt_tokens=160, prefix_hashes=range(7_000, 7_010)) for n in range(12)]
    wider = parse.encode_config(capped(2))
    made.clear()
    await plane.store.configure(POOL, Request(), wider, None)
    answer = await asyncio.wait_for(waiting, 10)
    assert (answer.placement.instance_id, answer.placement.expected_cached_tokens) == ("j", 80_000)
    await asyncio.wait_for(others[0], 10)
    assert made["prefix_lookup"] <= 2 * 10, "heads only, and each no more than once a second"
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)


# What it costs


async def test_only_hashes_cost_a_round_trip(pair: list[Plane], monkeypatch: pytest.MonkeyPatch) -> None:
    made = calls(monkeypatch, pair[0])
    await pair[0].placed("s0")
    assert made == {"admit": 1}
    await tell(pair[0], update("i", [1]), update("j", [1]))
    made.clear()
    await pair[0].placed("s1", prompt_tokens=160, prefix_hashes=range(1, 11))
    assert made == {"prefix_lookup": 1, "admit": 1}
    made.clear()
    await pair[0].placed("s2")
    assert made == {"admit": 1}


async def test_a_store_that_does_not_answer_a_lookup_is_unavailable(
    pair: list[Plane], monkeypatch: pytest.MonkeyPatch
) -> None:
    await tell(pair[0], update("j", [1]))

    async def away(*_: Any) -> Any:
        raise StoreUnavailable

    monkeypatch.setattr(pair[0].store, "prefix_lookup", away)
    refusal = await refused(pair[0].admit("s", **LONG))
    assert refusal.code == grpc.StatusCode.UNAVAILABLE
    assert (await pair[0].books()).sessions == {}


# The former home of a paused session


async def paused_on_j(plane: Plane) -> None:
    """A session that leaves 70,000 tokens on j."""
    await plane.report("i", state=pb.INSTANCE_STATE_PAUSED)
    answer = await eventually(lambda: _admitted(plane))
    assert answer.placement.instance_id == "j"
    usage = pb.Usage(context_tokens=70_000)
    await plane.release("s", answer.lease.token, outcome=pb.OUTCOME_PAUSED, usage=usage)
    await plane.report("i")
    await asyncio.sleep(VIEW_S)


async def _admitted(plane: Plane) -> pb.AdmitResponse | None:
    answer = await plane.admit("s", prompt_tokens=16)
    return answer if answer.decision == pb.DECISION_PLACE else None


async def test_a_resumed_session_goes_home(pair: list[Plane], monkeypatch: pytest.MonkeyPatch) -> None:
    await paused_on_j(pair[0])
    made = calls(monkeypatch, pair[1])
    assert await home(pair[1], "s", prompt_tokens=80_000) == ("j", 70_000)
    assert made == {"admit": 2}


async def test_a_former_home_that_began_anew_draws_nobody(pair: list[Plane]) -> None:
    await paused_on_j(pair[0])
    await pair[0].report("j", incarnation="2")
    await asyncio.sleep(VIEW_S)
    assert await home(pair[1], "s", prompt_tokens=80_000) == ("i", 0)
