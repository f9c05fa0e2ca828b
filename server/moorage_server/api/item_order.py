"""The order of a stream's calls: those of one session one after the other, those of others not at all."""

from __future__ import annotations

from collections.abc import Callable

from moorage_server.api.item_calls import Item


class ItemOrder:
    """Says by ``start`` which call may be carried out now.

    A call that waits for its turn stands in the ledger's queue: what follows does not wait for it. A Release may be
    what ends the wait, and the Release of another session what its turn depends on.
    """

    def __init__(self, start: Callable[[Item], None]) -> None:
        self._start = start
        #: Of each session, what is not answered yet, oldest first.
        self._lines: dict[tuple[str, str], list[Item]] = {}

    def add(self, item: Item) -> None:
        """A call has come."""
        line = self._lines.get(item.session)
        if line is None:
            self._lines[item.session] = [item]
            self._start(item)
        else:
            line.append(item)
            self._advance(line)

    def moved(self, item: Item) -> None:
        """A call has begun to wait for its turn."""
        self._advance(self._lines[item.session])

    def done(self, item: Item) -> None:
        """A call is answered, in its turn or not; one that was refused before it came here is none of ours."""
        line = self._lines.get(item.session)
        if line is None or item not in line:
            return
        line.remove(item)
        if line:
            self._advance(line)
        else:
            del self._lines[item.session]

    def clear(self) -> None:
        """Nothing is carried out any more."""
        self._lines.clear()

    def _advance(self, line: list[Item]) -> None:
        for item in line:
            if not item.running:
                self._start(item)
            if not item.waiting:
                return
