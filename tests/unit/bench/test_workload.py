"""The workload has the trace's shape, shares what should be shared, and repeats by seed."""

from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest

from bench.summary import mixture_deviation, percentile
from bench.workload import CLASSES, TOOL_SHARE, Quantiles, SessionPlan, Workload, WorkloadConfig, token_ids


def sessions(count: int, config: WorkloadConfig | None = None, seed: int = 1) -> list[SessionPlan]:
    workload = Workload(config, seed)
    return [workload.next_session() for _ in range(count)]


def requests(plans: list[SessionPlan]) -> list[tuple[int, int]]:
    """(input, output) tokens of every request."""
    pairs = []
    for plan in plans:
        context = len(plan.prompt)
        for turn in plan.turns:
            context += turn.new_tokens
            pairs.append((context, turn.output_tokens))
            context += turn.output_tokens
    return pairs


def test_same_seed_same_sessions_other_seed_other_sessions() -> None:
    assert sessions(40, seed=3) == sessions(40, seed=3)
    assert sessions(40, seed=3) != sessions(40, seed=4)


def test_wrong_labels_change_nothing_but_the_labels() -> None:
    right = sessions(400)
    wrong = sessions(400, WorkloadConfig(mislabelled=0.2, unlabelled=0.1))
    assert [replace(plan, label=None) for plan in wrong] == right
    assert all(plan.declared_class == plan.workload_class for plan in right)
    count = Counter("none" if not plan.declared_class else plan.declared_class == plan.workload_class for plan in wrong)
    assert count["none"] / 400 == pytest.approx(0.1, abs=0.04)
    assert count[False] / 400 == pytest.approx(0.2, abs=0.05)
    assert {plan.declared_class for plan in wrong} == {"", *CLASSES}
    assert wrong == sessions(400, WorkloadConfig(mislabelled=0.2, unlabelled=0.1))


def test_a_session_does_not_depend_on_those_drawn_before() -> None:
    plans = {plan.session_id: plan for plan in sessions(60)}
    alone = Workload(seed=1).session("agentic", 9)
    assert plans[alone.session_id] == alone


@pytest.mark.parametrize(
    ("workload_class", "side", "quantiles"),
    [
        ("agentic", 0, (37_757, 103_209, 123_207)),
        ("agentic", 1, (148, 1_612, 3_930)),
        ("rlhf", 1, (7_344, 24_447, 37_101)),
        ("rlvr", 1, (47_583, 130_815, 130_958)),
    ],
)
def test_requests_have_the_published_quantiles(workload_class: str, side: int, quantiles: tuple[int, int, int]) -> None:
    config = WorkloadConfig()
    workload = Workload(config, seed=5)
    drawn = [pair[side] for pair in requests([workload.session(workload_class, i) for i in range(1_500)])]
    found = [percentile(drawn, share) / config.scale for share in (0.5, 0.95, 0.99)]
    assert found == pytest.approx(quantiles, rel=0.12)


def test_a_distribution_goes_through_its_quantiles() -> None:
    import random

    rng = random.Random(0)
    lengths = Quantiles(100, 900, 1_000)
    drawn = [lengths.draw(rng) for _ in range(20_000)]
    assert percentile(drawn, 0.5) == pytest.approx(100, rel=0.05)
    assert percentile(drawn, 0.95) == pytest.approx(900, rel=0.05)
    assert percentile(drawn, 0.99) == pytest.approx(1_000, rel=0.05)


@pytest.mark.parametrize("max_context", [512, 2_048, 7_000, 131_072])
def test_every_session_fits_the_context_at_any_scale(max_context: int) -> None:
    plans = sessions(200, WorkloadConfig(max_context=max_context))
    assert all(0 < plan.final_context <= max_context for plan in plans)
    assert all(turn.output_tokens >= 1 for plan in plans for turn in plan.turns)
    assert all(plan.prompt and plan.turns for plan in plans)


