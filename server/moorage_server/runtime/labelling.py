"""Follows what sessions do, for the epoch's holder, and says whose label their behaviour contradicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moorage_server.core import config as cfg
from moorage_server.core import labels, queue
from moorage_server.core.config import PoolConfig
from moorage_server.core.labels import NOTHING, Behaviour, Inferred, Memory, Model
from moorage_server.core.view import Ask, Pool
from moorage_server.store.records import Change, Relabel

#: Time between two fits of the profiles, milliseconds.
_FIT_MS = 5_000
#: Sessions that one epoch says something of; the others come next.
_MOST = 500
#: A confidence that moved by less is not worth writing down.
_TELLING = 0.1


@dataclass(slots=True)
class _Known:
    """A living or held session."""

    ask: Ask
    declared: str
    in_force: str
    seen: Behaviour
    turns: int | None = None
    moves: int = 0
    contradicted: bool = False
    #: What the ledger was last told.
    told: Inferred = NOTHING
    judged: bool = False


class Labelling:
    """What is known of the sessions of one pool, kept by the same changes as the mirror."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        #: Label, behaviour, and whether it was known already that the one contradicts the other.
        self._ended: list[tuple[str, Behaviour, bool]] = []
        self._model: Model | None = None
        self._fitted_ms = 0
        self._contradicted = 0

    def profiles(self, config: PoolConfig) -> Model | None:
        """What servers judge arrivals by; None where nobody's class may be inferred."""
        if config.class_inference == cfg.INFER_OFF or self._model is None:
            return None
        return self._model.hints()

    def apply(self, changes: list[Change]) -> None:
        """Takes in changed sessions."""
        for change in changes:
            before = self._known.pop(change.session_id, None)
            if change.now is not None:
                self._known[change.session_id] = _follow(before, change.session_id, change.now)
            elif change.ended is not None and change.ended["outcome"] == "COMPLETED":
                self._ended.append(_over(before, change.session_id, change.ended))

    def step(self, memory: Memory, view: Pool) -> list[Relabel]:
        """One epoch: learns from who ended, judges who changed, and says what the ledger is to be told."""
        config = view.config
        if config.classes:
            memory.keep(config.classes)
        for declared, seen, _ in self._ended:
            if label := _label(view, declared):
                memory.learn(label, seen)
        ended, self._ended = self._ended, []
        self._judge_ended(view, ended)
        if (ended or self._model is None) and view.now_ms - self._fitted_ms >= _FIT_MS:
            living = [(_label(view, k.declared), k.seen) for k in self._known.values()]
            self._model, self._fitted_ms = labels.fit(memory, living), view.now_ms
            for known in self._known.values():
                known.judged = False
        return self._judge(view)

    def take_contradicted(self) -> int:
        """Sessions that are over, and that only their end showed to be mislabelled, since the last call."""
        count, self._contradicted = self._contradicted, 0
        return count

    def _judge_ended(self, view: Pool, ended: list[tuple[str, Behaviour, bool]]) -> None:
        told = [_label(view, declared) for declared, _, _ in ended]
        wanted = labels.candidates(view.config, self._model)
        found = labels.judge(self._model, [seen for _, seen, _ in ended], told, wanted)
        for (declared, _, known), inferred in zip(ended, found, strict=True):
            self._contradicted += not known and labels.contradicts(view.config, declared, inferred)

    def _judge(self, view: Pool) -> list[Relabel]:
        wanted = labels.candidates(view.config, self._model)
        waiting = {sid: k for sid, k in self._known.items() if not k.judged}
        found = labels.judge(
            self._model,
            [k.seen for k in waiting.values()],
            [_label(view, k.declared) for k in waiting.values()],
            wanted,
        )
        items: list[Relabel] = []
        for (sid, known), inferred in zip(waiting.items(), found, strict=True):
            if len(items) == _MOST:
                break
            known.judged = True
            if (item := _tell(view, sid, known, inferred)) is not None:
                items.append(item)
        return items


def _tell(view: Pool, sid: str, known: _Known, found: Inferred) -> Relabel | None:
    """What the ledger is to be told of one session; None where that is nothing new."""
    to = ""
    if known.moves < labels.MOST_RELABELS:
        to = labels.overruled(view.config, known.declared, known.in_force, found)
    contradicted = labels.contradicts(view.config, known.declared, found)
    same = found.name == known.told.name and abs(found.confidence - known.told.confidence) < _TELLING
    if not to and (same or not found.name) and contradicted <= known.contradicted:
        return None
    known.told, known.contradicted = found, known.contradicted or contradicted
    step = queue.step(view, to) if to else 0
    return Relabel(
        sid, known.in_force, to, found, contradicted, queue.step(view, known.in_force), step, queue.CREDIT * step
    )


def _label(view: Pool, declared: str) -> str:
    """The class that a label names. Without configured classes the ledger's table says which names are any."""
    label = labels.usable(view.config, declared)
    return label if view.config.classes or label in view.classes else ""


def _follow(before: _Known | None, sid: str, now: Mapping[str, str]) -> _Known:
    """A session as it is now."""
    ask = before.ask if before is not None else Ask.decode(sid, now["class"], now.get("ask", ""))
    turns = _most(None if before is None else before.turns, now.get("turn"))
    reported = bool(now.get("admitted")) and int(now.get("ctx_at") or 0) > int(now["admitted"])
    seen = labels.behaviour(
        ask,
        context=float(now["ctx"]) if reported else None,
        turns=turns,
        gaps=int(now.get("gapn") or 0),
        gap_ms=int(now.get("gap") or 0),
    )
    return _Known(
        ask,
        now.get("declared", ""),
        now["class"],
        seen,
        turns,
        int(now.get("moves") or 0),
        now.get("mis") == "1",
        Inferred(now["inf"], float(now["conf"])) if now.get("inf") else NOTHING,
        judged=before is not None and before.judged and before.seen == seen and before.in_force == now["class"],
    )


def _over(before: _Known | None, sid: str, ended: Mapping[str, str]) -> tuple[str, Behaviour, bool]:
    """Label and behaviour of a session that is complete, and whether the one was found to contradict the other."""
    ask = before.ask if before is not None else Ask.decode(sid, ended["class"], ended.get("ask", ""))
    final = float(ended["ctx"]) if ended.get("ctx") else None
    if final is not None and final <= (ask.prompt_tokens or 0):
        # Still the prompt that was booked: nobody said how far the session got.
        final = None
    seen = labels.behaviour(
        ask,
        context=final,
        turns=_most(None if before is None else before.turns, ended.get("turn")),
        gaps=int(ended.get("gapn") or 0),
        gap_ms=int(ended.get("gap") or 0),
        over=True,
    )
    return ended.get("declared", ""), seen, ended.get("mis") == "1"


def _most(before: int | None, turn: str | None) -> int | None:
    """Turns begun: reports may come late, but turns are not taken back."""
    now = int(turn) + 1 if turn else None
    return now if before is None else before if now is None else max(before, now)
