"""The cache-aware policy of vLLM Router and SGLang's gateway, after its documentation: the usual static baseline.

Each request goes where the longest prefix of it was sent before, if that is a fair part of it; otherwise where the
least was sent so far; and where requests in flight are far out of balance, to the least loaded engine.
"""

from collections.abc import Sequence

from bench.blocks import extend_hashes
from bench.routers import Loads, PerRequestSession, RoutedSession
from bench.workload import SessionPlan

#: Defaults of vllm-router 0.1.17.
CACHE_THRESHOLD, BALANCE_DIFFERENCE, BALANCE_RATIO = 0.3, 64, 1.5
#: Tokens per node of the approximate prefix tree; the real one goes by characters.
NODE = 8


class CacheAwareRouter:
    """No admission and no sessions: turns of one session stay together as long as their prefix says so."""

    def __init__(self, engines: Sequence[str]) -> None:
        self._loads = Loads(engines)
        self._sent: dict[str, set[int]] = {engine: set() for engine in engines}

    def session(self, plan: SessionPlan) -> RoutedSession:
        """See `Router.session`."""
        return PerRequestSession(self.choose, self.end)

    def choose(self, prompt: Sequence[int]) -> str:
        """Return the engine for a prompt, count the request in, and remember what was sent."""
        hashes: list[int] = []
        extend_hashes(hashes, prompt, NODE)
        engine = self._preferred(hashes)
        if engine is None:
            engine = self._loads.take_least()
        else:
            self._loads.take(engine)
        self._sent[engine].update(hashes)
        return engine

    def end(self, engine: str) -> None:
        """One request less in flight."""
        self._loads.give_back(engine)

    def _preferred(self, hashes: Sequence[int]) -> str | None:
        """Where the prefix, or else the room for it, is; None while loads are out of balance."""
        counts = self._loads.counts
        most, least = max(counts.values()), min(counts.values())
        if most - least > BALANCE_DIFFERENCE and most > BALANCE_RATIO * least:
            return None
        matched = {engine: _prefix(hashes, sent) for engine, sent in self._sent.items()}
        best = max(matched, key=lambda engine: matched[engine])
        if matched[best] > CACHE_THRESHOLD * len(hashes):
            return best
        return min(self._sent, key=lambda engine: len(self._sent[engine]))


def _prefix(hashes: Sequence[int], sent: set[int]) -> int:
    return next((n for n, block in enumerate(hashes) if block not in sent), len(hashes))
