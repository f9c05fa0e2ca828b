"""The paper's version: sessions limited by K_w and K_wb alone."""

from __future__ import annotations

from moorage_server.core import admission, controller
from moorage_server.core.config import ClassConfig, PoolConfig
from moorage_server.core.controller import Happened, State
from moorage_server.core.view import Class
from tests.unit.core.builders import ask, config, instance, line, needing, pool

CAPS: PoolConfig = config(reference_caps=True)


def test_the_forecast_keeps_nobody_out() -> None:
    full = instance(cap=20, sessions=5, budget=768, need=needing(768))
    assert not admission.try_place(pool(full), ask()).candidates
    assert admission.try_place(pool(full, settings=CAPS), ask()).candidates


def test_the_cap_of_the_instance_does() -> None:
    verdict = admission.try_place(pool(instance(cap=5, sessions=5), settings=CAPS), ask())
    assert (verdict.candidates, verdict.reason) == ((), "POOL_CAP")


def test_a_class_at_its_cap_waits_while_another_wants_its_own() -> None:
    home = instance(cap=20, sessions=8, by_class={"rlvr": 6, "agentic": 2}, class_caps={"rlvr": 6, "agentic": 4})
    wanted = pool(
        home, settings=CAPS, queues={"agentic": line(ask("a", "agentic"))}, classes={"agentic": Class(held=1)}
    )
    verdict = admission.try_place(wanted, ask())
    assert (verdict.candidates, verdict.reason) == ((), "CLASS_CAP")
    assert verdict.detail == "6 sessions of a quota of 6 on a, while class 'agentic' waits for its own"
    assert admission.try_place(wanted, ask("b", "agentic")).candidates


def test_what_nobody_wants_is_lent() -> None:
    home = instance(cap=20, sessions=8, by_class={"rlvr": 6}, class_caps={"rlvr": 6, "agentic": 4})
    assert admission.try_place(pool(home, settings=CAPS), ask()).candidates


def test_the_cap_moves_towards_what_the_blocks_hold_of_the_mean_footprint() -> None:
    """Nothing was seen yet, so the footprint is the prior's: 320 tokens, 20 blocks, 38 in 768 blocks."""
    classes = {"rlvr": ClassConfig(prior_context_tokens=320)}
    settings = config(reference_caps=True, classes=classes)
    caps = [18]
    for _ in range(6):
        home = instance(cap=caps[-1], sessions=2, by_class={"rlvr": 2})
        caps.append(controller.epoch(State(), pool(home, settings=settings), [], Happened()).rulings["a"].cap)
    assert caps == [18, 21, 25, 30, 36, 38, 38]
