"""A session as its client knows it. No I/O: `flows` says what to send, the sync and asyncio drivers send it."""

from __future__ import annotations

import enum
import logging
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from moorage.errors import LeaseLost, Unavailable
from moorage.messages import AdmitFields, admit_request, place_request, release_request, to_seconds
from moorage.usage import TurnUsage, UsageLog
from moorage.v1.scheduler_pb2 import (
    OUTCOME_ABORTED,
    PHASE_RUNNING,
    PHASE_TOOL_WAIT,
    AdmitRequest,
    AdmitResponse,
    Hold,
    Lease,
    Outcome,
    Phase,
    Placement,
    PlaceRequest,
    PlaceResponse,
    ReleaseRequest,
    ReleaseResponse,
    SessionAck,
    SessionProgress,
    Usage,
)

logger = logging.getLogger("moorage")

#: What a session does while the control plane can not be reached.
OnUnavailable = Literal["fail", "admit"]

#: Where unmanaged sessions go: a function from session id to endpoint, or endpoints to choose from by session id.
Fallback = Callable[[str], str] | Sequence[str]

#: Lease assumed where the server names none, in seconds.
DEFAULT_LEASE_TTL = 30.0

#: Reasons of a heartbeat that mean a lost lease; any other means that the report itself was refused.
LOST_REASONS = frozenset({"LEASE_STALE", "SESSION_UNKNOWN"})

#: Finished turns of one session in one heartbeat; more wait for the next.
MAX_REPORTS = 100


@dataclass(frozen=True, slots=True)
class Turn:
    """Where a turn's request goes.

    Attributes:
        number: of the turn, from 0.
        placement: instance, endpoint, rank, and prompt tokens expected from its prefix cache.
        moved: the session has a new home, where its prefix is cold.
        managed: False where the control plane did not confirm the placement (`on_unavailable="admit"`).

    Example:
        >>> turn = Turn(0, Placement(instance_id="engine-0", endpoint="http://10.0.0.7:8000"))
        >>> turn.endpoint, turn.moved
        ('http://10.0.0.7:8000', False)
    """

    number: int
    placement: Placement
    moved: bool = False
    managed: bool = True

    @property
    def endpoint(self) -> str:
        """Address of the engine."""
        return self.placement.endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """How a session asks and waits; times in seconds."""

    pool: str
    session_id: str
    fields: AdmitFields
    max_wait: float
    wait_timeout: float | None
    timeout: float
    release_timeout: float
    outage_patience: float
    readmit: bool
    keep_place: bool
    on_unavailable: OnUnavailable
    fallback: Fallback | None


class Stage(enum.Enum):
    """Where a session is, for its client."""

    NEW = enum.auto()
    LIVING = enum.auto()
    LOST = enum.auto()
    UNMANAGED = enum.auto()
    OVER = enum.auto()


@dataclass(frozen=True, slots=True)
class ProgressItem:
    """One item of a heartbeat, and whose it is."""

    state: SessionState
    progress: SessionProgress
    report: TurnUsage | None


