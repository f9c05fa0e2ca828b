"""OperatorService: changes how a pool behaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moorage.v1 import operator_pb2 as opb
from moorage.v1 import operator_pb2_grpc
from moorage_server.api import pool_config, validation
from moorage_server.api.answers import identity
from moorage_server.api.pools import known_pool
from moorage_server.api.scheduler import policy_version_of
from moorage_server.core.view import Instance, Pool
from moorage_server.errors import InstanceUnknown, WrongState
from moorage_server.runtime.control import ControlPlane
from moorage_server.store.parse import encode_config
from moorage_server.store.records import Request, WeightUpdate

#: Tries of a masked change while others change the same pool.
_TRIES = 10
_EVICTED = "EVICTED"

_InstanceRequest = opb.CordonInstanceRequest | opb.UncordonInstanceRequest | opb.DrainInstanceRequest
_OfInstance = _InstanceRequest | opb.BeginWeightUpdateRequest | opb.EndWeightUpdateRequest


class OperatorServicer(operator_pb2_grpc.OperatorServiceServicer):
    """Thin: validates, changes the ledger, answers."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control

    async def ConfigurePool(self, request: opb.ConfigurePoolRequest, context: Any) -> opb.ConfigurePoolResponse:
        """See operator.proto. A masked change is made from the configuration it was checked with, or tried again."""
        validation.configure_pool(request)
        pool = validation.pool_of(request)
        desk, store = self._control.desk(pool), self._control.store
        for _ in range(_TRIES):
            view = await store.view(pool, desk.default)
            wanted = encode_config(pool_config.merged(view.config, request))
            if await store.configure(pool, identity(request), wanted, view.config_version):
                desk.wake()
                view = await store.view(pool, desk.default)
                return opb.ConfigurePoolResponse(config=pool_config.to_proto(view.config))
        raise WrongState(f"the configuration of pool {pool!r} keeps changing", {"pool": pool, "tries": str(_TRIES)})

    async def CordonInstance(self, request: opb.CordonInstanceRequest, context: Any) -> opb.CordonInstanceResponse:
        """See operator.proto."""
        changed, _ = await self._mark(request, "cordon", lambda i: not i.cordoned)
        return opb.CordonInstanceResponse(changed=changed)

    async def UncordonInstance(
        self, request: opb.UncordonInstanceRequest, context: Any
    ) -> opb.UncordonInstanceResponse:
        """See operator.proto."""
        changed, _ = await self._mark(request, "open", lambda i: i.cordoned or i.drain_asked)
        return opb.UncordonInstanceResponse(changed=changed)

    async def DrainInstance(self, request: opb.DrainInstanceRequest, context: Any) -> opb.DrainInstanceResponse:
        """See operator.proto."""
        changed, sessions = await self._mark(request, "drain", lambda i: not i.drain_asked)
        return opb.DrainInstanceResponse(changed=changed, sessions=sessions)

    async def BeginWeightUpdate(
        self, request: opb.BeginWeightUpdateRequest, context: Any
    ) -> opb.BeginWeightUpdateResponse:
        """See operator.proto."""
        validation.weight_update(request)
        view = await known_pool(self._control, validation.pool_of(request))
        update = WeightUpdate(True, request.weight_version, hold=view.config.hold_during_weight_update)
        return opb.BeginWeightUpdateResponse(changed=await self._update_weights(view, request, update))

    async def EndWeightUpdate(self, request: opb.EndWeightUpdateRequest, context: Any) -> opb.EndWeightUpdateResponse:
        """See operator.proto."""
        validation.weight_update(request)
        view = await known_pool(self._control, validation.pool_of(request))
        told = request.policy_version if request.HasField("policy_version") else None
        update = WeightUpdate(
            False,
            request.weight_version,
            policy_version_of(request.weight_version) if told is None else told,
            cleared=request.cache_cleared,
            reason="ended" if request.weight_version else "failed",
            told=told is not None,
        )
        return opb.EndWeightUpdateResponse(changed=await self._update_weights(view, request, update))

    async def EvictSession(self, request: opb.EvictSessionRequest, context: Any) -> opb.EvictSessionResponse:
        """See operator.proto."""
        validation.evict_session(request)
        pool = validation.pool_of(request)
        await known_pool(self._control, pool)
        result = await self._control.desk(pool).release(
            Request(), request.session_id, "", _EVICTED, None, evict_reason=request.reason or "operator"
        )
        return opb.EvictSessionResponse(evicted=not result.over)

    async def _mark(
        self, request: _InstanceRequest, mark: str, needs_it: Callable[[Instance], bool]
    ) -> tuple[int, int]:
        """Marks the ranks that the request means and that need it: how many, and the sessions on all of those meant."""
        validation.instance(request)
        pool = validation.pool_of(request)
        meant = _meant(await known_pool(self._control, pool), request)
        changed = 0
        for item in meant:
            if needs_it(item):
                known, _ = await self._control.store.mark(pool, item.key, mark)
                changed += known
        self._control.desk(pool).wake()
        return changed, sum(i.sessions for i in meant)

    async def _update_weights(
        self, view: Pool, request: opb.BeginWeightUpdateRequest | opb.EndWeightUpdateRequest, update: WeightUpdate
    ) -> int:
        """Carries an update to the ranks that the request means, all of the pool's where it names none."""
        meant = _meant(view, request) if request.instance_id else list(view.instances.values())
        changed = 0
        if not request.instance_id:
            await self._control.store.weights(view.name, "", update)
        for item in meant:
            changed += await self._control.store.weights(view.name, item.key, update)
        self._control.desk(view.name).wake()
        return changed


def _meant(view: Pool, request: _OfInstance) -> list[Instance]:
    """The ranks that a request names. Raises InstanceUnknown where there are none."""
    rank = request.dp_rank if request.HasField("dp_rank") else None
    meant = [
        i
        for i in view.instances.values()
        if i.instance_id == request.instance_id and (rank is None or i.dp_rank == rank)
    ]
    if not meant:
        raise InstanceUnknown(view.name, request.instance_id, rank)
    return meant
