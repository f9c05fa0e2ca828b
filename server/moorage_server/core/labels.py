"""What a session's behaviour says of its class, where the label is missing or wrong.

A session is seen as a few lengths: what it asked for when it came (prompt, expected output, expected turns, largest
context), and what it did since (turns, tokens gained per turn, mean tool gap). Each is a bin of half an octave, so that
heavy tails weigh as much as anything else. Nothing that depends on the load is looked at: no rates, no times but those
that a caller spends in its own tools.

A class's profile is a histogram per length, fitted to the last labelled sessions that ended and to those that live. Two
things would spoil a plain count. Labels are wrong now and then: so the fit is an EM that lets each session belong to
the class its behaviour points to, its label being one more piece of evidence, and the share of wrong labels being
estimated along with the profiles. And the first sessions to end are the short ones (policy.md section 4, note 1): so
what still lives counts as censored, and turns and growth are Kaplan-Meier estimates.

Naive Bayes judges from what is known so far; what is not known does not count, and a turn or a token that may still be
followed by others counts as "at least". Confidence is kept honest three ways: a profile of few sessions is drawn
towards the mean of all, no single length counts for more than a bounded factor, and classes are equally likely
beforehand, however often they come. The numbers are in ``profiles``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from moorage_server.core import config as cfg
from moorage_server.core import profiles
from moorage_server.core.config import PoolConfig
from moorage_server.core.profiles import BINS, HINTS, LEAST_SESSIONS, MEAN_TURNS, UNKNOWN, WIDTH, Floats, Ints, bin_of

if TYPE_CHECKING:
    from moorage_server.core.view import Ask

#: Confidence from which a session is taken for what it behaves like, if it has no usable label or one that is
#: contradicted.
CONFIDENT = 0.8
#: Chance of being wrong from which behaviour contradicts a label.
CONTRADICTS = 0.95
#: Share of wrong labels: what is assumed with the weight of so many sessions, and between which bounds it is estimated.
_WRONG, _WRONG_SESSIONS, _LEAST_WRONG, _MOST_WRONG = 0.1, 20.0, 0.01, 0.3
#: Times that one session may change its class in its life.
MOST_RELABELS = 3
#: Characters that an encoded behaviour has.
ENCODED = WIDTH + 1

#: Ended sessions that are remembered, of one class at least, and classes that are.
SAMPLES, _LEAST_SAMPLES, MOST_CLASSES = 768, 24, 32
#: Living sessions that a fit looks at.
_LIVING = 1024
_ROUNDS = 6
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijkl"


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Bins of all lengths, ``UNKNOWN`` where nobody said; ``over`` once turns and growth are what they will be."""

    bins: tuple[int, ...]
    over: bool = False

    def encode(self) -> str:
        """One character per length, and one for ``over``."""
        return ("+" if self.over else ".") + "".join("-" if b == UNKNOWN else _DIGITS[b] for b in self.bins)

    @classmethod
    def decode(cls, text: str) -> Behaviour:
        """The reverse of :meth:`encode`."""
        return cls(tuple(UNKNOWN if c == "-" else _DIGITS.index(c) for c in text[1:]), text[0] == "+")


def behaviour(
    ask: Ask,
    *,
    context: float | None = None,
    turns: int | None = None,
    gaps: int = 0,
    gap_ms: int = 0,
    over: bool = False,
) -> Behaviour:
    """A session as it is known so far: ``context`` tokens now, ``turns`` begun, and tool gaps that came to an end."""
    if gaps:
        turns = max(turns or 0, gaps + 1)
    gained = None
    if context is not None and ask.prompt_tokens is not None and turns and (over or turns == 1 or turns >= MEAN_TURNS):
        gained = max(0.0, context - ask.prompt_tokens) / turns
    lengths = (
        ask.prompt_tokens,
        ask.expected_output_tokens,
        ask.expected_turns,
        ask.max_context_tokens,
        gap_ms / gaps if gaps else None,
        turns,
        gained,
    )
    return Behaviour(tuple(UNKNOWN if v is None else bin_of(v) for v in lengths), over)


