"""The collector: many engines, each read by its own task, and one line of heartbeats to the server."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import httpx

from moorage.collect.heartbeat import ServerLine, open_channel
from moorage.collect.logs import line, logger
from moorage.collect.reader import EngineReader
from moorage.collect.targets import Target, resolve_targets
from moorage.collect.vllm_reader import VllmReader
from moorage.collect.worker import Board, EngineWorker, Pace

# How each engine is read. Another engine is another reader, and a line here.
READERS: Mapping[str, Callable[[Target, httpx.AsyncClient], EngineReader]] = {"vllm": VllmReader}

# Seconds that a heartbeat waits for the engines that answer a little after the first.
SETTLE_SECONDS = 0.1
# Unknown instances are shown to the server again after at most this time.
REREGISTER_SECONDS = 1.0
# Less than the 5 s after which vLLM's server closes idle connections, so that no request runs into a closing one.
KEEPALIVE_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class CollectorSettings:
    """What to collect and where to send it.

    `urls` holds URL or NAME=URL; `names` (by URL) overrides. `interval` and `timeout` are seconds: without an interval
    the server's `next_interval` is followed (1 s until it is known), without a timeout a scrape may take 0.8 intervals.
    """

    urls: Sequence[str]
    pool: str = "default"
    server: str = "127.0.0.1:50061"
    interval: float | None = None
    timeout: float | None = None
    token: str | None = None
    names: Mapping[str, str] | None = None
    engine: str = "vllm"

    def __post_init__(self) -> None:
        if self.engine not in READERS:
            raise ValueError(f"unknown engine {self.engine!r}: one of {sorted(READERS)}")
        for name, seconds in (("interval", self.interval), ("timeout", self.timeout)):
            if seconds is not None and not 0 < seconds < float("inf"):
                raise ValueError(f"{name} must be a positive number of seconds, not {seconds}")


async def run(settings: CollectorSettings, *, stop: asyncio.Event | None = None) -> None:
    """Collects until `stop` is set or the task is cancelled. Raises ValueError on engine URLs that make no sense.

    Engines and server may come and go: nothing they do ends it.
    """
    targets = resolve_targets(settings.urls, settings.names)
    stop = stop or asyncio.Event()
    # Engines are asked directly, whatever proxy the environment names, and a hanging one uses up nobody's connections.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_SECONDS)
    async with (
        httpx.AsyncClient(limits=limits, trust_env=False) as http,
        open_channel(settings.server) as channel,
        asyncio.TaskGroup() as group,
    ):
        board, pace = Board(), Pace(settings.interval, settings.timeout)
        read = READERS[settings.engine]
        workers = {
            target.instance_id: EngineWorker(target.instance_id, read(target, http), board, pace) for target in targets
        }
        logger.info(line("collector_started", engines=len(workers), pool=settings.pool, server=settings.server))
        tasks = [group.create_task(worker.run()) for worker in workers.values()]
        tasks.append(group.create_task(_beat(ServerLine(channel, settings.pool, settings.token), board, pace, workers)))
        await stop.wait()
        for task in tasks:
            task.cancel()
    logger.info(line("collector_stopped"))


async def _beat(server: ServerLine, board: Board, pace: Pace, workers: Mapping[str, EngineWorker]) -> None:
    """One heartbeat per interval, right after the scrapes, while there is anything new."""
    clock = asyncio.get_running_loop().time
    while True:
        await board.wait()
        settle = min(SETTLE_SECONDS, pace.interval / 10)
        await asyncio.sleep(settle)
        started = clock()
        beat = await server.send(board.take())
        pace.suggest(beat.next_interval)
        for instance_id in beat.reregister & workers.keys():
            workers[instance_id].look_now()
        pause = pace.interval - settle
        if beat.reregister:
            pause = min(pause, REREGISTER_SECONDS)
        if beat.retry_after is not None:
            pause = beat.retry_after
        await asyncio.sleep(max(0.0, started + pause - clock()))
