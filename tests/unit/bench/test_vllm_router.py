"""What vllm-router is told, policy by policy, and its program scheduler's configuration."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.emulator import CostModel
from bench.vllm_router import DIALECTS, VllmRouterBackend, program_config, vocabulary
from bench.workload import SessionPlan, Turn

PLAN = SessionPlan("agentic-0-1", "agentic", "agentic-0", 4, (1, 2), (Turn(0, 3, 0.0), Turn(1, 2, 0.0)))


def asked(dialect: str) -> tuple[list[tuple[dict[str, str], dict[str, Any]]], list[str]]:
    """Play a session's two requests; return them, and the other calls that the router saw."""
    calls: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        calls.append(f"{request.method} {request.url.raw_path.decode()}")
        return httpx.Response(200)

    async def main() -> list[tuple[dict[str, str], dict[str, Any]]]:
        backend = VllmRouterBackend("http://r", "m", DIALECTS[dialect], ["t0", "t1", "t2"], httpx.MockTransport(answer))
        async with backend, backend.session(PLAN) as session:
            assert await session.place(0, [1, 2]) == "http://r"
            return [backend.request(f"{PLAN.session_id}/{turn}", [1, 2], 3) for turn in (0, 1)]

    return asyncio.run(main()), calls


def test_round_robin_is_told_nothing() -> None:
    [(headers, body), _], calls = asked("round_robin")
    assert headers == {"X-Request-Id": "agentic-0-1/0"}
    assert body["prompt"] == [1, 2]
    assert "vllm_xargs" not in body
    assert calls == []


def test_cache_aware_gets_text() -> None:
    [(_, body), _], _ = asked("cache_aware")
    assert body["prompt"] == "t1 t2"


def test_sticky_sessions_have_a_header_and_an_end() -> None:
    [(headers, _), _], calls = asked("sticky_least_loaded")
    assert headers["X-Session-ID"] == "agentic-0-1"
    assert calls == ["POST /finish_session?session_id=agentic-0-1"]


@pytest.mark.parametrize(("dialect", "told"), [("program", None), ("program_told_lengths", 3)])
def test_programs_have_an_identity_and_a_last_turn(dialect: str, told: int | None) -> None:
    requests, calls = asked(dialect)
    contexts = [body["vllm_xargs"]["agentic_context"] for _, body in requests]
    assert {context["program_id"] for context in contexts} == {"agentic-0-1:lead"}
    assert [context["expected_resume"] for context in contexts] == [True, False]
    assert [context.get("expected_output_length") for context in contexts] == [told, told]
    assert calls == []


def test_the_scheduler_counts_a_cold_prefill_and_a_decode_step_as_the_emulator_does() -> None:
    config = program_config(24_576)
    prefill, decode, costs = config["prefill_cost_model"], config["decode_throughput_model"], CostModel()
    seconds = (
        prefill["intercept_seconds"]
        + prefill["linear_seconds_per_1k_tokens"] * 7
        + prefill["quadratic_seconds_per_1k_tokens_squared"] * 49
    )
    assert seconds == pytest.approx(costs.step_seconds([(0, 7_000)]))
    step = (
        decode["fixed_step_seconds"]
        + decode["batch_step_seconds_per_request"] * 2
        + decode["context_step_seconds_per_token"] * 3_000
    )
    assert step == pytest.approx(costs.step_seconds([(1_000, 1), (2_000, 1)]))
    assert config["token_capacity_per_target"] == 24_576


def test_the_vocabulary_is_in_the_order_of_ids(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": {"t1": 1, "t0": 0, "</s>": 2}}}))
    assert vocabulary(path) == ["t0", "t1", "</s>"]
