"""What one more session would bring on an engine, and whether more may be asked of it than it has.

Where a decoding step takes about as long for many sequences as for few, as on an accelerator that waits for its memory,
every further session adds its whole pace; where the engine computes all the time, a further session only slows the
others down. So the time per step is learnt as a line, a + b n over n running sequences: the pace n / (a + b n) grows by
the share a / (a + b n) of what another session would bring alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Time constant of what is learnt, seconds.
_WINDOW_S = 90.0
#: Looks that must have been taken, and how far apart (variance of n) they must lie, to say anything.
_LEAST_LOOKS, _LEAST_VARIANCE = 20.0, 0.3
#: Most that may be asked for beyond the budget, as a share of it; from this share of protected blocks on nothing is.
_MOST_OVER, _PROTECTED = 0.8, 0.3


@dataclass(slots=True)
class Pace:
    """Decayed sums over looks at one engine: n sequences that ran, and t seconds per step.

    A look counts by the steps it saw: one long prefill at the start must not outweigh a minute of decoding.
    """

    looks: float = 0.0
    steps: float = 0.0
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
        steps = elapsed_s / step_s
        self.looks = self.looks * fade + 1.0
        self.steps = self.steps * fade + steps
        self.n = self.n * fade + steps * running
        self.nn = self.nn * fade + steps * running * running
        self.t = self.t * fade + elapsed_s
        self.nt = self.nt * fade + elapsed_s * running

    def gain(self) -> float | None:
        """Share of its lone pace that one more session would add, 0..1; None while too little was seen."""
        if self.looks < _LEAST_LOOKS:
            return None
        n, t = self.n / self.steps, self.t / self.steps
        variance = self.nn / self.steps - n * n
        if variance < _LEAST_VARIANCE:
            return None
        slope = max(0.0, (self.nt / self.steps - n * t) / variance)
        return min(1.0, max(0.0, 1.0 - slope * n / t))


def over(gain: float | None, protected: float) -> float:
    """Share of the budget that may be asked for beyond it.

    Past the physical budget there is a cliff (section 7): what idle sessions left in the cache is evicted. Where nobody
    is idle between turns there is nothing to lose there. ``protected`` is the share of the blocks that classes of
    several turns hold: the less there are, the more may the engine's own queue keep its batch full, and the more so the
    more a session brings.
    """
    return 0.0 if gain is None else _MOST_OVER * gain * max(0.0, 1.0 - protected / _PROTECTED)
