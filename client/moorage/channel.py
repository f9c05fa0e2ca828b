"""Channels to the control plane: where it is, how calls are retried, how a token travels.

`service_config.json` beside this file holds the retry policy in gRPC's own format, for every language. Calls that fail
UNAVAILABLE are tried up to five times within their deadline, about three seconds in all; mutations carry a `request_id`
that is the same in every try. A token bucket ends retries while most calls fail, and the server's pushback is honoured.

`round_robin` spreads calls over all addresses of a headless service. Health checks by the client stay off: while the
store is away every replica is unready, and a health check would replace the server's reason and pushback by a blind
local failure; a replica that drains says so itself (GOAWAY), and retries go to the next one.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version
from importlib.resources import files
from typing import Any

import grpc
import grpc.aio

from moorage.credentials import Token

#: Server where neither the caller nor MOORAGE_SERVER names one.
DEFAULT_TARGET = "127.0.0.1:50061"

#: Options as gRPC takes them.
ChannelOptions = Sequence[tuple[str, Any]]

_MAX_MESSAGE_BYTES = 4 * 1024 * 1024


def resolve_target(target: str | None = None) -> str:
    """`target`, else MOORAGE_SERVER, else 127.0.0.1:50061."""
    return target or os.environ.get("MOORAGE_SERVER") or DEFAULT_TARGET


def service_config() -> str:
    """The retry policy, as JSON in gRPC's service config format."""
    return files("moorage").joinpath("service_config.json").read_text("utf-8")


def channel_options(overrides: ChannelOptions = ()) -> list[tuple[str, Any]]:
    """Options of a channel; those in `overrides` win."""
    options: dict[str, Any] = {
        "grpc.primary_user_agent": f"moorage-python/{version('moorage')}",
        "grpc.service_config": service_config(),
        # A call larger than this buffer is not retried: hold the largest message.
        "grpc.per_rpc_retry_buffer_size": _MAX_MESSAGE_BYTES,
        "grpc.max_send_message_length": _MAX_MESSAGE_BYTES,
        # The server permits a ping every 30 s. Without calls there is nothing to keep alive.
        "grpc.keepalive_time_ms": 60_000,
        "grpc.keepalive_timeout_ms": 20_000,
        "grpc.keepalive_permit_without_calls": 0,
        # A waiting Admit is silent for minutes; its pings must not stop after two.
        "grpc.http2.max_pings_without_data": 0,
        # gRPC would back off up to two minutes, longer than a lease lasts.
        "grpc.initial_reconnect_backoff_ms": 200,
        "grpc.min_reconnect_backoff_ms": 1_000,
        "grpc.max_reconnect_backoff_ms": 5_000,
    }
    return list((options | dict(overrides)).items())


def open_channel(
    target: str,
    credentials: grpc.ChannelCredentials | None = None,
    token: Token | None = None,
    options: ChannelOptions = (),
) -> grpc.Channel:
    """A channel for threads: TLS where `credentials` are given, every call with `token` where there is one."""
    arguments = channel_options(options)
    if credentials is None:
        channel = grpc.insecure_channel(target, arguments)
    else:
        channel = grpc.secure_channel(target, credentials, arguments)
    return grpc.intercept_channel(channel, _Bearer(token)) if token else channel


def open_aio_channel(
    target: str,
    credentials: grpc.ChannelCredentials | None = None,
    token: Token | None = None,
    options: ChannelOptions = (),
) -> grpc.aio.Channel:
    """The same for asyncio; call it inside the loop that will use the channel."""
    arguments = channel_options(options)
    # grpc.aio takes an interceptor for one kind of call only.
    interceptors = [_AioUnaryBearer(token), _AioStreamBearer(token)] if token else None
    if credentials is None:
        return grpc.aio.insecure_channel(target, arguments, interceptors=interceptors)
    return grpc.aio.secure_channel(target, credentials, arguments, interceptors=interceptors)


class _CallDetails(grpc.ClientCallDetails):
    """A call's details with one more header."""

    def __init__(self, details: grpc.ClientCallDetails, header: tuple[str, str]) -> None:
        self.method = details.method
        self.timeout = details.timeout
        self.metadata = (*(details.metadata or ()), header)
        self.credentials = details.credentials
        self.wait_for_ready = details.wait_for_ready
        self.compression = details.compression


class _Bearer(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    def __init__(self, token: Token) -> None:
        self._token = token

    def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: grpc.ClientCallDetails, request: Any
    ) -> Any:
        return continuation(_CallDetails(client_call_details, self._token.header()), request)

    def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: grpc.ClientCallDetails, request: Any
    ) -> Any:
        return continuation(_CallDetails(client_call_details, self._token.header()), request)


def _with_header(details: grpc.aio.ClientCallDetails, header: tuple[str, str]) -> grpc.aio.ClientCallDetails:
    metadata = grpc.aio.Metadata(*(details.metadata or ()), header)
    return grpc.aio.ClientCallDetails(
        details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
    )


class _AioUnaryBearer(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, token: Token) -> None:
        self._token = token

    async def intercept_unary_unary(
        self,
        continuation: Callable[..., Awaitable[Any]],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        return await continuation(_with_header(client_call_details, self._token.header()), request)


class _AioStreamBearer(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, token: Token) -> None:
        self._token = token

    async def intercept_unary_stream(
        self,
        continuation: Callable[..., Awaitable[Any]],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        return await continuation(_with_header(client_call_details, self._token.header()), request)
