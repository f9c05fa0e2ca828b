"""Prefix knowledge: what is looked up, what may be relied on, and what a decision makes of it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage_server.core import admission, forecast, placement, prefixes
from moorage_server.core.config import OBSERVE, ClassConfig
from moorage_server.core.view import EVENTS, PLACED, Ask, Instance, PrefixIndex
from tests.unit.core.builders import NOW, ask, config, instance, needing, pool

#: A prompt of 8,000 tokens: a second of prefill where nothing else is known.
LONG = 8_000


def indexed(key: str = "a", source: str = EVENTS, age_ms: int = 0, behind: bool = False, **changes: Any) -> Instance:
    """An instance of which 100 blocks are known."""
    return instance(key, prefixes=PrefixIndex(source, 100, NOW - age_ms, behind), **changes)


def knowing(prompt: int | None = LONG, **tokens: int) -> Ask:
    """A session whose prompt was found on instances."""
    return ask(prompt=prompt, reusable=tokens)


def order(wanted: Ask, *instances: Instance, class_prefix: int = 0) -> list[str]:
    return [i.key for i in placement.ranked(wanted, list(instances), class_prefix)]


# What is looked up


@given(st.integers(0, 16_384))
def test_probes_are_few_ordered_and_reach_both_ends(count: int) -> None:
    positions = prefixes.probes(count)
    assert len(positions) == min(count, 64)
    assert list(positions) == sorted(set(positions))
    if count:
        assert (positions[0], positions[-1]) == (0, count - 1)
        steps = [b - a for a, b in itertools.pairwise(positions)]
        assert max(steps, default=1) <= -(-count // 63)


def test_up_to_64_blocks_are_looked_up_exactly() -> None:
    assert prefixes.probes(64) == tuple(range(64))


@pytest.mark.parametrize(
    ("home", "expected"),
    [
        (indexed(), True),
        (indexed(age_ms=5_000), True),
        (indexed(age_ms=5_001), False),
        (indexed(behind=True), False),
        (indexed(source=PLACED), True),
        (indexed(source=PLACED, age_ms=500_000), True),
        (instance(), False),
    ],
)
def test_an_index_is_relied_on_while_it_is_complete_and_its_events_come(home: Instance, expected: bool) -> None:
    assert prefixes.reliable(pool(home), home) is expected


def test_events_may_be_three_intervals_old() -> None:
    slow = config(heartbeat_interval_s=4.0)
    assert prefixes.reliable(pool(settings=slow), indexed(age_ms=12_000))
    assert not prefixes.reliable(pool(settings=slow), indexed(age_ms=12_001))


def searched(*instances: Instance, prompt: int | None = 160, hashes: int = 10) -> list[str]:
    return [i.key for i in prefixes.searched(pool(*instances), ask(prompt=prompt), hashes)]


def test_only_living_instances_with_a_reliable_index_are_searched() -> None:
    assert searched(indexed("a"), indexed("b", behind=True), indexed("c", gone=True), instance("d")) == ["a"]
    assert searched() == []


def test_hashes_are_compared_with_blocks_of_the_size_they_were_made_for() -> None:
    """The length of the prompt tells it, else the majority: another size could only match by chance."""
    small, other, large = indexed("a"), indexed("b"), indexed("c", block_size=32)
    assert searched(small, other, large, prompt=330, hashes=20) == ["a", "b"]
    assert searched(small, other, large, prompt=330, hashes=10) == ["c"]
    assert searched(small, other, large, prompt=None, hashes=10) == ["a", "b"]
    assert searched(large, prompt=None, hashes=10) == ["c"]
    # The beginning of a prompt that is too long to be hashed whole.
    assert searched(small, large, prompt=2**20, hashes=16_384) == ["a"]


def test_what_is_kept_follows_the_size_of_the_instance() -> None:
    assert prefixes.most_hashes(instance(total_blocks=16_000)) == 17_000
    assert prefixes.most_hashes(instance(total_blocks=100)) == 164
    assert prefixes.most_hashes(instance(total_blocks=10**9)) == prefixes.MOST_HASHES
    assert prefixes.most_hashes(instance(total_blocks=None)) == prefixes.MOST_HASHES
    assert prefixes.most_hashes(None) == prefixes.MOST_HASHES


# What a decision makes of it


def test_the_most_that_is_known_counts() -> None:
    home = instance(groups={"g": 100}, by_class={"rlvr": 1})
    found, shared = knowing(a=4_000), ask(prompt=LONG, group_id="g")
    assert placement.reusable_prefix(found, home) == 4_000
    assert placement.reusable_prefix(shared, home) == 1_600
    assert placement.reusable_prefix(replace(shared, reusable={"a": 4_000}), home, 500) == 4_000
    assert placement.reusable_prefix(replace(shared, reusable={"a": 400}), home, 500) == 1_600
    assert placement.reusable_prefix(ask(prompt=LONG), home, 500) == 496
    assert placement.reusable_prefix(found, instance("b")) == 0


def test_nothing_longer_than_the_prompt_is_reused() -> None:
    home = instance(by_class={"rlvr": 1})
    assert placement.reusable_prefix(knowing(prompt=100, a=4_000), home, 500) == 100


def test_the_prefix_of_a_class_counts_where_a_session_of_it_is_at_home() -> None:
    assert placement.reusable_prefix(ask(prompt=LONG), instance(by_class={"agentic": 3}), 512) == 0
    assert placement.reusable_prefix(ask(prompt=LONG), instance(by_class={"rlvr": 0}), 512) == 0
    assert order(ask(prompt=LONG), instance("a"), instance("b", sessions=1, by_class={"rlvr": 1})) == ["a", "b"]
    wanted, home = ask(prompt=LONG), instance("b", sessions=1, by_class={"rlvr": 1})
    assert order(wanted, instance("a"), home, class_prefix=4_000) == ["b", "a"]


def test_a_prompt_of_unknown_length_goes_where_most_of_it_is() -> None:
    assert order(knowing(prompt=None, b=4_000), instance("a"), instance("b")) == ["b", "a"]


def test_a_long_prefix_outweighs_a_short_backlog_and_not_a_long_one() -> None:
    """7,200 tokens found save 0.9 s: worth a backlog of 400 blocks (0.8 s), not one of 800 (1.6 s)."""
    wanted = knowing(b=7_200)
    assert order(wanted, instance("a"), instance("b", backlog_blocks=400)) == ["b", "a"]
    assert order(wanted, instance("a"), instance("b", backlog_blocks=800)) == ["a", "b"]


def test_what_is_found_saves_computing_and_no_booking() -> None:
    """Cached blocks that are others' may be evicted: they are booked as if they had to be computed."""
    home = instance(budget=768, need=needing(0), max_context=16_384)
    (cold,) = admission.try_place(pool(home), ask(prompt=LONG)).candidates
    (warm,) = admission.try_place(pool(home), knowing(a=7_200)).candidates
    assert (cold.prefill, cold.expected_cached) == (500, 0)
    assert (warm.prefill, warm.expected_cached) == (50, 7_200)
    assert (warm.asks, warm.shared) == (cold.asks, cold.shared)


