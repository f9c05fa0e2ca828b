"""The emulated cache-aware policy: prefix first, then room, and balance where loads are far apart."""

from bench.cache_aware import BALANCE_DIFFERENCE, CacheAwareRouter

PROMPT = list(range(100, 180))


def test_a_prompt_follows_its_prefix() -> None:
    router = CacheAwareRouter(["e0", "e1"])
    home = router.choose(PROMPT)
    other = router.choose([7] * 80)
    assert other != home, "unknown prompts go where the least was sent"
    assert {router.choose(PROMPT + [n] * 8) for n in range(5)} == {home}


def test_a_short_match_is_no_reason_to_stay() -> None:
    """A quarter of the prompt matches where the most was sent: below the threshold, room decides."""
    router = CacheAwareRouter(["e0", "e1"])
    home = router.choose(PROMPT)
    assert router.choose(PROMPT[:16] + [3] * 48) != home


def test_far_out_of_balance_the_least_loaded_takes_it() -> None:
    router = CacheAwareRouter(["e0", "e1"])
    homes = [router.choose(PROMPT) for _ in range(BALANCE_DIFFERENCE + 1)]
    assert len(set(homes)) == 1
    assert router.choose(PROMPT) != homes[0]


def test_what_ended_is_not_counted() -> None:
    router = CacheAwareRouter(["e0", "e1"])
    for _ in range(3 * BALANCE_DIFFERENCE):
        router.end(router.choose(PROMPT))
    assert router.choose(PROMPT) == router.choose(PROMPT)
