"""Under which class a session arrives."""

from __future__ import annotations

from typing import Any

import pytest

from moorage_server.core import config as cfg
from moorage_server.core import labels
from moorage_server.core.config import ClassConfig
from moorage_server.core.labels import Memory
from moorage_server.core.view import Ask, Class, Pool
from moorage_server.runtime.arrivals import Arrival, arrival, as_held
from moorage_server.store.records import Request
from tests.unit.core.builders import ask, config, instance, line, pool

CLASSES = {"short": ClassConfig(aliases=("s",)), "long": ClassConfig()}


def asks(name: str, prompt: int | None, group: str = "") -> Ask:
    """A session that expects as much output as its prompt is long."""
    return Ask("s", name, group, prompt_tokens=prompt, expected_output_tokens=prompt)


def profiles() -> labels.Model | None:
    """Prompts of a hundred tokens and outputs of tens are short, those of thousands long."""
    memory = Memory()
    for n in range(200):
        for name, prompt in (("short", 90 + n % 20), ("long", 9_000 + n)):
            memory.learn(name, labels.behaviour(asks(name, prompt), over=True))
    model = labels.fit(memory)
    return None if model is None else model.hints()


PROFILES = profiles()


def view(inference: str, known: labels.Model | None = PROFILES, **changes: Any) -> Pool:
    settings = config(classes=CLASSES, class_inference=inference)
    return pool(instance(), settings=settings, labels=known, **changes)


def arrive(declared: str, inference: str, prompt: int | None = 100, **changes: Any) -> Arrival:
    return arrival(asks(declared, prompt), view(inference, **changes), request=Request())


@pytest.mark.parametrize(
    ("declared", "inference", "in_force", "label", "by_inference"),
    [
        ("short", cfg.INFER_ALL, "short", "", False),
        ("s", cfg.INFER_ALL, "short", "", False),
        ("", cfg.INFER_OFF, cfg.UNLABELLED, "UNLABELLED", False),
        ("", cfg.INFER_UNLABELLED, "short", "UNLABELLED", True),
        ("typo", cfg.INFER_OFF, "typo", "UNKNOWN", False),
        ("typo", cfg.INFER_UNLABELLED, "short", "UNKNOWN", True),
        ("long", cfg.INFER_UNLABELLED, "long", "", False),
        ("long", cfg.INFER_ALL, "short", "", True),
    ],
)
def test_the_class_in_force(declared: str, inference: str, in_force: str, label: str, by_inference: bool) -> None:
    found = arrive(declared, inference)
    assert (found.ask.workload_class, found.label, found.by_inference) == (in_force, label, by_inference)
    assert found.declared_class == declared
    assert (found.inferred.name, found.inferred.confidence >= labels.CONFIDENT) == ("short", True)
    assert found.contradicted == (declared == "long")


@pytest.mark.parametrize("inference", cfg.INFERENCES)
def test_without_hints_or_profiles_nothing_is_inferred(inference: str) -> None:
    assert arrive("long", inference, prompt=None).ask.workload_class == "long"
    assert arrive("", inference, prompt=None).ask.workload_class == cfg.UNLABELLED
    assert arrive("", inference, known=None).inferred == labels.NOTHING


def test_a_sibling_tells_the_class() -> None:
    home = instance(group_classes={"g": "long"})
    settings = config(classes=CLASSES, class_inference=cfg.INFER_UNLABELLED)
    seen = pool(home, settings=settings, labels=PROFILES)
    assert arrival(Ask("s", "", "g"), seen, request=Request()).ask.workload_class == "long"
    assert arrival(Ask("s", "", "other"), seen, request=Request()).ask.workload_class == cfg.UNLABELLED


def test_load_is_not_looked_at() -> None:
    """The same session arrives as the same, whatever is booked and waits."""
    full = instance(sessions=400, used_blocks=768, brake=0.1, pressure=0.9, by_class={"short": 400})
    queues, classes = {"short": line(*[ask("x", "short")] * 8)}, {"short": Class(active=400, held=900)}
    settings = config(classes=CLASSES, class_inference=cfg.INFER_ALL)
    busy = pool(full, settings=settings, labels=PROFILES, queues=queues, classes=classes)
    for declared in ("", "short", "long", "typo"):
        found = arrival(asks(declared, 100), busy, request=Request())
        assert found.inferred == arrive(declared, cfg.INFER_ALL).inferred
        assert found.ask == arrive(declared, cfg.INFER_ALL).ask


def test_a_held_session_is_decided_for_under_the_class_it_is_held_under() -> None:
    waiting = view(cfg.INFER_ALL, queues={"long": line(ask("s", "long"))})
    assert as_held(waiting, ask("s", "short")).workload_class == "long"
    assert as_held(waiting, ask("t", "short")).workload_class == "short"
    off = view(cfg.INFER_OFF, queues={"long": line(ask("s", "long"))})
    assert as_held(off, ask("s", "short")).workload_class == "short"


def test_names_that_callers_make_up_find_room_until_there_is_none() -> None:
    assert arrive("short", cfg.INFER_OFF).room is None
    assert arrive("", cfg.INFER_OFF).room is None
    assert arrive("typo", cfg.INFER_OFF).room == cfg.MOST_CLASSES - 2
    many = {f"c{n}": Class() for n in range(cfg.MOST_CLASSES)}
    found = arrive("typo", cfg.INFER_OFF, classes=many)
    assert (found.ask.workload_class, found.label, found.room) == (cfg.UNLABELLED, "UNKNOWN", None)
    assert arrive("c7", cfg.INFER_OFF, classes=many).ask.workload_class == "c7"
    assert arrive("short", cfg.INFER_OFF, classes=many).ask.workload_class == "short"
    bare = pool(instance(), settings=config(), classes=many)
    made_up = arrival(Ask("s", "new"), bare, request=Request())
    assert (made_up.ask.workload_class, made_up.label) == (cfg.UNLABELLED, "UNKNOWN")


def test_a_class_that_nobody_knows_is_said_in_the_hold() -> None:
    assert arrive("typo", cfg.INFER_OFF).explained("12 of 12 sessions on a") == (
        "12 of 12 sessions on a; the declared class 'typo' is none of the pool's"
    )
    assert arrive("typo", cfg.INFER_OFF).explained("") == ""
    assert arrive("short", cfg.INFER_OFF).explained("full") == "full"
