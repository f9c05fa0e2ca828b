"""Random sequences of everything that can happen to the ledger, audited after every step: short ones that hypothesis
shrinks, and long ones by dice."""

from __future__ import annotations

import random

import pytest
from fakeredis import FakeServer
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.properties.machine import CLASSES, INSTANCES, OUTCOMES, SESSIONS, STATES, LedgerMachine


@pytest.mark.parametrize("kind", ["fakeredis", "redis"])
def test_whatever_happens_the_books_balance(kind: str, request: pytest.FixtureRequest) -> None:
    class Machine(LedgerMachine):
        store = request.getfixturevalue("redis_server").url if kind == "redis" else FakeServer()

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=20,
            stateful_step_count=40,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


def _random_step(machine: LedgerMachine, rng: random.Random) -> None:
    """One step of a long history, the common ones more often than the rare."""
    sid, instance, server = rng.choice(SESSIONS), rng.choice(INSTANCES), rng.randrange(2)
    kind = rng.choices(
        [
            "admit",
            "place",
            "progress",
            "release",
            "time",
            "snapshot",
            "look",
            "keep",
            "withdraw",
            "reap",
            "relabel",
            "rare",
        ],
        [34, 10, 8, 22, 14, 3, 4, 3, 3, 4, 6, 2],
    )[0]
    if kind in ("place", "progress", "release"):
        alive = [s for s in SESSIONS if machine.field(s, "st") == "live"]
        sid = rng.choice(alive) if alive and rng.random() < 0.8 else sid
    if kind == "admit":
        on = rng.choice([[], [instance], INSTANCES, INSTANCES[::-1]])
        name, group = rng.choice(CLASSES), rng.choice(["", "", "g", "h"])
        machine.admit(server, sid, name, group, on, rng.randint(1, 3), rng.choice([50, 160, 400]), rng.random() < 0.3)
    elif kind == "place":
        machine.place(server, sid, rng.choice([None, 80, 300, 600]))
    elif kind == "progress":
        phase = rng.choice(["RUNNING", "TOOL_WAIT"])
        machine.progress(server, sid, rng.randrange(6), rng.randint(1, 900), rng.randrange(900), phase)
    elif kind == "release":
        machine.release(server, sid, rng.choice(OUTCOMES), rng.choice("ccccco-"))
    elif kind == "time":
        machine.time_passes(rng.choice([1, 1_001, 4_000, 9_000, 40_000]))
        for key in INSTANCES:
            machine.snapshot(server, key, "SERVING")
    elif kind == "snapshot":
        machine.snapshot(server, instance, rng.choice(STATES))
    elif kind == "look":
        machine.look(server)
    elif kind == "keep":
        machine.keep(server, rng.sample(SESSIONS, 3))
    elif kind == "withdraw":
        machine.withdraw(server, sid)
    elif kind == "relabel":
        chosen = [(s, rng.choice([*CLASSES, "c", ""])) for s in rng.sample(SESSIONS, 3)]
        machine.relabel(server, chosen, rng.randrange(2), rng.random() < 0.5)
    elif kind == "reap":
        machine.reap(server, rng.randint(1, 20))
    elif rng.random() < 0.5:
        machine.restart(server, instance)
    elif rng.random() < 0.5:
        machine.mark(server, instance, rng.choice(["cordon", "drain", "open"]))
        machine.mark(server, rng.choice(INSTANCES), "open")
    else:
        machine.everything_stops(rng.choice([60_000, -60_000, 3_600_000]), rng.random() < 0.5)


@pytest.mark.parametrize("kind", ["fakeredis", "redis"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_long_history_balances_at_every_step(kind: str, seed: int, request: pytest.FixtureRequest) -> None:
    class Machine(LedgerMachine):
        store = request.getfixturevalue("redis_server").url if kind == "redis" else FakeServer()

    machine, rng = Machine(), random.Random(seed)
    try:
        for _ in range(300):
            _random_step(machine, rng)
            machine.books_balance()
            machine.admissions_are_counted_once()
        assert sum(machine.admissions.values()) > 20
    finally:
        machine.teardown()
