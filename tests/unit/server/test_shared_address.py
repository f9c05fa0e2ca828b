"""Addresses that several processes of a server share, and what may stand in the settings of each."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Iterator

import pytest

from moorage_server.runtime.addresses import host_and_port
from moorage_server.runtime.server import AddressInUse
from moorage_server.runtime.settings_sources import SettingsError, load_settings
from moorage_server.runtime.shared_address import SharedAddress
from moorage_server.runtime.workers import settings_of

REDIS = {"MOORAGE_REDIS_URL": "redis://:hush@h:1/0"}


@pytest.fixture
def shared() -> Iterator[SharedAddress]:
    address = SharedAddress("127.0.0.1:0")
    yield address
    address.close()


def _listener(address: str, *options: int) -> socket.socket:
    one = socket.socket()
    try:
        for option in options:
            one.setsockopt(socket.SOL_SOCKET, option, 1)
        one.bind(host_and_port(address))
        one.listen()
    except OSError:
        one.close()
        raise
    return one


def test_processes_of_ours_listen_there_and_the_keeper_takes_no_connection(shared: SharedAddress) -> None:
    assert host_and_port(shared.address)[1] != 0
    with _listener(shared.address, socket.SO_REUSEPORT) as a, _listener(shared.address, socket.SO_REUSEPORT) as b:
        a.settimeout(0)
        b.settimeout(0)
        calls = [socket.create_connection(host_and_port(shared.address), timeout=5) for _ in range(32)]
        accepted = [sum(1 for _ in _accepted(one)) for one in (a, b)]
        for call in calls:
            call.close()
    assert sum(accepted) == 32
    assert min(accepted) > 0


def _accepted(listener: socket.socket) -> Iterator[None]:
    while True:
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return
        yield


def test_others_do_not_get_it_and_it_outlives_the_processes(shared: SharedAddress) -> None:
    _listener(shared.address, socket.SO_REUSEPORT).close()
    with pytest.raises(OSError, match="in use"):
        _listener(shared.address)
    shared.close()
    _listener(shared.address, socket.SO_REUSEADDR).close()


@pytest.mark.parametrize("options", [(), (socket.SO_REUSEPORT,)])
def test_an_address_that_others_listen_on_is_refused(options: tuple[int, ...]) -> None:
    with _listener("127.0.0.1:0", *options) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(AddressInUse, match=f"can not listen on {address}: "):
            SharedAddress(address)


def test_a_name_is_kept_wherever_it_is() -> None:
    shared = SharedAddress("localhost:0")
    assert shared.address.startswith("localhost:")
    with pytest.raises(OSError, match="in use"):
        _listener(f"127.0.0.1:{host_and_port(shared.address)[1]}")
    shared.close()


@pytest.mark.parametrize("listen", ["192.0.2.1:0", "no-such-host.invalid:0"])
def test_an_address_that_is_not_here_is_refused(listen: str) -> None:
    with pytest.raises(AddressInUse, match=f"can not listen on {listen}: "):
        SharedAddress(listen)


def test_each_process_has_its_own_metrics_and_all_the_rest_in_common() -> None:
    settings = load_settings(None, {"processes": 3}, REDIS | {"MOORAGE_METRICS_LISTEN": "[::1]:9464"})
    own = [settings_of(settings, number) for number in range(3)]
    assert [one.metrics.listen for one in own] == ["[::1]:9464", "[::1]:9465", "[::1]:9466"]
    assert {one.model_copy(update={"metrics": settings.metrics}) == settings for one in own} == {True}
    anywhere = load_settings(None, {"processes": 2}, REDIS | {"MOORAGE_METRICS_LISTEN": "[::1]:0"})
    assert settings_of(anywhere, 1).metrics.listen == "[::1]:0"
    without = load_settings(None, {"processes": 2}, REDIS)
    assert settings_of(without, 1) == without


def test_settings_travel_whole_to_a_process() -> None:
    pools = {"MOORAGE_POOLS": "{p: {classes: {rlvr: {aliases: [math]}}}}"}
    settings = load_settings(None, {"processes": 2}, REDIS | pools)
    arrived = pickle.loads(pickle.dumps(settings))
    assert arrived == settings
    assert arrived.redis_url == "redis://:hush@h:1/0"
    assert arrived.pool_configs() == settings.pool_configs()


def _problems(flags: dict[str, object], env: dict[str, str]) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load_settings(None, flags, env)
    return list(caught.value.problems)


def test_what_can_not_be_shared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    embedded = (
        "processes: must be 1 with the embedded ledger, which lives in one process: give redis.url (--redis-url),"
        " got '2' (MOORAGE_PROCESSES)"
    )
    assert _problems({}, {"MOORAGE_PROCESSES": "2"}) == [embedded]
    ports = "metrics.listen: needs a port for each of 3 processes, up to 65535, got '127.0.0.1:65534'"
    env = REDIS | {"MOORAGE_METRICS_LISTEN": "127.0.0.1:65534"}
    assert _problems({"processes": 3}, env) == [f"{ports} (MOORAGE_METRICS_LISTEN)"]
    assert load_settings(None, {"processes": 2}, env).processes == 2
    for wrong, limit in ((0, "greater than or equal to 1"), (65, "less than or equal to 64")):
        assert _problems({"processes": wrong}, REDIS) == [f"processes: must be {limit}, got '{wrong}' (--processes)"]
    monkeypatch.delattr(socket, "SO_REUSEPORT")
    (problem,) = _problems({"processes": 2}, REDIS)
    assert problem.startswith("processes: must be 1: this platform can not share a port")
    assert load_settings(None, {"processes": 1}, REDIS).processes == 1
