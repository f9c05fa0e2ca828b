"""One instance in virtual time: the real controller and admission, sessions that grow and end, one epoch per second."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from moorage_server.core import admission, controller
from moorage_server.core.config import PoolConfig
from moorage_server.core.controller import Happened, Row, State
from moorage_server.core.view import Ask, Class, Ended, Held, Pool, Queue
from tests.unit.core.builders import NOW, instance

_BLOCK = 16
#: Members of a queue that a view shows.
_HEADS = 32


@dataclass
class Sample:
    """A session: grows from ``start`` to ``final`` tokens at ``rate`` per second, then is complete."""

    ask: Ask
    start: float
    final: float
    rate: float
    tokens: float = 0.0

    @property
    def blocks(self) -> int:
        return max(1, math.ceil(self.tokens / _BLOCK))


@dataclass
class Engine:
    """One instance and everybody who waits for it."""

    settings: PoolConfig
    waiting: list[Sample]
    total_blocks: int = 768
    max_context: int = 8192
    state: State = field(default_factory=State)
    living: dict[str, Sample] = field(default_factory=dict)
    completed: int = 0
    #: Most blocks that were held at once.
    peak: int = 0

    def __post_init__(self) -> None:
        home = instance(total_blocks=self.total_blocks, max_context=self.max_context)
        self.pool = Pool("p", NOW, self.settings, instances={home.key: home})
        for sample in self.waiting:
            self.pool.classes.setdefault(sample.ask.workload_class, Class()).held += 1

    def run(self, seconds: int) -> Engine:
        """Seconds on: sessions grow, the controller rules, and who may enter enters."""
        for _ in range(seconds):
            happened = self._grow()
            self._rule(happened)
            self._admit()
            self.peak = max(self.peak, self.blocks)
        return self

    @property
    def blocks(self) -> int:
        """Blocks held now."""
        return sum(s.blocks for s in self.living.values())

    def _grow(self) -> Happened:
        self.pool = replace(self.pool, now_ms=self.pool.now_ms + 1000)
        happened = Happened()
        if self.pool.epochs == 0:
            asked = ((s.ask.workload_class, s.ask.declared_tokens) for s in self.waiting)
            happened.declared = [(name, float(tokens)) for name, tokens in asked if tokens is not None]
        for name, c in self.pool.classes.items():
            mine = [s for s in self.living.values() if s.ask.workload_class == name]
            c.block_ms, c.session_ms = c.block_ms + 1000 * sum(s.blocks for s in mine), c.session_ms + 1000 * len(mine)
            c.accrued_ms = self.pool.now_ms
        for sid, sample in list(self.living.items()):
            name, before = sample.ask.workload_class, sample.tokens
            sample.tokens = min(sample.final, sample.tokens + sample.rate)
            happened.grown[name] = happened.grown.get(name, 0.0) + sample.tokens - before
            if sample.tokens >= sample.final:
                happened.ended.append(Ended(name, "COMPLETED", sample.start, sample.final))
                del self.living[sid]
                self.completed += 1
        return happened

    def _rule(self, happened: Happened) -> None:
        home = self.pool.instances["a"]
        names = [s.ask.workload_class for s in self.living.values()]
        home.by_class, home.sessions = {n: names.count(n) for n in set(names)}, len(names)
        home.seen_ms, home.used_blocks = self.pool.now_ms, self.blocks
        for name, c in self.pool.classes.items():
            c.active, c.blocks = names.count(name), 0
        outcome = controller.epoch(self.state, self.pool, self._rows(), happened)
        ruling = outcome.rulings["a"]
        home.budget, home.cap, home.class_caps = ruling.budget, ruling.cap, ruling.class_caps
        home.brake, home.need = ruling.brake, outcome.needs["a"]
        self.pool = replace(self.pool, published=dict(outcome.published), epochs=self.pool.epochs + 1)

    def _rows(self) -> Iterable[Row]:
        for sample in self.living.values():
            ask = sample.ask
            yield Row(
                ask.workload_class, "a", sample.start, sample.tokens, self.pool.now_ms, True, 0,
                math.inf if ask.max_context_tokens is None else float(ask.max_context_tokens),
                math.nan if ask.declared_tokens is None else float(ask.declared_tokens),
            )  # fmt: skip

    def _admit(self) -> None:
        by_id = {s.ask.session_id: s for s in self.waiting}
        for name in self.pool.classes:
            mine = [s.ask for s in self.waiting if s.ask.workload_class == name]
            heads = [Held(a, "", NOW, self.pool.now_ms + 9000) for a in mine[:_HEADS]]
            self.pool.queues[name] = Queue(len(mine), heads, more=len(mine) > _HEADS)
        for verdict in admission.plan(self.pool):
            if verdict.candidates:
                admission.charge(self.pool, verdict, verdict.candidates[0])
                sample = by_id[verdict.ask.session_id]
                self.waiting.remove(sample)
                self.pool.classes[sample.ask.workload_class].held -= 1
                sample.tokens = sample.start
                self.living[sample.ask.session_id] = sample
