"""What the collector asks of an engine, whichever engine it is."""

from dataclasses import dataclass
from typing import Protocol

from moorage.v1.scheduler_pb2 import InstanceSnapshot


class EngineUnreachable(Exception):
    """No answer: refused, reset, or not within the time allowed. `refused`: nobody listens there at all."""

    def __init__(self, message: str, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class EngineUnreadable(Exception):
    """There was an answer, but it is not what such an engine says."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one look at an engine gave."""

    # One per data-parallel rank, all of the same moment.
    snapshots: tuple[InstanceSnapshot, ...]
    # For people: by name, what the engine does not tell (what hangs on it is absent from the snapshots) or contradicts.
    remarks: frozenset[str]


class EngineReader(Protocol):
    """Reads one engine. It remembers what it saw, to tell restarts and rates; its owner calls it from one task."""

    async def read(self, timeout: float) -> Reading:
        """Looks at the engine now, for at most `timeout` seconds.

        Raises EngineUnreachable or EngineUnreadable; nothing is reported for an engine that could not be read.
        """
        ...

    def forget_facts(self) -> None:
        """Asks again, at the next `read`, for what is otherwise asked rarely."""
        ...
