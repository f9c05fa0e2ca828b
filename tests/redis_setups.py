"""Several Redis processes that make one store: a primary with replica and sentinels, and a Cluster. Nothing is kept."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.crc import key_slot
from redis.exceptions import RedisError

from tests.integration.processes import PATIENCE_S, eventually

MASTER = "ledger"
#: Milliseconds of silence after which a sentinel believes that the primary is down.
DOWN_AFTER_MS = 1_000


def needs(*programs: str) -> None:
    """Skips the test where a program is missing; fails it in CI."""
    missing = [name for name in programs if shutil.which(name) is None]
    if missing and os.environ.get("CI"):
        pytest.fail(f"not installed: {', '.join(missing)}")
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def _free_ports(count: int) -> list[int]:
    with ExitStack() as sockets:
        free = [sockets.enter_context(socket.socket()) for _ in range(count)]
        for one in free:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in free]


def _until(probe: Callable[[], object]) -> None:
    """Waits until the probe says yes; a Redis that does not answer yet says nothing."""

    def asked() -> object:
        try:
            return probe()
        except RedisError:
            return None

    eventually(asked)


class Node:
    """One process of redis-server or redis-sentinel on loopback."""

    def __init__(self, folder: Path, port: int, program: str, *options: str) -> None:
        folder.mkdir()
        self.port = port
        self.address = f"127.0.0.1:{port}"
        self.client: Any = Redis(port=port, socket_timeout=5)
        self._process = subprocess.Popen([program, *options], cwd=folder, stdout=subprocess.DEVNULL)

    @classmethod
    def server(cls, folder: Path, port: int, *options: str) -> Node:
        """A redis-server that keeps nothing."""
        plain = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        return cls(folder, port, "redis-server", *plain, *options)

    def kill(self) -> None:
        """SIGKILL: it says nothing to anybody."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(PATIENCE_S)

    def freeze(self) -> None:
        """Keeps its connections, and answers nobody."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Carries on."""
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Ends it, however it fares."""
        self.client.close()
        if self._process.poll() is None:
            self.kill()


class Sentinels:
    """A primary, its replica, and three sentinels that watch them."""

    def __init__(self, folder: Path) -> None:
        ports = _free_ports(5)
        self.primary = Node.server(folder / "primary", ports[0], "--repl-diskless-sync-delay", "0")
        replica_of = ("--replicaof", "127.0.0.1", str(ports[0]))
        self.replica = Node.server(folder / "replica", ports[1], "--repl-diskless-sync-delay", "0", *replica_of)
        self.nodes = [self.primary, self.replica]
        _until(self.primary.client.ping)
        _until(lambda: self.replica.client.info("replication")["master_link_status"] == "up")
        for number, port in enumerate(ports[2:]):
            config = folder / f"sentinel-{number}.conf"
            config.write_text(
                f"port {port}\nbind 127.0.0.1\n"
                f"sentinel monitor {MASTER} 127.0.0.1 {ports[0]} 2\n"
                f"sentinel down-after-milliseconds {MASTER} {DOWN_AFTER_MS}\n"
                f"sentinel failover-timeout {MASTER} 5000\n",
                encoding="utf-8",
            )
            self.nodes.append(Node(folder / f"sentinel-{number}", port, "redis-sentinel", str(config)))
        self.sentinels = self.nodes[2:]
        _until(lambda: all(self._complete(sentinel) for sentinel in self.sentinels))

    @staticmethod
    def _complete(sentinel: Node) -> bool:
        """Whether it knows the replica and the two others."""
        state = sentinel.client.sentinel_master(MASTER)
        return int(state["num-slaves"]) == 1 and int(state["num-other-sentinels"]) == 2

    @property
    def environment(self) -> dict[str, str]:
        """Variables that point a server at this store."""
        addresses = ",".join(sentinel.address for sentinel in self.sentinels)
        return {"MOORAGE_REDIS_SENTINELS": addresses, "MOORAGE_REDIS_MASTER_NAME": MASTER}

    def primary_port(self) -> int:
        """Where the sentinels say the primary is."""
        return int(self.sentinels[0].client.sentinel_get_master_addr_by_name(MASTER)[1])

    def close(self) -> None:
        """Ends all that is left."""
        for node in self.nodes:
            node.stop()


class Cluster:
    """Masters that share the slots evenly."""

    SLOTS = 16_384

    def __init__(self, folder: Path, masters: int = 3) -> None:
        ports = _free_ports(2 * masters)
        buses = dict(zip(ports[:masters], ports[masters:], strict=True))
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "3000", "--cluster-port")
        self.nodes = [Node.server(folder / f"node-{port}", port, *options, str(bus)) for port, bus in buses.items()]
        for node in self.nodes:
            _until(node.client.ping)
        share = self.SLOTS // len(self.nodes) + 1
        for number, node in enumerate(self.nodes):
            last = min(self.SLOTS, (number + 1) * share) - 1
            node.client.execute_command("CLUSTER", "ADDSLOTSRANGE", number * share, last)
            node.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in self.nodes[1:]:
            self.nodes[0].client.execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, buses[node.port])
        _until(lambda: all(self._complete(node) for node in self.nodes))

    def _complete(self, node: Node) -> bool:
        info: bytes = node.client.execute_command("CLUSTER", "INFO")
        return b"cluster_state:ok" in info and b"cluster_known_nodes:%d" % len(self.nodes) in info

    @property
    def url(self) -> str:
        """One of the nodes."""
        return f"redis://{self.nodes[0].address}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables that point a server at this store."""
        return {"MOORAGE_REDIS_URL": self.url, "MOORAGE_REDIS_CLUSTER": "true"}

    def owner(self, key: str) -> Node:
        """The node that serves a key's slot, by its own word."""
        slot = key_slot(key.encode())
        for first, last, (_, port, *_), *_ in self.nodes[0].client.execute_command("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == port)
        raise AssertionError(f"nobody serves slot {slot}")

    def move(self, key: str, target: Node, batch: int = 10, pause_s: float = 0.0) -> int:
        """Moves the slot of a key to another node the way redis-cli does, a few keys at a time; how many there were."""
        slot, source, moved = key_slot(key.encode()), self.owner(key), 0
        source_id, target_id = (node.client.execute_command("CLUSTER", "MYID") for node in (source, target))
        target.client.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
        source.client.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
        while names := source.client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, batch):
            source.client.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5_000, "KEYS", *names)
            moved += len(names)
            time.sleep(pause_s)
        for node in (target, source, *self.nodes):
            node.client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target_id)
        return moved

    def close(self) -> None:
        """Ends all nodes."""
        for node in self.nodes:
            node.stop()
