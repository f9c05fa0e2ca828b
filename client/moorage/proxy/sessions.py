"""The sessions that this process serves: entered with their first request, over when told, idle, or done."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import grpc

from moorage import AsyncClient
from moorage.aio_session import AsyncSession
from moorage.errors import MoorageError, from_rpc_error
from moorage.messages import AdmitFields, OutcomeLike
from moorage.proxy.identity import Ticket
from moorage.proxy.log import line, logger
from moorage.proxy.usage import TokenUsage
from moorage.state import Turn
from moorage.v1.inspector_pb2 import GetSessionRequest, Session
from moorage.v1.scheduler_pb2 import PHASE_HELD

#: How long a session that went on without the control plane does so before it asks again, in seconds.
UNMANAGED_S = 10.0
#: Longest look at a session in the ledger, in seconds.
LOOK_S = 2.0
#: How long sessions are taken to have turns elsewhere after one was found that had, in seconds.
SHARED_S = 600.0
#: Part of a lease within which everybody who holds a session renews it: clients do so a third of a lease apart.
RENEWED_WITHIN = 0.4


class ProxySession:
    """One session, and what this process has of it. Any number of its requests may be under way."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.handle: AsyncSession | None = None
        self.lock = asyncio.Lock()
        self.active = 0
        self.ends = False
        self.outcome: OutcomeLike | None = None
        self.idle_since = time.monotonic()
        self.entered_at = 0.0
        self.refused_at: str | None = None
        self.parting = False

    @property
    def session_id(self) -> str:
        """The session's id."""
        return self.ticket.session_id

    def report(self, turn: Turn, usage: TokenUsage | None) -> None:
        """The request of `turn` is done. Of requests that overlap, the last to begin speaks for the session."""
        if self.handle is None or self.handle.turn != turn.number:
            return
        usage = usage or TokenUsage()
        self.handle.report(
            phase="RUNNING" if self.active > 1 else "TOOL_WAIT",
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
        )


@dataclass(frozen=True, slots=True)
class Finished:
    """What became of a session that should end: over, or over with its last request."""

    released: bool
    pending: bool = False


