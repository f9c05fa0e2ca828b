"""Pools, instances and sessions for the tests of the core, with defaults that stay out of a test's way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from moorage_server.core import controller, survival
from moorage_server.core.config import ClassConfig, PoolConfig
from moorage_server.core.controller import Row
from moorage_server.core.view import Ask, Class, Held, Instance, Pool, Published, Queue

#: Now on the store's clock, milliseconds.
NOW = 1_000_000
#: Nobody ever ends: the forecast is growth alone.
IMMORTAL = (1.0,) * (survival.BINS + 1)


def config(*, classes: Mapping[str, ClassConfig] | None = None, **changes: Any) -> PoolConfig:
    """A pool's configuration."""
    return PoolConfig(classes=MappingProxyType(dict(classes or {})), **changes)


def mixture(**shares: float) -> dict[str, ClassConfig]:
    """Classes with target shares."""
    return {name: ClassConfig(target_share=share) for name, share in shares.items()}


def instance(key: str = "a", **changes: Any) -> Instance:
    """A fresh, empty, serving instance of 768 blocks of 16 tokens, seen just now."""
    base = Instance(key, key, 0, "1", seen_ms=NOW, block_size=16, total_blocks=768, used_blocks=0, max_context=8192)
    return replace(base, **changes)


def published(**changes: Any) -> Published:
    """Estimates of a class with full evidence, no growth, and sessions that never end."""
    base = Published(
        reference_blocks=40.0, residency_s=60.0, growth=0.0, evidence=1.0, prior_tokens=640.0, survival=IMMORTAL
    )
    return replace(base, **changes)


def ask(session_id: str = "s", workload_class: str = "rlvr", prompt: int | None = 160, **changes: Any) -> Ask:
    """A session that asks: 160 tokens of prompt, ten blocks."""
    return Ask(session_id, workload_class, prompt_tokens=prompt, **changes)


def held(wanted: Ask, since_ms: int = NOW - 1000) -> Held:
    """A held session that is there."""
    return Held(wanted, "KV_BUDGET", since_ms, NOW + 10_000)


def line(*asks: Ask, more: bool = False) -> Queue:
    """A class's queue, in order."""
    return Queue(len(asks) + more, [held(a, NOW - 1000 + n) for n, a in enumerate(asks)], more)


def pool(
    *instances: Instance,
    settings: PoolConfig | None = None,
    known: Mapping[str, Published] | None = None,
    queues: Mapping[str, Queue] | None = None,
    classes: Mapping[str, Class] | None = None,
    **changes: Any,
) -> Pool:
    """A pool at NOW. Classes ``rlvr`` and ``agentic`` are known unless ``known`` says otherwise."""
    known = {"rlvr": published(), "agentic": published()} if known is None else known
    return Pool(
        "p",
        NOW,
        settings or config(),
        instances={i.key: i for i in instances},
        classes=dict(classes or {}),
        published=dict(known),
        queues=dict(queues or {}),
        **changes,
    )


def needing(*blocks: int) -> tuple[int, ...]:
    """A need vector: one number for all horizons, or one per column."""
    return blocks * 6 if len(blocks) == 1 else blocks


def ids(asks: Iterable[Ask]) -> list[str]:
    """Session ids, in order."""
    return [a.session_id for a in asks]


def later(view: Pool, seconds: float, **changes: Any) -> Pool:
    """The pool some seconds on, its instances just seen again with ``changes``."""
    now = view.now_ms + round(1000 * seconds)
    homes = {key: replace(home, seen_ms=now, **changes) for key, home in view.instances.items()}
    return replace(view, now_ms=now, instances=homes)


def row(tokens: float = 160.0, name: str = "rlvr", home: str = "a", **changes: Any) -> Row:
    """A living session, just reported."""
    return replace(Row(name, home, tokens, tokens, NOW, True, 0), **changes)


def needs(view: Pool, *rows: Row) -> tuple[int, ...]:
    """The need vector of instance ``a``."""
    return controller.needs(view, rows, view.published)["a"]
