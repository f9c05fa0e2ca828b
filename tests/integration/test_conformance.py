"""The conformance table, played with the Python stubs."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from tests.integration.conformance import CASES, Case, Player


@pytest.fixture(scope="module")
def channels(conformance_servers: dict[str, str]) -> Iterator[dict[str, grpc.Channel]]:
    options = [("grpc.enable_retries", 0)]
    channels = {name: grpc.insecure_channel(address, options) for name, address in conformance_servers.items()}
    yield channels
    for channel in channels.values():
        channel.close()


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_case(case: Case, channels: dict[str, grpc.Channel]) -> None:
    Player(channels[case.get("server", "MOORAGE_SERVER")]).play(case)