def test_the_prefix_of_a_class_reaches_the_decision() -> None:
    settings = config(classes={"rlvr": ClassConfig(shared_prefix_tokens=4_000)})
    homes = instance("a"), instance("b", by_class={"rlvr": 1}, sessions=1)
    first = admission.try_place(pool(*homes, settings=settings), ask(prompt=LONG)).candidates[0]
    assert (first.instance, first.expected_cached, first.prefill) == ("b", 4_000, 250)


def test_observe_places_by_what_is_found_and_charges_no_less_than_nothing() -> None:
    view = pool(instance("a"), instance("b"), settings=config(mode=OBSERVE))
    (first, _) = admission.observe(view, knowing(prompt=None, b=10**6)).candidates
    assert (first.instance, first.prefill) == ("b", 0)


def placed(view: Any, wanted: Ask, count: int) -> dict[str, int]:
    """Where so many sessions alike go, one after the other."""
    homes: dict[str, int] = {}
    for n in range(count):
        verdict = admission.decide(view, replace(wanted, session_id=f"s{n}"))
        if not verdict.candidates:
            break
        admission.charge(view, verdict, verdict.candidates[0])
        homes[verdict.candidates[0].instance] = homes.get(verdict.candidates[0].instance, 0) + 1
    return homes


def test_a_hot_prefix_fills_its_instance_to_the_budget_and_no_further() -> None:
    """Ten blocks each: 76 fit into 768. What comes after goes elsewhere, and then waits."""
    view = pool(*(instance(key, budget=768, need=needing(0)) for key in "ab"))
    wanted = knowing(prompt=160, a=160)
    hot = replace(wanted, prompt_tokens=160)
    homes = placed(view, hot, 1_000)
    assert homes == {"a": 76, "b": 76}
    for home in view.instances.values():
        assert home.budget is not None
        assert max(home.need[: len(forecast.HORIZONS)]) <= home.budget


def test_a_hot_prefix_does_not_draw_all_that_is_still_to_be_computed() -> None:
    """Half of each prompt is found on one instance: its backlog grows by the other half, and others get their part."""
    view = pool(*(instance(key, total_blocks=100_000, budget=100_000, need=needing(0)) for key in "abcd"))
    homes = placed(view, knowing(a=4_000), 40)
    assert set(homes) == set("abcd")
    assert homes["a"] == max(homes.values())
    assert homes["a"] <= 20


def test_what_is_found_everywhere_alike_leaves_the_balance_as_it_was() -> None:
    view = pool(*(instance(key, total_blocks=100_000, budget=100_000, need=needing(0)) for key in "abcd"))
    homes = placed(view, knowing(a=4_000, b=4_000, c=4_000, d=4_000), 40)
    assert homes == dict.fromkeys("abcd", 10)


def test_a_few_tokens_found_do_not_upset_the_balance() -> None:
    """Two blocks save 4 ms, less than what counts as a difference: the emptier instance wins."""
    full = instance("a", budget=768, need=needing(500))
    assert order(knowing(prompt=160, a=32), full, instance("b", budget=768, need=needing(10))) == ["b", "a"]


def test_what_was_found_is_no_part_of_what_a_session_asks() -> None:
    """It is the moment's knowledge: neither kept in the ledger nor compared."""
    assert knowing(a=16) == ask(prompt=LONG)
    assert Ask.decode("s", "rlvr", knowing(a=16).encode()).reusable == {}
