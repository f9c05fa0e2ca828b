"""What each class's line waits for, on the numbers of now."""

from __future__ import annotations

from moorage_server.core import lines
from moorage_server.core.view import Class, Queue
from tests.unit.core.builders import ask, config, instance, line, mixture, needing, pool

FULL = {"sessions": 1, "budget": 100, "need": needing(85)}


def waiting(**held: int) -> dict[str, Class]:
    return {name: Class(held=number) for name, number in held.items()}


def test_the_reason_of_the_first_that_stays_outside() -> None:
    queues = {"rlvr": line(ask("s1", prompt=16), ask("s2", prompt=1600))}
    view = pool(instance(**FULL), queues=queues, classes=waiting(rlvr=2))
    assert lines.reasons(view) == {"rlvr": "KV_BUDGET"}
    capped = pool(instance(sessions=3, cap=3, budget=700, need=needing(10)), queues=queues, classes=waiting(rlvr=2))
    assert lines.reasons(capped) == {"rlvr": "POOL_CAP"}, "though it was noted as KV_BUDGET when they came"


def test_a_class_behind_one_that_does_not_fit_waits_for_its_turn() -> None:
    queues = {"rlvr": line(ask("big", prompt=1600)), "agentic": line(ask("a1", "agentic", 16))}
    classes = {"rlvr": Class(held=1), "agentic": Class(held=1, virtual_time=10**9)}
    settings = config(classes=mixture(rlvr=1, agentic=1))
    view = pool(instance(**FULL), queues=queues, classes=classes, settings=settings, global_virtual_time=10**9)
    assert lines.reasons(view) == {"rlvr": "KV_BUDGET", "agentic": "QUEUED_BEHIND"}


def test_where_no_instance_is_open_all_lines_wait_for_that() -> None:
    queues = {"rlvr": line(ask("s1")), "agentic": line(ask("a1", "agentic"))}
    view = pool(instance(cordoned=True), queues=queues, classes=waiting(rlvr=1, agentic=1))
    assert lines.reasons(view) == {"rlvr": "DRAINING", "agentic": "DRAINING"}
    assert lines.reasons(pool(queues=queues, classes=waiting(rlvr=1))) == {
        "rlvr": "NO_INSTANCE",
        "agentic": "NO_INSTANCE",
    }


def test_a_line_without_anybody_there_tells_nothing() -> None:
    view = pool(instance(), queues={"rlvr": Queue(3, [])}, classes={**waiting(rlvr=3), "agentic": Class(active=1)})
    assert lines.reasons(view) == {"rlvr": "UNKNOWN"}
