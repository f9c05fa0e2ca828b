import pytest

from moorage.collect.targets import Target, parse_target, resolve_targets


@pytest.mark.parametrize(
    ("text", "instance_id", "endpoint"),
    [
        ("http://10.0.0.7:8000", "10.0.0.7:8000", "http://10.0.0.7:8000"),
        ("http://10.0.0.7:8000/", "10.0.0.7:8000", "http://10.0.0.7:8000"),
        ("http://10.0.0.7:8000/metrics", "10.0.0.7:8000", "http://10.0.0.7:8000"),
        ("10.0.0.7:8000", "10.0.0.7:8000", "http://10.0.0.7:8000"),
        ("https://engine.example", "engine.example:443", "https://engine.example"),
        ("http://[::1]:8000", "[::1]:8000", "http://[::1]:8000"),
        ("http://proxy/engines/3/", "proxy:80/engines/3", "http://proxy/engines/3"),
        ("blue=http://10.0.0.7:8000", "blue", "http://10.0.0.7:8000"),
        ("blue=10.0.0.7:8000", "blue", "http://10.0.0.7:8000"),
        ("a b{c}:d=http://h:1", "a b{c}:d", "http://h:1"),
    ],
)
def test_names_and_endpoints(text: str, instance_id: str, endpoint: str) -> None:
    assert parse_target(text) == Target(instance_id, endpoint)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ftp://h:1",
        "http://",
        "http://u:secret@h:1",
        "http://h:1/?a=b",
        "http://h:1#x",
        "http://h:0x1",
        "n" * 257 + "=h:1",
    ],
)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        parse_target(text)
    assert "secret" not in str(error.value)


def test_names_override_and_must_differ() -> None:
    names = {"http://h:1": "one", "x=http://h:2/": "two"}
    assert [target.instance_id for target in resolve_targets(["h:1", "x=http://h:2/", "y=h:3"], names)] == [
        "one",
        "two",
        "y",
    ]
    with pytest.raises(ValueError, match="two engines are called 'h:1'"):
        resolve_targets(["h:1", "http://h:1"])
    assert resolve_targets([]) == []
