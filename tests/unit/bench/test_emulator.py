"""The emulated engine does to requests, blocks and counters what a real one does."""

import random
from itertools import pairwise

import pytest

from bench.emulator import CostModel, EmulatedEngine, EngineConfig, Output
from bench.workload import token_ids

FLAT = CostModel(
    step_overhead_s=0.01, prefill_token_s=0.001, prefill_context_s=0.0, decode_seq_s=0.002, decode_context_s=0.0
)


def engine(num_blocks: int = 33, **overrides: int) -> EmulatedEngine:
    settings: dict[str, int] = {"block_size": 4, "max_context": 64, "max_batched_tokens": 32, "max_sequences": 8}
    settings |= overrides
    return EmulatedEngine(EngineConfig(num_blocks=num_blocks, costs=FLAT, **settings))  # type: ignore[arg-type]


def finish(emulated: EmulatedEngine, now: float = 0.0) -> tuple[float, list[Output]]:
    """Step until idle; return the time and all that was generated."""
    outputs: list[Output] = []
    while True:
        due = emulated.step(now)
        outputs += emulated.drain()
        assert 0 <= emulated.pool.free <= emulated.pool.total
        if due is None:
            return now, outputs
        now = due


def complete(emulated: EmulatedEngine, prompt: list[int], output_tokens: int, name: str = "r") -> list[Output]:
    emulated.submit(name, prompt, output_tokens)
    return finish(emulated)[1]


def test_a_request_gets_exactly_its_tokens_at_the_cost_of_its_steps() -> None:
    emulated = engine()
    emulated.submit("r", list(range(10)), 3)
    end, outputs = finish(emulated)
    # One step of prefill, two of decoding.
    assert end == pytest.approx(0.01 + 10 * 0.001 + 2 * (0.01 + 0.002))
    assert [output.finished for output in outputs] == [False, False, True]
    assert emulated.counters.generation_tokens == 3
    assert emulated.pool.free == emulated.pool.total


def test_a_step_takes_effect_when_it_is_due() -> None:
    emulated = engine()
    emulated.submit("r", list(range(10)), 1)
    due = emulated.step(5.0)
    assert due is not None
    assert due == pytest.approx(5.02)
    assert emulated.step(5.01) == due
    assert emulated.drain() == []
    assert emulated.step(due) is None
    assert len(emulated.drain()) == 1


def test_a_repeated_prompt_comes_from_the_cache_but_for_its_last_block() -> None:
    emulated = engine()
    prompt = list(range(16))
    assert complete(emulated, prompt, 1)[0].cached_tokens == 0
    assert complete(emulated, prompt, 1)[0].cached_tokens == 12
    assert emulated.counters.prefix_query_tokens == 32
    assert emulated.counters.prefix_hit_tokens == 12
    assert emulated.counters.prefill_tokens == 20


def test_a_continuation_finds_the_whole_blocks_of_its_context() -> None:
    emulated = engine()
    prompt = list(range(10))
    outputs = complete(emulated, prompt, 7, "turn-0")
    context = prompt + [output.token for output in outputs]
    # 17 tokens of which the last was never computed: four blocks.
    assert complete(emulated, [*context, 1, 2, 3, 4, 5], 1, "turn-1")[0].cached_tokens == 16


def test_siblings_that_run_together_share_blocks() -> None:
    emulated = engine()
    emulated.submit("a", list(range(16)), 8)
    emulated.step(0.0)
    emulated.submit("b", list(range(16)), 8)
    emulated.step(emulated.step(0.0) or 0.0)
    # Five blocks for 17 tokens and four for 16; three are shared, since at least one token has to be computed.
    assert emulated.pool.total - emulated.pool.free == 5 + 4 - 3


def test_long_prompts_are_computed_in_chunks_beside_decoding() -> None:
    emulated = engine(max_batched_tokens=16)
    emulated.submit("short", [1], 20)
    now = emulated.step(0.0) or 0.0
    emulated.submit("long", list(range(100, 150)), 1)
    emulated.step(now)
    outputs = finish(emulated, now)[1]
    order = [output.request_id for output in outputs]
    # 50 tokens at 15 a step, one token of each step going to the request that decodes.
    assert order.index("long") == 5
    assert emulated.counters.prefill_tokens == 51


def test_a_prompt_that_does_not_fit_waits_for_blocks() -> None:
    emulated = engine(num_blocks=17)
    emulated.submit("big", list(range(48)), 8)
    now = emulated.step(0.0) or 0.0
    emulated.submit("waits", list(range(100, 132)), 1)
    now = emulated.step(now) or 0.0
    snapshot = emulated.snapshot(now)
    assert (snapshot.running, snapshot.waiting, snapshot.waiting_capacity) == (1, 1, 1)
    outputs = finish(emulated, now)[1]
    assert outputs[-1] == Output("waits", outputs[-1].token, 0, True)
    assert emulated.counters.preemptions == 0


