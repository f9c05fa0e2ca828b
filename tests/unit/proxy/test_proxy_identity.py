from __future__ import annotations

from typing import Any

import pytest
from multidict import CIMultiDict

from moorage.proxy.identity import SESSION_FIELDS, SESSION_HEADERS, BadRequest, Identifier, Ticket
from moorage.proxy.rules import ClassPolicy, Rules

PATH = "/v1/chat/completions"


def ticket(
    headers: dict[str, str] | None = None,
    body: dict[str, Any] | None = None,
    rules: Rules | None = None,
    first: tuple[str, ...] = (),
    first_fields: tuple[str, ...] = (),
) -> Ticket:
    return Identifier(rules or Rules(), first, first_fields).ticket(PATH, CIMultiDict(headers or {}), body or {})


def nested(path: str, value: object) -> dict[str, Any]:
    first, _, rest = path.partition(".")
    return {first: nested(rest, value) if rest else value}


@pytest.mark.parametrize("name", SESSION_HEADERS)
def test_every_header_names_a_session_whatever_its_case(name: str) -> None:
    assert ticket({name.upper(): "s-1"}).session_id == "s-1"


@pytest.mark.parametrize("path", SESSION_FIELDS)
def test_every_field_names_a_session(path: str) -> None:
    assert ticket(body=nested(path, "s-1")).session_id == "s-1"
    assert ticket(body=nested(path, 7)).session_id == "7"


def test_headers_go_over_fields_and_configured_places_over_usual_ones() -> None:
    headers, body = {"X-Session-ID": "h", "X-Mine": "m"}, {"session_id": "b", "user": "u"}
    assert ticket(headers, body).session_id == "h"
    assert ticket(headers, body, first=("X-Mine",)).session_id == "m"
    assert ticket({}, body).session_id == "b"
    assert ticket({}, body, first_fields=("user",)).session_id == "u"


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({}, {"user": "u-1", "prompt_cache_key": "k"}),
        ({"X-Request-ID": "r-1", "X-Correlation-ID": "c-1"}, {}),
        ({"X-Session-ID": ""}, {"session_id": None, "metadata": None}),
        ({}, {"metadata": "s-1", "session_params": ["s-1"]}),
    ],
)
def test_without_a_session_every_request_is_one(headers: dict[str, str], body: dict[str, Any]) -> None:
    one, two = ticket(headers, body), ticket(headers, body)
    assert one.session_id != two.session_id
    assert (one.named, one.ends) == (False, True)


def test_a_named_session_goes_on_until_it_says_so_or_its_class_does() -> None:
    assert ticket({"X-Session-ID": "s"}).ends is False
    assert ticket({"X-Session-ID": "s", "X-Session-End": "True"}).ends is True
    assert ticket({"X-Session-ID": "s", "X-Session-End": "false"}).ends is False
    for said, ends in (("true", True), (True, True), ("1", True), ("false", False), (None, False), ([], False)):
        assert ticket({"X-Session-ID": "s"}, {"metadata": {"session_end": said}}).ends is ends
    assert ticket({"X-Session-ID": "s", "X-Session-End": "false"}, {"metadata": {"session_end": "true"}}).ends is False
    once = Rules(classes={"judge": ClassPolicy(single_turn=True)})
    assert ticket({"X-Session-ID": "s", "X-Workload-Class": "judge"}, rules=once).ends is True


def test_the_class_comes_from_header_metadata_rules_or_default() -> None:
    rules = Rules.parse({"rules": [{"path": "/v1/chat/*", "class": "chat"}], "default_class": "other"})
    body = {"metadata": {"workload_class": "meta", "group_id": "g-2"}}
    assert ticket({"X-Workload-Class": "head"}, body, rules).workload_class == "head"
    assert ticket({}, body, rules).workload_class == "meta"
    assert ticket({}, body, rules).group_id == "g-2"
    assert ticket({}, {}, rules).workload_class == "chat"
    assert ticket({}, {}, Rules(default_class="other")).workload_class == "other"
    assert ticket().workload_class == ""


def test_sizes_are_declared_or_known_or_unknown() -> None:
    assert ticket().prompt_tokens is None
    assert ticket(body={"prompt": "a b"}).prompt_tokens is None
    assert ticket(body={"prompt": [[1, 2], [3]]}).prompt_tokens is None
    counted = ticket(body={"prompt": [1, 2, 3], "max_tokens": 5})
    assert (counted.prompt_tokens, counted.max_context_tokens) == (3, 8)
    # A session that goes on is not bounded by what one of its requests may generate.
    assert ticket({"X-Session-ID": "s"}, {"prompt": [1], "max_tokens": 5}).max_context_tokens is None
    declared = ticket({"X-Prompt-Tokens": "9", "X-Max-Context-Tokens": "100"}, {"prompt": [1], "max_tokens": 5})
    assert (declared.prompt_tokens, declared.max_context_tokens) == (9, 100)
    bounded = Rules(default_policy=ClassPolicy(max_context_tokens=64))
    assert ticket({"X-Session-ID": "s"}, rules=bounded).max_context_tokens == 64


@pytest.mark.parametrize(
    ("headers", "body", "named"),
    [
        ({"X-Session-ID": "é" * 129}, {}, "256 bytes, not 258"),
        ({"X-Session-ID": "\udcff"}, {}, "UTF-8"),
        ({}, {"session_id": "a\nSet-Cookie: b"}, "control characters"),
        ({}, {"session_id": {"a": 1}}, "session_id: must be a string"),
        ({}, {"metadata": {"group_id": True}}, "metadata.group_id"),
        ({"X-Workload-Class": "c" * 300}, {}, "workload class"),
        ({"X-Prompt-Tokens": "many"}, {}, "X-Prompt-Tokens"),
        ({"X-Prompt-Tokens": "9" * 5000}, {}, "X-Prompt-Tokens"),
        ({"X-Max-Context-Tokens": "-1"}, {}, "X-Max-Context-Tokens"),
        ({"X-Group-Size": "4294967296"}, {}, "X-Group-Size"),
    ],
)
def test_what_can_not_be_is_refused_by_name(headers: dict[str, str], body: dict[str, Any], named: str) -> None:
    with pytest.raises(BadRequest, match=named):
        ticket(headers, body)


def test_the_policy_version_comes_from_its_header() -> None:
    assert ticket({"X-Session-ID": "s"}).policy_version is None
    assert ticket({"X-Policy-Version": "0"}).policy_version == 0
    assert ticket({"x-policy-version": str(2**63 - 1)}).policy_version == 2**63 - 1
    assert ticket({"X-Policy-Version": "000"}).policy_version == 0
    assert ticket({"X-Policy-Version": "0" * 5000 + "7"}).policy_version == 7
    for wrong in ("-1", "1.5", "step-7", str(2**63), "0" * 20 + str(2**63), "0" * 19 + "9" * 30, "9" * 60):
        with pytest.raises(BadRequest, match=rf"X-Policy-Version.*{2**63 - 1}.*{wrong}"):
            ticket({"X-Policy-Version": wrong})
