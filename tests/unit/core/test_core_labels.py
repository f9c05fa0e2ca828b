"""What behaviour says of a session's class."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage_server.core import config as cfg
from moorage_server.core import labels
from moorage_server.core.config import ClassConfig
from moorage_server.core.labels import NOTHING, Behaviour, Inferred, Memory, Model
from moorage_server.core.profiles import LEAST_SESSIONS
from moorage_server.core.view import Ask
from tests.unit.core.builders import config

NAMES = ("agentic", "rlhf", "rlvr")
CLASSES = {name: ClassConfig() for name in NAMES}


def session(true: str, dice: random.Random) -> tuple[Ask, int, int, int, int]:
    """Ask, final context, turns, gaps and their milliseconds of a session in the shape of the paper's classes."""
    if true == "agentic":
        prompt, turns = int(dice.lognormvariate(6.0, 0.7)), 4 + int(dice.lognormvariate(2.5, 0.6))
        grown = sum(int(dice.lognormvariate(4.7, 0.6)) for _ in range(turns))
        gap_ms = sum(int(dice.lognormvariate(3.0, 1.0)) for _ in range(turns - 1))
        return Ask("s", "", prompt_tokens=prompt, max_context_tokens=7000), prompt + grown, turns, turns - 1, gap_ms
    prompt = int(dice.lognormvariate(2.0, 1.2))
    grown = int(dice.lognormvariate(6.0, 0.7) if true == "rlhf" else dice.lognormvariate(7.9, 0.5))
    return Ask("s", "", prompt_tokens=prompt, max_context_tokens=7000), prompt + grown, 1, 0, 0


def whole(true: str, dice: random.Random) -> Behaviour:
    """A session from end to end."""
    ask, context, turns, gaps, gap_ms = session(true, dice)
    return labels.behaviour(ask, context=context, turns=turns, gaps=gaps, gap_ms=gap_ms, over=True)


def label(true: str, wrong: float, dice: random.Random) -> str:
    return dice.choice([n for n in NAMES if n != true]) if dice.random() < wrong else true


def learnt(wrong: float = 0.0, count: int = 300, seed: int = 1) -> Model:
    """Profiles of so many sessions, of which a share had a wrong label."""
    dice, memory = random.Random(seed), Memory()
    for _ in range(count):
        true = dice.choice(NAMES)
        memory.learn(label(true, wrong, dice), whole(true, dice))
    model = labels.fit(memory)
    assert model is not None
    return model


def judge(model: Model, seen: Behaviour, declared: str = "") -> Inferred:
    (found,) = labels.judge(model, [seen], [declared], NAMES)
    return found


def test_wrong_labels_are_found_and_right_ones_are_left_alone() -> None:
    model, dice = learnt(wrong=0.2), random.Random(7)
    assert model.wrong == pytest.approx(0.2, abs=0.07)
    found = {True: 0, False: 0}
    total = dict(found)
    for _ in range(600):
        true = dice.choice(NAMES)
        declared = label(true, 0.2, dice)
        inferred = judge(model, whole(true, dice), declared)
        total[true != declared] += 1
        found[true != declared] += labels.contradicts(config(classes=CLASSES), declared, inferred)
    # The two classes of one turn overlap: short samples of the long one are like any of the short one.
    assert found[True] / total[True] > 0.6
    assert found[False] / total[False] < 0.01


@pytest.mark.parametrize("wrong", [0.0, 0.2])
def test_confidence_is_the_share_that_is_right(wrong: float) -> None:
    """Of those that are said to be something with 80 to 100 %, no fewer are."""
    model, dice = learnt(wrong), random.Random(8)
    sure = []
    for _ in range(600):
        true = dice.choice(NAMES)
        found = judge(model, whole(true, dice))
        if found.confidence >= labels.CONFIDENT:
            sure.append((found.name == true, found.confidence))
    right, said = np.mean(sure, axis=0)
    assert len(sure) > 300
    assert right > said - 0.05


def test_a_second_turn_after_a_tool_gap_is_agentic() -> None:
    model = learnt(wrong=0.2)
    ask = Ask("s", "", prompt_tokens=60)
    first = judge(model, labels.behaviour(ask, turns=1), "rlvr")
    assert not labels.contradicts(config(classes=CLASSES), "rlvr", first)
    second = judge(model, labels.behaviour(ask, gaps=1, gap_ms=20))
    assert (second.name, second.confidence > labels.CONFIDENT) == ("agentic", True)
    sure = judge(model, labels.behaviour(ask, gaps=5, gap_ms=100), "rlvr")
    assert labels.contradicts(config(classes=CLASSES), "rlvr", sure)


def test_one_turn_of_a_long_generation_is_not_agentic() -> None:
    model, ask = learnt(wrong=0.2), Ask("s", "", prompt_tokens=60)
    doubts = [
        judge(model, labels.behaviour(ask, context=context, turns=1), "agentic").doubt
        for context in (80, 160, 1_000, 4_000)
    ]
    assert max(doubts[:2]) < 0.9
    assert doubts[-1] > labels.CONTRADICTS


