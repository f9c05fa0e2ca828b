"""How an instance is shared between classes: the worked vector of policy.md, and others computed by hand."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage_server.core import controller, quotas
from moorage_server.core.config import MISA, MISA_T, SESSION, STATIC
from moorage_server.core.view import Class
from tests.unit.core.builders import config, instance, pool, published

#: Name: capacity, demand, footprint, residency, then M and K under `misa`, M and K under `misa-t`.
VECTORS = {
    # policy.md section 3. S = 320, 120, 20 (sum 460); R = 19200, 2400, 200 (sum 21800).
    "policy.md": (
        1000.0,
        (8, 4, 2),
        (40, 30, 10),
        (60, 20, 10),
        (695.65, 260.87, 43.48),
        (17, 8, 4),
        (880.73, 110.09, 9.17),
        (22, 3, 1),
    ),
    # S = 6*20, 3*40 = 120, 120: M = 300, 300; 300/20 = 15, 300/40 = 7.5.
    # R = 120*30, 120*90 = 3600, 10800 (sum 14400): M = 600/4, 600*3/4 = 150, 450; 150/20 = 7.5, 450/40 = 11.25.
    "equal blocks, unequal stays": (600.0, (6, 3), (20, 40), (30, 90), (300, 300), (15, 7), (150, 450), (7, 11)),
    # One class has it all, whatever its numbers: 768/50 = 15.36.
    "alone": (768.0, (5,), (50,), (12,), (768,), (15,), (768,), (15,)),
    # S = 64, 160 (sum 224): M = 100*64/224 = 28.57, 71.43; 28.57/64 < 1 is lifted to 1, 71.43/8 = 8.93.
    # R = 19200, 1600 (sum 20800): M = 92.31, 7.69; 92.31/64 = 1.44, 7.69/8 < 1 is lifted to 1.
    "the floor of one": (100.0, (1, 20), (64, 8), (300, 10), (28.57, 71.43), (1, 8), (92.31, 7.69), (1, 1)),
}


@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.parametrize("policy", [MISA, MISA_T])
def test_shares_by_hand(name: str, policy: str) -> None:
    capacity, demand, footprint, residency, misa_m, misa_k, misat_m, misat_k = VECTORS[name]

    def named(values: tuple[float, ...]) -> dict[str, float]:
        return {f"class {n}": float(v) for n, v in enumerate(values)}

    found = quotas.shares(capacity, named(demand), named(footprint), named(residency) if policy == MISA_T else None)
    blocks, sessions = (misat_m, misat_k) if policy == MISA_T else (misa_m, misa_k)
    assert [q.blocks for q in found.values()] == pytest.approx(blocks, abs=0.005)
    assert tuple(q.sessions for q in found.values()) == sessions


@pytest.mark.parametrize(("policy", "caps"), [(MISA, (17, 8, 4)), (MISA_T, (22, 3, 1)), (SESSION, ()), (STATIC, ())])
def test_the_controller_rules_the_worked_vector(policy: str, caps: tuple[int, ...]) -> None:
    """Demand 8, 4, 2 is made of sessions on the instance and of held ones: the only instance has all of them."""
    one = instance(total_blocks=1000, by_class={"agentic": 6, "rlvr": 4}, sessions=10)
    view = pool(
        one,
        settings=config(policy=policy),
        classes={"agentic": Class(active=6, held=2), "rlvr": Class(active=4), "rlhf": Class(held=2)},
        known={},
    )
    known = {
        "agentic": published(reference_blocks=40.0, residency_s=60.0),
        "rlvr": published(reference_blocks=30.0, residency_s=20.0),
        "rlhf": published(reference_blocks=10.0, residency_s=10.0),
    }
    ruling, blocks = controller._rule(controller.Watched("1"), one, view, known, set(), 1.0)
    assert ruling.class_caps == dict(zip(("agentic", "rlvr", "rlhf"), caps, strict=False))
    assert math.fsum(blocks.values()) == pytest.approx(1000.0 if caps else 0.0)


def test_held_demand_is_split_by_capacity() -> None:
    """Six held sessions, instances of 200 and 100 blocks: they see 2 + 4 and 1 + 2 sessions."""
    large, small = instance("a", total_blocks=200, by_class={"rlvr": 2}), instance("b", total_blocks=100)
    small.by_class["rlvr"] = 1
    view = pool(large, small, classes={"rlvr": Class(active=3, held=6)})
    assert controller._demand(view, large) == {"rlvr": pytest.approx(6.0)}
    assert controller._demand(view, small) == {"rlvr": pytest.approx(3.0)}


def test_a_class_without_demand_leaves_its_share_to_the_others() -> None:
    demand = {"agentic": 4.0, "rlvr": 0.0}
    found = quotas.shares(500.0, demand, {"agentic": 25.0, "rlvr": 10.0})
    assert {n: (q.blocks, q.sessions) for n, q in found.items()} == {"agentic": (500.0, 20)}
    assert quotas.shares(500.0, {"rlvr": 0.0}, {"rlvr": 10.0}) == {}
    assert quotas.shares(500.0, {}, {}) == {}


_counts = st.lists(st.tuples(st.integers(1, 500), st.integers(1, 4096), st.integers(1, 3600)), min_size=1, max_size=5)


@settings(deadline=None)
@given(capacity=st.integers(1, 2**24), rows=_counts)
def test_shares_add_up_and_floor_exactly(capacity: int, rows: list[tuple[int, int, int]]) -> None:
    """Against exact fractions: the quotas exhaust the budget, and no session is lost to a rounded quotient."""
    names = [str(n) for n in range(len(rows))]
    demand, footprint, stay = ({n: float(row[i]) for n, row in zip(names, rows, strict=True)} for i in range(3))
    found = quotas.shares(float(capacity), demand, footprint, stay)
    assert math.fsum(q.blocks for q in found.values()) == pytest.approx(capacity)
    total = sum(Fraction(n * k * t) for n, k, t in rows)
    for name, (n, _, t) in zip(names, rows, strict=True):
        exact = Fraction(capacity * n * t) / total
        rounding = exact / 10**12
        assert max(1, math.floor(exact - rounding)) <= found[name].sessions <= max(1, math.floor(exact + rounding))
