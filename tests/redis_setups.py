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

from tests.certificates import Authority
from tests.integration.processes import PATIENCE_S, eventually

MASTER, PASSWORD = "ledger", "hush"
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


class Guard:
    """How a setup is guarded: in the clear and open to all, or by TLS of a CA of its own and a password."""

    def __init__(self, folder: Path | None = None) -> None:
        self.ca: str | None = None
        self._options: dict[str, str] = {}
        self._arguments: dict[str, Any] = {}
        if folder is not None:
            authority = Authority()
            (folder / "ca.pem").write_bytes(authority.pem)
            certificate, key = authority.server().write(folder, "redis")
            self.ca = str(folder / "ca.pem")
            self._options = {"tls-cert-file": certificate, "tls-key-file": key, "tls-ca-cert-file": self.ca}
            self._options |= {"tls-auth-clients": "no", "tls-replication": "yes", "requirepass": PASSWORD}
            self._arguments = {"ssl": True, "ssl_ca_certs": self.ca, "password": PASSWORD}

    def options(self, port: int) -> dict[str, str]:
        """What a server is started with."""
        listening = {"port": str(port)} if self.ca is None else {"port": "0", "tls-port": str(port)}
        return {"bind": "127.0.0.1", **listening, **self._options}

    def client(self, port: int) -> Any:
        """A client of one server."""
        return Redis(port=port, socket_timeout=5, **self._arguments)

    def url(self, address: str = "") -> str:
        """The URL with what it takes to be let in; the CA is told elsewhere."""
        return f"redis://{address}" if self.ca is None else f"rediss://:{PASSWORD}@{address}"


class Node:
    """One process of redis-server on loopback, as a server or as a sentinel."""

    def __init__(self, folder: Path, port: int, guard: Guard, program: str, *arguments: str) -> None:
        folder.mkdir()
        self.port = port
        self.address = f"127.0.0.1:{port}"
        self.client = guard.client(port)
        self._process = subprocess.Popen([program, *arguments], cwd=folder, stdout=subprocess.DEVNULL)

    @classmethod
    def server(cls, folder: Path, port: int, guard: Guard, **options: str) -> Node:
        """A redis-server that keeps nothing."""
        told = {**guard.options(port), "save": "", "appendonly": "no", **options}
        return cls(folder, port, guard, "redis-server", *(part for k, v in told.items() for part in (f"--{k}", v)))

    @classmethod
    def sentinel(cls, folder: Path, port: int, guard: Guard, primary: int) -> Node:
        """A sentinel: the same program in another mode."""
        watch = [f"monitor {MASTER} 127.0.0.1 {primary} 2", f"down-after-milliseconds {MASTER} {DOWN_AFTER_MS}"]
        watch += [f"failover-timeout {MASTER} 5000"]
        if guard.ca is not None:
            watch.append(f"auth-pass {MASTER} {PASSWORD}")
        lines = [f"{name} {value}" for name, value in guard.options(port).items()]
        config = folder.with_suffix(".conf")
        config.write_text("\n".join([*lines, *(f"sentinel {line}" for line in watch), ""]), encoding="utf-8")
        return cls(folder, port, guard, "redis-server", str(config), "--sentinel")

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


