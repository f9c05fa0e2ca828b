"""Client of the moorage control plane: admission and placement of RL rollout sessions on LLM inference engines.

`Client` (threads) and `AsyncClient` (asyncio) admit sessions, keep their leases and release them. Names are loaded when
they are first used, so that `moorage.v1` and the command line do not pay for what they do not use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moorage.aio import AsyncClient
    from moorage.aio_session import AsyncSession
    from moorage.client import Client
    from moorage.dispatch import AsyncDispatch
    from moorage.errors import (
        DeadlineExceeded,
        FailedPrecondition,
        FieldViolation,
        Held,
        InvalidArgument,
        LeaseLost,
        MoorageError,
        NotFound,
        PermissionDenied,
        PoolUnknown,
        Rejected,
        ResourceExhausted,
        SessionUnknown,
        Unauthenticated,
        Unavailable,
    )
    from moorage.hashes import PrefixHasher, prefix_hashes, text_hashes
    from moorage.session import Session
    from moorage.state import Turn
    from moorage.v1.scheduler_pb2 import (
        AdmitResponse,
        Decision,
        HeartbeatResponse,
        Hold,
        HoldReason,
        InstanceSnapshot,
        Lease,
        Outcome,
        Phase,
        Placement,
        PlaceResponse,
        PrefixUpdate,
        ReleaseResponse,
        Residency,
        SessionProgress,
        Usage,
    )

_HOME = {
    "AsyncClient": "moorage.aio",
    "AsyncDispatch": "moorage.dispatch",
    "AsyncSession": "moorage.aio_session",
    "Client": "moorage.client",
    "PrefixHasher": "moorage.hashes",
    "Session": "moorage.session",
    "Turn": "moorage.state",
    "prefix_hashes": "moorage.hashes",
    "text_hashes": "moorage.hashes",
    **dict.fromkeys(
        (
            "DeadlineExceeded",
            "FailedPrecondition",
            "FieldViolation",
            "Held",
            "InvalidArgument",
            "LeaseLost",
            "MoorageError",
            "NotFound",
            "PermissionDenied",
            "PoolUnknown",
            "Rejected",
            "ResourceExhausted",
            "SessionUnknown",
            "Unauthenticated",
            "Unavailable",
        ),
        "moorage.errors",
    ),
    **dict.fromkeys(
        (
            "AdmitResponse",
            "Decision",
            "HeartbeatResponse",
            "Hold",
            "HoldReason",
            "InstanceSnapshot",
            "Lease",
            "Outcome",
            "Phase",
            "PlaceResponse",
            "Placement",
            "PrefixUpdate",
            "ReleaseResponse",
            "Residency",
            "SessionProgress",
            "Usage",
        ),
        "moorage.v1.scheduler_pb2",
    ),
}

__all__ = [
    "AdmitResponse",
    "AsyncClient",
    "AsyncDispatch",
    "AsyncSession",
    "Client",
    "DeadlineExceeded",
    "Decision",
    "FailedPrecondition",
    "FieldViolation",
    "HeartbeatResponse",
    "Held",
    "Hold",
    "HoldReason",
    "InstanceSnapshot",
    "InvalidArgument",
    "Lease",
    "LeaseLost",
    "MoorageError",
    "NotFound",
    "Outcome",
    "PermissionDenied",
    "Phase",
    "PlaceResponse",
    "Placement",
    "PoolUnknown",
    "PrefixHasher",
    "PrefixUpdate",
    "Rejected",
    "ReleaseResponse",
    "Residency",
    "ResourceExhausted",
    "Session",
    "SessionProgress",
    "SessionUnknown",
    "Turn",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "prefix_hashes",
    "text_hashes",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