def test_what_may_still_come_is_not_held_against_a_session() -> None:
    """A long class's session that is young, or in its first turn, is not taken for one of a short class."""
    model, dice = learnt(), random.Random(9)
    for _ in range(100):
        ask, context, _, _, _ = session("rlvr", dice)
        young = labels.behaviour(ask, context=(ask.prompt_tokens or 0) + 0.1 * context, turns=1)
        assert not labels.contradicts(config(classes=CLASSES), "rlvr", judge(model, young, "rlvr"))


def test_the_first_to_end_are_the_short_ones_and_do_not_define_the_class() -> None:
    """Note 1 of policy.md section 4: those that live and are long already keep the profile from being short."""
    memory, living = Memory(), []
    for n in range(20):
        ask = Ask("s", "", prompt_tokens=10)
        for name, final in (("rlvr", 80 + n), ("rlhf", 400 + 20 * n)):
            memory.learn(name, labels.behaviour(ask, context=10 + final, turns=1, over=True))
        living += [("rlvr", labels.behaviour(ask, context=600, turns=1))] * 3
    long = labels.behaviour(Ask("s", "", prompt_tokens=10), context=600, turns=1)
    alone, together = labels.fit(memory), labels.fit(memory, living)
    assert alone is not None
    assert together is not None
    (biased,) = labels.judge(alone, [long], ["rlvr"], ["rlvr", "rlhf"])
    (fair,) = labels.judge(together, [long], ["rlvr"], ["rlvr", "rlhf"])
    assert fair.doubt < 0.5 < biased.doubt


def test_heavy_tails_do_not_pull_a_profile_away() -> None:
    dice, memory = random.Random(3), Memory()
    for _ in range(200):
        memory.learn("rlhf", whole("rlhf", dice))
        memory.learn("rlvr", whole("rlvr", dice))
    for _ in range(4):
        ask = Ask("s", "", prompt_tokens=2**39)
        memory.learn("rlhf", labels.behaviour(ask, context=2**40, turns=1, over=True))
    model = labels.fit(memory)
    assert model is not None
    seen = labels.behaviour(Ask("s", "", prompt_tokens=8), context=300, turns=1, over=True)
    (found,) = labels.judge(model, [seen], [""], ["rlhf", "rlvr"])
    assert found.name == "rlhf"


def test_too_few_sessions_say_nothing() -> None:
    dice, memory = random.Random(2), Memory()
    for _ in range(int(LEAST_SESSIONS) - 1):
        memory.learn("rlvr", whole("rlvr", dice))
        memory.learn("agentic", whole("agentic", dice))
    model = labels.fit(memory)
    assert model is not None
    assert judge(model, whole("agentic", dice), "rlvr") == NOTHING
    assert labels.fit(Memory()) is None
    assert labels.judge(None, [whole("rlvr", dice)], [""], NAMES) == [NOTHING]


def test_a_label_that_nothing_is_known_of_is_not_doubted() -> None:
    model, dice = learnt(), random.Random(4)
    (found,) = labels.judge(model, [whole("agentic", dice)], ["new"], [*NAMES, "new"])
    assert found == NOTHING


def test_an_odd_gap_is_no_sign_of_a_class_that_has_none() -> None:
    model, ask = learnt(wrong=0.1), Ask("s", "", prompt_tokens=400)
    usual, odd = (
        judge(model, labels.behaviour(ask, context=1_300, gaps=9, gap_ms=9 * ms), "agentic") for ms in (20, 600_000)
    )
    assert (usual.name, odd.name) == ("agentic", "agentic")
    assert odd.confidence > 0.99


def test_a_sibling_says_what_the_prompt_does_not() -> None:
    model, nothing = learnt(), labels.behaviour(Ask("s", ""))
    (found,) = labels.judge(model, [nothing], [""], NAMES, ["rlhf"])
    assert (found.name, found.confidence > 0.8) == ("rlhf", True)
    assert labels.judge(model, [nothing], [""], NAMES, [""]) == [NOTHING]


def test_hints_judge_at_entry_and_survive_the_way_to_other_servers() -> None:
    model, dice = learnt(wrong=0.2), random.Random(5)
    told = labels.decode_model(json.loads(json.dumps(labels.encode_model(model.hints()))))
    for true in NAMES * 20:
        seen = labels.behaviour(session(true, dice)[0])
        here, there = judge(model, seen), judge(told, seen)
        assert there.name == here.name
        assert there.confidence == pytest.approx(here.confidence, abs=0.03)
    assert judge(told, labels.behaviour(Ask("s", "", prompt_tokens=900))).name == "agentic"


# Properties

