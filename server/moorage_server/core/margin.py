"""How much of the forecast's uncertainty is kept free: as much as a miss costs more than another session brings.

The forecast leaves room for z standard deviations (policy.md section 7). Which z is right depends on the engine. Where
a decoding step takes about as long for many sequences as for few, as on an accelerator that waits for its memory, every
further session adds its whole pace, and some misses are worth it: an over-timid target loses to a tuned static cap
(section 4, note 5). Where the engine computes all the time, a further session only slows the others down, and what is
lost from the cache is lost work. So the time per step is learnt as a line, a + b n over n running sequences; the pace
n / (a + b n) grows by the share a / (a + b n) of what another session would bring alone, and z shrinks by that share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Time constant of what is learnt, seconds.
_WINDOW_S = 90.0
#: Looks that must have been taken, and how far apart (variance of n) they must lie, to say anything.
_LEAST_LOOKS, _LEAST_VARIANCE = 20.0, 0.3
#: Share of the configured margin that is always kept.
LEAST = 0.2


@dataclass(slots=True)
class Pace:
    """Decayed sums over looks at one engine: n sequences that ran, and t seconds per step."""

    looks: float = 0.0
    n: float = 0.0
    nn: float = 0.0
    t: float = 0.0
    nt: float = 0.0

    def take(self, running: float, tokens_per_s: float, elapsed_s: float) -> None:
        """One look: ``running`` sequences generated ``tokens_per_s`` over ``elapsed_s``."""
        if running < 1.0 or tokens_per_s <= 0.0:
            return
        step_s = running / tokens_per_s
        fade = math.exp(-elapsed_s / _WINDOW_S)
        self.looks = self.looks * fade + 1.0
        self.n = self.n * fade + running
        self.nn = self.nn * fade + running * running
        self.t = self.t * fade + step_s
        self.nt = self.nt * fade + running * step_s

    def gain(self) -> float | None:
        """Share of its lone pace that one more session would add, 0..1; None while too little was seen."""
        if self.looks < _LEAST_LOOKS:
            return None
        n, t = self.n / self.looks, self.t / self.looks
        variance = self.nn / self.looks - n * n
        if variance < _LEAST_VARIANCE:
            return None
        slope = max(0.0, (self.nt / self.looks - n * t) / variance)
        return min(1.0, max(0.0, 1.0 - slope * n / t))


def share(gain: float | None) -> float:
    """Share of the configured margin that is in force; all of it while the gain is unknown."""
    return 1.0 if gain is None else max(LEAST, 1.0 - gain)