class SessionState:
    """Lease, placement and usage of one session. Safe for threads: the renewal reads what the caller's thread writes.

    A call whose answer was not seen leaves its request behind (`asking`, `unresolved`): the server may have acted on
    it, and a repeat under the same request_id tells.

    Example:
        >>> state = SessionState(options)  # doctest: +SKIP
        >>> state.admitted(answer)  # doctest: +SKIP
        >>> state.placement.endpoint  # doctest: +SKIP
        'http://10.0.0.7:8000'
    """

    def __init__(self, options: SessionOptions) -> None:
        self.options = options
        self.stage = Stage.NEW
        self.placement: Placement | None = None
        self.hold: Hold | None = None
        self.workload_class = options.fields.get("workload_class") or ""
        self.lease_token = ""
        self.lease_ttl = DEFAULT_LEASE_TTL
        self.lost: LeaseLost | None = None
        self.outage: Unavailable | None = None
        self.asking: AdmitRequest | None = None
        self.queued = False
        self.unresolved: PlaceRequest | None = None
        self.release: ReleaseRequest | None = None
        self.release_answer: ReleaseResponse | None = None
        self._usage = UsageLog()
        self._phase: Phase.ValueType = PHASE_RUNNING
        self._admitted_at = 0.0
        self._moved = False
        self._lock = threading.Lock()

    # --- admission

    def admit_request(self, max_wait: float, prompt_tokens: int | None = None) -> AdmitRequest:
        """The next Admit, with the prompt as it is now where the session enters again."""
        fields = self.options.fields
        if prompt_tokens is not None:
            fields = {**fields, "prompt_tokens": prompt_tokens}
        return admit_request(self.options.pool, self.options.session_id, fields, max_wait=max_wait)

    def admitted(self, answer: AdmitResponse) -> None:
        """Takes the placement and the lease."""
        with self._lock:
            self._moved = self.placement is not None and not _same_home(self.placement, answer.placement)
            self.placement = answer.placement
            self.workload_class = answer.workload_class or self.workload_class
            self.hold = answer.hold if answer.HasField("hold") else None
            self._take_lease(answer.lease)
            self._admitted_at = time.monotonic()
            self.asking = self.unresolved = self.lost = None
            self.queued = False
            self.stage = Stage.LIVING

    def held(self, hold: Hold) -> None:
        """The session waits in the pool's queue."""
        self.hold = hold
        self.asking = None
        self.queued = True

    def not_known(self) -> None:
        """The server holds neither an admission that was not seen, nor a place in its queue."""
        self.asking = None
        self.queued = False

    @property
    def may_be_known(self) -> bool:
        """The server may hold one of the two."""
        return self.asking is not None or self.queued

    def unmanage(self, outage: Unavailable) -> None:
        """Goes on without the control plane, at the fallback's endpoint."""
        fallback = self.options.fallback
        if fallback is None:
            raise ValueError("an unmanaged session needs a fallback")
        if callable(fallback):
            endpoint = fallback(self.options.session_id)
        else:
            # A digest, not hash(): every process sends the session to the same engine, where its prefix is.
            endpoint = fallback[zlib.crc32(self.options.session_id.encode()) % len(fallback)]
        with self._lock:
            self._moved = self.placement is not None
            self.placement = Placement(endpoint=endpoint)
            self.outage = outage
            self.stage = Stage.UNMANAGED

    # --- turns

    def admission_serves(self, prompt_tokens: int | None, prefix_hashes: Sequence[int]) -> bool:
        """The admission's placement can be the first turn's: it is fresh, and the turn tells nothing new."""
        fields = self.options.fields
        return (
            self._usage.current is None
            and time.monotonic() - self._admitted_at < self.lease_ttl / 3
            and prompt_tokens in (None, fields.get("prompt_tokens"))
            and list(prefix_hashes) in ([], list(fields.get("prefix_hashes") or ()))
        )

    @property
    def turn_number(self) -> int | None:
        """Number of the current turn, from 0; None before the first."""
        return self._usage.current.number if self._usage.current else None

    def place_request(
        self, prompt_tokens: int | None, prefix_hashes: Sequence[int], max_wait: float, request_id: str | None = None
    ) -> PlaceRequest:
        """The Place of the next turn, with the newest token."""
        with self._lock:
            return place_request(
                self.options.pool,
                self.options.session_id,
                lease_token=self.lease_token,
                turn=self._usage.next_number,
                prompt_tokens=prompt_tokens,
                prefix_hashes=prefix_hashes,
                max_wait=max_wait,
                request_id=request_id,
            )

    def placed(self, answer: PlaceResponse) -> None:
        """Takes the placement and the lease, whose token a move has rotated."""
        with self._lock:
            self.placement = answer.placement
            self.hold = answer.hold if answer.HasField("hold") else None
            self._take_lease(answer.lease)
            self._moved = self._moved or answer.moved

    def begin_turn(self, prompt_tokens: int | None = None, *, managed: bool = True) -> Turn:
        """Starts the next turn at the present placement."""
        if prompt_tokens is None and self._usage.current is None:
            prompt_tokens = self.options.fields.get("prompt_tokens")
        with self._lock:
            if self.placement is None:
                raise RuntimeError("the session is not open")
            turn = self._usage.begin(prompt_tokens)
            moved, self._moved = self._moved, False
            self._phase = PHASE_RUNNING
            return Turn(turn.number, self.placement, moved, managed)

    def resume(self, turn: int) -> None:
        """Numbers the next turn `turn` at least."""
        self._usage.least_number = turn

    def finish_turn(self) -> None:
        """Ends the current turn."""
        with self._lock:
            self._usage.finish()

    @property
    def has_reports(self) -> bool:
        """Finished turns wait to be reported."""
        return self._usage.has_unreported

    def record(
        self,
        *,
        phase: Phase.ValueType | None = None,
        prompt_tokens: int | None = None,
        context_tokens: int | None = None,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> bool:
        """Takes what the caller reports of the current turn; True where it should be told to the server soon."""
        with self._lock:
            if phase is None and cached_tokens is not None:
                phase = PHASE_TOOL_WAIT
            turn = self._usage.current or self._usage.begin(self.options.fields.get("prompt_tokens"))
            turn.update(prompt_tokens, cached_tokens, output_tokens, context_tokens)
            waits = phase == PHASE_TOOL_WAIT and self._phase != PHASE_TOOL_WAIT
            # A context that grows is what the server's forecast lives on.
            grew = context_tokens is not None or output_tokens is not None
            self._phase = self._phase if phase is None else phase
            if self._phase == PHASE_TOOL_WAIT:
                self._usage.finish()
            return waits or grew or self._usage.has_unreported

    # --- heartbeats

    def collect(self) -> list[ProgressItem]:
        """What the next heartbeat says: one item for every finished turn not yet reported, and how things stand now."""
        with self._lock:
            reports = self._usage.take(MAX_REPORTS)
            current = self._usage.current
            items = [self._item(turn, turn.cached_tokens, turn) for turn in reports]
            if not reports or reports[-1] is not current:
                items.append(self._item(current, None, None))
            return items

    def _item(self, turn: TurnUsage | None, cached_tokens: int | None, report: TurnUsage | None) -> ProgressItem:
        progress = SessionProgress(
            session_id=self.options.session_id,
            lease_token=self.lease_token,
            phase=self._phase if turn is self._usage.current else PHASE_TOOL_WAIT,
            cached_tokens=cached_tokens,
        )
        if turn is not None:
            progress.turn = turn.number
            if turn.context_tokens is not None:
                progress.context_tokens = turn.context_tokens
            if turn.output_so_far is not None:
                progress.output_tokens = turn.output_so_far
        return ProgressItem(self, progress, report)

    def acknowledge(self, item: ProgressItem, ack: SessionAck) -> bool:
        """Takes the server's answer to one item; False where it says that the session is lost.

        A session is lost only if its newest token is refused. While a Place is on its way, or its answer was not seen,
        the server may have rotated the token: then the refusal proves nothing.
        """
        with self._lock:
            if ack.known:
                if ack.lease.HasField("ttl"):
                    self.lease_ttl = to_seconds(ack.lease.ttl)
                return True
            rotated = item.progress.lease_token != self.lease_token
            if rotated or self.unresolved is not None:
                self._restore(item)
                return True
            if self.stage is not Stage.LIVING or self.release is not None:
                return True
            if ack.reason and ack.reason not in LOST_REASONS:
                logger.warning("a report of session %r was refused: %s", self.options.session_id, ack.reason)
                return True
            self._lose(LeaseLost(f"the lease of session {self.options.session_id!r} is over: {ack.reason}"))
            return False

    def put_back(self, item: ProgressItem) -> None:
        """The heartbeat did not arrive."""
        with self._lock:
            self._restore(item)

    def lose(self, cause: LeaseLost) -> None:
        """The server refused the newest token."""
        with self._lock:
            self._lose(cause)

    # --- the end

    def usage(self) -> Usage:
        """Tokens of all turns so far."""
        with self._lock:
            return self._usage.total()

    def release_request(self, outcome: Outcome.ValueType) -> ReleaseRequest:
        """The Release; the first outcome stands, and a repeat is the same request."""
        with self._lock:
            if self.release is None:
                self.release = release_request(
                    self.options.pool,
                    self.options.session_id,
                    outcome=outcome,
                    lease_token=self.lease_token,
                    usage=self._usage.total(),
                )
            return self.release

    def withdrawal(self, lease_token: str = "") -> ReleaseRequest:
        """A Release for a session that never got to run; without a token it ends a held one only."""
        return release_request(
            self.options.pool, self.options.session_id, outcome=OUTCOME_ABORTED, lease_token=lease_token
        )

    # --- with the lock held

    def _take_lease(self, lease: Lease) -> None:
        self.lease_token = lease.token or self.lease_token
        if lease.HasField("ttl"):
            self.lease_ttl = to_seconds(lease.ttl)

    def _restore(self, item: ProgressItem) -> None:
        if item.report is not None:
            self._usage.put_back(item.report)

    def _lose(self, cause: LeaseLost) -> None:
        self.lost = cause
        self.stage = Stage.LOST


def _same_home(one: Placement, other: Placement) -> bool:
    return (one.instance_id, one.dp_rank, one.incarnation) == (other.instance_id, other.dp_rank, other.incarnation)
