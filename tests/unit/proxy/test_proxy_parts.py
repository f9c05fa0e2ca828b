from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict, CIMultiDictProxy

from moorage.errors import Held, InvalidArgument, LeaseLost, MoorageError, Rejected, ResourceExhausted, Unavailable
from moorage.proxy.errors import ProxyError, from_moorage
from moorage.proxy.forward import _asking_for_usage
from moorage.proxy.headers import downstream_headers, rank_header, upstream_headers
from moorage.proxy.rules import ClassPolicy, Rules
from moorage.proxy.settings import ProxySettings
from moorage.proxy.tokens import TokenGate
from moorage.state import Turn
from moorage.v1.scheduler_pb2 import HOLD_REASON_KV_BUDGET, HOLD_REASON_TOO_LARGE, Hold, Placement


def turn(rank: int = 0) -> Turn:
    return Turn(0, Placement(instance_id="engine-0", endpoint="http://e:1", dp_rank=rank))


def multi(*pairs: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(pairs))


def held(seconds: float) -> Held:
    hold = Hold(reason=HOLD_REASON_KV_BUDGET)
    hold.retry_after.FromNanoseconds(int(seconds * 1e9))
    return Held("held", hold=hold)


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (held(2.2), 429, "KV_BUDGET", "3"),
        (held(0.01), 429, "KV_BUDGET", "1"),
        (ResourceExhausted("busy", reason="RATE_LIMITED"), 429, "RATE_LIMITED", "1"),
        (Rejected("no", hold=Hold(reason=HOLD_REASON_TOO_LARGE)), 422, "TOO_LARGE", None),
        (Unavailable("away", retry_after=5.0), 503, "UNAVAILABLE", "5"),
        (InvalidArgument("bad"), 400, "INVALIDARGUMENT", None),
        (LeaseLost("gone"), 502, "LEASELOST", None),
        (MoorageError("what"), 502, "MOORAGEERROR", None),
    ],
)
def test_errors_have_openais_form(error: MoorageError, status: int, code: str, retry_after: str | None) -> None:
    response = from_moorage(error).response()
    assert (response.status, response.headers.get("Retry-After")) == (status, retry_after)
    assert isinstance(response.body, bytes)
    content = json.loads(response.body)["error"]
    assert set(content) == {"message", "type", "param", "code"}
    assert content["code"] == code


def test_hop_by_hop_headers_stay_here_and_repeated_ones_stay_repeated() -> None:
    seen = upstream_headers(
        multi(
            ("Host", "proxy"), ("Connection", "close, X-Hop"), ("x-hop", "1"), ("Transfer-Encoding", "chunked"),
            ("Cookie", "a=1"), ("Accept", "a"), ("Accept", "b"), ("Authorization", "Bearer t"), ("x-session-id", "old"),
        ),
        "s-1", "r-1", consumed=("authorization",),
    )  # fmt: skip
    assert sorted(seen.items()) == [
        ("Accept", "a"), ("Accept", "b"), ("Accept-Encoding", "identity"), ("Cookie", "a=1"), ("X-Request-ID", "r-1"),
        ("X-SMG-Routing-Key", "s-1"), ("X-Session-ID", "s-1"),
    ]  # fmt: skip
    back = downstream_headers(
        multi(("Content-Length", "3"), ("Set-Cookie", "b=2"), ("X-Request-Id", "r-9")), turn(), "s-1", "r-1"
    )
    assert dict(back) == {
        "Set-Cookie": "b=2", "X-Request-Id": "r-9", "X-Moorage-Session": "s-1", "X-Moorage-Instance": "engine-0",
    }  # fmt: skip


def test_the_rank_is_named_where_there_are_several() -> None:
    assert rank_header(turn(), set()) == {}
    assert rank_header(turn(2), set()) == {"X-data-parallel-rank": "2"}
    assert rank_header(turn(), {"engine-0"}) == {"X-data-parallel-rank": "0"}


