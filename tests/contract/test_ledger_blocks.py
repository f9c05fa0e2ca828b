"""Blocks: booked once, and integrated over time exactly."""

from __future__ import annotations

from moorage_server.store.records import Released
from tests.contract.steps import I0, I1, Steps


async def test_block_time_is_the_piecewise_integral(steps: Steps) -> None:
    """Blocks of 16 tokens: 10 for 1.5 s, 30 for 2.25 s, 5 for 0.25 s, 6 (a turn's prompt) for 4 s."""
    placed = await steps.placed("s", tokens=160)
    await steps.backend.clock.advance(1_500)
    await steps.progress("s", placed.token, context_tokens=480)
    await steps.backend.clock.advance(1_000)
    await steps.progress("s", placed.token, context_tokens=480)
    await steps.backend.clock.advance(1_250)
    await steps.progress("s", placed.token, context_tokens=65)
    await steps.backend.clock.advance(250)
    await steps.place("s", placed.token, prompt=96)
    await steps.backend.clock.advance(4_000)
    integral = 10 * 1_500 + 30 * 2_250 + 5 * 250 + 6 * 4_000
    assert await steps.release("s", placed.token) == Released(False, 8_000, integral, 30)


async def test_block_time_stands_still_without_a_home(steps: Steps) -> None:
    placed = await steps.placed("s", tokens=160)
    await steps.backend.clock.advance(1_000)
    await steps.snapshot(inc="2")
    await steps.backend.clock.advance(7_000)
    moved = await steps.moved("s", placed.token, I0, inc="2")
    await steps.backend.clock.advance(2_000)
    assert await steps.release("s", moved.token) == Released(False, 10_000, 30_000, 10)


async def test_a_clock_that_goes_back_never_takes_block_time_away(steps: Steps) -> None:
    placed = await steps.placed("s", tokens=160)
    await steps.backend.clock.advance(2_000)
    await steps.progress("s", placed.token, context_tokens=320)
    await steps.backend.clock.advance(-60_000)
    await steps.progress("s", placed.token, context_tokens=160)
    await steps.backend.clock.advance(1_000)
    assert await steps.release("s", placed.token) == Released(False, 0, 20_000 + 10_000, 20)


async def test_a_class_accrues_what_its_sessions_hold(steps: Steps) -> None:
    one = await steps.placed("one", tokens=160)
    await steps.backend.clock.advance(1_000)
    two = await steps.placed("two", tokens=320)
    await steps.backend.clock.advance(2_000)
    await steps.release("one", one.token)
    await steps.backend.clock.advance(500)
    await steps.release("two", two.token)
    books = await steps.books()
    assert books.counter("z", "a") == 10 * 1_000 + 30 * 2_000 + 20 * 500
    assert books.counter("d", "a") == 1_000 + 2 * 2_000 + 500


async def test_a_shared_prefix_is_booked_once_per_instance(steps: Steps) -> None:
    await steps.snapshot(I1)
    tokens = [
        (await steps.placed(f"s{n}", I1 if n == 2 else I0, tokens=100, group="g", shared=6)).token for n in range(3)
    ]
    books = await steps.books()
    assert [books.sessions[f"s{n}"]["blocks"] for n in range(3)] == ["1", "1", "1"]
    assert (books.instances[I0]["blocks"], books.instances[I0]["shared"]) == ("8", "6")
    assert (books.instances[I1]["blocks"], books.instances[I1]["shared"]) == ("7", "6")
    assert books.counter("blk", "a") == 15
    await steps.release("s0", tokens[0])
    assert (await steps.books()).instances[I0]["blocks"] == "7"
    await steps.release("s1", tokens[1])
    books = await steps.books()
    assert (books.instances[I0]["blocks"], books.groups.get(I0, {})) == ("0", {})


async def test_a_shared_prefix_outlives_the_class_that_brought_it(steps: Steps) -> None:
    one = await steps.placed("one", tokens=100, group="g", shared=6, workload_class="a")
    await steps.placed("two", tokens=100, group="g", shared=6, workload_class="b")
    await steps.release("one", one.token)
    books = await steps.books()
    assert (books.counter("blk", "a"), books.counter("blk", "b")) == (6, 1)


async def test_a_group_leaves_with_its_incarnation(steps: Steps) -> None:
    tokens = [(await steps.placed(f"s{n}", tokens=100, group="g", shared=6)).token for n in range(2)]
    await steps.snapshot(inc="2")
    assert (await steps.books()).groups.get(I0, {}) == {}
    await steps.moved("s0", tokens[0], I0, inc="2", shared=6)
    books = await steps.books()
    assert (books.instances[I0]["blocks"], books.instances[I0]["shared"]) == ("7", "6")


async def test_a_group_whose_prompt_is_not_known_shares_nothing(steps: Steps) -> None:
    await steps.placed("one", tokens=100, group="g", shared=0)
    await steps.placed("two", tokens=100, group="g", shared=6)
    assert (await steps.books()).instances[I0]["blocks"] == "14"


async def test_blocks_already_booked_do_not_move_with_a_block_size(steps: Steps) -> None:
    await steps.placed("s", tokens=160)
    await steps.snapshot(block_size=None)
    await steps.placed("t", tokens=160)
    await steps.snapshot(block_size=32)
    await steps.placed("u", tokens=160)
    books = await steps.books()
    assert [books.sessions[sid]["blocks"] for sid in "stu"] == ["10", "10", "5"]


async def test_the_largest_numbers_are_kept_exactly(steps: Steps) -> None:
    placed = await steps.placed("s", tokens=2**40)
    await steps.backend.clock.advance(1_000)
    renewed = await steps.progress("s", placed.token, context_tokens=2**40 - 16, output_tokens=2**40)
    assert renewed.status == "OK"
    await steps.backend.clock.advance(1_000)
    released = await steps.release("s", placed.token)
    assert (released.block_ms, released.peak_blocks) == ((2**36 + 2**36 - 1) * 1_000, 2**36)
