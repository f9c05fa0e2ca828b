"""Random updates of a prefix index, with repeats, gaps, streams that take turns and engines that restart, through two
servers: what the store holds is what the accepted ones say."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fakeredis import FakeServer
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from moorage_server.core.config import PoolConfig
from moorage_server.core.view import EVENTS, PLACED, UNINDEXED
from moorage_server.runtime.prefixes import pack
from moorage_server.store import redis_prefixes
from moorage_server.store.records import PrefixChange
from tests.conftest import make_backend
from tests.contract.steps import I0, Steps

#: Few hashes, so that updates meet; parts of three, so that most updates take several.
HASHES, PART = range(1, 24), 3

some_hashes = st.lists(st.sampled_from(HASHES), max_size=8, unique=True)


class IndexMachine(RuleBasedStateMachine):
    """The model is a set, and how far which stream came."""

    store: FakeServer | str

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(redis_prefixes, "PART", PART)
        self.backend = make_backend(self.store)
        self.servers = [Steps(self.backend, self.backend.open()) for _ in range(2)]
        self.source, self.stream, self.sequence, self.behind = UNINDEXED, "", 0, False
        self.held: set[int] = set()
        self.incarnation = 0
        self.restart()

    def run(self, work: Any) -> Any:
        async def whole() -> Any:
            return await work

        return self.loop.run_until_complete(whole())

    def teardown(self) -> None:
        self.run(self.backend.close())
        self.patch.undo()
        self.loop.close()

    def forget(self) -> None:
        self.source, self.stream, self.sequence, self.behind, self.held = UNINDEXED, "", 0, False, set()

    @rule()
    def restart(self) -> None:
        self.incarnation += 1
        self.run(self.servers[0].snapshot(inc=str(self.incarnation), sequence=self.incarnation))
        self.forget()

    @rule(
        server=st.sampled_from([0, 1]),
        stream=st.sampled_from(["a", "a", "a", "b"]),
        ahead=st.sampled_from([1, 1, 1, 1, 0, -1, 2]),
        reset=st.sampled_from([False, False, False, True]),
        behind=st.booleans(),
        stored=some_hashes,
        removed=some_hashes,
        old=st.sampled_from([False, False, False, False, True]),
    )
    def update(
        self,
        server: int,
        stream: str,
        ahead: int,
        reset: bool,
        behind: bool,
        stored: list[int],
        removed: list[int],
        old: bool,
    ) -> None:
        known = stream == self.stream
        sequence = max(1, (self.sequence if known else 0) + ahead)
        inc = str(self.incarnation - old)
        change = PrefixChange(I0, inc, stream, sequence, reset, behind, pack(stored), pack(removed))
        steps = self.servers[server]
        answer = self.run(steps.store.prefix_update(steps.pool, change, 10_000))
        if old:
            assert answer == ("OLD_INCARNATION" if self.incarnation > 1 else "OTHER_INCARNATION")
        elif known and reset and sequence < self.sequence:
            assert answer == "NEW_STREAM"
        elif known and sequence <= self.sequence:
            assert answer == "REPEAT"
        elif not known and not reset:
            assert answer == "NEW_STREAM"
        elif not reset and sequence != self.sequence + 1:
            assert answer == "GAP"
        else:
            assert answer == "OK"
            before = set() if reset else self.held
            # A block that came back is cached now.
            self.held = (before - set(removed)) | set(stored)
            self.source, self.stream, self.sequence, self.behind = EVENTS, stream, sequence, behind

    @rule(server=st.sampled_from([0, 1]), prompt=some_hashes)
    def note(self, server: int, prompt: list[int]) -> None:
        steps = self.servers[server]
        noted = self.run(steps.store.prefix_note(steps.pool, I0, str(self.incarnation), pack(prompt), 10_000))
        assert noted == (self.source != EVENTS or not prompt)
        if noted and prompt:
            self.source = PLACED
            self.held |= set(prompt)

    @rule(server=st.sampled_from([0, 1]), prompt=some_hashes)
    def look_up(self, server: int, prompt: list[int]) -> None:
        steps = self.servers[server]
        (found,) = self.run(steps.store.prefix_lookup(steps.pool, [I0], pack(prompt)))
        assert set(prompt[:found]) <= self.held
        assert found == len(prompt) or prompt[found] not in self.held

    @invariant()
    def the_index_is_the_model(self) -> None:
        kept = list(self.run(self.backend.client.keys(f"{self.backend.prefix}*:x:*")))
        members = self.run(self.backend.client.zrange(kept[0], 0, -1)) if kept else []
        assert {int.from_bytes(m, "little") for m in members} == self.held
        view = self.run(self.servers[0].store.view(self.servers[0].pool, PoolConfig()))
        index = view.instances[I0].prefixes
        assert (index.source, index.blocks, index.behind) == (self.source, len(self.held), self.behind)


@pytest.mark.parametrize("kind", ["fakeredis", "redis"])
def test_the_index_is_what_the_accepted_updates_say(kind: str, request: pytest.FixtureRequest) -> None:
    class Machine(IndexMachine):
        store = request.getfixturevalue("redis_server").url if kind == "redis" else FakeServer()

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=30,
            stateful_step_count=40,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
