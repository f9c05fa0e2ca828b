"""Who goes first: lost homes, then classes below their quota, then the largest deficit against the mixture."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from moorage_server.core import admission, queue
from moorage_server.core.view import Class, Pool, Queue
from tests.unit.core.builders import ask, config, held, instance, line, mixture, pool, published

RHO = mixture(agentic=0.5, rlvr=0.3, rlhf=0.2)


def view(queues: Mapping[str, Queue], *, shares: bool = True, **changes: object) -> Pool:
    settings = config(classes=RHO) if shares else config()
    return pool(instance(), settings=settings, queues=queues, **changes)  # type: ignore[arg-type]


def order(seen: Pool) -> list[str]:
    return queue.order(seen, seen.queues)


def admit_next(seen: Pool, session_id: str) -> str:
    """Books one session of the class whose turn it is; everybody keeps waiting."""
    name = order(seen)[0]
    verdict = admission.Verdict(ask(session_id, name), "", "")
    admission.charge(seen, verdict, admission.Candidate("a", "1", cap=0, shared=0, prefill=0, expected_cached=0))
    return name


def test_a_step_is_one_over_the_share() -> None:
    seen = view({})
    assert queue.step(seen, "agentic") == 2 * queue.UNIT
    assert queue.step(seen, "rlhf") == 5 * queue.UNIT
    assert queue.step(seen, "unnamed") == 20 * queue.UNIT
    assert queue.step(view({}, shares=False), "agentic") == queue.UNIT


@pytest.mark.parametrize("shares", [(1e-300, 1.0), (1e308, 1e308), (5e-324, 1e308)])
def test_steps_stay_exact_in_the_ledger_whatever_the_shares(shares: tuple[float, float]) -> None:
    """Lua counts in doubles: a thousand admissions stay below 2^53."""
    seen = pool(settings=config(classes=mixture(a=shares[0], b=shares[1])))
    assert sum(seen.config.target_mixture().values()) == pytest.approx(1.0)
    for name in ("a", "b"):
        assert 0 < 1000 * queue.step(seen, name) < 2**53


def test_the_largest_deficit_goes_first() -> None:
    """Admitted so far against rho: agentic 4/0.5 = 8, rlvr 2/0.3 = 6.7, rlhf 2/0.2 = 10."""
    queues = {name: line(ask(name, name)) for name in ("agentic", "rlhf", "rlvr")}
    counts = {"agentic": 4, "rlvr": 2, "rlhf": 2}
    empty = view({})
    classes = {name: Class(virtual_time=n * queue.step(empty, name)) for name, n in counts.items()}
    assert order(view(queues, classes=classes)) == ["rlvr", "agentic", "rlhf"]


def test_without_a_mixture_the_first_to_come_goes_first() -> None:
    queues = {
        "agentic": Queue(1, [held(ask("a", "agentic"), 30)]),
        "rlvr": Queue(1, [held(ask("b", "rlvr"), 10)]),
        "rlhf": Queue(1, [held(ask("c", "rlhf"), 20)]),
    }
    classes = {"rlvr": Class(virtual_time=10**9)}
    assert order(view(queues, shares=False, classes=classes)) == ["rlvr", "rlhf", "agentic"]


def test_a_class_that_was_idle_catches_up_by_a_bounded_credit() -> None:
    """The pool is at virtual time 1000; rlvr slept since 0. It gets four admissions of credit, not three hundred."""
    queues = {"agentic": line(ask("a", "agentic")), "rlvr": line(ask("b", "rlvr"))}
    now = 1000 * queue.UNIT
    classes = {"agentic": Class(virtual_time=now), "rlvr": Class(virtual_time=0)}
    seen = view(queues, classes=classes, global_virtual_time=now)
    served = [admit_next(seen, str(n)) for n in range(6)]
    assert served == ["rlvr"] * 4 + ["agentic", "rlvr"]


def test_lost_homes_go_before_everything() -> None:
    queues = {"agentic": line(ask("a", "agentic")), "rlvr": line(ask("b", "rlvr", homeless=True))}
    classes = {"rlvr": Class(virtual_time=10**12)}
    assert order(view(queues, classes=classes)) == ["rlvr", "agentic"]


def test_a_class_below_its_quota_goes_before_a_larger_deficit() -> None:
    """What was lent is called back: rlvr holds 2 * 40 of 200 blocks, agentic 20 * 40 of 160 and the larger deficit."""
    queues = {"agentic": line(ask("a", "agentic")), "rlvr": line(ask("b", "rlvr"))}
    classes = {"agentic": Class(active=20), "rlvr": Class(active=2, virtual_time=10**9)}
    known = {"agentic": published(quota_blocks=160.0), "rlvr": published(quota_blocks=200.0)}
    assert order(view(queues, classes=classes, known=known)) == ["rlvr", "agentic"]
    classes["rlvr"].active = 20
    assert order(view(queues, classes=classes, known=known)) == ["agentic", "rlvr"]


def test_a_class_without_quota_or_without_sessions_is_below_it() -> None:
    queues = {"agentic": line(ask("a", "agentic")), "rlvr": line(ask("b", "rlvr"))}
    classes = {"agentic": Class(active=20), "rlvr": Class(virtual_time=10**9)}
    for quota in (0.0, 1.0):
        known = {"agentic": published(quota_blocks=160.0), "rlvr": published(quota_blocks=quota)}
        assert order(view(queues, classes=classes, known=known)) == ["rlvr", "agentic"]


def test_lent_capacity_is_called_back_as_sessions_end() -> None:
    """Agentic has all twenty places, twice its quota. rlvr comes back: the places that fall free are rlvr's."""
    queues = {"agentic": line(ask("a", "agentic")), "rlvr": line(ask("b", "rlvr"))}
    classes = {"agentic": Class(active=20), "rlvr": Class()}
    known = {"agentic": published(quota_blocks=400.0), "rlvr": published(quota_blocks=400.0)}
    seen = view(queues, shares=False, classes=classes, known=known)
    served = []
    for n in range(5):
        seen.classes["agentic"].active -= 1
        served.append(admit_next(seen, str(n)))
    assert served == ["rlvr"] * 5


