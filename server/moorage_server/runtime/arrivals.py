"""A session that wants in: under which class, and what the ledger is told of its label."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moorage_server.core import config as cfg
from moorage_server.core import labels
from moorage_server.core.labels import NOTHING, Inferred
from moorage_server.core.view import Ask, Pool
from moorage_server.store.records import Request, Resumed


@dataclass(slots=True)
class Arrival:
    """A session that wants in, with what the ledger keeps of it."""

    ask: Ask
    request: Request
    declared_class: str = ""
    group_size: int = 0
    lease_ttl_ms: int = 60_000
    #: '' | 'UNLABELLED' | 'UNKNOWN': what was wrong with the declared class.
    label: str = ""
    #: What its hints say of its class, whether that is in force, and whether it contradicts the label.
    inferred: Inferred = NOTHING
    by_inference: bool = False
    contradicted: bool = False
    #: See ``store.records.Admission``.
    room: int | None = None
    fallback: str = cfg.UNLABELLED
    #: Names this call in the ledger, so that what it alone brought about can be taken back.
    ticket: str = field(default_factory=lambda: secrets.token_hex(8))
    #: One hash per full block of the prompt.
    hashes: Sequence[int] = ()
    #: Where a session that was paused was at home, once the ledger told.
    former: Resumed | None = None
    #: When its hashes were last looked up, on the event loop's clock, and what came of it: tokens by instance.
    looked_up: float | None = None
    found: dict[str, int] = field(default_factory=dict)

    def explained(self, detail: str) -> str:
        """The detail of a hold; a class that nobody knows is said aloud."""
        if self.label != "UNKNOWN" or not detail:
            return detail
        return f"{detail}; {unknown_class(self.declared_class)}"


def unknown_class(declared: str) -> str:
    """Says for people that a declared class is none of the pool's."""
    return f"the declared class {declared!r} is none of the pool's"


def arrival(ask: Ask, view: Pool, **rest: Any) -> Arrival:
    """The arrival of ``ask`` under the class in force: declared, mapped or inferred."""
    config, declared = view.config, ask.workload_class
    label = ""
    if not declared:
        label = "UNLABELLED"
    elif config.classes and config.named(declared) is None:
        label = "UNKNOWN"
    found = _hints(ask, view)
    name = config.class_in_force(declared)
    told = labels.overruled(config, declared, name, found)
    name = told or name
    fallback = config.default_class or cfg.UNLABELLED
    room = None
    if name not in config.classes and name not in (fallback, cfg.UNLABELLED):
        room = max(0, cfg.MOST_CLASSES - len(config.classes))
        if name not in view.classes and len(view.classes) >= cfg.MOST_CLASSES:
            # Whoever makes names up shares one class with all who do.
            name, label, room = fallback, "UNKNOWN", None
    return Arrival(
        replace(ask, workload_class=name),
        declared_class=declared,
        label=label,
        inferred=found,
        by_inference=bool(told),
        contradicted=labels.contradicts(config, declared, found),
        room=room,
        fallback=fallback,
        **rest,
    )


def as_held(view: Pool, ask: Ask) -> Ask:
    """The ask under the class it is held under, which may have changed since it was declared."""
    if view.config.class_inference == cfg.INFER_OFF:
        return ask
    for name, queue in view.queues.items():
        if any(held.ask.session_id == ask.session_id for held in queue.heads):
            return replace(ask, workload_class=name)
    return ask


def _hints(ask: Ask, view: Pool) -> Inferred:
    """What is inferred from what the session says of itself, and from its siblings' class."""
    if view.labels is None:
        return NOTHING
    label = labels.usable(view.config, ask.workload_class)
    known = labels.candidates(view.config, view.labels)
    sibling = next(
        (i.group_classes[ask.group_id] for i in view.instances.values() if ask.group_id in i.group_classes), ""
    )
    (found,) = labels.judge(view.labels, [labels.behaviour(ask)], [label], known, [sibling])
    return found
