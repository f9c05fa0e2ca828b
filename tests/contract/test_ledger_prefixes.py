"""Prefix indexes on the ledger: what engines tell, what is noted, what is found, and what drops it all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from moorage_server.core.config import PoolConfig
from moorage_server.core.view import EVENTS, PLACED, UNINDEXED, PrefixIndex
from moorage_server.runtime.prefixes import pack
from moorage_server.store.records import PrefixChange, Resumed
from tests.contract.steps import I0, I1, NOON, Steps

#: Hashes kept, where it does not matter.
MANY = 100_000


class Sender:
    """One sender's record of an instance's cache."""

    def __init__(self, steps: Steps, stream: str = "one", instance: str = I0, inc: str = "1") -> None:
        self.steps, self.stream, self.instance, self.inc = steps, stream, instance, inc
        self.sequence = 0

    async def tell(
        self, stored: Iterable[int] = (), removed: Iterable[int] = (), *, most: int = MANY, **changes: Any
    ) -> str:
        """The next update; the first one begins the stream."""
        self.sequence += 1
        return await self.repeat(stored, removed, most=most, **{"reset": self.sequence == 1, **changes})

    async def repeat(
        self, stored: Iterable[int] = (), removed: Iterable[int] = (), *, most: int = MANY, **changes: Any
    ) -> str:
        """An update with the sequence as it is."""
        values: dict[str, Any] = {"sequence": self.sequence, **changes}
        hashes = {"stored": pack(list(stored)), "removed": pack(list(removed))}
        change = PrefixChange(self.instance, self.inc, self.stream, **values, **hashes)
        return await self.steps.store.prefix_update(self.steps.pool, change, most)


async def found(steps: Steps, *hashes: int, on: str = I0) -> int:
    """How many of the hashes the instance holds, from the first on."""
    (count,) = await steps.store.prefix_lookup(steps.pool, [on], pack(hashes))
    return count


async def index(steps: Steps, instance: str = I0) -> PrefixIndex:
    """What a view shows of the index."""
    return (await steps.store.view(steps.pool, PoolConfig())).instances[instance].prefixes


async def note(steps: Steps, *hashes: int, inc: str = "1", most: int = MANY) -> bool:
    """Notes a prompt that was sent."""
    return await steps.store.prefix_note(steps.pool, I0, inc, pack(hashes), most)


# What engines tell


async def test_what_is_stored_is_found_until_it_is_removed(steps: Steps) -> None:
    sender = Sender(steps)
    assert await sender.tell([1, 2, 3]) == "OK"
    assert await found(steps, 1, 2, 3, 4) == 3
    assert await sender.tell([4], [2]) == "OK"
    assert await found(steps, 1, 2, 3, 4) == 1
    assert await found(steps, 3, 4) == 2
    assert await found(steps, 9, 1) == 0
    assert await index(steps) == PrefixIndex(EVENTS, 3, NOON, behind=False)


async def test_hashes_take_all_of_their_64_bits(steps: Steps) -> None:
    whole = [0, 2**64 - 1, 2**63, 2**53 + 1, 2**53, int.from_bytes(b"\r\n\0 %{}:")]
    await Sender(steps).tell(whole)
    assert await found(steps, *whole) == len(whole)
    assert await found(steps, 2**53 + 2) == 0


async def test_each_instance_answers_for_itself(steps: Steps) -> None:
    await steps.snapshot(I1)
    await Sender(steps).tell([1, 2])
    await Sender(steps, instance=I1).tell([1])
    many = [I1, I0, "0|nobody"] * 50
    assert await steps.store.prefix_lookup(steps.pool, many, pack([1, 2, 3])) == [1, 2, 0] * 50


async def test_a_repeat_is_dropped_and_acknowledged(steps: Steps) -> None:
    sender = Sender(steps)
    await sender.tell([1])
    await sender.tell([2])
    await steps.backend.clock.advance(3_000)
    assert await sender.repeat([7], [1]) == "REPEAT"
    assert await sender.repeat([8], sequence=1) == "REPEAT"
    # A sender that was started again, and takes up its old name: what it means is another record.
    assert await sender.repeat([8], sequence=1, reset=True) == "NEW_STREAM"
    assert await found(steps, 1, 2) == 2
    assert (await index(steps)).updated_ms == NOON


async def test_a_gap_asks_for_all_of_it_again(steps: Steps) -> None:
    sender = Sender(steps)
    await sender.tell([1])
    assert await sender.repeat([3], sequence=3) == "GAP"
    assert await found(steps, 1, 3) == 1
    # A reset is complete by itself, whatever came before.
    assert await sender.repeat([5], sequence=9, reset=True) == "OK"
    assert (await found(steps, 1), await found(steps, 5)) == (0, 1)
    sender.sequence = 9
    assert await sender.tell([6]) == "OK"


async def test_an_unknown_stream_begins_with_reset(steps: Steps) -> None:
    assert await Sender(steps).tell([1], reset=False) == "NEW_STREAM"
    assert await index(steps) == PrefixIndex(UNINDEXED, 0, None)
    await Sender(steps).tell([1])
    assert await Sender(steps, "two").tell([2], reset=False) == "NEW_STREAM"
    assert await found(steps, 1) == 1
    assert await Sender(steps, "two").tell([2]) == "OK"
    assert (await found(steps, 1), await found(steps, 2)) == (0, 1)


async def test_an_empty_update_says_that_the_sender_is_there(steps: Steps) -> None:
    sender = Sender(steps)
    await sender.tell([1])
    await steps.backend.clock.advance(2_000)
    assert await sender.tell() == "OK"
    assert await index(steps) == PrefixIndex(EVENTS, 1, NOON + 2_000)


async def test_a_sender_that_is_behind_says_so_until_it_is_not(steps: Steps) -> None:
    sender = Sender(steps)
    await sender.tell([1], behind=True)
    assert (await index(steps)).behind
    await sender.tell([2])
    assert not (await index(steps)).behind


async def test_a_large_update_counts_once_its_last_part_is_there(steps: Steps) -> None:
    """It comes in parts: whoever carried only some of them out leaves an index that says it is behind."""
    everything = list(range(16_384))
    sender = Sender(steps)
    assert await sender.tell(everything) == "OK"
    assert await index(steps) == PrefixIndex(EVENTS, 16_384, NOON)
    run, parts = steps.store._run, 0

    async def breaks(name: str, *args: Any) -> Any:
        nonlocal parts
        parts += name == "prefix_update"
        if parts > 3:
            raise ConnectionError
        return await run(name, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps.store, "_run", breaks)
        with pytest.raises(ConnectionError):
            await sender.tell(removed=everything[:8_000])
    assert await index(steps) == PrefixIndex(EVENTS, 16_384 - 3 * 1_024, NOON, behind=True)
    assert await sender.repeat(removed=everything[:8_000]) == "OK"
    assert await index(steps) == PrefixIndex(EVENTS, 8_384, NOON)
    assert await sender.repeat(removed=everything[:8_000]) == "REPEAT"


async def test_an_update_and_its_repeat_may_arrive_at_once(steps: Steps) -> None:
    """A sender that heard nothing asks another server, while the first one is still at it; then it goes on."""
    sender, other = Sender(steps), Sender(Steps(steps.backend, steps.backend.open()))
    await sender.tell(range(5_000))
    sender.sequence = other.sequence = 2
    twice = [s.repeat(range(5_000, 9_000), range(3_000), sequence=2) for s in (sender, other)]
    assert set(await asyncio.gather(*twice)) <= {"OK", "REPEAT"}
    assert await other.tell([1]) == "OK"
    assert await index(steps) == PrefixIndex(EVENTS, 6_001, NOON)


async def test_only_the_registered_incarnation_is_heard(steps: Steps) -> None:
    assert await Sender(steps, instance="0|nobody").tell([1]) == "NO_INSTANCE"
    assert await Sender(steps, inc="2").tell([1]) == "OTHER_INCARNATION"
    await steps.snapshot(inc="2")
    assert await Sender(steps, inc="1").tell([1]) == "OLD_INCARNATION"
    assert await Sender(steps, inc="2").tell([1]) == "OK"


# What is kept, and how long


async def test_the_oldest_are_dropped_above_the_limit(steps: Steps) -> None:
    sender = Sender(steps)
    await sender.tell(range(10), most=20)
    await steps.backend.clock.advance(1_000)
    await sender.tell(range(100, 115), most=20)
    assert (await index(steps)).blocks == 20
    # Of what came at one time the deepest blocks go first.
    assert await found(steps, *range(10)) == 5
    assert await found(steps, *range(100, 115)) == 15


async def test_what_is_stored_again_is_young_again(steps: Steps) -> None:
    sender = Sender(steps)
    for hashes in ([1], [2], [1]):
        await sender.tell(hashes, most=2)
        await steps.backend.clock.advance(1_000)
    await sender.tell([3], most=2)
    assert (await found(steps, 1), await found(steps, 2), await found(steps, 3)) == (1, 0, 1)


async def test_an_index_that_shrinks_does_so_step_by_step(steps: Steps) -> None:
    """No script runs long, however much there is to drop."""
    sender = Sender(steps)
    await sender.tell(range(10_000))
    await sender.tell(most=100)
    assert (await index(steps)).blocks == 10_000 - 4_096
    await sender.tell(most=100)
    await sender.tell(most=100)
    assert (await index(steps)).blocks == 100


async def test_a_new_incarnation_drops_the_index(steps: Steps) -> None:
    sender = Sender(steps)
    await sender.tell([1])
    await steps.snapshot(inc="2")
    assert await found(steps, 1) == 0
    assert await index(steps) == PrefixIndex(UNINDEXED, 0, None)
    sender.inc = "2"
    assert await sender.tell([2]) == "NEW_STREAM"


async def test_an_engine_that_clears_its_cache_drops_the_index(steps: Steps) -> None:
    await steps.snapshot(cache_epoch=5)
    sender = Sender(steps)
    await sender.tell([1])
    await steps.snapshot(cache_epoch=5)
    assert await found(steps, 1) == 1
    await steps.snapshot(cache_epoch=6)
    assert await found(steps, 1) == 0
    assert await sender.tell([2]) == "NEW_STREAM"


async def test_new_weights_drop_the_index_if_the_cache_was_cleared_with_them(steps: Steps) -> None:
    await Sender(steps).tell([1])
    await steps.weights(False, "2")
    assert await found(steps, 1) == 1
    await steps.weights(False, "3", cleared=True)
    assert await found(steps, 1) == 0
    assert await index(steps) == PrefixIndex(UNINDEXED, 0, None)


async def test_a_forgotten_instance_leaves_nothing(steps: Steps) -> None:
    await Sender(steps).tell([1])
    await steps.pass_time(600_000)
    assert await steps.gone() == "FORGOTTEN"
    assert await steps.backend.client.keys(f"{steps.backend.prefix}*:[ix]:*") == []


async def test_an_index_expires_by_itself(steps: Steps) -> None:
    await Sender(steps).tell([1])
    (key,) = await steps.backend.client.keys(f"{steps.backend.prefix}*:x:*")
    assert 0 < await steps.backend.client.pttl(key) <= 600_000


async def test_a_stream_that_fell_silent_for_long_begins_anew(steps: Steps) -> None:
    """Its hashes have expired: what follows would be no complete record."""
    sender = Sender(steps)
    await sender.tell([1])
    await steps.pass_time(599_999)
    assert (await index(steps)).source == EVENTS
    await steps.pass_time(1)
    assert await index(steps) == PrefixIndex(UNINDEXED, 0, None)
    assert await sender.tell([2]) == "NEW_STREAM"


# What is noted


async def test_what_was_sent_is_noted_where_no_engine_tells(steps: Steps) -> None:
    assert await note(steps, 1, 2, 3)
    assert await index(steps) == PrefixIndex(PLACED, 3, NOON)
    assert await found(steps, 1, 2, 9) == 2
    assert await steps.store.prefix_note(steps.pool, I0, "1", pack([4]), MANY, 3)
    assert await found(steps, 1, 2, 3, 4) == 4


async def test_nothing_is_noted_where_the_engine_tells_or_is_another(steps: Steps) -> None:
    assert not await note(steps, 1, inc="2")
    assert await index(steps) == PrefixIndex(UNINDEXED, 0, None)
    await Sender(steps).tell([1])
    assert not await note(steps, 2)
    assert await found(steps, 2) == 0


async def test_events_take_over_from_what_was_noted(steps: Steps) -> None:
    await note(steps, 1)
    assert await Sender(steps).tell([2], reset=False) == "NEW_STREAM"
    await Sender(steps).tell([2])
    assert (await found(steps, 1), await found(steps, 2)) == (0, 1)
    assert (await index(steps)).source == EVENTS


async def test_notes_take_over_once_events_are_long_gone(steps: Steps) -> None:
    sender = Sender(steps)
    await sender.tell([1], behind=True)
    await steps.pass_time(600_000)
    assert await note(steps, 2)
    assert ((await index(steps)).source, (await index(steps)).behind) == (PLACED, False)
    assert await sender.tell([3]) == "NEW_STREAM"


async def test_of_two_prompts_the_tails_are_dropped_first(steps: Steps) -> None:
    """A block is nothing without those before it. A part is noted after the other, with where it begins."""
    prompt = list(range(2_000))
    await note(steps, *prompt, most=1_500)
    assert await found(steps, *prompt[:1_500]) == 1_500
    assert await found(steps, prompt[1_500]) == 0


# The former home of a paused session


async def pause(steps: Steps, context: int = 3_200) -> None:
    placed = await steps.placed("s")
    await steps.release("s", placed.token, "PAUSED", context=context)


async def test_a_resumed_session_is_told_where_it_was_at_home(steps: Steps) -> None:
    await pause(steps)
    before = await steps.books()
    assert await steps.admit("s", I0, told=False) == Resumed(I0, "1", 3_200)
    after = await steps.books()
    assert (after.sessions, after.classes, after.pool) == (before.sessions, before.classes, before.pool)
    assert (await steps.placed("s")).fresh
    placed = await steps.admit("s", I0, told=False)
    assert not isinstance(placed, Resumed)
    assert not placed.fresh


async def test_it_is_told_again_while_it_is_held(steps: Steps) -> None:
    await pause(steps)
    await steps.held("s", tokens=16)
    assert await steps.admit("s", I0, told=False) == Resumed(I0, "1", 3_200)


async def test_a_former_home_that_began_anew_is_none(steps: Steps) -> None:
    await pause(steps)
    await steps.snapshot(inc="2")
    assert (await steps.admit("s", I0, inc="2", told=False)).fresh


async def test_a_former_home_that_is_gone_is_none(steps: Steps) -> None:
    await pause(steps)
    await steps.snapshot(I1)
    await steps.snapshot(state="STOPPED")
    await steps.gone()
    assert (await steps.admit("s", I1, told=False)).instance == I1


@pytest.mark.parametrize("turns", [False, True])
async def test_a_former_home_that_cleared_its_cache_is_none(steps: Steps, turns: bool) -> None:
    """After the pause, or before it and after the last turn."""
    placed = await steps.placed("s")
    if turns:
        await steps.turn("s", placed.token, 0, 3_200, 0)
        await steps.weights(False, "2", cleared=True)
        await steps.release("s", placed.token, "PAUSED")
    else:
        await steps.release("s", placed.token, "PAUSED")
        await steps.weights(False, "2", cleared=True)
    assert (await steps.admit("s", I0, told=False)).fresh


async def test_a_former_home_with_new_weights_may_have_it_still(steps: Steps) -> None:
    await pause(steps)
    await steps.weights(False, "2")
    assert isinstance(await steps.admit("s", I0, told=False), Resumed)


async def test_a_session_paused_while_it_was_held_left_nothing(steps: Steps) -> None:
    await steps.held("s")
    await steps.release("s", outcome="PAUSED")
    assert (await steps.admit("s", I0, told=False)).fresh


async def test_what_a_first_turn_finds_cached_is_what_was_decided_with(steps: Steps) -> None:
    placed = await steps.placed("s", cached=96)
    assert (await steps.place("s", placed.token)).cached_tokens == 96
    await steps.progress("s", placed.token, turn=0, context_tokens=320, cached_tokens=0)
    assert (await steps.place("s", placed.token)).cached_tokens == 320
