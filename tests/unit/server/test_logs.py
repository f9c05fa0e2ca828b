"""What ends up on stderr."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from moorage_server.runtime.logs import configure_logging
from moorage_server.runtime.settings import LogSettings


@pytest.fixture
def out() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:], root.level = before
    structlog.reset_defaults()


def events(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_json_is_one_object_per_line(out: io.StringIO) -> None:
    configure_logging(LogSettings(format="json"), out)
    structlog.get_logger("moorage.x").info("admitted", pool="p", session="é", latency_ms=1.5)
    (event,) = events(out)
    assert event.pop("timestamp").endswith("Z")
    assert event == {
        "event": "admitted",
        "level": "info",
        "logger": "moorage.x",
        "pool": "p",
        "session": "é",
        "latency_ms": 1.5,
    }


def test_console_is_for_people(out: io.StringIO) -> None:
    configure_logging(LogSettings(format="console"), out)
    structlog.get_logger().info("admitted", pool="p")
    assert "admitted" in out.getvalue()
    assert "pool=p" in out.getvalue()
    assert "\x1b" not in out.getvalue(), "no colours where nobody watches"


@pytest.mark.parametrize(("level", "printed"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_levels(out: io.StringIO, level: Any, printed: int) -> None:
    configure_logging(LogSettings(format="json", level=level), out)
    log = structlog.get_logger()
    for name in ("debug", "info", "warning", "error"):
        getattr(log, name)("x")
    assert len(events(out)) == printed


def test_context_of_a_task_is_in_its_events(out: io.StringIO) -> None:
    configure_logging(LogSettings(format="json"), out)
    with structlog.contextvars.bound_contextvars(pool="p"):
        structlog.get_logger().info("epoch")
    assert events(out)[0]["pool"] == "p"


def test_what_no_person_reads_is_json(out: io.StringIO) -> None:
    configure_logging(LogSettings(), out)
    structlog.get_logger().info("epoch", pool="p")
    assert events(out)[0]["pool"] == "p"


@pytest.mark.parametrize("style", ["json", "console"])
def test_secrets_are_masked_in_fields_messages_and_tracebacks(out: io.StringIO, style: Any) -> None:
    configure_logging(LogSettings(format=style), out)
    log = structlog.get_logger()
    log.info("connected to redis://:hush@h", lease_token="hush", headers={"authorization": "hush"})
    try:
        raise ValueError('lease_token: "hush" at redis://u:hush@h')
    except ValueError:
        log.exception("failed")
        logging.getLogger("redis").exception("can not connect to redis://:hush@h")
    assert "ValueError" in out.getvalue()
    assert "hush" not in out.getvalue()


def test_other_libraries_speak_the_same_way(out: io.StringIO) -> None:
    configure_logging(LogSettings(format="json"), out)
    logging.getLogger("some.library").warning("%s is low", "disk")
    logging.getLogger("asyncio").debug("selector")
    logging.getLogger("grpc").info("chatter")
    (event,) = events(out)
    assert (event["event"], event["level"], event["logger"]) == ("disk is low", "warning", "some.library")


def test_a_line_is_one_write_so_that_processes_can_share_the_stream() -> None:
    writes: list[str] = []

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            writes.append(text)
            return len(text)

    configure_logging(LogSettings(format="json"), Stream())
    structlog.get_logger("moorage.server").info("epoch")
    logging.getLogger("some.library").warning("disk is low")
    assert [(text[0], text[-2:], text.count("\n")) for text in writes] == [("{", "}\n", 1)] * 2
