"""Which call of a stream may be carried out when."""

from __future__ import annotations

from moorage.v1 import scheduler_pb2 as pb
from moorage_server.api.item_calls import Item
from moorage_server.api.item_order import ItemOrder


class Rig:
    """An order, and the ids of what it started."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.order = ItemOrder(self._start)

    def _start(self, item: Item) -> None:
        item.running = True
        self.started.append(item.id)

    def add(self, number: int, session: str = "s", pool: str = "") -> Item:
        item = Item(number, "place", pb.PlaceRequest(pool=pool, session_id=session))
        self.order.add(item)
        return item


def test_calls_of_one_session_go_one_after_the_other() -> None:
    rig = Rig()
    items = [rig.add(n) for n in range(3)]
    assert rig.started == [0]
    rig.order.done(items[0])
    assert rig.started == [0, 1]
    rig.order.done(items[1])
    rig.order.done(items[2])
    assert rig.started == [0, 1, 2]


def test_calls_of_other_sessions_and_pools_do_not_wait() -> None:
    rig = Rig()
    rig.add(1, "a")
    rig.add(2, "b")
    rig.add(3, "a", pool="other")
    # The empty pool is "default".
    rig.add(4, "a", pool="default")
    assert rig.started == [1, 2, 3]


def test_what_waits_for_its_turn_holds_up_nobody() -> None:
    rig = Rig()
    first, second, third = (rig.add(n) for n in range(3))
    first.wait()
    rig.order.moved(first)
    assert rig.started == [0, 1]
    rig.order.done(second)
    assert rig.started == [0, 1, 2]
    rig.order.done(first)
    rig.order.done(third)
    rig.add(9)
    assert rig.started == [0, 1, 2, 9]


def test_a_call_that_is_cancelled_in_line_is_passed_over() -> None:
    rig = Rig()
    first, second, third = (rig.add(n) for n in range(3))
    rig.order.done(second)
    assert rig.started == [0]
    rig.order.done(first)
    assert rig.started == [0, 2]
    rig.order.done(third)


def test_a_call_that_never_came_into_line_changes_nothing() -> None:
    rig = Rig()
    rig.add(1)
    rig.order.done(Item(2, "place", pb.PlaceRequest(session_id="s")))
    rig.order.done(Item(3, "place", pb.PlaceRequest(session_id="t")))
    assert rig.started == [1]


def test_a_report_is_of_the_session_it_tells_of() -> None:
    report = pb.ProgressReport(pool="p", session=pb.SessionProgress(session_id="s"))
    assert Item(1, "progress", report).session == Item(2, "admit", pb.AdmitRequest(pool="p", session_id="s")).session
    assert Item(3, "", pb.DispatchItem()).session == ("", "")
