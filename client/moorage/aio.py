"""The client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from moorage import aio_session as sessions
from moorage.aio_session import AsyncSession
from moorage.channel import ChannelOptions, open_aio_channel, resolve_target
from moorage.credentials import Proof
from moorage.dispatch import AsyncDispatch
from moorage.errors import MoorageError, from_rpc_error
from moorage.flows import Call
from moorage.messages import (
    AdmitFields,
    OutcomeLike,
    admit_request,
    heartbeat_request,
    place_request,
    release_request,
)
from moorage.renewal import AsyncRenewer
from moorage.settings import DEFAULT_MAX_WAIT, ClientSettings, OutageLog
from moorage.state import Fallback, OnCancel, OnUnavailable
from moorage.v1 import inspector_pb2_grpc, operator_pb2_grpc, scheduler_pb2_grpc
from moorage.v1.scheduler_pb2 import (
    OUTCOME_ABORTED,
    AdmitResponse,
    HeartbeatResponse,
    InstanceSnapshot,
    PlaceResponse,
    PrefixUpdate,
    ReleaseResponse,
    SessionProgress,
    Usage,
)

if TYPE_CHECKING:
    # Names that the generated stubs have for type checkers only.
    from moorage.v1.inspector_pb2_grpc import InspectorServiceAsyncStub
    from moorage.v1.operator_pb2_grpc import OperatorServiceAsyncStub
    from moorage.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub


class AsyncClient:
    """Client of a moorage control plane for asyncio, fit for thousands of concurrent sessions; see also `Client`.

    It owns one channel and, while sessions live, one task that renews all their leases. It may be made anywhere, but
    belongs to the event loop that first uses it. Not safe across a fork: make the client in the child.

    Args: as `Client`.

    Example:
        >>> async with AsyncClient("127.0.0.1:50061") as client:  # doctest: +SKIP
        ...     async with client.session("sess-1", workload_class="rlvr", prompt_tokens=156) as s:
        ...         answer = await generate(s.endpoint, prompt)
        ...         s.report(cached_tokens=answer.cached, output_tokens=answer.output)
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        pool: str = "default",
        token: str | None = None,
        token_file: str | None = None,
        tls: bool = False,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        plaintext_token: bool = False,
        credentials: grpc.ChannelCredentials | None = None,
        timeout: float = 5.0,
        on_unavailable: OnUnavailable = "fail",
        fallback: Fallback | None = None,
        release_timeout: float = 10.0,
        outage_patience: float = 30.0,
        options: ChannelOptions = (),
    ) -> None:
        target = resolve_target(target)
        proof = Proof(token, token_file, tls, ca, cert, key, plaintext_token).resolved()
        credentials = credentials or proof.to_credentials()
        self._settings = ClientSettings(
            target=target,
            pool=pool,
            token=proof.to_token(target, secure=credentials is not None),
            credentials=credentials,
            timeout=timeout,
            release_timeout=release_timeout,
            outage_patience=outage_patience,
            on_unavailable=on_unavailable,
            fallback=fallback,
            options=options,
        )
        self._renewer = AsyncRenewer(self._perform, timeout)
        self._outages = OutageLog(self._settings.target)
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Releases sessions that are still open as ABORTED, then closes the channel."""
        living = self._renewer.roster.living()
        for state in living:
            self._renewer.discard(state)
        await asyncio.gather(*(sessions.release(state, OUTCOME_ABORTED, self._perform) for state in living))
        self._closed = True
        if "_channel" in self.__dict__:
            await self._channel.close()

    @property
    def target(self) -> str:
        """The server."""
        return self._settings.target

    @property
    def pool(self) -> str:
        """Pool of every call that names no other."""
        return self._settings.pool

    @cached_property
    def _channel(self) -> grpc.aio.Channel:
        # grpc.aio binds a channel to the loop that runs when it is made.
        settings = self._settings
        return open_aio_channel(settings.target, settings.credentials, settings.token, settings.options)

    @cached_property
    def scheduler(self) -> SchedulerServiceAsyncStub:
        """Generated stub: no deadline and no error mapping of its own."""
        return cast("SchedulerServiceAsyncStub", scheduler_pb2_grpc.SchedulerServiceStub(self._channel))

    @cached_property
    def inspector(self) -> InspectorServiceAsyncStub:
        """Generated stub: no deadline and no error mapping of its own."""
        return cast("InspectorServiceAsyncStub", inspector_pb2_grpc.InspectorServiceStub(self._channel))

    @cached_property
    def operator(self) -> OperatorServiceAsyncStub:
        """Generated stub: no deadline and no error mapping of its own."""
        return cast("OperatorServiceAsyncStub", operator_pb2_grpc.OperatorServiceStub(self._channel))

    def session(
        self,
        session_id: str,
        *,
        pool: str | None = None,
        max_wait: float = DEFAULT_MAX_WAIT,
        wait_timeout: float | None = None,
        readmit: bool = False,
        keep_place: bool = False,
        on_cancel: OnCancel = "ABORTED",
        fallback: Fallback | None = None,
        **fields: Unpack[AdmitFields],
    ) -> AsyncSession:
        """A session, to be entered with `async with`. Nothing is sent before that.

        Args:
            session_id: unique in its pool, 1 to 256 bytes.
            pool: None takes the client's.
            max_wait: seconds that one call waits in the queue, at most 600; the wait goes on in the next call.
            wait_timeout: seconds to wait in all before Held is raised; None waits for ever.
            readmit: a session whose lease is lost enters again at its next place(), waiting as on entry.
            keep_place: leave the place in the queue when Held is raised, for a caller that comes back soon.
            on_cancel: how the session ends when its caller is cancelled or interrupted, waiting or inside: "PAUSED"
                keeps the seniority of one that stops early and goes on later.
            fallback: where the session goes unmanaged; None takes the client's.
            fields: what the session declares, see `AdmitFields`.

        Raises on entry:
            Held, Rejected, Unavailable, InvalidArgument, PermissionDenied, Unauthenticated.
        """
        options = self._settings.session_options(
            session_id,
            fields,
            pool=pool,
            max_wait=max_wait,
            wait_timeout=wait_timeout,
            readmit=readmit,
            keep_place=keep_place,
            on_cancel=on_cancel,
            fallback=fallback,
        )
        return AsyncSession(options, self._perform, self._renewer, self._outages)

    async def admit(
        self,
        session_id: str,
        *,
        max_wait: float = 0.0,
        pool: str | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
        **fields: Unpack[AdmitFields],
    ) -> AdmitResponse:
        """Asks once for a session to enter; HOLD and REJECT are answers. Arguments and errors as `Client.admit`."""
        request = admit_request(self._pool(pool), session_id, fields, max_wait=max_wait, request_id=request_id)
        response: AdmitResponse = await self._call("Admit", request, max_wait + self._timeout(timeout))
        return response

    async def place(
        self,
        session_id: str,
        *,
        lease_token: str,
        turn: int | None = None,
        prompt_tokens: int | None = None,
        prefix_hashes: Sequence[int] = (),
        max_wait: float = 0.0,
        pool: str | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> PlaceResponse:
        """Asks once where a living session's next request goes. Arguments and errors as `Client.place`."""
        request = place_request(
            self._pool(pool),
            session_id,
            lease_token=lease_token,
            turn=turn,
            prompt_tokens=prompt_tokens,
            prefix_hashes=prefix_hashes,
            max_wait=max_wait,
            request_id=request_id,
        )
        response: PlaceResponse = await self._call("Place", request, max_wait + self._timeout(timeout))
        return response

    async def release(
        self,
        session_id: str,
        *,
        outcome: OutcomeLike,
        lease_token: str = "",
        usage: Usage | None = None,
        pool: str | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> ReleaseResponse:
        """Ends a session, or takes a held one out of the queue. Arguments and errors as `Client.release`."""
        request = release_request(
            self._pool(pool),
            session_id,
            outcome=outcome,
            lease_token=lease_token,
            usage=usage,
            request_id=request_id,
        )
        response: ReleaseResponse = await self._call("Release", request, self._timeout(timeout))
        return response

    async def heartbeat(
        self,
        *,
        instances: Iterable[InstanceSnapshot] = (),
        sessions: Iterable[SessionProgress] = (),
        prefixes: Iterable[PrefixUpdate] = (),
        pool: str | None = None,
        timeout: float | None = None,
    ) -> HeartbeatResponse:
        """Reports snapshots and progress, at most 1,000 items in all. Arguments as `Client.heartbeat`."""
        request = heartbeat_request(self._pool(pool), instances=instances, sessions=sessions, prefixes=prefixes)
        response: HeartbeatResponse = await self._call("Heartbeat", request, self._timeout(timeout))
        return response

    def dispatch(self) -> AsyncDispatch:
        """A stream for a router's many calls, several times cheaper for the server than one by one.

        See `AsyncDispatch`. To be used with `async with`, in the loop of the client; it opens with its first call.
        """
        settings = self._settings

        def open_stream() -> Any:
            if self._closed:
                raise MoorageError("the client is closed")
            header = (settings.token.header(),) if settings.token else ()
            return self.scheduler.Dispatch(metadata=header)

        return AsyncDispatch(open_stream, settings.pool, settings.timeout)

    def _pool(self, pool: str | None) -> str:
        return self._settings.pool if pool is None else pool

    def _timeout(self, timeout: float | None) -> float:
        return self._settings.timeout if timeout is None else timeout

    async def _perform(self, call: Call) -> Any:
        return await self._call(call.method, call.request, call.timeout)

    async def _call(self, method: str, request: Message, timeout: float) -> Any:
        if self._closed:
            raise MoorageError("the client is closed")
        try:
            response = await getattr(self.scheduler, method)(request, timeout=timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.CancelledError as error:
            # grpc.aio cancels what waits on a channel that is closed; nobody cancelled the task.
            task = asyncio.current_task()
            if self._closed and not (task and task.cancelling()):
                raise MoorageError("the client is closed") from error
            raise
        self._outages.ended()
        return response
