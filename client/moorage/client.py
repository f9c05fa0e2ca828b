"""The client for threads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from google.protobuf.message import Message

from moorage import session as sessions
from moorage.channel import ChannelOptions, open_channel, resolve_target
from moorage.credentials import Proof
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
from moorage.renewal import Renewer
from moorage.session import Session
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


class Client:
    """Client of a moorage control plane, safe for threads. For asyncio see `AsyncClient`.

    It owns one channel and, while sessions live, one daemon thread that renews all their leases. Not safe across a
    fork: make the client in the child.

    Args:
        target: HOST:PORT or any gRPC target, such as "dns:///moorage-headless:50061"; None takes MOORAGE_SERVER, else
            127.0.0.1:50061.
        pool: pool of every call that names no other.
        token: bearer token for every call; None takes token_file, else MOORAGE_TOKEN or MOORAGE_TOKEN_FILE.
        token_file: file that holds the token; read again when it changes.
        tls: use TLS with the CAs that gRPC trusts; implied by ca and cert. Else MOORAGE_TLS.
        ca: file of CA certificates to trust, PEM; else MOORAGE_CA.
        cert: file of the client's certificate, PEM; else MOORAGE_CERT. Read once: a new one needs a new client.
        key: file of its key, PEM; else MOORAGE_KEY.
        plaintext_token: send the token without TLS beyond loopback too; else MOORAGE_PLAINTEXT_TOKEN. Where neither
            says so, that raises ValueError.
        credentials: channel credentials of your own making, instead of tls, ca, cert and key.
        timeout: deadline of a call in seconds, retries included; a waiting call gets its max_wait on top.
        on_unavailable: what sessions do while the control plane is away: "fail" raises Unavailable, "admit" goes on
            without it, at `fallback`.
        fallback: where unmanaged sessions go: a function from session id to endpoint, or endpoints to choose from.
        release_timeout: seconds for which a Release is repeated while the control plane is away.
        outage_patience: seconds of outage that a session sits out which lives or is in the queue already.
        options: gRPC channel options; they win over the client's own.

    Example:
        >>> with Client("127.0.0.1:50061") as client:  # doctest: +SKIP
        ...     with client.session("sess-1", workload_class="rlvr", prompt_tokens=156) as s:
        ...         answer = generate(s.endpoint, prompt)
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
        self._channel = open_channel(target, credentials, self._settings.token, options)
        self._renewer = Renewer(self._perform, timeout)
        self._outages = OutageLog(self._settings.target)
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Releases sessions that are still open as ABORTED, then closes the channel."""
        for state in self._renewer.roster.living():
            self._renewer.discard(state)
            sessions.release(state, OUTCOME_ABORTED, self._perform)
        self._closed = True
        self._channel.close()

    @property
    def target(self) -> str:
        """The server."""
        return self._settings.target

    @property
    def pool(self) -> str:
        """Pool of every call that names no other."""
        return self._settings.pool

    @cached_property
    def scheduler(self) -> scheduler_pb2_grpc.SchedulerServiceStub:
        """Generated stub: no deadline and no error mapping of its own."""
        return scheduler_pb2_grpc.SchedulerServiceStub(self._channel)

    @cached_property
    def inspector(self) -> inspector_pb2_grpc.InspectorServiceStub:
        """Generated stub: no deadline and no error mapping of its own."""
        return inspector_pb2_grpc.InspectorServiceStub(self._channel)

    @cached_property
    def operator(self) -> operator_pb2_grpc.OperatorServiceStub:
        """Generated stub: no deadline and no error mapping of its own."""
        return operator_pb2_grpc.OperatorServiceStub(self._channel)

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
    ) -> Session:
        """A session, to be entered with `with`. Nothing is sent before that.

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
        return Session(options, self._perform, self._renewer, self._outages)

    def admit(
        self,
        session_id: str,
        *,
        max_wait: float = 0.0,
        pool: str | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
        **fields: Unpack[AdmitFields],
    ) -> AdmitResponse:
        """Asks once for a session to enter; HOLD and REJECT are answers.

        Args:
            session_id: unique in its pool, 1 to 256 bytes.
            max_wait: seconds that the call may wait for the session's turn, at most 600.
            pool: None takes the client's.
            request_id: UUID; a repeat with the same id returns the first final answer. None makes one.
            timeout: seconds on top of max_wait; None takes the client's.
            fields: what the session declares, see `AdmitFields`.
        """
        request = admit_request(self._pool(pool), session_id, fields, max_wait=max_wait, request_id=request_id)
        response: AdmitResponse = self._call("Admit", request, max_wait + self._timeout(timeout))
        return response

    def place(
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
        """Asks once where the next request of a living session goes; HOLD is an answer.

        Args:
            session_id: the session.
            lease_token: token of its lease.
            turn: number of this turn, from 0.
            prompt_tokens: tokens of this turn's whole prompt.
            prefix_hashes: one hash per full block of the prompt, see `moorage.prefix_hashes`.
            max_wait: seconds that the call may wait where the session has to move.
            pool: None takes the client's.
            request_id: UUID; a repeat with the same id returns the first final answer. None makes one.
            timeout: seconds on top of max_wait; None takes the client's.

        Raises:
            SessionUnknown, LeaseLost, PoolUnknown, Unavailable, InvalidArgument.
        """
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
        response: PlaceResponse = self._call("Place", request, max_wait + self._timeout(timeout))
        return response

    def release(
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
        """Ends a session, or takes a held one out of the queue. Idempotent; from any process.

        Args:
            session_id: the session.
            outcome: COMPLETED, ABORTED, FAILED or PAUSED.
            lease_token: token of its lease; empty for a held session.
            usage: tokens of all turns, where known.
            pool: None takes the client's.
            request_id: UUID; a repeat with the same id returns the first answer. None makes one.
            timeout: seconds; None takes the client's.

        Raises:
            LeaseLost, PoolUnknown, Unavailable, InvalidArgument.
        """
        request = release_request(
            self._pool(pool),
            session_id,
            outcome=outcome,
            lease_token=lease_token,
            usage=usage,
            request_id=request_id,
        )
        response: ReleaseResponse = self._call("Release", request, self._timeout(timeout))
        return response

    def heartbeat(
        self,
        *,
        instances: Iterable[InstanceSnapshot] = (),
        sessions: Iterable[SessionProgress] = (),
        prefixes: Iterable[PrefixUpdate] = (),
        pool: str | None = None,
        timeout: float | None = None,
    ) -> HeartbeatResponse:
        """Reports snapshots, progress and prefixes, at most 1,000 items in all; renews the leases of sessions named.

        Args:
            instances: snapshots of instances.
            sessions: progress of sessions, with their lease tokens.
            prefixes: changes of instances' prefix caches, under the hashes of `moorage.prefix_hashes`.
            pool: None takes the client's.
            timeout: seconds; None takes the client's.
        """
        request = heartbeat_request(self._pool(pool), instances=instances, sessions=sessions, prefixes=prefixes)
        response: HeartbeatResponse = self._call("Heartbeat", request, self._timeout(timeout))
        return response

    def _pool(self, pool: str | None) -> str:
        return self._settings.pool if pool is None else pool

    def _timeout(self, timeout: float | None) -> float:
        return self._settings.timeout if timeout is None else timeout

    def _perform(self, call: Call) -> Any:
        return self._call(call.method, call.request, call.timeout)

    def _call(self, method: str, request: Message, timeout: float) -> Any:
        if self._closed:
            raise MoorageError("the client is closed")
        try:
            response = getattr(self.scheduler, method)(request, timeout=timeout)
        except grpc.RpcError as error:
            closed = MoorageError("the client is closed") if self._closed else None
            raise closed or from_rpc_error(error) from error
        self._outages.ended()
        return response