@pytest.mark.parametrize(
    ("content", "sent", "hidden"),
    [
        ('{"stream":true, "n": 1.0}', '{"stream_options":{"include_usage":true},"stream":true, "n": 1.0}', True),
        ('{"stream":false}', '{"stream":false}', False),
        ('{"stream":true,"stream_options":{"include_usage":true}}', None, False),
    ],
)
def test_the_usage_is_asked_for_without_touching_the_rest(content: str, sent: str | None, hidden: bool) -> None:
    body: dict[str, Any] = json.loads(content)
    expected = (content if sent is None else sent).encode()
    assert _asking_for_usage("/v1/completions", body, content.encode()) == (expected, hidden)
    json.loads(expected)
    assert _asking_for_usage("/v1/responses", body, content.encode()) == (content.encode(), False)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, "nonsense"])
def test_options_without_usage_are_completed(options: object) -> None:
    body = {"stream": True, "stream_options": options}
    sent, hidden = _asking_for_usage("/v1/completions", body, json.dumps(body).encode())
    assert (json.loads(sent)["stream_options"], hidden) == ({"include_usage": True}, True)


def test_all_of_a_rule_must_match_and_the_first_wins() -> None:
    rules = Rules.parse(
        {
            "rules": [
                {"class": "a", "path": "/v1/chat/*", "model": "m-*"},
                {"class": "b", "header": {"X-Team": "*"}},
                {"class": "c", "model": "m-?"},
            ],
            "classes": {"a": {"idle": 5, "max_context_tokens": 10}},
        },
        idle_s=7.0,
    )
    assert rules.class_of("/v1/chat/completions", "m-1", {"X-Team": "t"}) == "a"
    assert rules.class_of("/v1/completions", "m-1", {"X-Team": "t"}) == "b"
    assert rules.class_of("/v1/completions", "m-1", {}) == "c"
    assert rules.class_of("/v1/completions", "m-10", {}) == ""
    assert rules.policy_of("a") == ClassPolicy(5.0, False, 10)
    assert rules.policy_of("b") == ClassPolicy(7.0)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"rules": {}}, "rules: must be a list"),
        ({"rules": ["a"]}, r"rules\[0\]: must be a mapping"),
        ({"rules": [{"class": "a", "user": "u"}]}, "unknown key 'user'"),
        ({"rules": [{"class": 3}]}, r"rules\[0\].class"),
        ({"rules": [{"class": "a", "header": {"X": 1}}]}, r"rules\[0\].header.X"),
        ({"classes": {"a": {"idle": "x"}}}, "classes.a.idle"),
        ({"classes": {"a": {"idle": 0}}}, "classes.a.idle"),
        ({"classes": {"a": {"single_turn": "yes"}}}, "classes.a.single_turn"),
        ({"classes": {"a": {"max_context_tokens": 0}}}, "classes.a.max_context_tokens"),
        ({"default_class": 1}, "default_class"),
    ],
)
def test_rules_that_make_no_sense_are_named(content: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Rules.parse(content)


def request(**headers: str) -> web.Request:
    return make_mocked_request("POST", "/", headers={name.replace("_", "-"): value for name, value in headers.items()})


def test_the_token_is_ours_or_the_engines(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("one\n\n# none\ntwo\n")
    gate = TokenGate(str(file))
    assert gate.consumed(request(Authorization="Bearer two")) == ("authorization",)
    assert gate.consumed(request(Authorization="bearer one")) == ("authorization",)
    assert gate.consumed(request(X_Moorage_Token="one", Authorization="Bearer engine")) == ()
    for wrong in (request(), request(Authorization="Basic one"), request(Authorization="Bearer # none")):
        with pytest.raises(ProxyError) as caught:
            gate.consumed(wrong)
        assert caught.value.status == 401
    file.write_text("")  # Unusable: what was known stays in force.
    assert gate.consumed(request(Authorization="Bearer two")) == ("authorization",)
    for content in ("", "# nothing"):
        file.write_text(content)
        with pytest.raises(ValueError, match="no token"):
            TokenGate(str(file))
    with pytest.raises(ValueError, match="can not be read"):
        TokenGate(str(tmp_path / "missing"))


@pytest.mark.parametrize(
    ("listen", "address"),
    [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:80", ("::1", 80)), (":80", ("0.0.0.0", 80))],
)
def test_addresses(listen: str, address: tuple[str, int]) -> None:
    assert ProxySettings(listen=listen, server="s").address() == address


@pytest.mark.parametrize("listen", ["80", "host:", "host:port", "host:65536"])
def test_what_is_no_address(listen: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        ProxySettings(listen=listen, server="s")
