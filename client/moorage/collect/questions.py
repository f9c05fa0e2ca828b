"""What an engine tells outside its metrics: asked within a budget, and no more often than it can change."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from moorage.collect.reader import EngineUnreachable, EngineUnreadable
from moorage.collect.scraper import EndpointAbsent, Scraper

# After a failure; the answer known until then stands.
RETRY_SECONDS = 5.0

T = TypeVar("T")


@dataclass(slots=True)
class Question(Generic[T]):
    """One GET: the part of its answer that matters, the pause between two, and when it is due (monotonic seconds)."""

    path: str
    read: Callable[[object], T | None]
    period: float
    due: float = 0.0
    # The engine does not have the endpoint: it is not asked again.
    absent: bool = False
    answer: T | None = None

    async def ask(self, scraper: Scraper, budget: float, now: float) -> None:
        """Asks if it is due, for at most `budget` seconds. Never fails: see `answer` and `absent`."""
        if self.absent or now < self.due or budget <= 0:
            return
        try:
            self.answer = self.read(await scraper.json(self.path, budget))
            self.due = now + self.period
        except EndpointAbsent:
            self.absent, self.answer = True, None
        except (EngineUnreachable, EngineUnreadable):
            self.due = now + min(self.period, RETRY_SECONDS)

    def doubt(self) -> None:
        """The answer may have changed: it is unknown, and due."""
        self.answer, self.due = None, 0.0

    def remarks(self) -> frozenset[str]:
        """For people, where the endpoint is not there."""
        return frozenset({f"no answer from GET {self.path}"} if self.absent else ())
