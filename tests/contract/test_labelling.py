"""Labels that are missing or wrong, from the callers' reports to what people see: real server processes, real store."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.v1 import inspector_pb2 as ipb
from moorage.v1 import scheduler_pb2 as pb
from moorage_server.core.config import INFER_ALL, INFER_OFF, INFER_UNLABELLED, ClassConfig
from moorage_server.core.labels import MOST_RELABELS, Memory
from moorage_server.core.view import Class
from moorage_server.runtime import labelling
from moorage_server.runtime.labelling import Labelling
from moorage_server.store.records import Change
from tests.contract.plane import POOL, Plane, capped, eventually
from tests.unit.core.builders import NOW, config, instance, pool

CLASSES = {"agentic": ClassConfig(target_share=1.0), "rlvr": ClassConfig(target_share=1.0)}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles are fitted at every epoch."""
    monkeypatch.setattr(labelling, "_FIT_MS", 0)


async def run_turns(plane: Plane, sid: str, token: str, turns: int) -> None:
    """Turns of a hundred tokens with tool gaps in between."""
    for turn in range(turns):
        if turn:
            await plane.place(sid, token, turn=turn, prompt_tokens=160 + 100 * turn)
        report = pb.SessionProgress(
            session_id=sid, lease_token=token, phase=pb.PHASE_TOOL_WAIT, turn=turn, context_tokens=260 + 100 * turn
        )
        await plane.stub.Heartbeat(pb.HeartbeatRequest(pool=POOL, sessions=[report]))


async def teach(plane: Plane, count: int = 25) -> None:
    """Labelled sessions that are what they say: many short turns, or one long one."""
    await plane.report()
    for n in range(count):
        token = await plane.placed(f"agentic-{n}", workload_class="agentic")
        await run_turns(plane, f"agentic-{n}", token, 5)
        await plane.release(f"agentic-{n}", token)
        token = await plane.placed(f"rlvr-{n}", workload_class="rlvr")
        await plane.progress(f"rlvr-{n}", token, turn=0, context_tokens=3_000)
        await plane.release(f"rlvr-{n}", token)


async def seen(plane: Plane, sid: str) -> ipb.Session:
    answer = await plane.inspector.GetSession(ipb.GetSessionRequest(pool=POOL, session_id=sid))
    session: ipb.Session = answer.session
    return session


async def totals(plane: Plane) -> tuple[int, int]:
    answer = await plane.inspector.GetPool(ipb.GetPoolRequest(pool=POOL))
    return answer.inferred_total, answer.mislabelled_total


async def test_a_wrong_label_is_shown_and_not_used_while_inference_is_off(planes: Any) -> None:
    (plane,) = await planes(config=capped(100, classes=CLASSES, class_inference=INFER_OFF))
    await teach(plane)
    token = await plane.placed("wrong", workload_class="rlvr")
    await run_turns(plane, "wrong", token, 6)

    async def contradicted() -> bool:
        return await totals(plane) == (0, 1)

    await eventually(contradicted)
    session = await seen(plane, "wrong")
    assert (session.workload_class, session.declared_class, session.inferred_class) == ("rlvr", "rlvr", "agentic")
    assert session.inferred_confidence > 0.9
    answer = await plane.place("wrong", token, turn=6)
    assert answer.workload_class == "rlvr"
    await plane.release("wrong", token)
    assert (await plane.books()).counter("done", "rlvr") == 26


async def test_a_wrong_label_is_overruled_where_that_is_configured(planes: Any) -> None:
    plane, other = await planes(2, capped(100, classes=CLASSES, class_inference=INFER_ALL))
    await teach(plane)
    token = await plane.placed("wrong", workload_class="rlvr")
    right = await plane.placed("right", workload_class="rlvr")
    await plane.progress("right", right, turn=0, context_tokens=3_000)
    await run_turns(plane, "wrong", token, 6)

    async def relabelled() -> bool:
        return (await seen(other, "wrong")).workload_class == "agentic"

    await eventually(relabelled)
    assert (await other.place("wrong", token, turn=6)).workload_class == "agentic"
    assert (await plane.place("right", right, turn=0)).workload_class == "rlvr"
    assert (await seen(plane, "right")).workload_class == "rlvr"
    assert await totals(plane) == (1, 1)
    history = (await plane.inspector.GetSession(ipb.GetSessionRequest(pool=POOL, session_id="wrong"))).history
    assert "relabel" in [entry.kind for entry in history]
    await plane.release("wrong", token)
    assert (await plane.books()).counter("done", "agentic") == 26


async def test_a_session_without_a_label_is_scheduled_as_what_it_behaves_like(planes: Any) -> None:
    (plane,) = await planes(config=capped(100, classes=CLASSES, class_inference=INFER_UNLABELLED))
    await teach(plane)
    first = await plane.admit("none", workload_class="")
    assert first.workload_class == "unlabelled", "its prompt alone says nothing"
    wrong = await plane.placed("wrong", workload_class="rlvr")
    await run_turns(plane, "none", first.lease.token, 6)
    await run_turns(plane, "wrong", wrong, 6)

    async def known() -> bool:
        return (await seen(plane, "none")).workload_class == "agentic" and (await totals(plane))[1] == 1

    await eventually(known)
    assert (await seen(plane, "wrong")).workload_class == "rlvr", "it has a label"
    assert (await totals(plane))[0] == 1


