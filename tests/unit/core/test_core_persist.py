"""The controller's state survives its holder."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage_server.core import controller, labels, persist
from moorage_server.core.controller import Happened, State
from moorage_server.core.estimates import Exposure
from moorage_server.core.labels import Memory
from moorage_server.core.pressure import Brake, Sample
from moorage_server.core.survival import Survival
from moorage_server.core.view import Ask, Class, Ended
from moorage_server.core.watch import Watched
from tests.unit.core.builders import instance, later, pool, row

amounts = st.floats(0.0, 1e15)
counts = st.integers(0, 2**53)
maybe = st.one_of(st.none(), counts)
names = st.text(min_size=1, max_size=20)
turns = st.dictionaries(names, st.tuples(counts, counts), max_size=3)
samples = st.builds(Sample, st.floats(0, 1e10), turns, maybe, maybe, maybe, maybe)
parts = st.floats(0.0, 1.0)
some_part = st.one_of(st.none(), parts)
times = st.integers(0, 99)
brakes = st.builds(
    Brake,
    parts,
    amounts,
    amounts,
    st.lists(samples, max_size=4),
    st.dictionaries(names, parts, max_size=3),
    some_part,
    st.one_of(st.none(), amounts),
    times,
    times,
    some_part,
    parts,
    names,
)


def ended(pairs: list[tuple[float, float]]) -> Survival:
    found = Survival()
    for start, final in pairs:
        found.add_end(start, final, completed=True)
    return found


exposures = st.builds(
    Exposure,
    *[amounts] * 8,
    survival=st.builds(ended, st.lists(st.tuples(st.floats(0, 2**22), st.floats(0, 2**22)), max_size=5)),
    declared_tokens=amounts,
    declared=amounts,
    seen=st.one_of(st.none(), st.builds(Class, block_ms=counts, session_ms=counts, gap_ms=counts)),
)
watched = st.builds(
    Watched, names, brakes, counts, st.one_of(st.none(), amounts), maybe, counts, st.tuples(maybe, maybe, maybe),
    counts, st.booleans(),
)  # fmt: skip
behaviours = st.builds(
    lambda prompt, turns, over: labels.behaviour(Ask("s", "", prompt_tokens=prompt), turns=turns, over=over).encode(),
    st.integers(0, 2**40),
    st.one_of(st.none(), st.integers(1, 100)),
    st.booleans(),
)
memories = st.builds(Memory, st.dictionaries(names, st.lists(behaviours, min_size=1, max_size=4), max_size=3))
states = st.builds(
    State,
    counts,
    st.dictionaries(names, exposures, max_size=3),
    st.dictionaries(names, watched, max_size=3),
    memories,
)


def survivals(state: State) -> dict[str, tuple[list[float], list[float]]]:
    return {n: (e.survival.ended.tolist(), e.survival.at_risk.tolist()) for n, e in state.exposures.items()}


@settings(deadline=None)
@given(state=states)
def test_what_is_loaded_is_what_was_dumped(state: State) -> None:
    found = persist.load(persist.dump(state))
    assert survivals(found) == survivals(state)
    empty = Survival()
    for exposure in (*found.exposures.values(), *state.exposures.values()):
        exposure.survival = empty
    assert found == state


def test_counts_of_the_survival_function_are_kept_to_four_decimals() -> None:
    state = State(exposures={"rlvr": Exposure(survival=ended([(64.0, 1000.0)]))})
    state.exposures["rlvr"].survival.decay(1 / 3)
    counts = persist.load(persist.dump(state)).exposures["rlvr"].survival.at_risk
    assert counts == pytest.approx(state.exposures["rlvr"].survival.at_risk, abs=1e-4)


@pytest.mark.parametrize("text", ["", '{"layout": 0}', "{}"])
def test_what_is_not_of_this_layout_is_learnt_anew(text: str) -> None:
    assert persist.load(text) == State()


def changed(change: Any) -> str:
    data = json.loads(persist.dump(State(exposures={"a": Exposure()}, watched={"i": Watched("1")})))
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "7",
        changed(lambda data: data["watched"]["i"].update(later=1)),
        changed(lambda data: data["watched"]["i"].pop("pace")),
        changed(lambda data: data["exposures"]["a"].update(later=1)),
        changed(lambda data: data.pop("at_ms")),
        changed(lambda data: data.update(watched=[1])),
    ],
)
def test_what_makes_no_sense_stops_no_pool(text: str) -> None:
    """A release that added a field and forgot to raise the layout must not stop the one before it, or after."""
    assert persist.load(text) == State()


def test_a_survival_function_of_other_bins_is_learnt_anew() -> None:
    data = json.loads(persist.dump(State(exposures={"rlvr": Exposure(completions=5.0)})))
    data["exposures"]["rlvr"]["survival"] = {"ended": [1.0], "at_risk": [1.0]}
    exposure = persist.load(json.dumps(data)).exposures["rlvr"]
    assert exposure.completions == 5.0
    assert not exposure.survival.at_risk.any()


def test_another_holder_carries_on_where_the_last_one_stopped() -> None:
    """Handing over between any two epochs changes nothing of what is decided."""
    kept, handed = State(), State()
    draw = np.random.default_rng(2)
    view = pool(instance(preemptions=0, prefill_tokens=0, generation_tokens=0), classes={"rlvr": Class(active=3)})
    for second in range(1, 40):
        tokens = 3000 * second
        seen = later(
            view, second, preemptions=second // 17, prefill_tokens=tokens, generation_tokens=0,
            hits={"rlvr": (9000 * second, 8500 * second)},
        )  # fmt: skip
        seen.classes["rlvr"] = Class(active=3, block_ms=90_000 * second, session_ms=3000 * second)
        final = float(draw.integers(64, 4000))
        happened = Happened([Ended("rlvr", "COMPLETED", 64.0, final)], {"rlvr": 300.0}, [("rlvr", 900.0)])
        rows = [row(200.0), row(900.0)]
        one = controller.epoch(kept, seen, rows, happened)
        handed = persist.load(persist.dump(handed))
        other = controller.epoch(handed, seen, rows, happened)
        assert other.rulings == one.rulings
        assert np.array(other.needs["a"]) == pytest.approx(np.array(one.needs["a"]), abs=1)