def test_a_waiting_class_is_owed_what_it_could_not_get() -> None:
    """The credit bounds what an idle class may catch up, not what one that waits all the time has missed."""
    now = 1000 * queue.UNIT
    seen = view({}, classes={"rlvr": Class(held=1), "agentic": Class()}, global_virtual_time=now)
    assert queue.start(seen, "rlvr") == 0
    assert queue.start(seen, "agentic") == now - queue.CREDIT * queue.step(seen, "agentic")
    assert queue.start(seen, "rlhf") == now - queue.CREDIT * queue.step(seen, "rlhf")


def test_a_class_is_passed_until_it_is_behind_by_so_many_of_its_sessions() -> None:
    """Twelve are allowed: 12 / 0.3 = 40 units of virtual time."""
    step = queue.step(view({}), "rlvr")
    for behind, enough in ((12 * step - 1, False), (12 * step, True)):
        seen = view({}, classes={"rlvr": Class(held=1, virtual_time=100)}, global_virtual_time=100 + behind)
        assert queue.passed_enough(seen, "rlvr") == enough


def test_empty_queues_are_not_served() -> None:
    assert order(view({"agentic": Queue(70, [], more=True), "rlvr": line()})) == []


def test_the_mixture_is_met_over_many_admissions() -> None:
    """300 admissions with everybody waiting all the time: 150, 90 and 60, and never far from it on the way."""
    seen = view({name: line(ask(name, name)) for name in RHO}, known={}, classes={name: Class() for name in RHO})
    shares = seen.config.target_mixture()
    counts = dict.fromkeys(RHO, 0)
    for n in range(1, 301):
        counts[admit_next(seen, f"s{n}")] += 1
        assert all(abs(counts[c] - n * shares[c]) < 2 for c in counts)
    assert counts == {"agentic": 150, "rlvr": 90, "rlhf": 60}
