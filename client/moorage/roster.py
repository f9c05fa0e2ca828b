"""Which sessions of a client live, when their leases are due, and what the next heartbeats say. No I/O."""

from __future__ import annotations

import itertools
import logging
import math
import random
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from moorage.errors import MoorageError, Unavailable
from moorage.messages import heartbeat_request, to_seconds
from moorage.state import ProgressItem, SessionState
from moorage.v1.scheduler_pb2 import HeartbeatRequest, HeartbeatResponse

logger = logging.getLogger("moorage")

#: Items that a heartbeat may carry.
MAX_ITEMS = 1_000

#: Time within which a finished turn is reported where the server names none, in seconds.
DEFAULT_REPORT_INTERVAL = 1.0


@dataclass(frozen=True, slots=True)
class Batch:
    """One heartbeat: its request, and whose items it carries, in order."""

    request: HeartbeatRequest
    items: list[ProgressItem]


class Roster:
    """The living sessions of one client. Safe for threads.

    All of them renew together, a third of the shortest lease apart, with jitter. Between two renewals only sessions
    with something to report are sent, at most once per interval that the server names.

    Example:
        >>> roster = Roster()
        >>> roster.due_at() is None
        True
    """

    def __init__(self) -> None:
        self._states: dict[SessionState, None] = {}
        self._urgent: dict[SessionState, None] = {}
        self._renew_at = math.inf
        self._report_at = math.inf
        self._report_interval = DEFAULT_REPORT_INTERVAL
        self._failing = False
        self._lock = threading.Lock()

    def add(self, state: SessionState) -> None:
        """From now on the session is renewed."""
        with self._lock:
            self._states[state] = None
            self._renew_at = min(self._renew_at, time.monotonic() + _jitter(state.lease_ttl / 3))

    def discard(self, state: SessionState) -> None:
        """The session is over, lost, or about to be released."""
        with self._lock:
            self._states.pop(state, None)
            self._urgent.pop(state, None)
            if not self._states:
                self._renew_at = self._report_at = math.inf

    def report(self, state: SessionState) -> None:
        """The session has something to report before its next renewal."""
        with self._lock:
            if state in self._states:
                self._urgent[state] = None
                self._report_at = min(self._report_at, time.monotonic() + self._report_interval)

    def living(self) -> list[SessionState]:
        """The sessions at this moment."""
        with self._lock:
            return list(self._states)

    def due_at(self) -> float | None:
        """When the next heartbeat is due, on the monotonic clock; None while no session lives."""
        with self._lock:
            return min(self._renew_at, self._report_at) if self._states else None

    def timeout(self, longest: float) -> float:
        """Deadline of a heartbeat: one that hangs must leave time for another within the lease."""
        with self._lock:
            return min(longest, max(0.5, self._shortest_lease() / 3))

    def take_due(self) -> list[Batch]:
        """The heartbeats that are due now, and schedules the next ones."""
        now = time.monotonic()
        with self._lock:
            if now >= self._renew_at:
                due = list(self._states)
                self._renew_at = now + _jitter(self._shortest_lease() / 3)
            elif now >= self._report_at:
                due = list(self._urgent)
            else:
                return []
            self._urgent.clear()
            self._report_at = math.inf
        return list(_batches(due))

    def acknowledge(self, batch: Batch, response: HeartbeatResponse) -> None:
        """Hands the answers to their sessions; those that are lost leave."""
        if self._failing:
            self._failing = False
            logger.info("leases are renewed again")
        for item, ack in zip(batch.items, response.sessions, strict=False):
            if not item.state.acknowledge(item, ack):
                logger.warning("session %r has lost its lease: %s", item.state.options.session_id, ack.reason)
                self.discard(item.state)
        if response.HasField("next_interval"):
            self._report_interval = max(0.05, to_seconds(response.next_interval))

    def failed(self, batch: Batch, error: MoorageError) -> None:
        """A heartbeat did not arrive: again soon, and what it reported too unless it was refused for good."""
        if self.due_at() is None:
            return
        if not self._failing:
            self._failing = True
            logger.warning("leases of %d sessions could not be renewed, will go on trying: %s", len(batch.items), error)
        if not isinstance(error, Unavailable):
            return
        for item in batch.items:
            item.state.put_back(item)
        with self._lock:
            lease = self._shortest_lease()
            pause = max(error.retry_after or 0.0, min(lease / 10, 5.0))
            self._renew_at = min(self._renew_at, time.monotonic() + _jitter(min(pause, lease / 3)))

    def _shortest_lease(self) -> float:
        return min((state.lease_ttl for state in self._states), default=math.inf)


def _jitter(seconds: float) -> float:
    """Somewhat early, so that clients that started together do not stay together."""
    return seconds * random.uniform(0.8, 1.0)


def _batches(states: Iterable[SessionState]) -> Iterator[Batch]:
    """Heartbeats by pool, none above the limit; a session's items stay together and in order."""
    by_pool: dict[str, list[list[ProgressItem]]] = {}
    for state in states:
        by_pool.setdefault(state.options.pool, []).append(state.collect())
    for pool, groups in by_pool.items():
        chunk: list[ProgressItem] = []
        for group in itertools.chain(groups, [[]]):
            if chunk and (not group or len(chunk) + len(group) > MAX_ITEMS):
                yield Batch(heartbeat_request(pool, sessions=[item.progress for item in chunk]), chunk)
                chunk = []
            chunk += group
