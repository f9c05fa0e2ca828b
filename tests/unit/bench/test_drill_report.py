"""The report of a fire drill says what happened, from what was seen."""

from itertools import pairwise

from bench.drill_report import Exercise, Log, Moment, markdown
from bench.player import RunRecord, SessionRecord
from moorage.v1 import inspector_pb2, scheduler_pb2


def event(kind: str, instance: str = "", reason: str = "") -> inspector_pb2.WatchEventsResponse:
    return inspector_pb2.WatchEventsResponse(kind=kind, instance_id=instance, reason=reason)


def moment(time: float, state: scheduler_pb2.InstanceState.ValueType, brake: float = 1.0) -> Moment:
    snapshot = scheduler_pb2.InstanceSnapshot(instance_id="a:1", state=state)
    instance = inspector_pb2.Instance(
        snapshot=snapshot, freshness=inspector_pb2.FRESHNESS_FRESH, active_sessions=3, brake=brake
    )
    return Moment(time, [instance], inspector_pb2.GetPoolResponse(held_sessions=4))


def book() -> Log:
    sessions = [SessionRecord(f"s{n}", "rlvr", 0.0, end=float(n), outcome="completed") for n in range(1, 61)]
    exercise = Exercise("death", "It dies.", 100.0, 130.0, ((100.0, "killed"), (130.0, "answers")), "A")
    return Log(
        RunRecord({}, sessions),
        {"a:1": "A"},
        [exercise],
        [moment(float(t), scheduler_pb2.INSTANCE_STATE_SERVING, 0.5 if t == 110 else 1.0) for t in range(90, 170)],
        [
            (99.0, event("admit", "a:1")),
            (100.4, event("admit", "a:1")),
            (101.0, event("hold", reason="KV_BUDGET")),
            (103.0, event("detach", "a:1")),
            (104.5, event("move", "b:1")),
            (131.0, event("register", "a:1")),
            (140.0, event("admit", "a:1")),
        ],
        180.0,
    )


def test_it_counts_and_times_what_happened() -> None:
    lines = list(markdown(book()))
    assert lines[0] == "Sessions: {'completed': 60}; 20.0 completed per minute over 180 s."
    assert lines[1] == "Leases that ran out: 0; sessions that lost their home: 1, moved: 1."
    assert "Expired: 0; lost their home: 1; lowest brake: A 0.50." in lines
    assert "Sessions sent to A between its death and its return: 1, the last one 0.40 s after the death." in lines
    assert "1 sessions lost their home 3.0 to 3.0 s after the death." in lines
    assert "1 sessions had a new one 4.5 to 4.5 s after the death." in lines


def test_the_table_is_dense_near_the_steps_and_ends_after_them() -> None:
    rows = [line for line in markdown(book()) if line.startswith("| ") and not line.startswith("| s")]
    seconds = [int(row.split("|")[1]) for row in rows]
    assert seconds[0] == -4
    assert seconds[-1] < 54
    assert all(after - before == 2 for before, after in pairwise(seconds))
    assert rows[3] == "| 2 | SERVING fresh, 3, 1.00 | 4 KV_BUDGET | 0 |"
