"""Everything that can happen to the ledger, through two servers, with a model of what must come of it.

The clock is stopped and moved by hand: leases end, instances fall silent and outages happen within milliseconds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any, TypeVar, cast

import pytest
from fakeredis import FakeServer
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moorage_server.core.admission import Candidate
from moorage_server.core.config import PoolConfig
from moorage_server.core.labels import Inferred
from moorage_server.core.view import Ask
from moorage_server.errors import InvalidField, LeaseStale, SessionUnknown, WrongState
from moorage_server.runtime.mirror import Mirror
from moorage_server.store.records import (
    Admission,
    Homeless,
    HomeWaits,
    InstanceUpdate,
    OnHold,
    Placed,
    Refused,
    Relabel,
    Request,
    Resumed,
)
from tests.conftest import make_backend, settable_clock
from tests.contract.steps import GONE_MS, NOON, Steps, request
from tests.ledger_audit import audit

T = TypeVar("T")

SESSIONS = [f"s{n}" for n in range(6)]
INSTANCES = ["0|i", "1|i", "0|{j} :"]
CLASSES = ["a", "b:c"]
STATES = [*["SERVING"] * 8, "DRAINING", "PAUSED", "SLEEPING", "STOPPED"]
OUTCOMES = ["COMPLETED", "ABORTED", "FAILED", "PAUSED"]

session_ids = st.sampled_from(SESSIONS)
instance_keys = st.sampled_from(INSTANCES)
which_server = st.sampled_from([0, 1])


class LedgerMachine(RuleBasedStateMachine):
    """The model knows tokens, incarnations and how often each class was admitted; the audit knows the rest."""

    store: FakeServer | str

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.patch = pytest.MonkeyPatch()
        self.backend = make_backend(self.store)
        settable_clock(self.patch, self.backend.prefix)
        self.servers = [Steps(self.backend, self.backend.open()) for _ in range(2)]
        self.tokens: dict[str, str] = {}
        self.old_tokens: dict[str, str] = {}
        self.answers: dict[str, str] = {}
        self.requests: dict[str, tuple[Request, tuple[Any, ...]]] = {}
        self.incarnations = dict.fromkeys(INSTANCES, 1)
        self.over: dict[str, set[int]] = {key: set() for key in INSTANCES}
        self.sequence = 0
        self.admissions: Counter[str] = Counter()
        self.mirror = Mirror()
        self.run(self.backend.clock.set(NOON))
        for instance in INSTANCES:
            self.report(0, instance)

    def run(self, work: Awaitable[T]) -> T:
        async def whole() -> T:
            return await work

        return self.loop.run_until_complete(whole())

    def teardown(self) -> None:
        self.run(self.backend.close())
        self.patch.undo()
        self.loop.close()

    @invariant()
    def books_balance(self) -> None:
        assert self.run(audit(self.backend.client, self.backend.prefix, self.servers[0].pool)) == []

    def field(self, sid: str, name: str) -> str | None:
        """A field of a session's record as it is kept, the token included."""
        key = f"{self.backend.prefix}:1:{{{self.servers[0].pool}}}:s:{sid}"
        value = self.run(cast(Awaitable[bytes | None], self.backend.client.hget(key, name)))
        return None if value is None else value.decode()

    def counter(self, key: str, name: str) -> int:
        """A counter as it is kept."""
        full = f"{self.backend.prefix}:1:{{{self.servers[0].pool}}}:{key}"
        return int(self.run(cast(Awaitable[bytes | None], self.backend.client.hget(full, name))) or 0)

    # Engines

    def report(self, server: int, instance: str, state: str = "SERVING") -> None:
        self.sequence += 1
        inc = str(self.incarnations[instance])
        answer = self.run(self.servers[server].snapshot(instance, inc, state, sequence=self.sequence))
        assert answer in ("NEW", "OK")

    @rule(server=which_server, instance=instance_keys, state=st.sampled_from(STATES))
    def snapshot(self, server: int, instance: str, state: str) -> None:
        self.report(server, instance, state)

    @rule(server=which_server, instance=instance_keys)
    def restart(self, server: int, instance: str) -> None:
        if self.counter(f"i:{instance}", "seen"):
            self.over[instance].add(self.incarnations[instance])
        self.incarnations[instance] += 1
        self.report(server, instance)
        for inc in self.over[instance]:
            answer = self.run(self.servers[server].snapshot(instance, str(inc), sequence=self.sequence + 99))
            assert answer == "OLD_INCARNATION"

    @rule(server=which_server, instance=instance_keys, mark=st.sampled_from(["cordon", "drain", "open", "open"]))
    def mark(self, server: int, instance: str, mark: str) -> None:
        self.run(self.servers[server].store.mark(self.servers[server].pool, instance, mark))

    # Callers

    @rule(
        server=which_server,
        sid=session_ids,
        workload_class=st.sampled_from(CLASSES),
        group=st.sampled_from(["", "", "g"]),
        on=st.sampled_from([[], ["0|i"], ["1|i"], INSTANCES, INSTANCES, INSTANCES[::-1]]),
        cap=st.integers(1, 3),
        tokens=st.integers(1, 400),
        repeat=st.booleans(),
    )
    def admit(
        self,
        server: int,
        sid: str,
        workload_class: str,
        group: str,
        on: list[str],
        cap: int,
        tokens: int,
        repeat: bool,
    ) -> None:
        steps = self.servers[server]
        body = (workload_class, group, tokens)
        rid = request(repr(body))
        # The policy proposes nobody who is silent.
        on = [i for i in on if self.backend.clock.now_ms - self.counter(f"i:{i}", "seen") < GONE_MS]
        if repeat and sid in self.requests and self.requests[sid][1] == body:
            rid = self.requests[sid][0]
        self.requests[sid] = (rid, body)
        before, token = self.field(sid, "st"), self.field(sid, "token")
        homeless = self.field(sid, "homeless") == "1"
        held_class = self.field(sid, "class") if before == "held" else workload_class
        answer = self.run(self._admit(steps, sid, workload_class, group, on, cap, tokens, rid))
        assert not isinstance(answer, Refused)
        if rid.request_id in self.answers:
            assert isinstance(answer, Placed), "an answer that is final is replayed"
            assert answer.token == self.answers[rid.request_id]
        elif isinstance(answer, OnHold):
            assert before != "live"
            assert self.field(sid, "st") == "held"
        elif before == "live":
            assert answer.token == token, "admit again keeps the token"
            self.answers[rid.request_id] = answer.token
        else:
            assert answer.token != token, "whoever gets in takes another token"
            assert self.counter(f"i:{answer.instance}", "ses") <= cap
            assert answer.moved == homeless
            self.admissions[str(held_class)] += not homeless
            self.answers[rid.request_id] = answer.token
            self.remember(sid, answer.token)
            self.place_now(steps, sid)

    async def _admit(self, steps: Steps, sid: str, *rest: Any) -> Placed | OnHold | Refused:
        workload_class, group, on, cap, tokens, rid = rest
        shared = tokens // 32 if group else 0
        admission = Admission(
            ask=Ask(sid, workload_class, group, prompt_tokens=tokens),
            tokens=tokens,
            reason="" if on else "KV_BUDGET",
            present_ms=1_000,
            ticket=rid.request_id,
            candidates=tuple(Candidate(i, str(self.incarnations[i]), cap, shared, 0, 0) for i in on),
        )
        answer = await steps.store.admit(steps.pool, rid, admission)
        if isinstance(answer, Resumed):
            # Nothing was done yet: the decision is made again with where the session was at home.
            assert answer.incarnation == str(self.incarnations[answer.instance])
            answer = await steps.store.admit(steps.pool, rid, replace(admission, told=True))
        assert not isinstance(answer, Resumed)
        return answer

    def remember(self, sid: str, token: str) -> None:
        """A token that is in force from now on."""
        if sid in self.tokens and self.tokens[sid] != token:
            self.old_tokens[sid] = self.tokens[sid]
        self.tokens[sid] = token

    def place_now(self, steps: Steps, sid: str) -> None:
        """After PLACE on an unchanged pool, Place succeeds."""
        answer = self.run(steps.place(sid, self.tokens[sid]))
        assert isinstance(answer, Placed)
        assert (answer.token, answer.moved) == (self.tokens[sid], False)

    @rule(server=which_server, sid=session_ids, prompt=st.one_of(st.none(), st.integers(1, 600)))
    def place(self, server: int, sid: str, prompt: int | None) -> None:
        if sid not in self.tokens:
            return
        state, home, token = self.field(sid, "st"), self.field(sid, "inst"), self.field(sid, "token")
        serves = silent = False
        if state == "live":
            row = f"{self.backend.prefix}:1:{{{self.servers[0].pool}}}:i:{home}"
            found = self.run(cast(Awaitable[list[Any]], self.backend.client.hmget(row, "state", "drain", "seen")))
            serves = found[0] == b"SERVING" and found[1] is None
            silent = self.backend.clock.now_ms - int(found[2]) >= GONE_MS
        try:
            answer = self.run(self.servers[server].place(sid, self.tokens[sid], prompt=prompt))
        except (SessionUnknown, WrongState):
            assert state in (None, "paused", "held")
        except LeaseStale:
            assert token != self.tokens[sid]
        else:
            assert token == self.tokens[sid]
            if serves and not silent:
                assert isinstance(answer, Placed), "a continuation is never refused while its home lives"
            assert isinstance(answer, Placed | Homeless | HomeWaits)

    @rule(server=which_server, sid=session_ids, outcome=st.sampled_from(OUTCOMES), token=st.sampled_from("cco-"))
    def release(self, server: int, sid: str, outcome: str, token: str) -> None:
        chosen = {"c": self.tokens.get(sid, ""), "o": self.old_tokens.get(sid, "0.x"), "-": ""}[token]
        state, in_force = self.field(sid, "st"), self.field(sid, "token")
        waits = state == "held" and self.field(sid, "homeless") != "1"
        try:
            answer = self.run(self.servers[server].release(sid, chosen, outcome))
        except InvalidField:
            assert not chosen
            assert not waits
        except LeaseStale:
            assert chosen != in_force
        else:
            assert answer.over == (state in (None, "paused"))
            assert self.field(sid, "st") in (None, "paused")

    @rule(server=which_server, sid=session_ids)
    def withdraw(self, server: int, sid: str) -> None:
        if sid in self.requests:
            rid = self.requests[sid][0]
            steps = self.servers[server]
            ticket = self.field(sid, "ticket")
            resumes = self.field(sid, "st") == "held" and self.field(sid, "resumes") == "1"
            taken_back = self.run(steps.store.withdraw(steps.pool, rid, sid, rid.request_id))
            if taken_back:
                assert ticket == rid.request_id
                assert self.field(sid, "st") == ("paused" if resumes else None)
                self.answers.pop(self.requests.pop(sid)[0].request_id, None)

    @rule(
        server=which_server,
        sid=session_ids,
        turn=st.integers(0, 5),
        context=st.integers(1, 900),
        cached=st.integers(0, 900),
        phase=st.sampled_from(["RUNNING", "TOOL_WAIT"]),
    )
    def progress(self, server: int, sid: str, turn: int, context: int, cached: int, phase: str) -> None:
        if sid in self.tokens:
            alive = self.field(sid, "st") == "live" or self.field(sid, "homeless") == "1"
            in_force = self.field(sid, "token") == self.tokens[sid]
            renewed = self.run(
                self.servers[server].progress(
                    sid, self.tokens[sid], turn=turn, context_tokens=context, cached_tokens=cached, phase=phase
                )
            )
            assert renewed.status == ("UNKNOWN" if not alive else "OK" if in_force else "STALE")

    @rule(
        server=which_server,
        chosen=st.lists(st.tuples(session_ids, st.sampled_from([*CLASSES, "c", ""])), max_size=4),
        over=st.integers(0, 2),
        contradicted=st.booleans(),
    )
    def relabel(self, server: int, chosen: list[tuple[str, str]], over: int, contradicted: bool) -> None:
        """The holder finds that sessions are of another class, some of them twice over."""
        steps = self.servers[server]
        self.run(steps.tick())
        was = {sid: self.field(sid, "class") or "a" for sid, _ in chosen}
        admitted = {sid for sid, _ in chosen if self.field(sid, "admitted")}
        found = [
            Relabel(sid, was[sid], to, Inferred(to or "b", 0.9), contradicted, 1_000, 3_000, 12_000)
            for sid, to in chosen
        ]
        changed = self.run(steps.store.relabel(steps.pool, "me", found, over))
        assert changed is not None
        for item, moved in zip(found, changed, strict=True):
            if moved:
                assert item.was != item.to != ""
                assert self.field(item.session_id, "st") in ("live", "held")
                if item.session_id in admitted:
                    self.admissions.subtract([item.was])
                    self.admissions.update([item.to])

    @rule(server=which_server, waiting=st.lists(session_ids, max_size=4, unique=True))
    def keep(self, server: int, waiting: list[str]) -> None:
        steps = self.servers[server]
        states = self.run(steps.store.keep(steps.pool, waiting, 15_000, 30_000))
        assert states == [self.field(sid, "st") or "" for sid in waiting]

    # Controllers and time

    @rule(ms=st.sampled_from([1, 999, 4_000, 4_000, 40_000]))
    def time_passes(self, ms: int) -> None:
        self.run(self.servers[0].pass_time(ms))

    @rule(ms=st.sampled_from([60_000, -60_000, 3_600_000]), flush=st.booleans())
    def everything_stops(self, ms: int, flush: bool) -> None:
        """An outage, or a clock that jumps; scripts may be lost with it."""
        self.run(self.servers[0].tick())
        self.run(self.backend.clock.advance(ms))
        if flush:
            self.run(self.backend.client.script_flush())
        assert self.run(self.servers[0].expire()) == 0 or ms < 0

    @rule(server=which_server, per_second=st.integers(1, 20))
    def reap(self, server: int, per_second: int) -> None:
        """What ran out ends, and who is silent is gone."""
        assert self.run(self.servers[server].expire(per_second, 100)) <= per_second
        for instance in INSTANCES:
            if self.run(self.servers[server].gone(instance)) == "FORGOTTEN":
                self.over[instance].clear()

    @rule(server=which_server)
    def look(self, server: int) -> None:
        """The holder's mirror has the sessions that live, and who publishes does not disturb who admits."""
        steps = self.servers[server]
        self.run(steps.tick())
        view = self.run(steps.store.view(steps.pool, PoolConfig()))
        changes = self.run(steps.store.changes(steps.pool, "me", self.mirror.revision, 1_000))
        assert changes is not None
        self.mirror.apply(changes.rows)
        self.mirror.revision = changes.revision
        live = {sid for sid in SESSIONS if self.field(sid, "st") == "live"}
        assert set(self.mirror.rows) == live
        assert all(h.tokens >= 0 for h in self.mirror.rows.values())
        assert all(h.workload_class == self.field(sid, "class") for sid, h in self.mirror.rows.items())
        updates = [InstanceUpdate(key, i.incarnation, i.added, (1, 2), {}) for key, i in view.instances.items()]
        self.run(steps.store.publish(steps.pool, "me", "", "", True, updates))

    @invariant()
    def admissions_are_counted_once(self) -> None:
        for name in [*CLASSES, "c"]:
            assert self.counter("classes", f"adm:{name}") == self.admissions[name]
