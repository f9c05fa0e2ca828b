"""Engines that come and go: DNS with a resolver that does as it is told, and what becomes of the workers."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Sequence

import pytest

from moorage.collect import discovery as discovery_module
from moorage.collect.discovery import DiscoveryFailed, keep_looking
from moorage.collect.dns import DnsDiscovery, SystemResolver
from moorage.collect.fleet import Fleet
from moorage.collect.reader import Reading
from moorage.collect.targets import Target
from moorage.collect.worker import Board, EngineWorker, Pace
from moorage.v1.scheduler_pb2 import InstanceSnapshot

Outcome = Sequence[str] | Exception


class Names:
    """A resolver: one outcome per call, the last one for ever. What it was asked is in `asked`."""

    def __init__(self, *outcomes: Outcome) -> None:
        self.outcomes = list(outcomes)
        self.asked: list[str] = []

    async def __call__(self, host: str) -> Sequence[str]:
        self.asked.append(host)
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class StubReader:
    """Reads at once, and counts."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.reads = 0

    async def read(self, timeout: float) -> Reading:
        self.reads += 1
        return Reading((InstanceSnapshot(instance_id=self.target.instance_id),), frozenset())

    def forget_facts(self) -> None:
        """There are none."""


class Yard:
    """A fleet, and all readers it ever had."""

    def __init__(self, group: asyncio.TaskGroup, *sources: str) -> None:
        self.board = Board()
        self.readers: list[StubReader] = []
        self.fleet = Fleet(sources, self._hire, group, self.board)

    def _hire(self, target: Target) -> EngineWorker:
        self.readers.append(StubReader(target))
        return EngineWorker(target.instance_id, self.readers[-1], self.board, Pace(0.01, None))

    def instances(self) -> list[str]:
        return list(self.fleet.workers)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came to that")


def messages(caplog: pytest.LogCaptureFixture, event: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if f"event={event} " in record.getMessage()]


@pytest.fixture(autouse=True)
def _log_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "moorage.collect")


async def test_each_address_is_an_engine() -> None:
    names = Names(["10.0.0.12", "fd00::7", "10.0.0.2", "10.0.0.2"])
    discovery = DnsDiscovery("vllm.rl.svc:8000", names)
    assert await discovery.find() == [
        Target("10.0.0.2:8000", "http://10.0.0.2:8000"),
        Target("10.0.0.12:8000", "http://10.0.0.12:8000"),
        Target("[fd00::7]:8000", "http://[fd00::7]:8000"),
    ]
    assert names.asked == ["vllm.rl.svc"]
    assert discovery.name == "dns vllm.rl.svc:8000"


@pytest.mark.parametrize(
    "outcome", [socket.gaierror(socket.EAI_NONAME, "unknown"), OSError("no network"), [], ["not an address"]]
)
async def test_a_name_without_addresses_is_a_failure(outcome: Outcome) -> None:
    with pytest.raises(DiscoveryFailed, match=r"vllm\.rl\.svc"):
        await DnsDiscovery("vllm.rl.svc:8000", Names(outcome)).find()


@pytest.mark.parametrize("text", ["", "name", "name:", ":8000", "name:0", "name:65536", "name:x", "http://name:8000"])
def test_names_that_make_no_sense(text: str) -> None:
    with pytest.raises(ValueError, match="DNS name and port"):
        DnsDiscovery(text)


async def test_the_system_resolves_addresses_and_the_name_of_this_machine() -> None:
    resolve = SystemResolver()
    assert set(await resolve("127.0.0.1")) == {"127.0.0.1"}
    assert set(await resolve("localhost")) & {"127.0.0.1", "::1"}
    with pytest.raises(OSError, match=r"."):
        await resolve("no such name")


async def test_looks_that_hang_take_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging, asked = threading.Event(), []

    def getaddrinfo(host: str, *_: object, **__: object) -> list[object]:
        asked.append(host)
        hanging.wait(5)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    resolve = SystemResolver()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await resolve("a.example")
    assert asked == ["a.example"]
    hanging.set()
    assert await resolve("b.example") == []
    assert asked == ["a.example", "b.example"]


async def test_engines_come_and_go_and_the_others_are_not_touched(caplog: pytest.LogCaptureFixture) -> None:
    names = Names(["10.0.0.1", "10.0.0.2"])
    async with asyncio.TaskGroup() as group:
        yard = Yard(group, "dns e:1")
        task = group.create_task(keep_looking(DnsDiscovery("e:1", names), yard.fleet, 0.01))
        await until(lambda: yard.instances() == ["10.0.0.1:1", "10.0.0.2:1"])
        kept = yard.fleet.workers["10.0.0.2:1"]
        names.outcomes = [["10.0.0.2", "10.0.0.3"]]
        await until(lambda: yard.instances() == ["10.0.0.2:1", "10.0.0.3:1"])
        assert yard.fleet.workers["10.0.0.2:1"] is kept
        gone, *others = yard.readers
        yard.board.take()
        reads = gone.reads, [reader.reads for reader in others]
        await until(lambda: all(now.reads > before for now, before in zip(others, reads[1], strict=True)))
        assert gone.reads == reads[0]
        assert {snapshot.instance_id for snapshot in yard.board.take()} <= {"10.0.0.2:1", "10.0.0.3:1"}
        task.cancel()
        yard.fleet.end()
    assert len(yard.readers) == 3
    assert messages(caplog, "engine_left")[0] == "event=engine_left instance=10.0.0.1:1 endpoint=http://10.0.0.1:1"


