"""The engines that are read at present: one worker and one task each, started and ended as they come and go."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from moorage.collect.logs import line, logger
from moorage.collect.targets import Target
from moorage.collect.worker import Board, EngineWorker


class Fleet:
    """Workers for all engines that any source names. `hire` makes a worker; its task runs in `group`.

    Sources that are named first go first: where two name the same instance, or the same endpoint under two names (the
    same KV would count twice), the later one is passed over.
    """

    def __init__(
        self, sources: Sequence[str], hire: Callable[[Target], EngineWorker], group: asyncio.TaskGroup, board: Board
    ) -> None:
        self._hire = hire
        self._group = group
        self._board = board
        self._named: dict[str, Sequence[Target]] = dict.fromkeys(sources, ())
        self._passed_over: set[Target] = set()
        self._targets: dict[str, Target] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._workers: dict[str, EngineWorker] = {}

    @property
    def workers(self) -> Mapping[str, EngineWorker]:
        """By instance; it changes as engines come and go."""
        return self._workers

    def update(self, source: str, targets: Sequence[Target]) -> None:
        """Takes what `source` names now. Engines that nobody names any more are not read any more, from here on."""
        self._named[source] = targets
        wanted = self._wanted()
        for instance_id, target in list(self._targets.items()):
            if wanted.get(instance_id) != target:
                self._end(instance_id)
        for instance_id, target in wanted.items():
            if instance_id not in self._targets:
                self._begin(target)

    def end(self) -> None:
        """Stops reading."""
        for instance_id in list(self._targets):
            self._end(instance_id)

    def _wanted(self) -> dict[str, Target]:
        wanted: dict[str, Target] = {}
        by_endpoint: dict[str, Target] = {}
        passed_over = set()
        for source, targets in self._named.items():
            for target in targets:
                other = wanted.get(target.instance_id) or by_endpoint.get(target.endpoint)
                if other is None:
                    wanted[target.instance_id] = by_endpoint[target.endpoint] = target
                elif other != target:
                    passed_over.add(target)
                    self._say_passed_over(source, target, other)
        self._passed_over = passed_over
        return wanted

    def _say_passed_over(self, source: str, target: Target, other: Target) -> None:
        if target not in self._passed_over:
            fields = {"instance": target.instance_id, "endpoint": target.endpoint, "source": source}
            by = f"{other.instance_id} at {other.endpoint}"
            logger.warning(line("engine_passed_over", **fields, known=by))

    def _begin(self, target: Target) -> None:
        worker = self._hire(target)
        self._targets[target.instance_id] = target
        self._workers[target.instance_id] = worker
        self._tasks[target.instance_id] = self._group.create_task(worker.run())
        logger.info(line("engine_found", instance=target.instance_id, endpoint=target.endpoint))

    def _end(self, instance_id: str) -> None:
        """The task may still be at work for a moment, but puts nothing on the board any more."""
        target = self._targets.pop(instance_id)
        del self._workers[instance_id]
        self._tasks.pop(instance_id).cancel()
        self._board.drop(instance_id)
        logger.info(line("engine_left", instance=instance_id, endpoint=target.endpoint))
