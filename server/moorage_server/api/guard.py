"""The guard: who calls, may they, and how often. One word per call, before its request is decoded."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from time import monotonic
from typing import Any, TypeAlias

import grpc
import structlog

from moorage_server import errors
from moorage_server.api.callers import HEARTBEAT_ROLES, REFLECTION, Caller, Callers, TokenBucket, roles_for
from moorage_server.api.errors import abort_with
from moorage_server.api.validation import pool_of
from moorage_server.errors import Forbidden, MoorageFailure, RateLimited, Unauthenticated

# In quotes: these are generic to type checkers only.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_ADMIT = "/moorage.v1.SchedulerService/Admit"
_HEARTBEAT = "/moorage.v1.SchedulerService/Heartbeat"
_BEARER = "bearer "
#: Refusals of one reason are logged once in this time, seconds: strangers must not fill the disk.
_QUIET_S = 1.0

_log = structlog.get_logger("moorage.auth")


class Guard:
    """Knows the callers, which may change at any time, and counts their calls.

    Rates are per caller and per server process. A caller that keeps its rate keeps its bucket when callers change.
    """

    def __init__(self, callers: Callers, clock: Callable[[], float] = monotonic) -> None:
        self.callers = callers
        self._clock = clock
        self._buckets: dict[str, TokenBucket] = {}
        self._refusals = _RefusalLog(clock)

    def enter(self, method: str, context: Context) -> Caller:
        """Who makes the call. Raises Unauthenticated, RateLimited, or Forbidden where the caller's roles lack it."""
        try:
            caller = self._identify(context)
            self._count(caller)
            require_role(caller, roles_for(method), method)
        except MoorageFailure as refusal:
            self._refusals.add(refusal, method, context)
            raise
        return caller

    def recheck(self, method: str, context: Context) -> Caller:
        """Who makes a call under way, as the credential is now. Raises as :meth:`enter` does."""
        caller = self._identify(context)
        require_role(caller, roles_for(method), method)
        return caller

    def count(self, caller: Caller, method: str, context: Context) -> None:
        """One more call inside a stream. Raises RateLimited."""
        try:
            self._count(caller)
        except RateLimited as refusal:
            self._refusals.add(refusal, method, context)
            raise

    def _identify(self, context: Context) -> Caller:
        given = [value for key, value in context.invocation_metadata() or () if key == "authorization"]
        if given:
            caller = self._holding(given)
        else:
            names = list(_certified_names(context.auth_context()))
            caller = self.callers.certified(names)
            if not names:
                raise Unauthenticated(
                    errors.CREDENTIAL_MISSING, "no credential: send authorization: Bearer TOKEN, or a certificate"
                )
        if caller is None:
            message = "the token is not known here"
            if not given:
                message = "the certificate is not known here, and there is no token"
            raise Unauthenticated(errors.CREDENTIAL_INVALID, message, {"kind": "token" if given else "certificate"})
        return caller

    def _holding(self, given: list[Any]) -> Caller | None:
        value = given[0]
        if len(given) != 1 or not isinstance(value, str) or value[: len(_BEARER)].lower() != _BEARER:
            return None
        return self.callers.holding(value[len(_BEARER) :].strip())

    def _count(self, caller: Caller) -> None:
        if caller.rate is None:
            return
        now = self._clock()
        bucket = self._buckets.get(caller.name)
        if bucket is None or bucket.rate != caller.rate:
            bucket = self._buckets[caller.name] = TokenBucket(caller.rate, now)
        wait_s = bucket.take(now)
        if wait_s > 0:
            raise RateLimited(caller.name, caller.rate.calls_per_s, wait_s)


def require_role(caller: Caller, roles: frozenset[str], method: str, field: str = "") -> None:
    """Raises Forbidden where the caller has none of ``roles``, which ``method``, or a ``field`` of it, needs."""
    if caller.roles & roles:
        return
    has, needs = ", ".join(sorted(caller.roles)), " or ".join(sorted(roles))
    name = method.rpartition("/")[2]
    what = f"{name} with {field}" if field else name
    metadata = {"method": name, "roles": has, "needs": needs, "caller": caller.name}
    if field:
        metadata["field"] = field
    raise Forbidden(errors.ROLE_MISSING, f"{what} needs the role {needs}, {caller.name!r} has {has}", metadata)


def check(caller: Caller, method: str, request: Any) -> None:
    """Raises Forbidden where a request goes beyond its caller's pools, classes, tenants, or roles.

    Classes and tenants bind Admit, by what it declares; later calls of a session are bound by its lease token.
    """
    _require_listed(caller, errors.POOL_FORBIDDEN, "pool", pool_of(request), caller.pools)
    if method == _ADMIT:
        _require_listed(caller, errors.CLASS_FORBIDDEN, "workload_class", request.workload_class, caller.classes)
        _require_listed(caller, errors.TENANT_FORBIDDEN, "tenant", request.tenant, caller.tenants)
    elif method == _HEARTBEAT:
        for field, roles in HEARTBEAT_ROLES.items():
            if getattr(request, field):
                require_role(caller, roles, method, field)


def _require_listed(caller: Caller, reason: str, field: str, value: str, listed: frozenset[str] | None) -> None:
    if listed is None or value in listed:
        return
    shown = errors.shorten(value)
    raise Forbidden(reason, f"{field}: {shown!r} is not open to {caller.name!r}", {field: shown, "caller": caller.name})


def _certified_names(auth: Any) -> Iterator[str]:
    """Names in the peer's certificate, which TLS has verified: alternative names first, then the common name."""
    for key in ("x509_subject_alternative_name", "x509_common_name"):
        for value in auth.get(key, ()):
            yield value.decode("utf-8", "replace")


def guarded(handler: Handler, method: str, guard: Guard) -> Handler:
    """Reflection's handler, behind the guard; other services' as they are, health among them."""
    if not method.startswith(REFLECTION):
        return handler

    behaviour: Any = handler.stream_stream

    async def call(requests: Any, context: Context) -> AsyncIterator[Any]:
        try:
            guard.enter(method, context)
        except MoorageFailure as refusal:
            await abort_with(context, refusal)
        async for response in behaviour(requests, context):
            yield response

    return grpc.stream_stream_rpc_method_handler(call, handler.request_deserializer, handler.response_serializer)


class _RefusalLog:
    """Says who was refused, and how many more were since."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._said: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    def add(self, refusal: MoorageFailure, method: str, context: Context) -> None:
        reason, now = refusal.reason, self._clock()
        if now - self._said.get(reason, -_QUIET_S) < _QUIET_S:
            self._unsaid[reason] = self._unsaid.get(reason, 0) + 1
            return
        self._said[reason] = now
        _log.warning(
            "refused",
            reason=reason,
            rpc=method.rpartition("/")[2],
            peer=context.peer(),
            caller=refusal.metadata.get("caller"),
            others=self._unsaid.pop(reason, 0),
        )
