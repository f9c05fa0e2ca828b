"""moorage as a router: admission and placement by the control plane, through the Python client."""

import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from bench.routers import Progress, RoutedSession
from bench.workload import SessionPlan
from moorage import AsyncClient, PrefixHasher
from moorage.messages import AdmitFields


class MoorageRouter:
    """Declares each session's class, group, prompt and context limit; never how long it will really get.

    Session and group ids carry a run id, so that two runs of one seed are strangers to a lasting server. Addresses of
    engines are the endpoints of their snapshots.
    """

    def __init__(self, client: AsyncClient, *, max_context: int, block_size: int, run_id: str | None = None) -> None:
        """`max_context` is the largest context a session may reach, in tokens, `block_size` that of the engines."""
        self._client = client
        self._max_context = max_context
        self._block_size = block_size
        self._run_id = run_id or uuid.uuid4().hex[:8]

    def session(self, plan: SessionPlan) -> RoutedSession:
        """See `Router.session`."""
        hasher = PrefixHasher(self._block_size)
        fields = AdmitFields(
            workload_class=plan.declared_class,
            group_id=f"{self._run_id}/{plan.group_id}",
            group_size=plan.group_size,
            prompt_tokens=len(plan.prompt),
            max_context_tokens=self._max_context,
            prefix_hashes=hasher.extend(plan.prompt),
        )
        return _MoorageSession(self._client, f"{self._run_id}/{plan.session_id}", fields, hasher, len(plan.prompt))


class _MoorageSession:
    def __init__(
        self, client: AsyncClient, session_id: str, fields: AdmitFields, hasher: PrefixHasher, hashed: int
    ) -> None:
        self._session = client.session(session_id, **fields)
        self._hasher = hasher
        self._hashed = hashed

    async def __aenter__(self) -> Self:
        await self._session.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.__aexit__(kind, error, trace)

    async def place(self, turn: int, prompt: Sequence[int]) -> str:
        hashes = self._hasher.extend(prompt[self._hashed :])
        self._hashed = len(prompt)
        placed = await self._session.place(prompt_tokens=len(prompt), prefix_hashes=hashes)
        return placed.endpoint.rstrip("/")

    def report(self, progress: Progress) -> None:
        self._session.report(
            phase="TOOL_WAIT" if progress.turn_done else "RUNNING",
            context_tokens=progress.context_tokens,
            cached_tokens=progress.cached_tokens,
            output_tokens=progress.output_tokens,
        )
