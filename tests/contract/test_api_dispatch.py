"""A stream of calls: order, limits, and the errors of single calls."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]

from moorage.v1 import scheduler_pb2 as pb
from moorage_server import limits
from moorage_server.api import answers, dispatch
from moorage_server.api.item_calls import METHODS
from moorage_server.errors import StoreUnavailable
from tests.contract.plane import POOL, Plane, capped, eventually, new_id, refused
from tests.contract.stream_calls import admit, held, info, is_gone, is_held, place, release, report
from tests.contract.streams import Stream, item

Code = grpc.StatusCode


@pytest.fixture
async def plane(planes: Any) -> Plane:
    """A server with one instance that has room for two sessions."""
    (made,) = await planes(config=capped(2))
    await made.report()
    return made


async def test_a_session_over_a_stream(plane: Plane) -> None:
    stream = Stream(plane.stub)
    admitted = (await stream.ask(admit("s"))).admit
    assert admitted.decision == pb.DECISION_PLACE
    token = admitted.lease.token
    placed = (await stream.ask(place("s", token, turn=1, prompt_tokens=320))).place
    assert (placed.decision, placed.placement, placed.moved) == (pb.DECISION_PLACE, admitted.placement, False)
    assert (placed.lease.token, placed.workload_class) == (token, "a")
    ack = (await stream.ask(report("s", token, turn=1, context_tokens=400))).progress
    assert (ack.session_id, ack.known, ack.lease.token) == ("s", True, token)
    assert ack.lease.ttl == admitted.lease.ttl
    released = (await stream.ask(release("s", token))).release
    assert (released.released, released.residency.peak_blocks) == (True, 25)
    assert await stream.close() is Code.OK
    assert not (await plane.books()).sessions


async def test_calls_of_one_session_are_carried_out_in_order(plane: Plane) -> None:
    stream = Stream(plane.stub)
    token = await plane.placed("s")
    requests: list[Any] = [place("s", token, prompt_tokens=160 + 16 * n) for n in range(20)]
    requests += [report("s", token, context_tokens=1_600), release("s", token), place("s", token), admit("s")]
    numbers = stream.send(*requests)
    last = await stream.answer(numbers[-1])
    assert [result.id for result in stream.answers] == numbers
    assert all(result.place.decision == pb.DECISION_PLACE for result in stream.answers[:20])
    known, over, unknown, _ = stream.answers[20:]
    assert known.progress.known
    assert over.release.residency.peak_blocks == 100
    assert info(unknown.error).reason == "SESSION_UNKNOWN"
    assert last.admit.lease.token != token
    await stream.close()


async def test_a_wait_holds_up_nobody_and_gets_its_turn(plane: Plane) -> None:
    stream = Stream(plane.stub)
    tokens = {sid: (await stream.ask(admit(sid))).admit.lease.token for sid in ("one", "two")}
    (waiting,) = stream.send(admit("three", wait=30))
    await eventually(lambda: is_held(plane, "three"))
    assert (await stream.ask(place("one", tokens["one"]))).place.decision == pb.DECISION_PLACE
    # In the order of the stream, what waits for its turn has been carried out: it stands in the queue.
    assert (await stream.ask(place("three", "t"))).error.code == Code.FAILED_PRECONDITION.value[0]
    assert (await stream.ask(release("two", tokens["two"]))).release.released
    assert (await stream.answer(waiting)).admit.decision == pb.DECISION_PLACE
    await stream.close()


async def test_a_release_ends_the_wait_of_its_session(plane: Plane) -> None:
    stream = Stream(plane.stub)
    for sid in ("one", "two"):
        await plane.placed(sid)
    # In one frame: the release comes while the admission is still on its way to the ledger.
    waiting, leaving = stream.send(admit("three", wait=30), release("three"))
    assert (await stream.answer(leaving)).release.released
    assert info((await stream.answer(waiting)).error).reason == "WRONG_STATE"
    assert "three" not in (await plane.books()).state("held")
    await stream.close()


async def test_one_bad_call_never_spoils_the_others(plane: Plane) -> None:
    stream = Stream(plane.stub)
    token = await plane.placed("s")
    items = [
        pb.DispatchItem(id=1),
        item(2, place("", "t")),
        item(3, place("s", "stale")),
        item(4, release("s", token, outcome=99)),
        item(5, report("s", "stale")),
        item(6, report("", "t")),
        item(7, report("s", token, pool="p" * 300)),
        item(8, place("s", token, pool="nobody")),
        item(9, admit("t", labels={"": "x"})),
        item(2**64 - 1, place("s", token)),
    ]
    await stream.call.write(pb.DispatchRequest(items=items))
    by_id = {number: await stream.answer(number) for number in [*range(1, 10), 2**64 - 1]}
    codes = {number: result.error.code for number, result in by_id.items() if result.HasField("error")}
    invalid, missing, aborted = (code.value[0] for code in (Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.ABORTED))
    assert codes == {1: invalid, 2: invalid, 3: aborted, 4: invalid, 7: invalid, 8: missing, 9: invalid}
    assert info(by_id[1].error).metadata["field"] == "call"
    assert info(by_id[4].error).metadata == {"field": "outcome", "value": "99", "limit": _outcomes(by_id[4])}
    assert (by_id[5].progress.known, by_id[5].progress.reason) == (False, "LEASE_STALE")
    assert by_id[6].progress.reason.startswith("session_id: must be")
    assert by_id[2**64 - 1].place.decision == pb.DECISION_PLACE
    await stream.close()


def _outcomes(result: pb.DispatchResult) -> str:
    limit = info(result.error).metadata["limit"]
    assert limit.startswith("one of OUTCOME_COMPLETED")
    return limit


async def test_an_id_is_free_again_once_its_call_is_answered(plane: Plane) -> None:
    stream = Stream(plane.stub)
    await stream.call.write(pb.DispatchRequest(items=[pb.DispatchItem(id=1), item(1, report("", "t"))]))
    assert await stream.close() is Code.OK
    assert [(result.id, result.WhichOneof("answer")) for result in stream.answers] == [(1, "error"), (1, "progress")]


async def test_an_error_says_what_the_unary_call_says(plane: Plane) -> None:
    stream = Stream(plane.stub)
    token = await plane.placed("s")
    for request in (place("s", "stale"), place("", token), release("s"), place("s", token, request_id="no uuid")):
        unary = await refused(
            (plane.stub.Place if isinstance(request, pb.PlaceRequest) else plane.stub.Release)(request)
        )
        error = (await stream.ask(request)).error
        assert error.SerializeToString() == unary.trailers["grpc-status-details-bin"], request
    await stream.close()


async def test_a_repeat_over_either_way_gets_the_first_answer(plane: Plane) -> None:
    stream = Stream(plane.stub)
    request = admit("s", request_id=new_id())
    first = await plane.stub.Admit(request)
    assert (await stream.ask(request)).admit.lease.token == first.lease.token
    turn = place("s", first.lease.token, turn=1, request_id=new_id())
    placed = (await stream.ask(turn)).place
    assert await plane.stub.Place(turn) == placed
    turn.turn = 2
    assert info((await stream.ask(turn)).error).reason == "REQUEST_ID_REUSED"
    end = release("s", first.lease.token, request_id=new_id())
    # Twice in one batch, under other sessions' noise.
    one, _, two = stream.send(end, place("t", "x"), end)
    assert await stream.answer(one) != await stream.answer(two)
    assert (await stream.answer(one)).release == (await stream.answer(two)).release
    await stream.close()


@pytest.mark.parametrize("with_id", [True, False])
async def test_a_cancelled_call_is_taken_back_and_told_so(plane: Plane, with_id: bool) -> None:
    stream = Stream(plane.stub)
    for sid in ("one", "two"):
        await plane.placed(sid)
    (waiting,) = stream.send(admit("three", wait=30, request_id=new_id() if with_id else ""))
    await eventually(lambda: is_held(plane, "three"))
    stream.send(cancelled=(waiting, 77))
    assert info((await stream.answer(waiting)).error).reason == "CALL_CANCELLED"
    await eventually(lambda: is_gone(plane, "three"))
    # Before it begins at all, behind another call of its session, or together with it.
    (number,) = stream.send(admit("four", wait=30), cancelled=(waiting + 1,))
    assert number == waiting + 1
    assert (await stream.answer(number)).error.code == Code.CANCELLED.value[0]
    await eventually(lambda: is_gone(plane, "four"))
    assert await stream.close() is Code.OK


async def test_a_full_frame_is_answered_and_so_are_many(plane: Plane) -> None:
    stream = Stream(plane.stub)
    token = await plane.placed("s")
    for _ in range(3):
        stream.send(*(place(f"unknown-{n}", "t") for n in range(limits.DISPATCH_ITEMS - 1)), place("s", token))
    assert await stream.close() is Code.OK
    assert len(stream.answers) == 3 * limits.DISPATCH_ITEMS
    assert sum(result.place.decision == pb.DECISION_PLACE for result in stream.answers) == 3


async def test_reading_stops_while_too_much_is_under_way(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MOST_CALLS", 4)
    for sid in ("one", "two"):
        await plane.placed(sid)
    stream = Stream(plane.stub)
    opened, places, most = asyncio.Event(), plane.store.places, 0

    async def slow(*args: Any) -> Any:
        nonlocal most
        await opened.wait()
        answers = await places(*args)
        most = max(most, len(answers))
        return answers

    monkeypatch.setattr(plane.store, "places", slow)
    # Waits do not count: whoever frees room for them must get through.
    stream.send(*(admit(f"w{n}", wait=30) for n in range(8)))
    await eventually(lambda: held(plane, 8))
    numbers = [stream.send(place(f"s{n}", "t"), place(f"t{n}", "t"))[1] for n in range(10)]
    await asyncio.sleep(0.2)
    assert stream.answers == []
    opened.set()
    await stream.answer(numbers[-1])
    assert most <= 4
    await stream.cut()
    await eventually(lambda: held(plane, 0))


async def test_more_waits_than_a_stream_may_have_are_answered_at_once(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "MOST_WAITS", 2)
    for sid in ("one", "two"):
        await plane.placed(sid)
    stream = Stream(plane.stub)
    for n in range(2):
        stream.send(admit(f"w{n}", wait=30))
        await eventually(lambda n=n: held(plane, n + 1))
    assert (await stream.ask(admit("w9", wait=30))).admit.decision == pb.DECISION_HOLD
    await stream.cut()


async def test_mixed_pools_and_the_default_one(planes: Any) -> None:
    (plane,) = await planes(config=capped(5))
    stream = Stream(plane.stub)
    for pool in (POOL, "", "other {pool}"):
        await plane.report(pool=pool)
    pools = {"s-p": POOL, "s-default": "", "s-other": "other {pool}"}
    numbers = stream.send(*(admit(sid, pool=pool, wait=10) for sid, pool in pools.items()))
    tokens = [(await stream.answer(n)).admit.lease.token for n in numbers]
    turns = stream.send(*(place(sid, t, pool=pool) for (sid, pool), t in zip(pools.items(), tokens, strict=True)))
    assert [(await stream.answer(n)).place.decision for n in turns] == [pb.DECISION_PLACE] * 3
    ends = stream.send(*(release(sid, t, pool=pool) for (sid, pool), t in zip(pools.items(), tokens, strict=True)))
    assert [(await stream.answer(n)).release.released for n in ends] == [True] * 3
    await stream.close()


async def test_an_outage_is_unavailable_for_each_call(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(plane.stub)
    token = await plane.placed("s")
    run, away = plane.store._run, True

    async def sometimes(name: str, *args: Any) -> Any:
        if away and name in ("place", "release", "progress", "admit"):
            raise StoreUnavailable
        return await run(name, *args)

    monkeypatch.setattr(plane.store, "_run", sometimes)
    requests = (admit("t"), place("s", token), report("s", token), release("s", token))
    results = [await stream.answer(n) for n in stream.send(*requests)]
    assert {result.error.code for result in results} == {Code.UNAVAILABLE.value[0]}
    assert {info(result.error).reason for result in results} == {"STORE_UNAVAILABLE"}
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in results[0].error.details)
    away = False
    assert (await stream.ask(release("s", token))).release.released
    await stream.close()


async def test_an_unexpected_failure_shows_an_id_and_nothing_else(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(plane.stub)
    token = await plane.placed("s")

    async def broken(*args: Any) -> Any:
        raise ValueError("a secret")

    with monkeypatch.context() as patched:
        patched.setattr(plane.store, "places", broken)
        patched.setattr(plane.store, "admit", broken)
        for request in (place("s", token), admit("t")):
            error = (await stream.ask(request)).error
            assert (error.code, info(error).reason) == (Code.INTERNAL.value[0], "INTERNAL")
            assert "secret" not in str(error)
    # In the middle of a batch: what was answered stays, the rest fails, and the stream goes on.
    fill, count = answers.fill_placed, 0

    def breaks(*args: Any) -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise ValueError("a secret")
        fill(*args)

    tokens = {"s": token, "t": await plane.placed("t")}
    with monkeypatch.context() as patched:
        patched.setattr(answers, "fill_placed", breaks)
        numbers = stream.send(*(place(sid, token) for sid, token in tokens.items()))
        one, two = [await stream.answer(number) for number in numbers]
    assert (one.place.decision, two.error.code) == (pb.DECISION_PLACE, Code.INTERNAL.value[0])
    assert (await stream.ask(place("s", token))).place.decision == pb.DECISION_PLACE
    await stream.close()


async def test_calls_are_counted_as_the_calls_they_are(plane: Plane) -> None:
    stream = Stream(plane.stub)
    token = (await stream.ask(admit("s"))).admit.lease.token
    stream.send(place("s", token), place("s", "stale"), report("s", token))
    await stream.ask(release("s", token))
    calls = {kind: plane.stats.of(method).calls for kind, method in METHODS.items()}
    assert calls == {
        "admit": {"OK": 1},
        "place": {"OK": 1, "ABORTED": 1},
        # One by the plane itself.
        "progress": {"OK": 2},
        "release": {"OK": 1},
    }
    assert all(plane.stats.of(method).under_way == 0 for method in METHODS.values())
    for sid in ("one", "two"):
        await stream.ask(admit(sid))
    stream.send(admit("three", wait=30))
    await eventually(lambda: is_held(plane, "three"))
    assert plane.stats.of(METHODS["admit"]).under_way == 1
    await stream.cut()
    await eventually(lambda: is_gone(plane, "three"))
    assert plane.stats.of(METHODS["admit"]).under_way == 0
    assert plane.stats.of(METHODS["admit"]).calls == {"OK": 3, "CANCELLED": 1}