async def test_what_was_not_sent_of_an_engine_that_left_is_not_sent() -> None:
    async with asyncio.TaskGroup() as group:
        yard = Yard(group, "s")
        yard.fleet.update("s", [Target("a", "http://h:1"), Target("b", "http://h:2")])
        await until(lambda: all(reader.reads for reader in yard.readers))
        yard.fleet.update("s", [Target("b", "http://h:2")])
        assert [snapshot.instance_id for snapshot in yard.board.take()] == ["b"]
        yard.fleet.end()


async def test_a_discovery_that_fails_keeps_the_engines_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    failure = socket.gaierror(socket.EAI_AGAIN, "try again")
    names = Names(["10.0.0.1"], failure, failure, KeyError("a bug"), failure)
    async with asyncio.TaskGroup() as group:
        yard = Yard(group, "dns e:1")
        task = group.create_task(keep_looking(DnsDiscovery("e:1", names), yard.fleet, 0.01))
        await until(lambda: len(names.asked) >= 6)
        assert yard.instances() == ["10.0.0.1:1"]
        names.outcomes = [["10.0.0.1", "10.0.0.2"]]
        await until(lambda: len(yard.instances()) == 2)
        task.cancel()
        yard.fleet.end()
    # The same engine, read all the time.
    assert len(yard.readers) == 2
    fails, works = messages(caplog, "discovery_state")
    assert fails.startswith("event=discovery_state state=fails source='dns e:1' engines=1 reason=")
    assert "try again" in fails
    assert works.startswith("event=discovery_state state=works source='dns e:1'")


async def test_a_discovery_that_hangs_or_breaks_fails(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery_module, "LOOK_SECONDS", 0.05)

    class Hanging:
        name = "hanging"

        async def find(self) -> Sequence[Target]:
            await asyncio.Event().wait()
            return []

    async with asyncio.TaskGroup() as group:
        yard = Yard(group, "hanging", "dns e:1")
        broken = DnsDiscovery("e:1", Names(KeyError("a bug")))
        tasks = [group.create_task(keep_looking(found, yard.fleet, 0.01)) for found in (Hanging(), broken)]
        await until(lambda: len(messages(caplog, "discovery_state")) == 2)
        for task in tasks:
            task.cancel()
    bug, silence = messages(caplog, "discovery_state")
    assert "source='dns e:1' engines=0" in bug
    assert "KeyError" in bug
    assert silence.endswith("source=hanging engines=0 reason='no answer in 0.05 s'")


async def test_an_instance_at_another_address_is_read_there() -> None:
    async with asyncio.TaskGroup() as group:
        yard = Yard(group, "pods")
        yard.fleet.update("pods", [Target("vllm-0", "http://10.0.0.1:8000")])
        yard.fleet.update("pods", [Target("vllm-0", "http://10.0.0.9:8000")])
        assert yard.instances() == ["vllm-0"]
        await until(lambda: yard.readers[1].reads > 0)
        assert yard.readers[1].target.endpoint == "http://10.0.0.9:8000"
        assert yard.readers[0].reads == 0
        yard.fleet.end()


async def test_an_engine_under_two_names_counts_once(caplog: pytest.LogCaptureFixture) -> None:
    given, pod = Target("blue", "http://10.0.0.1:8000"), Target("vllm-0", "http://10.0.0.1:8000")
    other = Target("blue", "http://10.0.0.2:8000")
    async with asyncio.TaskGroup() as group:
        yard = Yard(group, "given", "pods")
        yard.fleet.update("pods", [pod])
        assert yard.instances() == ["vllm-0"]
        yard.fleet.update("given", [given])
        for _ in range(3):
            yard.fleet.update("pods", [pod, other])
        assert [reader.target for reader in yard.readers] == [pod, given]
        yard.fleet.update("given", [])
        assert yard.instances() == ["vllm-0", "blue"]
        yard.fleet.end()
    assert messages(caplog, "engine_passed_over") == [
        "event=engine_passed_over instance=vllm-0 endpoint=http://10.0.0.1:8000 source=pods "
        "known='blue at http://10.0.0.1:8000'",
        "event=engine_passed_over instance=blue endpoint=http://10.0.0.2:8000 source=pods "
        "known='blue at http://10.0.0.1:8000'",
    ]