async def test_a_long_prompt_tells_the_class_at_entry(planes: Any) -> None:
    plane, other = await planes(2, capped(100, classes=CLASSES, class_inference=INFER_UNLABELLED))
    await plane.report()
    for n in range(25):
        for name, prompt in (("agentic", 3_000 + n), ("rlvr", 20 + n % 5)):
            sid = f"{name}-{n}"
            await plane.release(sid, await plane.placed(sid, workload_class=name, prompt_tokens=prompt))

    async def told() -> bool:
        await other.release("s", (await other.admit("s", workload_class="", prompt_tokens=3_100)).lease.token)
        answer: pb.AdmitResponse = await other.admit("s", workload_class="", prompt_tokens=3_100)
        return answer.workload_class == "agentic"

    await eventually(told)
    hold = await other.admit("typo", workload_class="rlrv", prompt_tokens=22)
    assert hold.workload_class == "rlvr"


async def test_a_misspelt_class_is_visible_to_its_caller(planes: Any) -> None:
    (plane,) = await planes(config=capped(1, classes=CLASSES))
    await plane.report()
    answer = await plane.admit("s", workload_class="rlrv")
    assert answer.workload_class == "rlrv"
    hold = await plane.held("t", workload_class="rlrv")
    assert hold.detail.endswith("the declared class 'rlrv' is none of the pool's")
    shown = await plane.inspector.GetSession(ipb.GetSessionRequest(pool=POOL, session_id="t"))
    assert shown.hold.detail.endswith("the declared class 'rlrv' is none of the pool's")
    events = await plane.store.events(POOL, "0", 100)
    assert [e.fields["sid"] for e in events if e.fields["kind"] == "label"] == ["s", "t"]


# What the epoch's holder makes of the changes


def living(**changes: str) -> dict[str, str]:
    row = {
        "st": "live", "class": "rlvr", "declared": "rlvr", "inst": "0|i", "ctx": "100", "ctx_at": "500",
        "admitted": "500", "ask": "100,,,", "phase": "RUNNING", "gapn": "0", "gap": "0", "mis": "0", "moves": "0",
    }  # fmt: skip
    return {**row, **changes}


def agent(sid: str, **changes: str) -> Change:
    """Six turns, five gaps."""
    return Change(sid, living(turn="5", gapn="5", gap="500", ctx="700", ctx_at="900", **changes), None)


def over(sid: str, name: str, **changes: str) -> Change:
    row = {"class": name, "declared": name, "outcome": "COMPLETED", "admitted": "500", "ask": "100,,,", **changes}
    return Change(sid, None, row)


def taught(inference: str) -> tuple[Labelling, Memory, Any]:
    """A holder that has seen thirty sessions of each class."""
    followed, memory = Labelling(), Memory()
    view = pool(
        instance(),
        settings=config(classes=CLASSES, class_inference=inference),
        classes={"rlvr": Class(), "agentic": Class()},
    )
    rows = [over(f"a{n}", "agentic", turn="5", gapn="5", gap="500", ctx="700") for n in range(30)]
    rows += [over(f"r{n}", "rlvr", turn="0", gapn="0", gap="0", ctx="3000") for n in range(30)]
    followed.apply(rows)
    assert followed.step(memory, view) == []
    return followed, memory, view


def test_it_is_said_once_and_again_only_where_it_changed() -> None:
    followed, memory, view = taught(INFER_OFF)
    followed.apply([agent("s")])
    (told,) = followed.step(memory, view)
    assert (told.session_id, told.was, told.to, told.inferred.name) == ("s", "rlvr", "", "agentic")
    assert told.contradicted
    followed.apply([agent("s", phase="TOOL_WAIT", mis="1", inf="agentic", conf="0.99")])
    assert followed.step(memory, view) == []


def test_nothing_is_said_of_a_session_that_is_what_it_says() -> None:
    followed, memory, view = taught(INFER_ALL)
    followed.apply([agent("s", **{"class": "agentic", "declared": "agentic"})])
    assert [item.to for item in followed.step(memory, view)] == [""]
    assert followed.take_contradicted() == 0


def test_a_session_changes_its_class_so_often_and_no_more() -> None:
    followed, memory, view = taught(INFER_ALL)
    followed.apply([agent("s"), agent("t", moves=str(MOST_RELABELS))])
    assert {item.session_id: item.to for item in followed.step(memory, view)} == {"s": "agentic", "t": ""}


def test_a_short_session_is_found_out_at_its_end() -> None:
    followed, memory, view = taught(INFER_OFF)
    followed.apply([over("s", "agentic", turn="0", gapn="0", gap="0", ctx="3000")])
    followed.apply([over("known", "agentic", turn="0", gapn="0", gap="0", ctx="3000", mis="1")])
    followed.step(memory, view)
    assert followed.take_contradicted() == 1
    assert followed.take_contradicted() == 0


def test_only_what_was_completed_under_a_known_label_is_learnt() -> None:
    followed, memory, view = taught(INFER_OFF)
    before = {name: len(kept) for name, kept in memory.samples.items()}
    rows = [over("x", "typo"), over("y", "")]
    rows += [over(outcome, "rlvr", outcome=outcome) for outcome in ("ABORTED", "FAILED", "PAUSED", "EXPIRED")]
    followed.apply([*rows, Change("never", None, None)])
    followed.step(memory, view)
    assert {name: len(kept) for name, kept in memory.samples.items()} == before
    open_pool = pool(instance(), settings=config(), classes={"known": Class()})
    followed.apply([over("a", "known"), over("b", "past-the-bound")])
    followed.step(memory, open_pool)
    assert "known" in memory.samples
    assert "past-the-bound" not in memory.samples


def test_profiles_are_published_only_where_they_are_used() -> None:
    followed, _, view = taught(INFER_OFF)
    assert followed.profiles(view.config) is None
    told = followed.profiles(config(classes=CLASSES, class_inference=INFER_UNLABELLED))
    assert told is not None
    assert told.names == ("agentic", "rlvr")
    assert Labelling().profiles(config(class_inference=INFER_ALL)) is None
    assert view.now_ms == NOW
