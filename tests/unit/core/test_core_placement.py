"""Where a session goes: c_rw = d_w + (L_r - H_rw) / mu_w, the emptier instance where that makes no difference."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moorage_server.core import placement
from moorage_server.core.view import Ask, Instance
from tests.unit.core.builders import ask, instance, needing


def order(wanted: Ask, *instances: Instance) -> list[str]:
    return [i.key for i in placement.ranked(wanted, list(instances))]


def test_cost_by_hand() -> None:
    """A backlog of 100 blocks of 16 and a prompt of 8000 tokens, 2000 of them shared, at 4000 tokens/s: 0.4 + 1.5 s."""
    wanted = ask(prompt=8000, group_id="g")
    busy = instance(backlog_blocks=100, prefill_rate=4000.0, groups={"g": 125, "other": 400})
    assert placement.reusable_prefix(wanted, busy) == 2000
    assert placement.cost_s(wanted, busy) == pytest.approx(1.9)
    assert placement.cost_s(ask(prompt=8000), busy) == pytest.approx(2.4)


def test_what_is_shared_is_no_longer_than_the_prompt() -> None:
    assert placement.reusable_prefix(ask(prompt=100, group_id="g"), instance(groups={"g": 125})) == 100


def test_an_unknown_prompt_costs_the_same_everywhere() -> None:
    wanted = ask(prompt=None, group_id="g")
    assert placement.cost_s(wanted, instance(groups={"g": 10})) == placement.cost_s(wanted, instance()) == 0.0


def test_an_instance_that_has_shown_no_throughput_is_taken_for_a_usual_one() -> None:
    assert placement.cost_s(ask(prompt=16_000), instance()) == pytest.approx(2.0)


def test_the_lowest_time_to_first_token_goes_first() -> None:
    wanted = ask(prompt=8000)
    slow, fast = instance("a", prefill_rate=2000.0), instance("b", prefill_rate=8000.0)
    behind = instance("c", prefill_rate=8000.0, backlog_blocks=1000)
    assert order(wanted, slow, behind, fast) == ["b", "c", "a"]


def test_equal_costs_go_to_the_emptier_instance() -> None:
    """The forecast need against the budget counts, else the number of sessions; then the name, for a stable order."""
    full = instance("a", budget=768, need=needing(700))
    half = instance("b", budget=768, need=needing(350))
    small = instance("c", budget=300, need=needing(200))
    assert order(ask(), full, half, small) == ["b", "c", "a"]
    assert order(ask(), instance("d", sessions=3), instance("e", sessions=2), instance("c", sessions=3)) == [
        "e",
        "c",
        "d",
    ]


def test_the_noise_of_an_estimate_does_not_decide() -> None:
    """160 tokens differ by 2 ms between these instances: the emptier one wins."""
    quick = instance("a", prefill_rate=9000.0, budget=768, need=needing(700))
    assert order(ask(prompt=160), quick, instance("b", budget=768, need=needing(10))) == ["b", "a"]


def test_what_is_needed_if_nobody_ends_does_not_count_as_fill() -> None:
    assert placement.fill(instance(budget=100, need=(10, 20, 30, 20, 10, 5000))) == pytest.approx(0.3)


def test_a_prefix_is_worth_its_prefill_not_a_crowd() -> None:
    """A tenth of a second saved does not outweigh an engine that is full where another is empty; a second does."""
    crowded = instance("a", budget=768, need=needing(760), groups={"g": 60})
    empty = instance("b", budget=768, need=needing(0))
    assert order(ask(prompt=960, group_id="g"), crowded, empty) == ["b", "a"]
    assert order(ask(prompt=8_000, group_id="g"), replace(crowded, groups={"g": 500}), empty) == ["a", "b"]
