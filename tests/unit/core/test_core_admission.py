"""One decision: what each mode listens to, what closes a pool, what can never enter, and what a plan may do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moorage_server.core import admission, queue
from moorage_server.core.admission import UNLIMITED
from moorage_server.core.config import MISA, MISA_T, OBSERVE, POLICIES, SESSION, STATIC, ClassConfig
from moorage_server.core.view import DRAINING, PAUSED, SLEEPING, STOPPED, Class, Instance, Queue
from tests.unit.core.builders import NOW, ask, config, ids, instance, line, mixture, needing, pool, published

FULL = needing(765)


def reason(*instances: Instance, policy: str = MISA_T, **wanted: Any) -> str:
    verdict = admission.decide(pool(*instances, settings=config(policy=policy)), ask(**wanted))
    return "PLACE" if verdict.candidates else verdict.reason


# What each mode listens to


@pytest.mark.parametrize(("policy", "expected"), [(STATIC, "PLACE")] + [(p, "KV_BUDGET") for p in POLICIES[1:]])
def test_static_knows_no_kv_budget(policy: str, expected: str) -> None:
    assert reason(instance(sessions=3, need=FULL, cap=16), policy=policy) == expected


@pytest.mark.parametrize(("policy", "expected"), [(STATIC, "POOL_CAP"), *((p, "PLACE") for p in POLICIES[1:])])
def test_before_the_first_epoch_only_static_has_a_cap(policy: str, expected: str) -> None:
    assert reason(instance(sessions=16), policy=policy) == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_every_mode_keeps_to_the_session_cap(policy: str) -> None:
    assert reason(instance(sessions=5, cap=5), policy=policy) == "POOL_CAP"
    assert reason(instance(sessions=4, cap=5), policy=policy) == "PLACE"


@pytest.mark.parametrize(
    ("policy", "expected"), [(STATIC, "PLACE"), (SESSION, "STALE_SNAPSHOT"), (MISA, "STALE_SNAPSHOT")]
)
@pytest.mark.parametrize("blocks", [None, 0])
def test_only_static_does_without_blocks(policy: str, expected: str, blocks: int | None) -> None:
    """Unknown, or none at all: an engine that has not sized its cache yet."""
    assert reason(instance(total_blocks=blocks), policy=policy) == expected


def test_the_configured_bound_holds_before_the_first_epoch() -> None:
    for policy in (STATIC, SESSION):
        settings = config(policy=policy, max_sessions_per_instance=4, static_cap=16)
        for sessions, placed in ((3, True), (4, False)):
            verdict = admission.decide(pool(instance(sessions=sessions), settings=settings), ask())
            assert bool(verdict.candidates) == placed


def test_quotas_order_but_never_refuse() -> None:
    """Soft quotas: over its quota of 2, with nobody else waiting, a class gets what the others do not use."""
    for policy in (MISA, MISA_T):
        home = instance(sessions=4, by_class={"rlvr": 4}, class_caps={"rlvr": 2, "agentic": 9}, cap=20)
        assert reason(home, policy=policy) == "PLACE"


def test_observe_places_whatever_enforce_would_have_said() -> None:
    full, empty = instance("a", sessions=9, cap=5, need=FULL), instance("b", sessions=5, cap=5)
    settings = config(mode=OBSERVE)
    verdict = admission.observe(pool(full, empty, settings=settings), ask())
    assert [c.instance for c in verdict.candidates] == ["b", "a"]
    assert (verdict.reason, verdict.rejected) == ("POOL_CAP", False)
    refused = config(mode=OBSERVE, classes={"rlvr": ClassConfig(refused=True)})
    verdict = admission.observe(pool(empty, settings=refused), ask())
    assert (bool(verdict.candidates), verdict.reason, verdict.rejected) == (True, "CLASS_REFUSED", False)
    verdict = admission.observe(pool(instance(), settings=settings), ask())
    assert (len(verdict.candidates), verdict.reason) == (1, "")
    assert admission.observe(pool(settings=settings), ask()).reason == "NO_INSTANCE"


# Alone on an instance, stale, closed, too large


def test_alone_whatever_can_be_served_may_enter() -> None:
    """A brake at its floor, a declared context beyond the budget, and blocks in use that nobody booked."""
    home = instance(budget=100, need=needing(3))
    assert reason(home, prompt=8000) == "PLACE"
    (candidate,) = admission.decide(pool(home), ask(prompt=8000)).candidates
    assert candidate.asks[0] == 500
    assert candidate.limits == (503,) * 5 + (UNLIMITED,)
    assert reason(replace(home, sessions=1), prompt=8000) == "KV_BUDGET"


def test_alone_only_where_the_engine_can_serve_it() -> None:
    """The large instance is full, the small one empty: 8000 tokens do not fit its 300 blocks in any state."""
    small, large = instance("a", total_blocks=300), instance("b", sessions=9, need=FULL)
    for policy in (STATIC, MISA_T):
        verdict = admission.decide(pool(small, replace(large, cap=9), settings=config(policy=policy)), ask(prompt=8000))
        assert not verdict.candidates


def test_the_forecast_is_what_the_ledger_checks_again() -> None:
    verdict = admission.decide(pool(instance(sessions=1, budget=700, need=needing(600))), ask(prompt=160))
    (candidate,) = verdict.candidates
    assert candidate.asks == (10,) * 6
    assert candidate.limits == (700,) * 5 + (UNLIMITED,)
    assert candidate.prefill == 10


def test_a_stale_instance_takes_only_what_fits_if_nobody_ends() -> None:
    silent = instance(seen_ms=NOW - 5000, sessions=3, budget=600)
    assert reason(replace(silent, need=(100, 100, 100, 100, 100, 750))) == "PLACE"
    assert reason(replace(silent, need=(100, 100, 100, 100, 100, 760))) == "STALE_SNAPSHOT"


def test_a_stale_instance_is_no_freer_than_a_fresh_one() -> None:
    """The brake is on: 300 of 768 blocks may be needed."""
    silent = instance(seen_ms=NOW - 5000, sessions=3, budget=300, need=needing(295))
    assert reason(silent) == "STALE_SNAPSHOT"
    assert reason(replace(silent, seen_ms=NOW)) == "KV_BUDGET"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"gone": True}, "NO_INSTANCE"),
        ({"state": STOPPED}, "NO_INSTANCE"),
        ({"seen_ms": NOW - 30_000}, "NO_INSTANCE"),
        ({"state": PAUSED}, "WEIGHT_UPDATE"),
        ({"state": SLEEPING}, "WEIGHT_UPDATE"),
        ({"state": DRAINING}, "DRAINING"),
        ({"drain_asked": True}, "DRAINING"),
        ({"cordoned": True}, "DRAINING"),
    ],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_closed_pool_says_why(policy: str, changes: dict[str, Any], expected: str) -> None:
    assert reason(instance(**changes), policy=policy) == expected


def test_one_open_instance_is_enough() -> None:
    verdict = admission.decide(
        pool(instance("a", cordoned=True), instance("b", state=PAUSED), instance("c", drain_asked=True), instance("d")),
        ask(),
    )
    assert [c.instance for c in verdict.candidates] == ["d"]


def test_nobody_is_gone_for_being_silent_right_after_an_outage() -> None:
    assert not admission.closed(pool(instance(seen_ms=0), in_grace=True))


def test_what_can_never_enter_is_rejected() -> None:
    small, large = instance("a", max_context=4096), instance("b", total_blocks=300, max_context=None)
    assert reason(small, large, prompt=4801) == "TOO_LARGE"
    assert reason(small, large, prompt=4800) == "PLACE"
    unknown = instance("b", total_blocks=None, max_context=None)
    assert reason(small, unknown, prompt=2**40) in ("KV_BUDGET", "STALE_SNAPSHOT")
    assert reason(replace(unknown, max_context=4096), prompt=4097) == "TOO_LARGE"
    assert reason(prompt=2**40) == "NO_INSTANCE"
    refused = pool(instance(), settings=config(classes={"rlvr": ClassConfig(refused=True)}))
    verdict = admission.decide(refused, ask())
    assert (verdict.rejected, verdict.reason) == (True, "CLASS_REFUSED")
    assert admission.decide(refused, ask(workload_class="agentic")).candidates


def test_a_protected_budget_refuses_nobody_for_good() -> None:
    """768 blocks, half of them protected: 8000 tokens are more than the half, and still can be served alone."""
    assert admission.decide(pool(instance(), settings=config(headroom=0.5)), ask(prompt=8000)).candidates


def test_a_living_session_is_never_rejected() -> None:
    """Its home is lost, its class refused since, its context too large for what is left: held, with the reason."""
    settings = config(classes={"rlvr": ClassConfig(refused=True)})
    assert admission.decide(pool(instance(), settings=settings), ask(homeless=True)).candidates
    verdict = admission.decide(pool(instance(), settings=settings), ask(prompt=9000, homeless=True))
    assert (verdict.rejected, verdict.reason) == (False, "KV_BUDGET")
    assert "9000 tokens" in verdict.detail


def test_room_is_found_behind_any_number_of_full_instances() -> None:
    """Forty fast instances are full; the slow one costs more, and has room."""
    full = [instance(f"f{n:02}", sessions=9, need=FULL, prefill_rate=50_000.0) for n in range(40)]
    verdict = admission.decide(pool(*full, instance("slow", prefill_rate=2000.0, sessions=1)), ask(prompt=1600))
    assert [c.instance for c in verdict.candidates] == ["slow"]


# The queue as a whole


def test_a_plan_books_as_it_goes_and_leaves_the_pool_alone() -> None:
    home = instance(sessions=1, budget=100, need=needing(60))
    view = pool(home, queues={"rlvr": line(*(ask(f"s{n}") for n in range(9)))})
    before = repr(view)
    verdicts = list(admission.plan(view))
    assert ids(v.ask for v in verdicts if v.candidates) == ["s0", "s1", "s2", "s3"]
    assert (verdicts[-1].ask.session_id, verdicts[-1].reason) == ("s4", "KV_BUDGET")
    assert repr(view) == before


def test_a_plan_stops_where_it_does_not_know_who_comes_next() -> None:
    queues = {"rlvr": line(ask("s0"), more=True), "agentic": line(ask("a0", "agentic"))}
    settings = config(classes=mixture(rlvr=1.0, agentic=0.1))
    assert ids(v.ask for v in admission.plan(pool(instance(), settings=settings, queues=queues))) == ["s0"]


def behind(sessions: int) -> dict[str, Any]:
    """rlvr waits and lacks ``sessions``; agentic is up to date."""
    classes = {"rlvr": Class(held=1), "agentic": Class(held=1, virtual_time=(sessions + 1) * queue.UNIT)}
    return {"classes": classes, "global_virtual_time": sessions * queue.UNIT}


def test_a_class_that_does_not_fit_is_passed_only_so_often() -> None:
    """It is ten sessions behind, twelve are allowed: two more may go by in this plan, then nobody."""
    home = instance(sessions=1, budget=700, need=needing(300))
    queues = {"rlvr": line(ask("big", prompt=8000)), "agentic": line(*(ask(f"a{n}", "agentic", 16) for n in range(9)))}
    placed = [v for v in admission.plan(pool(home, queues=queues, **behind(10))) if v.candidates]
    assert ids(v.ask for v in placed) == ["a0", "a1"]
    assert not any(v.candidates for v in admission.plan(pool(home, queues=queues, **behind(12))))


def test_a_lost_home_may_pass_even_then() -> None:
    home = instance(sessions=1, budget=700, need=needing(300))
    queues = {"rlvr": line(ask("big", prompt=8000)), "agentic": line(ask("moved", "agentic", 16, homeless=True))}
    view = pool(home, queues=queues, **behind(12))
    assert [v.ask.session_id for v in admission.plan(view) if v.candidates] == ["moved"]


def test_who_can_never_enter_holds_nobody_up() -> None:
    """Its large instance is gone: the head is rejected at once, and the pool does not stand still behind it."""
    queues = {
        "rlvr": line(ask("huge", prompt=20_000), ask("s1")),
        "agentic": line(ask("lost", "agentic", 20_000, homeless=True), ask("a1", "agentic")),
    }
    verdicts = {v.ask.session_id: v for v in admission.plan(pool(instance(), queues=queues, **behind(12)))}
    assert {s for s, v in verdicts.items() if v.candidates} == {"s1", "a1"}
    assert verdicts["huge"].rejected
    assert not verdicts["lost"].rejected


def test_a_newcomer_goes_behind_those_who_wait() -> None:
    home = instance(sessions=1, budget=100, need=needing(85))
    waits = {"rlvr": line(ask("first"))}
    assert admission.decide(pool(home), ask("new")).candidates
    verdict = admission.decide(pool(home, queues=waits), ask("new"))
    assert (verdict.candidates, verdict.reason) == ((), "KV_BUDGET")
    other = admission.decide(pool(home, queues={"rlvr": line(ask("first", prompt=1600))}), ask("new", "rlvr"))
    assert other.reason == "QUEUED_BEHIND"
    many = {"rlvr": Queue(99, line(ask("first")).heads, more=True)}
    assert admission.decide(pool(home, queues=many), ask("new")).reason == "QUEUED_BEHIND"


def test_a_retry_is_judged_in_its_place_with_what_it_says_now() -> None:
    home = instance(sessions=1, budget=100, need=needing(85))
    queues = {"rlvr": line(ask("first", prompt=1600), ask("second"))}
    assert admission.decide(pool(home, queues=queues), ask("second")).reason == "QUEUED_BEHIND"
    verdict = admission.decide(pool(home, queues=queues), ask("first", prompt=160))
    assert verdict.candidates[0].asks[0] == 10


def test_a_lost_home_is_taken_ahead_of_the_whole_queue() -> None:
    home = instance(sessions=1, budget=100, need=needing(85))
    queues = {"rlvr": line(ask("first"), ask("second"))}
    assert admission.decide(pool(home, queues=queues), ask("moved", homeless=True)).candidates


def test_decisions_leave_the_view_alone() -> None:
    view = pool(instance(sessions=1), queues={"rlvr": line(ask("first"))}, classes={"rlvr": Class(held=1)})
    before = repr(view)
    admission.decide(view, ask("new", "agentic"))
    admission.observe(view, ask("new", "rlhf"))
    assert repr(view) == before


def test_charge_is_what_the_ledger_would_do() -> None:
    view = pool(instance(need=needing(5)), classes={"rlvr": Class()}, known={"rlvr": published()})
    verdict = admission.decide(view, ask("s", prompt=160, group_id="g"))
    admission.charge(view, verdict, verdict.candidates[0])
    home = view.instances["a"]
    assert (home.sessions, home.by_class, home.need) == (1, {"rlvr": 1}, needing(15))
    assert (home.backlog_blocks, home.groups) == (10, {"g": 10})
    assert view.classes["rlvr"].active == 1
    assert view.classes["rlvr"].virtual_time == 1_000_000
