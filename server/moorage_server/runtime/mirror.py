"""The epoch holder's mirror of a pool's living sessions, kept by the changes since the last look."""

from __future__ import annotations

import math
from collections.abc import Mapping

from moorage_server.core.controller import Happened, Row
from moorage_server.core.view import Ask, Ended
from moorage_server.store.records import Change


class Mirror:
    """Living sessions by id, and what happened to sessions since it was last asked."""

    def __init__(self) -> None:
        self.revision = 0
        self.rows: dict[str, Row] = {}
        #: Living sessions without a home, as they were when they lost it.
        self._away: dict[str, Row] = {}
        self._happened = Happened()
        self._declared: set[str] = set()

    def apply(self, changes: list[Change]) -> None:
        """Takes in changed sessions."""
        for change in changes:
            if change.now is None:
                self._end(change.session_id, change.ended)
            else:
                self._declare(change.session_id, change.now)
                if change.now["st"] == "live":
                    self._update(change.session_id, change.now)
                elif (row := self.rows.pop(change.session_id, None)) is not None:
                    self._away[change.session_id] = row

    def take(self) -> Happened:
        """What happened since the last call."""
        happened, self._happened = self._happened, Happened()
        return happened

    def inherit(self) -> None:
        """What living sessions did until now, the last holder has counted. Ends it has not: reading one removes it."""
        self._happened = Happened(ended=self._happened.ended)

    def _declare(self, sid: str, now: Mapping[str, str]) -> None:
        if sid in self._declared:
            return
        self._declared.add(sid)
        ask = Ask.decode(sid, now["class"], now.get("ask", ""))
        if ask.declared_tokens is not None:
            self._happened.declared.append((now["class"], float(ask.declared_tokens)))

    def _update(self, sid: str, now: Mapping[str, str]) -> None:
        tokens = float(now["ctx"])
        row = self.rows.get(sid) or self._away.pop(sid, None)
        if row is None:
            ask = Ask.decode(sid, now["class"], now.get("ask", ""))
            start = tokens if ask.prompt_tokens is None else float(ask.prompt_tokens)
            ceiling = math.inf if ask.max_context_tokens is None else float(ask.max_context_tokens)
            declared = math.nan if ask.expected_tokens is None else float(ask.expected_tokens)
            announced = ask.expected_turns is not None and ask.expected_turns > 1
            row = Row(now["class"], now["inst"], start, start, 0, True, 0, ceiling, declared, announced)
        self.rows[sid] = row
        self._rename(row, now["class"])
        self._grow(row, tokens)
        row.instance = now["inst"]
        row.reported_ms = int(now["ctx_at"])
        row.growing = now["phase"] != "TOOL_WAIT"
        row.shared_blocks = int(now["shr"])
        # Turns count from 0. A tool gap alone says nothing: callers tell of one after their last turn too.
        row.returns = row.returns or int(now.get("turn") or 0) > 0

    def _rename(self, row: Row, name: str) -> None:
        """A session that turned out to be of another class takes along what it gained."""
        if row.workload_class != name:
            grown, gained = self._happened.grown, row.tokens - row.start_tokens
            grown[row.workload_class] = grown.get(row.workload_class, 0.0) - gained
            grown[name] = grown.get(name, 0.0) + gained
            row.workload_class = name

    def _grow(self, row: Row, tokens: float) -> None:
        if tokens > row.tokens:
            grown = self._happened.grown
            grown[row.workload_class] = grown.get(row.workload_class, 0.0) + tokens - row.tokens
        row.tokens = tokens

    def _end(self, sid: str, ended: Mapping[str, str] | None) -> None:
        self._declared.discard(sid)
        away = self._away.pop(sid, None)
        row = self.rows.pop(sid, away)
        if ended is None or not ended.get("admitted"):
            return
        final = float(ended["ctx"]) if ended.get("ctx") else None
        if row is None:
            ask = Ask.decode(sid, ended["class"], ended.get("ask", ""))
            start = float(ask.prompt_tokens or 0)
            declared = math.nan if ask.expected_tokens is None else float(ask.expected_tokens)
            row = Row(ended["class"], "", start, start, 0, False, 0, declared=declared)
        self._rename(row, ended["class"])
        if final is not None and final > row.start_tokens:
            self._grow(row, final)
        else:
            # Still the prompt that was booked: nobody said how far the session got.
            final = None
        self._happened.ended.append(Ended(ended["class"], ended["outcome"], row.start_tokens, final, row.declared))