def test_the_newest_request_is_preempted_recomputed_and_still_complete() -> None:
    emulated = engine(num_blocks=17)
    emulated.submit("old", list(range(24)), 30)
    emulated.submit("new", list(range(100, 124)), 30)
    outputs = finish(emulated)[1]
    assert emulated.counters.preemptions > 0
    assert emulated.pool.free == emulated.pool.total
    for name in ("old", "new"):
        tokens = [output.token for output in outputs if output.request_id == name]
        assert tokens == token_ids(name, 0, 30)
    assert [output.request_id for output in outputs if output.finished] == ["old", "new"]
    # Looked up once each: coming back after a preemption counts neither as a query nor as a hit.
    assert emulated.counters.prefix_query_tokens == 48
    assert emulated.counters.prefix_hit_tokens == 0
    assert emulated.counters.prefill_tokens == 48


def test_an_abort_frees_blocks_wherever_the_request_is() -> None:
    emulated = engine(num_blocks=17)
    emulated.submit("runs", list(range(40)), 8)
    now = emulated.step(0.0) or 0.0
    emulated.submit("waits", list(range(100, 140)), 8)
    emulated.step(now)
    emulated.abort("waits")
    emulated.abort("runs")
    emulated.abort("unknown")
    assert (emulated.running, emulated.waiting) == (0, 0)
    assert emulated.pool.free == emulated.pool.total
    assert all(output.request_id == "runs" for output in finish(emulated, now + 1.0)[1])


def test_requests_that_can_never_fit_are_refused() -> None:
    emulated = engine()
    with pytest.raises(ValueError, match="60 \\+ 5 tokens do not fit"):
        emulated.submit("r", list(range(60)), 5)
    with pytest.raises(ValueError, match="smaller than one context"):
        EngineConfig(num_blocks=16, block_size=4, max_context=64)


def test_usage_does_not_see_cached_blocks_and_stands_still_between_steps() -> None:
    emulated = engine()
    emulated.submit("r", list(range(16)), 2)
    assert emulated.snapshot(0.0).running == 0
    now = emulated.step(0.0) or 0.0
    running = emulated.snapshot(now)
    assert (running.running, running.used_blocks) == (1, 4)
    end, _ = finish(emulated, now)
    idle = emulated.snapshot(end)
    assert (idle.running, idle.used_blocks, idle.total_blocks) == (0, 0, 32)
    assert emulated.pool.cached_free == 4
    assert not idle.HasField("cached_blocks")


def test_snapshots_are_numbered_and_dated() -> None:
    emulated = engine()
    first, second = emulated.snapshot(100.25), emulated.snapshot(101.0)
    assert (first.sequence, second.sequence) == (1, 2)
    assert first.observed_time.ToNanoseconds() == 100_250_000_000
    assert not first.HasField("prefill_tokens_per_second")
    complete(emulated, list(range(32)), 1)
    assert emulated.snapshot(102.0).prefill_tokens_per_second == pytest.approx(32 / 0.042)


def test_a_random_load_keeps_every_count_sound_and_repeats_exactly() -> None:
    def play(seed: int) -> tuple[list[Output], list[int]]:
        rng = random.Random(seed)
        emulated = engine(num_blocks=20)
        outputs: list[Output] = []
        now, submitted, used = 0.0, 0, []
        expected = 0
        while submitted < 120 or emulated.running or emulated.waiting:
            if submitted < 120 and rng.random() < 0.5:
                prompt = token_ids(f"prompt-{rng.randrange(6)}", 0, rng.randint(1, 40))
                length = rng.randint(1, 20)
                emulated.submit(f"r{submitted}", prompt, length)
                expected += length
                submitted += 1
            now = emulated.step(now) or now
            outputs += emulated.drain()
            used.append(emulated.pool.total - emulated.pool.free)
            assert 0 <= used[-1] <= emulated.pool.total
        outputs += finish(emulated, now)[1]
        assert emulated.pool.free == emulated.pool.total
        assert len(outputs) == expected == emulated.counters.generation_tokens
        assert emulated.counters.prefix_hit_tokens < emulated.counters.prefix_query_tokens
        return outputs, used

    assert play(1) == play(1)
    assert play(1) != play(2)


def test_attention_makes_long_contexts_dearer() -> None:
    costs = CostModel()
    decode = [costs.step_seconds([(context, 1)]) for context in (100, 1_000, 7_000)]
    prefill = [costs.step_seconds([(context, 512)]) for context in (0, 1_000, 6_000)]
    assert all(before < after for before, after in pairwise(decode))
    assert all(before < after for before, after in pairwise(prefill))