def test_agentic_sessions_have_many_turns_whose_gaps_take_their_share() -> None:
    config = WorkloadConfig()
    plans = [plan for plan in sessions(400) if plan.workload_class == "agentic"]
    turns = [turn for plan in plans for turn in plan.turns]
    assert 15 <= len(turns) / len(plans) <= 30
    tools = sum(turn.tool_gap_s for turn in turns)
    nominal = sum(config.turn_seconds + turn.output_tokens * config.token_seconds for turn in turns)
    assert TOOL_SHARE[0] < tools / (tools + nominal) < TOOL_SHARE[1]
    assert all(plan.turns[0].tool_gap_s == 0 and plan.turns[0].new_tokens == 0 for plan in plans)


def test_other_classes_have_one_turn() -> None:
    assert {len(plan.turns) for plan in sessions(200) if plan.workload_class != "agentic"} == {1}


def test_the_started_mixture_stays_within_one_session_of_the_target() -> None:
    workload = Workload(seed=1)
    started: Counter[str] = Counter()
    for plan in islice(iter(workload.next_session, None), 300):
        started[plan.workload_class] += 1
        total = sum(started.values())
        assert all(abs(started[name] - share * total) <= 1.0 for name, share in workload.target.items())
    assert mixture_deviation(started, workload.target) < 0.5


def test_samples_of_a_group_share_the_prompt_and_nothing_else() -> None:
    config = WorkloadConfig(group_size=3)
    workload = Workload(config, seed=1)
    first, second, other = (workload.session("agentic", index) for index in (0, 1, 3))
    assert first.group_id == second.group_id != other.group_id
    assert first.prompt == second.prompt != other.prompt
    assert first.turns != second.turns
    assert first.tool_tokens(1)[:4] != second.tool_tokens(1)[:4]


def test_a_system_prompt_is_shared_by_the_class() -> None:
    workload = Workload(WorkloadConfig(system_tokens={"agentic": 64}), seed=1)
    first, other = workload.session("agentic", 0), workload.session("agentic", 4)
    assert first.prompt[:64] == other.prompt[:64]
    assert first.prompt[64:80] != other.prompt[64:80]


def test_token_ids_are_a_function_of_owner_and_position() -> None:
    whole = token_ids("owner", 0, 100)
    assert token_ids("owner", 40, 10) == whole[40:50]
    assert token_ids("another", 0, 100) != whole
    assert all(16 <= token < 4_016 for token in whole)


def test_the_mixture_may_leave_classes_out() -> None:
    plans = sessions(30, WorkloadConfig(mixture={"rlvr": 2.0, "rlhf": 1.0}))
    assert Counter(plan.workload_class for plan in plans) == {"rlvr": 20, "rlhf": 10}
    assert set(CLASSES) == {"agentic", "rlvr", "rlhf"}


def test_another_mixture_owes_nothing_to_what_was_started_before() -> None:
    workload = Workload(WorkloadConfig(mixture={"agentic": 1.0}), seed=1)
    before = [workload.next_session() for _ in range(20)]
    workload.change(WorkloadConfig(mixture={"agentic": 0.5, "rlhf": 0.5}))
    after = [workload.next_session() for _ in range(20)]
    assert Counter(plan.workload_class for plan in after) == {"agentic": 10, "rlhf": 10}
    assert len({plan.session_id for plan in before + after}) == 40


def test_tools_get_slower_for_turns_that_are_planned_already() -> None:
    workload = Workload(seed=1)
    turn = workload.session("agentic", 0).turns[1]
    assert workload.gap_s(turn) == turn.tool_gap_s > 0
    workload.change(WorkloadConfig(tool_slowdown=10.0))
    assert workload.gap_s(turn) == pytest.approx(10.0 * turn.tool_gap_s)


def test_a_new_policy_lengthens_outputs_and_nothing_else() -> None:
    config = WorkloadConfig(output_growth=2.0)
    before, after = (Workload(c, seed=1).session("rlhf", 0) for c in (None, config))
    assert after.prompt == before.prompt
    assert after.output_tokens == pytest.approx(2 * before.output_tokens, abs=1)
    for index in range(20):
        assert Workload(config, seed=1).session("rlvr", index).final_context <= config.max_context
    gaps = [[turn.tool_gap_s for turn in Workload(c, seed=1).session("agentic", 0).turns[:3]] for c in (None, config)]
    assert gaps[0] == gaps[1]
