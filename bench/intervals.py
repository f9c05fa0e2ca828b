"""Means over seeds with the confidence that a few runs allow."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.special import stdtrit

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and half the width of its confidence interval, which is None with fewer than two values."""

    mean: float
    half: float | None

    def text(self, form: str = ".1f", scale: float = 1.0) -> str:
        """Return it as `mean ± half`."""
        mean = format(scale * self.mean, form)
        return mean if self.half is None else f"{mean} ± {format(scale * self.half, form.lstrip('+'))}"


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of some independent values, by Student's t distribution. ValueError where there are none."""
    if not values:
        raise ValueError("no values, no mean")
    if len(values) == 1:
        return Interval(values[0], None)
    quantile = float(stdtrit(len(values) - 1, (1.0 + CONFIDENCE) / 2.0))
    return Interval(fmean(values), quantile * stdev(values) / math.sqrt(len(values)))


def gains(values: Sequence[float], baseline: Sequence[float]) -> Interval:
    """Return by what share values exceed a baseline, pair by pair: both come from the same seeds, in order."""
    return interval([value / base - 1.0 for value, base in zip(values, baseline, strict=True)])
