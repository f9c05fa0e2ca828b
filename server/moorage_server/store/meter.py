"""How long script calls take, and how they fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from moorage_server.meters import Histograms

#: Upper edges, seconds; a call is given up after two.
EDGES_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)


class ScriptMeter:
    """One store's calls. A call's time includes its wait for the round trip that carries it."""

    def __init__(self) -> None:
        self.seconds = Histograms(EDGES_S)
        #: By the class of the error, as the store's client names it.
        self.errors: Counter[str] = Counter()
        #: Told of every call, with its seconds: for traces.
        self.listener: Callable[[str, float], None] | None = None

    def took(self, script: str, seconds: float) -> None:
        """A call ended, well or not."""
        self.seconds.observe((script,), seconds)
        if self.listener is not None:
            self.listener(script, seconds)

    def failed(self, error: Exception) -> None:
        """A call failed."""
        self.errors[type(error).__name__] += 1
