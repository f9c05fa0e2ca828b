"""What vLLM tells outside its metrics: asked within a budget, and no more often than it can change."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from moorage.collect.reader import EngineUnreachable, EngineUnreadable
from moorage.collect.scraper import EndpointAbsent, Scraper
from moorage.collect.vllm import Facts

# Weights may change without a trace in the metrics (by an endpoint of the user's own), so ask now and then.
WEIGHTS_SECONDS = 30.0
# The context limit stays while the engine lives.
MODELS_SECONDS = 300.0
# After a failure; the answer known until then stands.
RETRY_SECONDS = 5.0

T = TypeVar("T")


@dataclass(slots=True)
class _Question(Generic[T]):
    """One GET: the part of its answer that matters, the pause between two, and when it is due (monotonic seconds)."""

    path: str
    read: Callable[[object], T | None]
    period: float
    due: float = 0.0
    absent: bool = False
    answer: T | None = None


class FactFinder:
    """Keeps the facts of one server up to date.

    `/is_paused` and `/weight_info` exist only in vLLM's development mode, `/v1/models` may want a key we do not have.
    """

    def __init__(self, scraper: Scraper, clock: Callable[[], float] = time.monotonic) -> None:
        self._scraper = scraper
        self._clock = clock
        self._weight_changes = 0
        self.forget()

    def forget(self) -> None:
        """Knows nothing any more, not even which endpoints exist: the engine is a new one."""
        self._paused = _Question("/is_paused", _read_paused, 0.0)
        self._weights = _Question("/weight_info", _read_weight_version, WEIGHTS_SECONDS)
        self._models = _Question("/v1/models", _read_max_context, MODELS_SECONDS)

    def weights_may_have_changed(self, weight_changes: int) -> None:
        """Takes the count of weight changes; when it moved, the version is unknown until asked again."""
        if weight_changes != self._weight_changes:
            self._weight_changes = weight_changes
            self._weights.answer, self._weights.due = None, 0.0

    async def facts(self, budget: float) -> Facts:
        """What is known after asking what is due, all at once, for at most `budget` seconds. Never fails."""
        await asyncio.gather(
            self._ask(self._paused, budget), self._ask(self._weights, budget), self._ask(self._models, budget)
        )
        return Facts(self._paused.answer, self._weights.answer, self._models.answer)

    def absent(self) -> frozenset[str]:
        """Remarks on the endpoints that are not there."""
        questions = (self._paused, self._weights, self._models)
        return frozenset(f"no answer from GET {question.path}" for question in questions if question.absent)

    async def _ask(self, question: _Question[T], budget: float) -> None:
        now = self._clock()
        if question.absent or now < question.due or budget <= 0:
            return
        try:
            question.answer = question.read(await self._scraper.json(question.path, budget))
            question.due = now + question.period
        except EndpointAbsent:
            question.absent, question.answer = True, None
        except (EngineUnreachable, EngineUnreadable):
            question.due = now + min(question.period, RETRY_SECONDS)


def _read_paused(answer: object) -> bool | None:
    paused = answer.get("is_paused") if isinstance(answer, dict) else None
    return paused if isinstance(paused, bool) else None


def _read_weight_version(answer: object) -> str | None:
    version = answer.get("weight_version") if isinstance(answer, dict) else None
    return version if isinstance(version, str) else None


def _read_max_context(answer: object) -> int | None:
    """The smallest limit of the models listed: adapters list none, several names of one model list the same."""
    models = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(models, list):
        return None
    limits = [model.get("max_model_len") for model in models if isinstance(model, dict)]
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)
