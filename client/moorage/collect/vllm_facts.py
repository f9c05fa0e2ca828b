"""What vLLM tells outside its metrics."""

import asyncio
import time
from collections.abc import Callable

from moorage.collect.questions import Question
from moorage.collect.scraper import Scraper
from moorage.collect.vllm import Facts

# Weights may change without a trace in the metrics (by an endpoint of the user's own), so ask now and then.
WEIGHTS_SECONDS = 30.0
# The context limit stays while the engine lives.
MODELS_SECONDS = 300.0


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
        self._paused = Question("/is_paused", _read_paused, 0.0)
        self._weights = Question("/weight_info", _read_weight_version, WEIGHTS_SECONDS)
        self._models = Question("/v1/models", _read_max_context, MODELS_SECONDS)

    def weights_may_have_changed(self, weight_changes: int) -> None:
        """Takes the count of weight changes; when it moved, the version is unknown until asked again."""
        if weight_changes != self._weight_changes:
            self._weight_changes = weight_changes
            self._weights.doubt()

    async def facts(self, budget: float) -> Facts:
        """What is known after asking what is due, all at once, for at most `budget` seconds. Never fails."""
        now = self._clock()
        questions = (self._paused, self._weights, self._models)
        await asyncio.gather(*(question.ask(self._scraper, budget, now) for question in questions))
        return Facts(self._paused.answer, self._weights.answer, self._models.answer)

    def absent(self) -> frozenset[str]:
        """Remarks on the endpoints that are not there."""
        return self._paused.remarks() | self._weights.remarks() | self._models.remarks()


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
