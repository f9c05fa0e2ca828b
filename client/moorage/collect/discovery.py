"""Which engines there are, asked again and again: they come and go without a restart of the collector."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from moorage.collect.fleet import Fleet
from moorage.collect.logs import line, logger
from moorage.collect.targets import Target

# For one look, whatever the interval.
LOOK_SECONDS = 10.0


class DiscoveryFailed(Exception):
    """There was no answer, or none that says which engines there are."""


class Discovery(Protocol):
    """Finds engines. Its owner calls it from one task."""

    @property
    def name(self) -> str:
        """For people: what it looks at."""
        ...

    async def find(self) -> Sequence[Target]:
        """The engines that are there now. Raises DiscoveryFailed; the caller bounds the time."""
        ...


async def keep_looking(discovery: Discovery, fleet: Fleet, interval: float) -> None:
    """Tells the fleet what `discovery` finds, every `interval` seconds, until cancelled.

    When it fails, the engines known until then stay: an engine that is really gone falls silent by itself.
    """
    failures = 0
    while True:
        trace: Exception | None = None
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                targets = await discovery.find()
        except TimeoutError:
            reason = f"no answer in {LOOK_SECONDS:g} s"
        except DiscoveryFailed as error:
            reason = str(error)
        # A discovery that breaks must not take the engines that are known with it.
        except Exception as error:
            reason, trace = f"{type(error).__name__}: {error}", error
        else:
            reason = ""
            fleet.update(discovery.name, targets)
        failures = _count(discovery, fleet, failures, reason, trace)
        await asyncio.sleep(interval)


def _count(discovery: Discovery, fleet: Fleet, failures: int, reason: str, trace: Exception | None) -> int:
    """Failures in a row, none if there is no `reason`. The first of them is news, and so is the end."""
    fields = {"source": discovery.name, "engines": len(fleet.workers)}
    if reason and not failures:
        logger.warning(line("discovery_state", state="fails", **fields, reason=reason), exc_info=trace)
    elif failures and not reason:
        logger.info(line("discovery_state", state="works", **fields, failures=failures))
    return failures + 1 if reason else 0
