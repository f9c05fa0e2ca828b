"""What the threads' and the asyncio client have in common: settings, and the options of their sessions."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import get_args

import grpc

from moorage.channel import ChannelOptions
from moorage.credentials import Token
from moorage.errors import Unavailable
from moorage.messages import AdmitFields
from moorage.state import Fallback, OnCancel, OnUnavailable, SessionOptions

logger = logging.getLogger("moorage")

#: How long one call waits in the pool's queue before it is repeated, in seconds.
DEFAULT_MAX_WAIT = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """How a client finds and treats its server; times in seconds. See `Client` for the meaning."""

    target: str
    pool: str
    token: Token | None
    credentials: grpc.ChannelCredentials | None = field(repr=False)
    timeout: float
    release_timeout: float
    outage_patience: float
    on_unavailable: OnUnavailable
    fallback: Fallback | None
    options: ChannelOptions

    def __post_init__(self) -> None:
        if self.on_unavailable not in get_args(OnUnavailable):
            raise ValueError(f"on_unavailable is {self.on_unavailable!r}, not one of {get_args(OnUnavailable)}")
        if self.timeout <= 0:
            raise ValueError(f"timeout is {self.timeout}, not above 0")

    def session_options(
        self,
        session_id: str,
        fields: AdmitFields,
        *,
        pool: str | None,
        max_wait: float,
        wait_timeout: float | None,
        readmit: bool,
        keep_place: bool,
        on_cancel: OnCancel,
        fallback: Fallback | None,
    ) -> SessionOptions:
        """Options of one session. Raises ValueError where it may go unmanaged and has nowhere to go."""
        if on_cancel not in get_args(OnCancel):
            raise ValueError(f"on_cancel is {on_cancel!r}, not one of {get_args(OnCancel)}")
        chosen = self.fallback if fallback is None else fallback
        if self.on_unavailable == "admit" and not chosen:
            raise ValueError(
                'on_unavailable="admit" needs a fallback: a function from session id to endpoint, or endpoints'
            )
        return SessionOptions(
            pool=self.pool if pool is None else pool,
            session_id=session_id,
            fields=fields,
            max_wait=max_wait,
            wait_timeout=wait_timeout,
            timeout=self.timeout,
            release_timeout=self.release_timeout,
            outage_patience=self.outage_patience,
            readmit=readmit,
            keep_place=keep_place,
            on_cancel=on_cancel,
            on_unavailable=self.on_unavailable,
            fallback=chosen,
        )


class OutageLog:
    """Says once per outage that sessions go on without the control plane, however many they are."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._said = False

    def met(self, outage: Unavailable) -> None:
        """A session goes on in spite of this outage."""
        if not self._said:
            self._said = True
            logger.warning("no control plane at %s, sessions go on unmanaged: %s", self._target, outage)

    def ended(self) -> None:
        """A call succeeded."""
        self._said = False
