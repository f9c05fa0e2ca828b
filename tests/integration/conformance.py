"""Plays cases of proto/conformance with the Python stubs; the format is described in the README there."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict, ParseDict
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from moorage.v1 import inspector_pb2, operator_pb2, scheduler_pb2
from tests.integration.processes import PATIENCE_S

Json = Any
Case = dict[str, Any]

CASES: list[Case] = json.loads((Path(__file__).parents[2] / "proto/conformance/cases.json").read_text("utf-8"))

_PACKAGE = "moorage.v1"
SERVICES = {
    name: service
    for module in (scheduler_pb2, inspector_pb2, operator_pb2)
    for name, service in module.DESCRIPTOR.services_by_name.items()
}
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_DEFAULTS: tuple[Json, ...] = (False, 0, "0", "")
_PAUSE_S = 0.1


class Player:
    """Plays one case over a channel. A step that goes otherwise than expected is an AssertionError that names it."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._variables: dict[str, str] = {"pool": f"conformance-{uuid.uuid4().hex[:12]}"}

    def play(self, case: Case) -> None:
        """All steps, in order."""
        for number, step in enumerate(case["steps"], 1):
            wrong = self._step(step)
            assert not wrong, f"step {number}, {step['call']}: " + "; ".join(wrong)

    def _step(self, step: dict[str, Any]) -> list[str]:
        until = time.monotonic() + step.get("within", 0)
        while True:
            answer = self._call(step["call"], self._filled(step["request"]))
            wrong = problems(answer, self._filled(step.get("expect", {})))
            if not wrong:
                for name, path in step.get("save", {}).items():
                    self._variables[name] = _at(answer["response"], path)
            if not wrong or time.monotonic() >= until:
                return wrong
            time.sleep(_PAUSE_S)

    def _call(self, call: str, request: Json) -> dict[str, Json]:
        """What came back: ``code``, ``response``, and the error's details under their types' names."""
        service, _, name = call.partition("/")
        method = SERVICES[service].methods_by_name[name]
        request_class, response_class = method.input_type._concrete_class, method.output_type._concrete_class
        stub = self._channel.unary_unary(
            f"/{_PACKAGE}.{call}",
            request_serializer=request_class.SerializeToString,
            response_deserializer=response_class.FromString,
        )
        try:
            response = stub(ParseDict(request, request_class()), timeout=PATIENCE_S)
        except grpc.RpcError as error:
            return {"code": error.code().name, "response": {}, "message": error.details(), **_details(error)}
        return {"code": "OK", "response": MessageToDict(response)}

    def _filled(self, value: Json) -> Json:
        """The value with all variables replaced."""
        if isinstance(value, str):
            return _VARIABLE.sub(lambda found: self._variable(found[1]), value)
        if isinstance(value, list):
            return [self._filled(item) for item in value]
        if isinstance(value, Mapping):
            return {key: self._filled(item) for key, item in value.items()}
        return value

    def _variable(self, name: str) -> str:
        if name == "uuid":
            return str(uuid.uuid4())
        if name.startswith("uuid_"):
            return self._variables.setdefault(name, str(uuid.uuid4()))
        return self._variables[name]


def _details(error: Any) -> dict[str, Json]:
    """The messages in the error's google.rpc.Status, as JSON under their types' names."""
    trailers = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailers.get("grpc-status-details-bin", b""))
    found: dict[str, Json] = {}
    for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
        for packed in status.details:
            message = kind()
            if packed.Unpack(message):
                found[kind.DESCRIPTOR.name] = MessageToDict(message)
    return found


def problems(answer: dict[str, Json], expect: dict[str, Json]) -> list[str]:
    """What is not as expected."""
    response, info = answer["response"], answer.get("ErrorInfo", {})
    fields = [violation["field"] for violation in answer.get("BadRequest", {}).get("fieldViolations", ())]
    bad: list[str] = []

    def need(what: str, wanted: Json, got: Json) -> None:
        if wanted != got:
            bad.append(f"{what} is {got!r}, not {wanted!r}")

    need("code", expect.get("code", "OK"), answer["code"])
    if "reason" in expect:
        need("reason", expect["reason"], info.get("reason"))
        need("domain", _PACKAGE, info.get("domain"))
    if "field" in expect and expect["field"] not in fields:
        bad.append(f"{expect['field']!r} is not among the violated fields {fields}")
    if expect.get("retry_info") and answer.get("RetryInfo", {}).get("retryDelay", "0s") == "0s":
        bad.append("no RetryInfo with a delay")
    bad += _mismatches("response", expect.get("response", {}), response)
    bad += [f"{path} is missing" for path in expect.get("present", ()) if _at(response, path) is None]
    there = {path: _at(response, path) for path in expect.get("absent", ())}
    bad += [f"{path} is there: {value!r}" for path, value in there.items() if value is not None]
    return [*bad, f"answer: {answer}"] if bad else []


def _mismatches(path: str, wanted: Json, got: Json) -> list[str]:
    """Where ``got`` does not hold what is wanted of it."""
    if isinstance(wanted, dict) and isinstance(got, dict):
        return [line for key in wanted for line in _mismatches(f"{path}.{key}", wanted[key], got.get(key))]
    if isinstance(wanted, list) and isinstance(got, list) and len(wanted) == len(got):
        return [line for n, item in enumerate(wanted) for line in _mismatches(f"{path}.{n}", item, got[n])]
    if wanted == got or (got is None and not isinstance(wanted, dict | list) and wanted in _DEFAULTS):
        return []
    return [f"{path} is {got!r}, not {wanted!r}"]


def _at(value: Json, path: str) -> Json:
    """The value at a path, None where there is none."""
    for name in path.split("."):
        if isinstance(value, list):
            value = value[int(name)] if int(name) < len(value) else None
        else:
            value = value.get(name) if isinstance(value, dict) else None
    return value
