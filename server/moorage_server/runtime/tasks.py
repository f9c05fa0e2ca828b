"""Ending tasks for good."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

#: How long a cancelled task may take before it is asked again, seconds.
_AGAIN_S = 0.2


async def end(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancels tasks until they are done.

    Once is not enough: Python 3.11's wait_for, which the store's client uses, loses a cancellation that arrives
    together with what it waits for.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
