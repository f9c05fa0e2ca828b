"""The numbers behind labels: histograms of what sessions of a class are like, and how well a session fits each of them.

Sessions are rows of bins, one column per length (see ``labels``); classes are the columns of ``belongs``, the share of
each session that is taken to be of each class.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Labelled sessions that a profile must rest on before anybody is taken for one of the class, or for none of it.
LEAST_SESSIONS = 8.0

#: What is known at entry; then what shows in life, of which the last two only grow. (What a turn gains is a mean from
#: some turns on, and as good as final.)
PROMPT, OUTPUT, ASKED_TURNS, CONTEXT, GAP, TURNS, GROWTH = range(7)
HINTS, WIDTH = 4, 7
GROWING = (TURNS, GROWTH)
#: Half octaves from 1 to 2^24 (tokens, turns, milliseconds).
BINS = 48
UNKNOWN = -1
#: Turns after which the tokens gained per turn are a mean of something.
MEAN_TURNS = 4
#: Pseudo-sessions per length that draw a profile to the mean of all, and that mean to nothing in particular.
_SHRINK, _FLOOR = 1.0, 1.0
#: Most that one length may count for one class against the best one: a factor of 400.
_MOST_PER_LENGTH = 6.0
#: Neighbouring bins get their share: where exactly a bin ends says nothing.
_KERNEL = (0.25, 0.5, 0.25)


def bin_of(value: float) -> int:
    """Half octave that a length lies in; everything below 1 is in the first."""
    return min(BINS - 1, int(2.0 * math.log2(value))) if value > 1 else 0


def prior(labels: Ints, classes: int, wrong: float) -> Floats:
    """Log of what labels (indices, negative for none) say, shape (sessions, classes)."""
    said = np.zeros((len(labels), classes))
    told = labels >= 0
    if classes > 1:
        said[told] = math.log(wrong / (classes - 1))
        said[told, labels[told]] = math.log(1.0 - wrong)
    return said


def posterior(score: Floats) -> Floats:
    """Chances from log likelihoods, shape (sessions, classes)."""
    weights = np.exp(score - score.max(axis=1, keepdims=True))
    shares: Floats = weights / weights.sum(axis=1, keepdims=True)
    return shares


def likelihood(points: Floats, reaches: Floats | None, bins: Ints, over: NDArray[np.bool_]) -> Floats:
    """Log likelihood of each session under each class, shape (sessions, classes)."""
    total = np.zeros((len(bins), points.shape[1]))
    for length in range(len(points)):
        told = bins[:, length] != UNKNOWN
        ended = told & _final(bins, over, length)
        total[ended] += _bounded(points[length][:, bins[ended, length]].T)
        if length in GROWING and reaches is not None:
            alive = told & ~ended
            total[alive] += _bounded(reaches[GROWING.index(length)][:, bins[alive, length]].T)
    return total


def _final(bins: Ints, over: NDArray[np.bool_], length: int) -> NDArray[np.bool_]:
    """Whose length is what it will be; of the others it is known to be no less."""
    if length not in GROWING:
        return np.ones_like(over)
    if length == TURNS:
        return over
    several: NDArray[np.bool_] = over | (bins[:, TURNS] >= bin_of(MEAN_TURNS))
    return several


def _bounded(values: Floats) -> Floats:
    """No class is further behind the best one than a single length may put it."""
    if not values.size:
        return values
    bounded: Floats = np.maximum(values, values.max(axis=1, keepdims=True) - _MOST_PER_LENGTH)
    return bounded


def counted(bins: Ints, over: NDArray[np.bool_], belongs: Floats) -> tuple[Floats, Floats]:
    """Log densities and log chances to get as far, shapes (lengths, classes, bins) and (growing lengths, ...)."""
    points, reaches = [], []
    for length in range(WIDTH):
        told = bins[:, length] != UNKNOWN
        ended = told & _final(bins, over, length)
        counts = _histogram(bins[ended, length], belongs[ended])
        seen = counts.sum(axis=1)
        if length in GROWING:
            alive = told & ~ended
            censored = np.zeros_like(counts)
            np.add.at(censored.T, bins[alive, length], belongs[alive])
            seen = seen + censored.sum(axis=1)
            density, reach = _kaplan_meier(counts, censored)
            reaches.append(_log_shrunk(reach, seen, 1.0 - np.arange(BINS) / BINS))
        else:
            density = counts / np.maximum(seen, 1e-12)[:, None]
        points.append(_log_shrunk(density, seen, np.full(BINS, 1.0 / BINS)))
    return np.array(points), np.array(reaches)


def _histogram(at: Ints, belongs: Floats) -> Floats:
    """Smoothed counts, shape (classes, bins); what would fall off an end stays in it."""
    counts = np.zeros((BINS, belongs.shape[1]))
    for offset, weight in zip((-1, 0, 1), _KERNEL, strict=True):
        np.add.at(counts, np.clip(at + offset, 0, BINS - 1), weight * belongs)
    return counts.T


def _kaplan_meier(ended: Floats, censored: Floats) -> tuple[Floats, Floats]:
    """Density and chance to get as far, by class and bin. A session censored in a bin was at risk in half of it."""
    after = np.cumsum((ended + censored)[:, ::-1], axis=1)[:, ::-1]
    at_risk = after - 0.5 * censored
    hazard = np.divide(ended, at_risk, out=np.zeros_like(ended), where=at_risk > 0)
    beyond = np.cumprod(1.0 - np.clip(hazard, 0.0, 1.0), axis=1)
    reach = np.concatenate((np.ones((len(ended), 1)), beyond[:, :-1]), axis=1)
    density = reach - beyond
    # What nobody has seen the end of ends somewhere in the last bin that was reached, or beyond it.
    density[:, -1] += beyond[:, -1]
    return density, reach


def _log_shrunk(values: Floats, seen: Floats, flat: Floats) -> Floats:
    """Log of the classes' values (classes, bins), drawn to the mean of all, and that to ``flat``; all the same while
    no class is known well enough.
    """
    total = seen.sum()
    mean = (seen @ values + _FLOOR * flat) / (total + _FLOOR)
    drawn: Floats = np.log((seen[:, None] * values + _SHRINK * mean) / (seen[:, None] + _SHRINK))
    told = seen >= LEAST_SESSIONS
    if not told.any():
        return np.zeros_like(drawn)
    # Where a class hardly showed the length, it hardly counts: an odd gap is no sign of a class that has none.
    trust = np.minimum(1.0, seen / LEAST_SESSIONS)[:, None]
    neutral: Floats = trust * drawn + (1.0 - trust) * drawn[told].max(axis=0)
    return neutral