class _Setup:
    """Processes that end together."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def close(self) -> None:
        """Ends all that is left."""
        for node in self.nodes:
            node.stop()


class Sentinels(_Setup):
    """A primary, its replica, and three sentinels that watch them."""

    def __init__(self, folder: Path, guard: Guard | None = None) -> None:
        super().__init__()
        self.guard = guard or Guard()
        try:
            self._start(folder)
        except BaseException:
            self.close()
            raise

    def _start(self, folder: Path) -> None:
        primary, replica, *sentinels = _free_ports(5)
        options = {"repl-diskless-sync-delay": "0"}
        if self.guard.ca is not None:
            options["masterauth"] = PASSWORD
        self.nodes.append(Node.server(folder / "primary", primary, self.guard, **options))
        options["replicaof"] = f"127.0.0.1 {primary}"
        self.nodes.append(Node.server(folder / "replica", replica, self.guard, **options))
        self.primary, self.replica = self.nodes
        _until(self.primary.client.ping)
        _until(lambda: self.replica.client.info("replication")["master_link_status"] == "up")
        for number, port in enumerate(sentinels):
            self.nodes.append(Node.sentinel(folder / f"sentinel-{number}", port, self.guard, primary))
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
        named = {"MOORAGE_REDIS_SENTINELS": addresses, "MOORAGE_REDIS_MASTER_NAME": MASTER}
        return named if self.guard.ca is None else {**named, "MOORAGE_REDIS_URL": self.guard.url()}

    def primary_port(self) -> int:
        """Where the sentinels say the primary is."""
        return int(self.sentinels[0].client.sentinel_get_master_addr_by_name(MASTER)[1])


class Cluster(_Setup):
    """Masters that share the slots evenly; the first one may have a replica, the last of the nodes."""

    SLOTS = 16_384

    def __init__(
        self, folder: Path, masters: int = 3, guard: Guard | None = None, *, with_replica: bool = False
    ) -> None:
        super().__init__()
        self.guard = guard or Guard()
        try:
            self._start(folder, masters + with_replica)
            self.masters = self.nodes[:masters]
            self._share_slots()
            if with_replica:
                self._replicate(self.nodes[0], self.nodes[-1])
        except BaseException:
            self.close()
            raise

    def _start(self, folder: Path, count: int) -> None:
        ports = _free_ports(2 * count)
        buses = dict(zip(ports[:count], ports[count:], strict=True))
        options = {"cluster-enabled": "yes", "cluster-node-timeout": "3000"}
        if self.guard.ca is not None:
            options["tls-cluster"] = "yes"
        for port, bus in buses.items():
            options["cluster-port"] = str(bus)
            self.nodes.append(Node.server(folder / f"node-{port}", port, self.guard, **options))
        for node in self.nodes:
            _until(node.client.ping)
        for number, node in enumerate(self.nodes):
            node.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in self.nodes[1:]:
            self.nodes[0].client.execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, buses[node.port])

    def _share_slots(self) -> None:
        share = self.SLOTS // len(self.masters) + 1
        for number, node in enumerate(self.masters):
            last = min(self.SLOTS, (number + 1) * share) - 1
            node.client.execute_command("CLUSTER", "ADDSLOTSRANGE", number * share, last)
        _until(lambda: all(self._complete(node) for node in self.nodes))

    def _replicate(self, master: Node, replica: Node) -> None:
        replica.client.execute_command("CLUSTER", "REPLICATE", master.client.execute_command("CLUSTER", "MYID"))
        _until(lambda: replica.client.info("replication").get("master_link_status") == "up")
        # Only who knows that a replica is one votes for it.
        _until(lambda: all(b" slave " in node.client.execute_command("CLUSTER", "NODES") for node in self.masters))

    def wait_for_replica(self) -> None:
        """Until the replica has what the first master acknowledged."""
        self.masters[0].client.wait(1, 5_000)

    def _complete(self, node: Node) -> bool:
        info: bytes = node.client.execute_command("CLUSTER", "INFO")
        return b"cluster_state:ok" in info and b"cluster_known_nodes:%d" % len(self.nodes) in info

    @property
    def url(self) -> str:
        """One of the nodes."""
        return self.guard.url(self.nodes[0].address)

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
        for node in (target, source, *self.masters):
            node.client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target_id)
        return moved


class Single(_Setup):
    """One Redis."""

    def __init__(self, folder: Path, guard: Guard | None = None) -> None:
        super().__init__()
        self.guard = guard or Guard()
        self.nodes.append(Node.server(folder / "single", _free_ports(1)[0], self.guard))
        _until(self.nodes[0].client.ping)

    @property
    def url(self) -> str:
        """Where it is."""
        return self.guard.url(self.nodes[0].address)