@dataclass(frozen=True, slots=True)
class Inferred:
    """The class that behaviour points to, empty while nothing can be said, and how sure that is, 0..1.

    ``doubt`` is the chance that the label is wrong: behaviour may rule it out and leave open what is right.
    """

    name: str = ""
    confidence: float = 0.0
    doubt: float = 0.0


NOTHING = Inferred()


@dataclass(slots=True)
class Memory:
    """The last labelled sessions that ended, encoded, by label; the oldest first."""

    samples: dict[str, list[str]] = field(default_factory=dict)

    def keep(self, names: Iterable[str]) -> None:
        """Forgets the labels that are none any more."""
        for gone in set(self.samples) - set(names):
            del self.samples[gone]

    def learn(self, label: str, seen: Behaviour) -> None:
        """One labelled session is over. The classes that come first are remembered, and no more than that."""
        if label not in self.samples and len(self.samples) >= MOST_CLASSES:
            return
        self.samples.setdefault(label, []).append(seen.encode())
        most = max(_LEAST_SAMPLES, SAMPLES // len(self.samples))
        for kept in self.samples.values():
            del kept[:-most]


@dataclass(frozen=True)
class Model:
    """Profiles. Logarithms of densities, shape (lengths, classes, bins); lengths nobody knew are flat."""

    names: tuple[str, ...]
    #: Sessions behind each profile.
    weights: tuple[float, ...]
    points: Floats
    #: Share of labels that are wrong.
    wrong: float = _WRONG
    #: Log chance that a length that only grows gets as far, in the order of ``GROWING``; None where hints alone count.
    reaches: Floats | None = None

    def known(self, name: str) -> bool:
        """Whether enough is known of the class to take somebody for one of it, or for none of it."""
        return name in self.names and self.weights[self.names.index(name)] >= LEAST_SESSIONS

    def hints(self) -> Model:
        """The part that can be judged at entry."""
        return Model(self.names, self.weights, np.round(self.points[:HINTS], 2), self.wrong)


def fit(memory: Memory, living: Sequence[tuple[str, Behaviour]] = ()) -> Model | None:
    """Profiles of the remembered sessions and the ``living`` ones (label, behaviour); None where there is nobody."""
    names = tuple(sorted(memory.samples))
    if not names:
        return None
    index = {name: n for n, name in enumerate(names)}
    stride = max(1, -(-len(living) // _LIVING))
    pairs = [(name, Behaviour.decode(text)) for name, kept in memory.samples.items() for text in kept]
    pairs += [(name, seen) for name, seen in living[::stride] if name in index]
    labels = np.array([index[name] for name, _ in pairs])
    bins = _matrix([seen for _, seen in pairs])
    over = np.array([seen.over for _, seen in pairs])
    belongs, wrong = np.eye(len(names))[labels], _WRONG
    for _ in range(_ROUNDS):
        points, reaches = profiles.counted(bins, over, belongs)
        belongs = profiles.posterior(
            profiles.likelihood(points, reaches, bins, over) + profiles.prior(labels, len(names), wrong)
        )
        astray = float((1.0 - belongs[np.arange(len(labels)), labels])[over].sum())
        wrong = (astray + _WRONG * _WRONG_SESSIONS) / (over.sum() + _WRONG_SESSIONS)
        wrong = float(min(_MOST_WRONG, max(_LEAST_WRONG, wrong)))
    return Model(names, tuple(float(w) for w in belongs[over].sum(axis=0)), points, wrong, reaches)


def judge(
    model: Model | None,
    seen: Sequence[Behaviour],
    labels: Sequence[str],
    candidates: Iterable[str],
    siblings: Sequence[str] = (),
) -> list[Inferred]:
    """What each of ``seen`` is, among ``candidates``. ``labels`` and ``siblings`` (the class of another sample of the
    same prompt) are evidence that may be wrong, or empty.

    Nothing is said of a session that showed nothing, and no label is doubted whose class is not known well enough.
    """
    wanted = [] if model is None else [n for n in sorted(set(candidates)) if n in model.names]
    if model is None or len(wanted) < 2 or not seen:
        return [NOTHING] * len(seen)
    rows = [model.names.index(name) for name in wanted]
    points = model.points[:, rows]
    reaches = None if model.reaches is None else model.reaches[:, rows]
    bins = _matrix(seen)[:, : len(points)]
    position = {name: n for n, name in enumerate(wanted)}

    def evidence(names: Sequence[str]) -> Floats:
        return profiles.prior(
            np.array([position.get(name, UNKNOWN) for name in names], dtype=np.int64), len(wanted), model.wrong
        )

    score = profiles.likelihood(points, reaches, bins, np.array([s.over for s in seen])) + evidence(labels)
    if siblings:
        score = score + evidence(siblings)
    chances = profiles.posterior(score)
    said = (bins != UNKNOWN).any(axis=1)
    found = []
    for n, label in enumerate(labels):
        best = int(np.argmax(chances[n]))
        name = wanted[best]
        vouched = model.known(name) and (not label or (label in position and model.known(label)))
        if not vouched or not (said[n] or (siblings and siblings[n])):
            found.append(NOTHING)
        else:
            doubt = 1.0 - float(chances[n, position[label]]) if label else 0.0
            found.append(Inferred(name, float(chances[n, best]), doubt))
    return found


def usable(config: PoolConfig, declared: str) -> str:
    """The class that a label names, empty for no label and for one that the configuration does not know."""
    if not declared or not config.classes:
        return declared
    named = config.named(declared)
    return "" if named is None else named


def candidates(config: PoolConfig, model: Model | None) -> list[str]:
    """Classes that a session may be taken for. A refused one is none: behaviour alone refuses nobody."""
    if model is None:
        return []
    if not config.classes:
        return list(model.names)
    return [name for name in model.names if name in config.classes and not config.classes[name].refused]


def contradicts(config: PoolConfig, declared: str, found: Inferred) -> bool:
    """Whether behaviour contradicts the label."""
    label = usable(config, declared)
    return bool(label) and found.name not in ("", label) and found.doubt >= CONTRADICTS


def overruled(config: PoolConfig, declared: str, in_force: str, found: Inferred) -> str:
    """The class that a session under ``in_force`` is to be scheduled under instead; empty for no change.

    Who was taken for something once stays that until behaviour says otherwise as surely: doubt alone changes nothing.
    """
    label = usable(config, declared)
    allowed = (cfg.INFER_ALL,) if label else (cfg.INFER_ALL, cfg.INFER_UNLABELLED)
    if config.class_inference not in allowed or found.confidence < CONFIDENT or found.name in ("", in_force):
        return ""
    if label and found.name != label and not contradicts(config, declared, found):
        return ""
    # A class that the operator refuses is refused by its label.
    if label and label in config.classes and config.classes[label].refused:
        return ""
    return found.name


def encode_model(model: Model) -> Mapping[str, object]:
    """What every server needs to judge at entry, as plain values: lengths that nobody knows are left out."""
    told = [n for n in range(len(model.points)) if np.ptp(model.points[n]) > 0]
    rows = {str(n): np.round(model.points[n], 2).tolist() for n in told}
    return {"names": model.names, "weights": [round(w, 1) for w in model.weights], "wrong": model.wrong, "points": rows}


def decode_model(row: Mapping[str, object]) -> Model:
    """The reverse of :func:`encode_model`."""
    names, weights, wrong, rows = row["names"], row["weights"], row["wrong"], row["points"]
    assert isinstance(names, list | tuple)
    assert isinstance(weights, list)
    assert isinstance(wrong, float)
    assert isinstance(rows, dict)
    points = np.zeros((HINTS, len(names), BINS))
    for n, values in rows.items():
        points[int(n)] = values
    return Model(tuple(names), tuple(weights), points, wrong)


def _matrix(seen: Sequence[Behaviour]) -> Ints:
    """Bins, shape (sessions, lengths)."""
    return np.array([s.bins for s in seen], dtype=np.int64).reshape(len(seen), WIDTH)