lengths = st.one_of(st.none(), st.integers(0, 2**40))
asks = st.builds(
    Ask, st.just("s"), st.just(""), prompt_tokens=lengths, expected_output_tokens=lengths,
    max_context_tokens=lengths, expected_turns=st.one_of(st.none(), st.integers(0, 2**32)),
)  # fmt: skip
behaviours = st.builds(
    lambda ask, context, turns, gaps, gap_ms, over: labels.behaviour(
        ask, context=context, turns=turns, gaps=gaps, gap_ms=gap_ms, over=over
    ),
    asks, lengths, st.one_of(st.none(), st.integers(1, 2**32)), st.integers(0, 2**20), st.integers(0, 2**40),
    st.booleans(),
)  # fmt: skip
memories = st.dictionaries(st.sampled_from([*NAMES, "other"]), st.lists(behaviours, max_size=30), max_size=4)
MODEL = learnt(wrong=0.2, count=120)


def remembered(samples: dict[str, list[Behaviour]]) -> Memory:
    memory = Memory()
    for name, seen in samples.items():
        for one in seen:
            memory.learn(name, one)
    return memory


@settings(deadline=None, max_examples=150)
@given(samples=memories, seen=behaviours, declared=st.sampled_from(["", *NAMES, "nobody"]))
def test_confidence_is_a_probability_whatever_was_learnt(
    samples: dict[str, list[Behaviour]], seen: Behaviour, declared: str
) -> None:
    model = labels.fit(remembered(samples), [("rlvr", seen)])
    (found,) = labels.judge(model, [seen], [declared], [*NAMES, "other"])
    assert 0.0 <= found.confidence <= 1.0
    assert 0.0 <= found.doubt <= 1.0
    assert (found.name == "") == (found == NOTHING)
    if found.name and declared and found.name != declared:
        assert found.confidence <= found.doubt + 1e-9


@settings(deadline=None)
@given(
    samples=memories,
    declared=st.sampled_from(["", *NAMES, "nobody"]),
    inference=st.sampled_from(cfg.INFERENCES),
    over=st.booleans(),
)
def test_nobody_is_relabelled_without_evidence(
    samples: dict[str, list[Behaviour]], declared: str, inference: str, over: bool
) -> None:
    settings_ = config(classes=CLASSES, class_inference=inference)
    nothing = labels.behaviour(Ask("s", declared), over=over)
    for model in (MODEL, labels.fit(remembered(samples))):
        (found,) = labels.judge(model, [nothing], [labels.usable(settings_, declared)], NAMES)
        assert found == NOTHING
        assert labels.overruled(settings_, declared, settings_.class_in_force(declared), found) == ""


@given(
    declared=st.sampled_from(["", *NAMES, "typo"]),
    in_force=st.sampled_from(NAMES),
    found=st.builds(Inferred, st.sampled_from(["", *NAMES]), st.floats(0, 1), st.floats(0, 1)),
    inference=st.sampled_from(cfg.INFERENCES),
)
def test_only_what_is_allowed_and_sure_changes_a_class(
    declared: str, in_force: str, found: Inferred, inference: str
) -> None:
    settings_ = config(classes={**CLASSES, "rlhf": ClassConfig(refused=True)}, class_inference=inference)
    to = labels.overruled(settings_, declared, in_force, found)
    if to:
        assert inference != cfg.INFER_OFF
        assert to == found.name != in_force
        assert found.confidence >= labels.CONFIDENT
        assert declared != "rlhf"
        if declared in NAMES:
            assert inference == cfg.INFER_ALL
            assert to == declared or found.doubt >= labels.CONTRADICTS


@given(seen=behaviours)
def test_a_behaviour_survives_as_text(seen: Behaviour) -> None:
    assert len(seen.encode()) == labels.ENCODED
    assert Behaviour.decode(seen.encode()) == seen


def test_memory_is_bounded_and_keeps_the_last() -> None:
    memory, seen = Memory(), labels.behaviour(Ask("s", ""), over=True)
    for n in range(labels.MOST_CLASSES + 20):
        for _ in range(100):
            memory.learn(f"c{n}", seen)
    assert len(memory.samples) == labels.MOST_CLASSES
    assert sum(len(kept) for kept in memory.samples.values()) <= labels.SAMPLES
    memory.learn("c0", labels.behaviour(Ask("s", "", prompt_tokens=100)))
    assert memory.samples["c0"][-1] != memory.samples["c0"][0]
    memory.keep(["c0", "c1", "new"])
    assert set(memory.samples) == {"c0", "c1"}


def test_usable_labels_and_candidates_follow_the_configuration() -> None:
    settings_ = config(classes={"a": ClassConfig(aliases=("x",)), "b": ClassConfig(refused=True)})
    assert [labels.usable(settings_, n) for n in ("a", "x", "b", "typo", "")] == ["a", "a", "b", "", ""]
    assert labels.usable(config(), "anything") == "anything"
    model = learnt(count=60)
    assert labels.candidates(config(), model) == list(NAMES)
    some = config(classes={"rlvr": ClassConfig(), "rlhf": ClassConfig(refused=True), "new": ClassConfig()})
    assert labels.candidates(some, model) == ["rlvr"]
    assert labels.candidates(some, None) == []
