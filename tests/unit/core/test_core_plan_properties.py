"""What holds for any pool: plans change nothing, answer each session once, explain holds, and keep to their passes."""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moorage_server.core import admission, forecast, queue
from moorage_server.core.config import POLICIES, ClassConfig
from moorage_server.core.view import DRAINING, PAUSED, SERVING, SLEEPING, STOPPED, Ask, Class, Instance, Pool, Queue
from tests.unit.core.builders import NOW, config, held, instance, published

CLASSES = ("agentic", "rlhf", "rlvr")
maybe_tokens = st.one_of(st.none(), st.integers(0, 20_000), st.just(2**40))
blocks = st.integers(0, 900)


@st.composite
def instances(draw: st.DrawFn, key: str) -> Instance:
    return instance(
        key,
        state=draw(st.sampled_from([SERVING] * 6 + [DRAINING, PAUSED, SLEEPING, STOPPED])),
        cordoned=draw(st.integers(0, 9)) == 0,
        gone=draw(st.integers(0, 9)) == 0,
        seen_ms=NOW - draw(st.sampled_from([0, 0, 0, 2999, 3001, 30_000, -50])),
        total_blocks=draw(st.sampled_from([768, 768, 300, 0, None])),
        used_blocks=draw(st.one_of(st.none(), blocks)),
        max_context=draw(st.sampled_from([8192, None])),
        need=draw(st.one_of(st.just(()), st.tuples(*[blocks] * forecast.WIDTH))),
        budget=draw(st.one_of(st.none(), blocks)),
        cap=draw(st.one_of(st.none(), st.integers(1, 30))),
        sessions=draw(st.integers(0, 20)),
        class_caps=draw(st.dictionaries(st.sampled_from(CLASSES), st.integers(1, 9))),
        groups=draw(st.dictionaries(st.sampled_from(["g1", "g2"]), st.integers(0, 40))),
        backlog_blocks=draw(st.integers(0, 3000)),
        prefill_rate=draw(st.one_of(st.none(), st.floats(1.0, 1e6))),
    )


@st.composite
def asks(draw: st.DrawFn, session_id: str, name: str) -> Ask:
    return Ask(
        session_id,
        name,
        group_id=draw(st.sampled_from(["", "", "g1", "g2"])),
        prompt_tokens=draw(maybe_tokens),
        expected_output_tokens=draw(maybe_tokens),
        max_context_tokens=draw(maybe_tokens),
        homeless=draw(st.integers(0, 9)) == 0,
    )


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    shares = draw(st.one_of(st.just((None,) * 3), st.tuples(*[st.floats(0.01, 100.0)] * 3)))
    classes = {
        name: ClassConfig(target_share=share, refused=draw(st.integers(0, 9)) == 0)
        for name, share in zip(CLASSES, shares, strict=True)
    }
    queues = {}
    for name in CLASSES:
        count = draw(st.integers(0, 5))
        heads = [held(draw(asks(f"{name} {n}", name)), NOW - 100 + n) for n in range(count)]
        queues[name] = Queue(count, sorted(heads, key=lambda h: not h.ask.homeless), more=draw(st.booleans()))
    found = [draw(instances(key)) for key in "abc"[: draw(st.integers(0, 3))]]
    return Pool(
        "p",
        NOW,
        config(classes=classes, policy=draw(st.sampled_from(POLICIES)), max_passes=draw(st.integers(0, 3))),
        instances={i.key: i for i in found},
        classes={n: Class(held=draw(st.integers(0, 4)), virtual_time=draw(st.integers(0, 10**7))) for n in CLASSES[:2]},
        published=draw(
            st.dictionaries(
                st.sampled_from(CLASSES),
                st.builds(
                    published, growth=st.floats(0, 200), evidence=st.floats(0, 1), prior_tokens=st.floats(1, 9000)
                ),
            )
        ),
        queues=queues,
        global_virtual_time=draw(st.integers(0, 10**7)),
    )


_thorough = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@_thorough
@given(view=pools())
def test_a_plan_answers_each_session_once_and_changes_nothing(view: Pool) -> None:
    before = repr(view)
    verdicts = list(admission.plan(view))
    assert repr(view) == before
    assert max(Counter(v.ask.session_id for v in verdicts).values(), default=0) <= 1
    waiting = {h.ask.session_id for q in view.queues.values() for h in q.heads}
    assert {v.ask.session_id for v in verdicts} <= waiting


@_thorough
@given(view=pools())
def test_order_inside_a_class_is_kept(view: Pool) -> None:
    """Nobody of a class is placed unless all before it were, or can never enter."""
    verdicts = {v.ask.session_id: v for v in admission.plan(view)}
    for line in view.queues.values():
        stopped = False
        for head in line.heads:
            verdict = verdicts.get(head.ask.session_id)
            assert not (stopped and verdict is not None and verdict.candidates)
            never = admission.refusal(view, head.ask) is not None
            stopped = stopped or verdict is None or not (verdict.candidates or never)


@_thorough
@given(view=pools())
def test_no_class_is_passed_more_often_than_allowed(view: Pool) -> None:
    """Nobody but a lost home goes by a class that is behind by as many sessions as it may be."""
    booked, blocked = view.copy(), set[str]()
    for verdict in admission.plan(view):
        if verdict.candidates:
            assert verdict.ask.homeless or not any(queue.passed_enough(booked, name) for name in blocked)
            admission.charge(booked, verdict, verdict.candidates[0])
        elif admission.refusal(view, verdict.ask) is None:
            blocked.add(verdict.ask.workload_class)


@_thorough
@given(view=pools())
def test_every_hold_has_reason_and_detail_and_every_candidate_fits(view: Pool) -> None:
    wanted = Ask("new", "rlvr", prompt_tokens=700)
    for verdict in (*admission.plan(view), admission.decide(view, wanted)):
        if not verdict.candidates:
            assert verdict.reason
            assert verdict.detail
            continue
        assert not verdict.rejected
        for candidate in verdict.candidates:
            home = view.instances[candidate.instance]
            assert home.state == SERVING
            assert not home.cordoned
            assert view.freshness(home) != "GONE"
            assert home.sessions < candidate.cap
            assert len(candidate.asks) == len(candidate.limits)
            assert all(a <= limit for a, limit in zip(candidate.asks, candidate.limits, strict=True))


@_thorough
@given(view=pools())
def test_free_capacity_never_stands_idle_for_ever(view: Pool) -> None:
    """Once every session has ended, the head of the queue enters, whatever was refused, passed or braked before."""
    for home in view.instances.values():
        home.sessions, home.need, home.budget, home.cap = 0, (5,) * forecast.WIDTH, 1, 1
        home.state, home.gone, home.cordoned, home.seen_ms, home.total_blocks = SERVING, False, False, NOW, 768
    for line in view.queues.values():
        line.more = False
    verdicts = list(admission.plan(view))
    heads = [h.ask for q in view.queues.values() for h in q.heads]
    can_enter = [a for a in heads if admission.refusal(view, a) is None]
    if view.instances and can_enter:
        assert any(v.candidates for v in verdicts)
