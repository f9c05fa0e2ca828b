"""Where events are published: what engines and the command line say, and what is made of it."""

import socket

import pytest

from moorage.collect.kv_sources import (
    Advertised,
    EventOptions,
    NoSource,
    Source,
    locate,
    parse_options,
    read_sglang_sources,
    read_vllm_sources,
)

ENGINE = "http://127.0.0.1:8000"


def test_options() -> None:
    options = parse_options(
        ["a=tcp://10.0.0.1:5557", "10.0.0.2:8000=tcp://*:5560,tcp://10.0.0.2:5561", "c=tcp://[::1]:5557", "d=off"]
    )
    assert options.of("a") == Advertised("10.0.0.1", 5557, explicit=True)
    assert options.of("10.0.0.2:8000") == Advertised("*", 5560, ("10.0.0.2", 5561), explicit=True)
    assert options.of("c") == Advertised("::1", 5557, explicit=True)
    assert (options.of("d"), options.is_off("d"), options.is_off("a"), options.is_off("x")) == (
        None,
        True,
        False,
        False,
    )
    assert parse_options(["off"]).is_off("a")
    assert parse_options([]) == EventOptions(False, {})


@pytest.mark.parametrize(
    "value",
    ["", "a", "=off", "a=", "a=tcp://h", "a=ipc:///x", "a=tcp://h:0", "a=tcp://h:70000", "a=tcp://h:1,udp://h:2"],
)
def test_options_that_make_no_sense(value: str) -> None:
    with pytest.raises(ValueError, match="KV events"):
        parse_options([value])


def test_what_vllm_says() -> None:
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv"}
    answer = {
        "0": config | {"replay_endpoint": "tcp://*:6557"},
        "1": config | {"endpoint": "tcp://[::]:5558", "replay_endpoint": None, "topic": None},
        "2": config | {"publisher": "null"},
        "3": config | {"endpoint": "ipc:///tmp/kv"},
        "4": config | {"replay_endpoint": "inproc://x"},
        "x": config,
        "5": None,
    }
    assert read_vllm_sources(answer) == {0: Advertised("*", 5557, ("*", 6557), "kv"), 1: Advertised("::", 5558)}
    assert read_vllm_sources({}) == read_vllm_sources([]) == read_vllm_sources(None) == {}


def test_what_sglang_says() -> None:
    config = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "", "dp_size": 2}
    assert read_sglang_sources({"kv_events": config}) == {0: Advertised("*", 5557), 1: Advertised("*", 5558)}
    replaying = config | {"replay_endpoint_port_base": 6557, "dp_size": 1, "topic": "t"}
    assert read_sglang_sources({"kv_events": replaying}) == {0: Advertised("*", 5557, ("*", 6557), "t")}
    for nothing in (None, [], {}, {"kv_events": None}, {"kv_events": config | {"endpoint_port_base": None}}):
        assert read_sglang_sources(nothing) == {}


@pytest.mark.parametrize("wildcard", ["*", "0.0.0.0", "::"])
async def test_wildcards_stand_for_the_engines_own_host(wildcard: str) -> None:
    told = Advertised(wildcard, 5557, (wildcard, 6557), "t")
    assert await locate(told, "http://10.1.2.3:8000") == Source(
        "tcp://10.1.2.3:5557", False, "tcp://10.1.2.3:6557", "t"
    )
    assert (await locate(told, "http://[fd00::1]:8000")).endpoint == "tcp://[fd00::1]:5557"


async def test_an_engine_that_connects_is_listened_for() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.listen()
        # Somebody listens there: the engine, that chose the port by itself.
        source = await locate(Advertised("localhost", port), ENGINE)
        assert (source.bind, source.endpoint) == (False, f"tcp://127.0.0.1:{port}")
    source = await locate(Advertised("127.0.0.1", port, ("127.0.0.1", 6557)), ENGINE)
    assert (source.bind, source.endpoint, source.replay) == (True, f"tcp://127.0.0.1:{port}", "tcp://127.0.0.1:6557")


async def test_addresses_that_are_not_ours() -> None:
    with pytest.raises(NoSource, match=r"tcp://192\.0\.2\.1:5557, which is not this host"):
        await locate(Advertised("192.0.2.1", 5557), ENGINE)
    # The engine's own: it chose the port by itself.
    own = await locate(Advertised("192.0.2.1", 5557), "http://192.0.2.1:8000")
    assert own == Source("tcp://192.0.2.1:5557", False, None, "")
    for told, engine in (
        (Advertised("no-such-host.invalid", 5557), ENGINE),
        (Advertised("no-such-host.invalid", 5557, explicit=True), ENGINE),
        (Advertised("*", 5557), "http://no-such-host.invalid:8000"),
    ):
        with pytest.raises(NoSource, match="is not known here"):
            await locate(told, engine)


async def test_what_the_command_line_says_goes() -> None:
    told = parse_options(["a=tcp://192.0.2.7:5557,tcp://192.0.2.7:6557", "b=tcp://*:5557"])
    [first, second] = [told.of("a"), told.of("b")]
    assert first is not None
    assert second is not None
    assert await locate(first, ENGINE) == Source("tcp://192.0.2.7:5557", False, "tcp://192.0.2.7:6557", "")
    assert await locate(second, ENGINE) == Source("tcp://*:5557", True, None, "")
