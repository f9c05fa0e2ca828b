"""The control plane in virtual time."""

import asyncio
import time
from contextlib import nullcontext

import fakeredis
import pytest

from bench import simulate, virtual_time
from bench.simulate import Case, run, virtual_store_clock


def test_keys_of_the_store_expire_by_virtual_time() -> None:
    async def main() -> list[object]:
        client = fakeredis.FakeAsyncRedis()
        await client.set("lease", "mine", px=1500)
        found: list[object] = []
        for pause in (1.4, 0.2):
            await asyncio.sleep(pause)
            found.append(await client.get("lease"))
        return found

    with virtual_store_clock():
        started = time.monotonic()
        found = virtual_time.run(main())
    assert time.monotonic() - started < 1.0
    assert found == [b"mine", None]


@pytest.mark.parametrize("router", ["misa-t", "clairvoyant"])
def test_the_same_case_plays_the_same_run(router: str) -> None:
    case = Case(router, duration_s=15.0, live=24)
    assert run(case) == run(case)


def test_the_quick_store_changes_nothing_but_the_time_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("misa-t", duration_s=15.0, live=24)
    quick = run(case)
    monkeypatch.setattr(simulate, "quick_lua", nullcontext)
    assert run(case) == quick
