"""The connection to the server: channel, stubs, deadlines, pages; failures become CliError."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import click

from moorage.cli.errors import from_rpc
from moorage.cli.options import Settings

if TYPE_CHECKING:
    import grpc
    from google.protobuf.message import Message

    from moorage.credentials import Token
    from moorage.v1.inspector_pb2 import (
        ListClassesResponse,
        ListInstancesResponse,
        ListSessionsRequest,
        ListSessionsResponse,
    )

_Answer = TypeVar("_Answer")

#: Most items the server puts on a page.
_PAGE = 1000
#: An instance's snapshot may name a thousand resident sessions, so pages of instances are shorter.
_INSTANCE_PAGE = 100
_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    # A watch may be silent for long: notice a dead peer. Servers allow a ping every 30 s.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)


_Paged = TypeVar("_Paged", "ListInstancesResponse", "ListClassesResponse", "ListSessionsResponse")


class Api:
    """The three services of one server, for one pool. Not for use by several threads."""

    def __init__(self, channel: grpc.Channel, settings: Settings, token: Token | None = None) -> None:
        from moorage.v1 import inspector_pb2_grpc, operator_pb2_grpc, scheduler_pb2_grpc

        self.channel = channel
        self.settings = settings
        self._token = token
        self.pool = settings.pool
        self.scheduler = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        self.inspector = inspector_pb2_grpc.InspectorServiceStub(channel)
        self.operator = operator_pb2_grpc.OperatorServiceStub(channel)

    def call(self, method: Callable[..., _Answer], request: Message, wait: float = 0.0) -> _Answer:
        """One call; its deadline is the timeout plus `wait` seconds that the server was asked to wait."""
        import grpc

        try:
            return method(request, timeout=self.settings.timeout + wait, metadata=self._metadata())
        except grpc.RpcError as error:
            raise from_rpc(error, self.settings.server) from None

    def stream(self, method: Callable[..., Iterator[_Answer]], request: Message) -> Iterator[_Answer]:
        """A server stream without a deadline; leaving the iterator cancels it."""
        import grpc

        try:
            yield from method(request, metadata=self._metadata())
        except grpc.RpcError as error:
            raise from_rpc(error, self.settings.server) from None

    def instances(self) -> ListInstancesResponse:
        """All instances of the pool, as one answer."""
        from moorage.v1.inspector_pb2 import ListInstancesRequest, ListInstancesResponse

        def fetch(size: int, token: str) -> ListInstancesResponse:
            request = ListInstancesRequest(pool=self.pool, page_size=min(size, _INSTANCE_PAGE), page_token=token)
            return self.call(self.inspector.ListInstances, request)

        return _all_pages(fetch, lambda answer: len(answer.instances), ListInstancesResponse(), None)

    def classes(self) -> ListClassesResponse:
        """All classes of the pool, as one answer."""
        from moorage.v1.inspector_pb2 import ListClassesRequest, ListClassesResponse

        def fetch(size: int, token: str) -> ListClassesResponse:
            request = ListClassesRequest(pool=self.pool, page_size=size, page_token=token)
            return self.call(self.inspector.ListClasses, request)

        return _all_pages(fetch, lambda answer: len(answer.classes), ListClassesResponse(), None)

    def sessions(self, request: ListSessionsRequest, limit: int | None) -> ListSessionsResponse:
        """The sessions that `request` filters, all of them or `limit`, as one answer."""
        from moorage.v1.inspector_pb2 import ListSessionsResponse

        def fetch(size: int, token: str) -> ListSessionsResponse:
            request.page_size, request.page_token = size, token
            return self.call(self.inspector.ListSessions, request)

        return _all_pages(fetch, lambda answer: len(answer.sessions), ListSessionsResponse(), limit)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return () if self._token is None else (self._token.header(),)


def _all_pages(
    fetch: Callable[[int, str], _Paged], count: Callable[[_Paged], int], merged: _Paged, limit: int | None
) -> _Paged:
    """Fetch page after page. Pages are asked no larger than what is still wanted, so the last token stays valid."""
    while True:
        wanted = _PAGE if limit is None else min(limit - count(merged), _PAGE)
        page = fetch(wanted, merged.next_page_token)
        merged.next_page_token = ""
        merged.MergeFrom(page)
        if not merged.next_page_token or (limit is not None and count(merged) >= limit):
            return merged


@contextmanager
def connect(settings: Settings) -> Iterator[Api]:
    """Open a channel to the server of the settings; nothing is sent before the first call."""
    import grpc

    proof = settings.proof()
    try:
        credentials = proof.to_credentials()
        token = proof.to_token(settings.server, secure=credentials is not None)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if credentials is None:
        channel = grpc.insecure_channel(settings.server, options=_OPTIONS)
    else:
        channel = grpc.secure_channel(settings.server, credentials, options=_OPTIONS)
    with channel:
        yield Api(channel, settings, token)