class SessionBook:
    """All of them, by id. State in memory only: another process admits the same session again, and finds it at home.

    Args:
        client: whose sessions they are.
        max_hold_s: longest time that a request waits for its session to get in.
        lease_s: lease to ask for; None takes the pool's.
    """

    def __init__(self, client: AsyncClient, *, max_hold_s: float, lease_s: float | None = None) -> None:
        self._client = client
        self._max_hold_s = max_hold_s
        self._lease_s = lease_s
        self._sessions: dict[str, ProxySession] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._parting: set[asyncio.Task[None]] = set()
        self._shared_until = 0.0

    def __len__(self) -> int:
        return len(self._sessions)

    def arrive(self, ticket: Ticket) -> ProxySession:
        """A request begins; `depart` ends it."""
        session = self._sessions.get(ticket.session_id)
        if session is None:
            session = self._sessions[ticket.session_id] = ProxySession(ticket)
        session.active += 1
        return session

    async def place(self, session: ProxySession, ticket: Ticket, deadline: float) -> Turn:
        """Where the request goes, waiting until `deadline` (monotonic) at most. Raises MoorageError."""
        async with session.lock:
            handle = await self._opened(session, ticket, deadline)
            await self._catch_up(session, handle)
            turn = await handle.place(prompt_tokens=ticket.prompt_tokens, wait_timeout=_left(deadline))
            if turn.managed and _home(turn) == session.refused_at:
                # Nobody listens at its home, which the control plane does not know yet. A session that fails tells.
                session.handle, session.refused_at = None, None
                await handle.release("FAILED")
                handle = await self._opened(session, ticket, deadline)
                turn = await handle.place(prompt_tokens=ticket.prompt_tokens, wait_timeout=_left(deadline))
            return turn

    def deadline(self) -> float:
        """How long a request that arrives now may wait."""
        return time.monotonic() + self._max_hold_s

    def refused(self, session: ProxySession, turn: Turn) -> None:
        """Nobody listened at the endpoint of `turn`: the next place() goes elsewhere."""
        session.refused_at = _home(turn)

    def depart(self, session: ProxySession, ticket: Ticket, outcome: OutcomeLike, *, answered: bool) -> None:
        """A request is over; with the last one of a session that ends, the session is.

        A request that was not `answered` may come again: it does not end a session that has a name.
        """
        session.active -= 1
        session.ends = session.ends or (ticket.ends and (answered or not ticket.named))
        session.idle_since = time.monotonic()
        if session.active:
            return
        if session.handle is None:
            self._forget(session)
        elif session.ends:
            self._end(session, session.outcome or outcome)

    async def finish(self, session_id: str, outcome: OutcomeLike) -> Finished:
        """Ends a session, whoever serves it. Raises MoorageError."""
        session = self._sessions.get(session_id)
        if session is not None and session.active:
            session.ends, session.outcome = True, outcome
            return Finished(released=False, pending=True)
        if session is not None and session.handle is not None and session.handle.managed and not session.handle.lost:
            self._forget(session)
            answer = await session.handle.release(outcome)
            return Finished(released=answer is not None and answer.released)
        if session is not None:
            self._forget(session)
        return Finished(await self._finish_elsewhere(session_id, outcome))

    async def _finish_elsewhere(self, session_id: str, outcome: OutcomeLike) -> bool:
        """Of a session that another process serves. Its Admit again tells the token that a Release needs."""
        found = await self._look(session_id, strict=True)
        if found is None:
            return False
        token = ""
        if found.phase != PHASE_HELD:
            token = (await self._client.admit(session_id, workload_class=found.declared_class)).lease.token
        return (await self._client.release(session_id, outcome=outcome, lease_token=token)).released

    async def sweep(self, pause_s: float) -> None:
        """Ends idle sessions, for ever."""
        while True:
            await asyncio.sleep(pause_s)
            now = time.monotonic()
            for session in [*self._sessions.values()]:
                handle = session.handle
                if session.active or session.parting or handle is None:
                    continue
                if handle.lost or (not handle.managed and now - session.idle_since > session.ticket.policy.idle_s):
                    self._forget(session)
                elif now - session.idle_since >= session.ticket.policy.idle_s - RENEWED_WITHIN * handle.lease_ttl:
                    session.parting = True
                    task = asyncio.create_task(self._part(session, handle))
                    self._parting.add(task)
                    task.add_done_callback(self._parting.discard)

    async def _part(self, session: ProxySession, handle: AsyncSession) -> None:
        """Ends an idle session, unless another process serves it too: then its lease is renewed although not by us."""
        since = session.idle_since
        try:
            await handle.hand_over()
            before = await self._look(session.session_id)
            rest = session.ticket.policy.idle_s - (time.monotonic() - since)
            await asyncio.sleep(max(RENEWED_WITHIN * handle.lease_ttl, rest))
            after = await self._look(session.session_id)
        finally:
            session.parting = False
        if session.active or session.idle_since != since:
            return
        self._forget(session)
        if (
            before is None
            or after is None
            or after.lease.expire_time.ToMilliseconds() > (before.lease.expire_time.ToMilliseconds())
        ):
            logger.debug(line("session_left", session=session.session_id))
            return
        await handle.release("COMPLETED")

    async def close(self, *, leave: bool) -> None:
        """Ends what is still here: left to other processes, or released as ABORTED."""
        for task in self._parting:
            task.cancel()
        sessions, self._sessions = [*self._sessions.values()], {}
        handles = [session.handle for session in sessions if session.handle is not None]
        ends = [handle.hand_over() if leave else handle.release("ABORTED") for handle in handles]
        await asyncio.gather(*ends, *self._ending.values(), *self._parting, return_exceptions=True)

    async def _opened(self, session: ProxySession, ticket: Ticket, deadline: float) -> AsyncSession:
        if (ending := self._ending.get(session.session_id)) is not None:
            # An Admit that overtook the Release would get a session that is about to end.
            await asyncio.wait([ending])
        handle = session.handle
        if handle is not None and not handle.managed and time.monotonic() - session.entered_at > UNMANAGED_S:
            handle = None
        if handle is None:
            handle = await self._enter(ticket, deadline)
            session.handle, session.entered_at = handle, time.monotonic()
        return handle

    async def _catch_up(self, session: ProxySession, handle: AsyncSession) -> None:
        """Numbers the next turn after those that went through other processes: reports of old turns count for nothing.

        Looked up where a turn first could follow one of those, and at every turn while other sessions had some lately.
        """
        ticket = session.ticket
        if not ticket.named or ticket.policy.single_turn or not handle.managed or handle.turn is None:
            return
        if handle.turn > 0 and time.monotonic() > self._shared_until:
            return
        found = await self._look(session.session_id)
        if found is not None and found.HasField("turn") and found.turn > handle.turn:
            self._go_on_from(found, handle)

    def _go_on_from(self, found: Session, handle: AsyncSession) -> None:
        self._shared_until = time.monotonic() + SHARED_S
        handle.resume(found.turn + 1)

    async def _enter(self, ticket: Ticket, deadline: float) -> AsyncSession:
        fields: AdmitFields = {
            "workload_class": ticket.workload_class or None,
            "group_id": ticket.group_id,
            "group_size": ticket.group_size,
            "prompt_tokens": ticket.prompt_tokens,
            "max_context_tokens": ticket.max_context_tokens,
            "lease_ttl": self._lease_s,
        }
        handle = self._client.session(
            ticket.session_id, wait_timeout=_left(deadline), readmit=True, keep_place=ticket.named, **fields
        )
        if not ticket.named or ticket.policy.single_turn:
            return await handle.__aenter__()
        # It may live already, served by another process until now: then its turns go on from there.
        look = asyncio.create_task(self._look(ticket.session_id))
        try:
            await handle.__aenter__()
            found = await look if handle.managed else None
        finally:
            look.cancel()
        if found is not None and found.HasField("turn"):
            self._go_on_from(found, handle)
        return handle

    async def _look(self, session_id: str, *, strict: bool = False) -> Session | None:
        """What the ledger says of a session; None where it knows none, or, unless `strict`, does not answer."""
        request = GetSessionRequest(pool=self._client.pool, session_id=session_id)
        try:
            return (await self._client.inspector.GetSession(request, timeout=LOOK_S)).session
        except grpc.RpcError as error:
            if strict and error.code() is not grpc.StatusCode.NOT_FOUND:
                raise from_rpc_error(error) from error
            return None

    def _forget(self, session: ProxySession) -> None:
        if self._sessions.get(session.session_id) is session:
            del self._sessions[session.session_id]

    def _end(self, session: ProxySession, outcome: OutcomeLike) -> None:
        self._forget(session)
        assert session.handle is not None
        task = asyncio.create_task(_released(session.handle, outcome))
        self._ending[session.session_id] = task
        task.add_done_callback(lambda _: self._ending.pop(session.session_id, None))


async def _released(handle: AsyncSession, outcome: OutcomeLike) -> None:
    try:
        await handle.release(outcome)
    except MoorageError as error:
        logger.warning(line("release_failed", session=handle.session_id, error=error))


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _home(turn: Turn) -> str:
    return f"{turn.placement.instance_id} {turn.endpoint}"
