"""Reads one SGLang server: its metrics and loads each time, the version of its weights when that is due."""

import time
from collections.abc import Callable

import httpx

from moorage.collect.exposition import NotMetrics, parse_page
from moorage.collect.questions import Question
from moorage.collect.reader import EngineUnreachable, EngineUnreadable, Reading
from moorage.collect.scraper import EndpointAbsent, Scraper
from moorage.collect.sglang import Scrape, advance, to_snapshots
from moorage.collect.sglang_loads import Load, read_loads
from moorage.collect.sglang_page import PageReading, read_page
from moorage.collect.targets import Target

LOADS = "/v1/loads"
MODEL_INFO = "/model_info"

# The version may be set without a trace in the metrics (through SGLang's Python API), so ask now and then.
WEIGHTS_SECONDS = 30.0


class SglangReader:
    """An EngineReader for SGLang. `wall_ns` (Unix time) and `clock` (monotonic seconds) are there for tests."""

    def __init__(
        self,
        target: Target,
        http: httpx.AsyncClient,
        wall_ns: Callable[[], int] = time.time_ns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._target = target
        self._scraper = Scraper(http, target.endpoint)
        self._wall_ns = wall_ns
        self._clock = clock
        self._last: Scrape | None = None
        self.forget_facts()

    async def read(self, timeout: float) -> Reading:
        """See EngineReader. The metrics go first; the rest gets what is left, and may stay unknown."""
        deadline = self._clock() + timeout
        page = await self._read_page(timeout)
        observed_ns = self._wall_ns()
        loads = await self._read_loads(min(deadline - self._clock(), timeout / 2))
        scrape = advance(self._last, page, loads or {}, observed_ns)
        self._note_changes(scrape)
        self._last = scrape
        await self._weights.ask(self._scraper, deadline - self._clock(), self._clock())
        remarks = page.remarks | self._weights.remarks() | self._load_remarks(page, loads)
        return Reading(to_snapshots(scrape, self._target, self._weights.answer), remarks)

    def forget_facts(self) -> None:
        """See EngineReader."""
        self._weights = Question(MODEL_INFO, _read_weight_version, WEIGHTS_SECONDS)
        self._loads_absent = False

    async def _read_page(self, timeout: float) -> PageReading:
        try:
            return read_page(parse_page(await self._scraper.text("/metrics", timeout)))
        except EndpointAbsent as error:
            raise EngineUnreadable(f"{error} (is SGLang running with --enable-metrics?)") from error
        except NotMetrics as error:
            raise EngineUnreadable(str(error)) from error

    async def _read_loads(self, budget: float) -> dict[int, Load] | None:
        """The loads of now, or None: old ones are worse than the gauges of the page."""
        if self._loads_absent or budget <= 0:
            return None
        try:
            return read_loads(await self._scraper.json(LOADS, budget))
        except EndpointAbsent:
            self._loads_absent = True
        except (EngineUnreachable, EngineUnreadable):
            pass
        return None

    def _note_changes(self, scrape: Scrape) -> None:
        """Doubts what may have changed since the last look."""
        if self._last is None:
            return
        if self._last.boot.incarnation != scrape.boot.incarnation:
            self.forget_facts()
        elif _weight_changes(self._last.page) != _weight_changes(scrape.page):
            self._weights.doubt()

    def _load_remarks(self, page: PageReading, loads: dict[int, Load] | None) -> frozenset[str]:
        if loads is None:
            return frozenset({f"no answer from GET {LOADS}"} if self._loads_absent else ())
        remarks = {f"missing in {LOADS}: rank {number}" for number in page.ranks.keys() - loads.keys()}
        if any(load.prefill_work is None for load in loads.values()):
            remarks.add(f"missing in {LOADS}: total_prefill_uncached_tokens or total_prefill_busy_us")
        return frozenset(remarks)


def _weight_changes(page: PageReading) -> tuple[object, ...]:
    """Another value whenever the weights, or their version, may have changed."""
    return page.version_changes, *(rank.weight_loads for rank in page.ranks.values())


def _read_weight_version(answer: object) -> str | None:
    version = answer.get("weight_version") if isinstance(answer, dict) else None
    return version if isinstance(version, str) else None
