"""The conformance table: that it is well-formed, and played with the Python stubs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tests.integration.conformance import CASES, SERVICES, Case, Player, problems

STEP = {"call", "request", "expect", "save", "within"}
EXPECT = {"code", "reason", "field", "retry_info", "response", "present", "absent"}


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


def test_every_call_of_the_api_is_played() -> None:
    unary = {
        f"{name}/{method.name}"
        for name, service in SERVICES.items()
        for method in service.methods
        if not (method.client_streaming or method.server_streaming)
    }
    assert {step["call"] for case in CASES for step in case["steps"]} == unary


def test_the_table_keeps_to_its_format() -> None:
    names = [case["name"] for case in CASES]
    assert len(set(names)) == len(names)
    for case in CASES:
        assert set(case) <= {"name", "why", "server", "steps"}, case["name"]
        known = {"pool", "uuid"}
        for step in case["steps"]:
            assert set(step) <= STEP, case["name"]
            assert set(step.get("expect", {})) <= EXPECT, case["name"]
            used = set(re.findall(r"\$\{(\w+)\}", json.dumps([step["request"], step.get("expect", {})])))
            assert {name for name in used if not name.startswith("uuid_")} <= known, case["name"]
            known |= set(step.get("save", {}))


@pytest.mark.parametrize(
    ("expect", "answer"),
    [
        ({}, {"code": "ABORTED"}),
        ({"code": "ABORTED"}, {}),
        ({"reason": "A"}, {"ErrorInfo": {"reason": "B", "domain": "moorage.v1"}}),
        ({"reason": "A"}, {"ErrorInfo": {"reason": "A", "domain": "elsewhere"}}),
        ({"field": "a"}, {"BadRequest": {"fieldViolations": [{"field": "a.b"}]}}),
        ({"retry_info": True}, {}),
        ({"retry_info": True}, {"RetryInfo": {"retryDelay": "0s"}}),
        ({"response": {"a": "1"}}, {"response": {"a": "2"}}),
        ({"response": {"a": {"b": "1"}}}, {"response": {"a": {"c": "1"}}}),
        ({"response": {"a": {}}}, {}),
        ({"response": {"a": True}}, {}),
        ({"response": {"a": False}}, {"response": {"a": True}}),
        ({"response": {"a": [{}, {}]}}, {"response": {"a": [{}]}}),
        ({"response": {"a": [{"b": "1"}]}}, {"response": {"a": [{"b": "2"}]}}),
        ({"present": ["a.b"]}, {"response": {"a": {}}}),
        ({"present": ["a.1"]}, {"response": {"a": [{}]}}),
        ({"absent": ["a.0.b"]}, {"response": {"a": [{"b": False}]}}),
    ],
)
def test_an_answer_that_is_not_as_expected_is_told(expect: dict[str, Any], answer: dict[str, Any]) -> None:
    assert problems({"code": "OK", "response": {}, **answer}, expect)
