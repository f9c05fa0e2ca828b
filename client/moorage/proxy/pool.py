"""What the control plane knows of the pool's engines, looked at now and then."""

from __future__ import annotations

import asyncio

import grpc

from moorage import AsyncClient
from moorage.v1.inspector_pb2 import ListInstancesRequest
from moorage.v1.scheduler_pb2 import INSTANCE_STATE_SERVING, INSTANCE_STATE_UNSPECIFIED

LOOK_EVERY_S = 2.0
LOOK_TIMEOUT_S = 5.0
#: An instance's snapshot may name a thousand resident sessions, so pages are short.
_PAGE = 100


class PoolView:
    """Endpoints and ranks of the pool, at most a few seconds old.

    Attributes:
        answers: whether the control plane did when last asked.
        endpoints: of instances that serve.
        ranked: ids of instances with more than one data-parallel rank.
        looked: set once it was asked for the first time.
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self.answers = False
        self.endpoints: list[str] = []
        self.ranked: set[str] = set()
        self.looked = asyncio.Event()

    async def watch(self) -> None:
        """Looks, for ever."""
        while True:
            await self.look()
            self.looked.set()
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """Looks once. What was known stays known while nobody answers."""
        request = ListInstancesRequest(pool=self._client.pool, page_size=_PAGE)
        endpoints: dict[str, None] = {}
        ranked: set[str] = set()
        try:
            while True:
                page = await self._client.inspector.ListInstances(request, timeout=LOOK_TIMEOUT_S)
                for instance in page.instances:
                    snapshot = instance.snapshot
                    if snapshot.state in (INSTANCE_STATE_UNSPECIFIED, INSTANCE_STATE_SERVING):
                        endpoints[snapshot.endpoint] = None
                    if snapshot.dp_rank:
                        ranked.add(snapshot.instance_id)
                request.page_token = page.next_page_token
                if not request.page_token:
                    break
        except grpc.RpcError as error:
            # A pool that nobody named yet is known to be empty.
            self.answers = error.code() is grpc.StatusCode.NOT_FOUND
            return
        self.answers, self.endpoints, self.ranked = True, list(endpoints), ranked
