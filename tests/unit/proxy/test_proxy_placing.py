"""What a gateway is told of a placement."""

from __future__ import annotations

import pytest

from moorage.proxy.errors import ProxyError
from moorage.proxy.placing import destination


@pytest.mark.parametrize(
    ("endpoint", "told"),
    [
        ("http://10.0.0.7:8000", "10.0.0.7:8000"),
        ("10.0.0.7:8000", "10.0.0.7:8000"),
        ("http://10.0.0.7/", "10.0.0.7:80"),
        ("https://engine.internal", "engine.internal:443"),
        ("http://[fd00::7]:8000", "[fd00::7]:8000"),
    ],
)
def test_an_endpoint_is_told_as_host_and_port(endpoint: str, told: str) -> None:
    assert destination(endpoint) == told


def test_a_path_can_not_be_told() -> None:
    with pytest.raises(ProxyError, match="endpoint http://gw/engine-1") as raised:
        destination("http://gw/engine-1")
    assert (raised.value.status, raised.value.code) == (502, "endpoint_path")
