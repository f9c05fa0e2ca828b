"""Reads one vLLM server: its metrics each time, its other endpoints when they are due."""

import time
from collections.abc import Callable

import httpx

from moorage.collect.exposition import NotMetrics, parse_page
from moorage.collect.reader import EngineUnreadable, Reading
from moorage.collect.scraper import EndpointAbsent, Scraper
from moorage.collect.targets import Target
from moorage.collect.vllm import Scrape, advance, to_snapshots
from moorage.collect.vllm_facts import FactFinder
from moorage.collect.vllm_page import read_page


class VllmReader:
    """An EngineReader for vLLM. `wall_ns` (Unix time) and `clock` (monotonic seconds) are there for tests."""

    def __init__(
        self,
        target: Target,
        http: httpx.AsyncClient,
        wall_ns: Callable[[], int] = time.time_ns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._target = target
        self._scraper = Scraper(http, target.endpoint)
        self._finder = FactFinder(self._scraper, clock)
        self._wall_ns = wall_ns
        self._clock = clock
        self._last: Scrape | None = None

    async def read(self, timeout: float) -> Reading:
        """See EngineReader. The metrics go first; the rest gets what is left, at most half, and may stay unknown."""
        deadline = self._clock() + timeout
        try:
            page = read_page(parse_page(await self._scraper.text("/metrics", timeout)))
        except (EndpointAbsent, NotMetrics) as error:
            raise EngineUnreadable(str(error)) from error
        scrape = advance(self._last, page, self._wall_ns())
        if self._last is not None and self._last.boot != scrape.boot:
            self._finder.forget()
        self._last = scrape
        self._finder.weights_may_have_changed(page.weight_changes)
        facts = await self._finder.facts(min(deadline - self._clock(), timeout / 2))
        return Reading(to_snapshots(scrape, self._target, facts), page.remarks | self._finder.absent())

    def forget_facts(self) -> None:
        """See EngineReader."""
        self._finder.forget()
