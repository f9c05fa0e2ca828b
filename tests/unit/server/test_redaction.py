"""Secrets are masked wherever they may turn up."""

from __future__ import annotations

import pytest

from moorage_server.runtime.redaction import mask_url, redact, redact_text


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("redis://user:hush@h:6379/0", "redis://***@h:6379/0"),
        ("rediss://:hush@h", "rediss://***@h"),
        ("redis://:hu@sh/x@h:1", "redis://***@h:1"),
        ("redis://:hu'sh@h:1", "redis://***@h:1"),
        ("user:hush@h:1", "***@h:1"),
        ("redis://h:1/0?password=hush&db=1", "redis://h:1/0?password=***&db=1"),
        ("redis://h:6379/0", "redis://h:6379/0"),
    ],
)
def test_urls(url: str, masked: str) -> None:
    assert mask_url(url) == masked


@pytest.mark.parametrize(
    "text",
    [
        'lease_token: "hush"',
        "lease_token='hush'",
        "{'lease_token': 'hush', 'a': 1}",
        '{"password": "hush"}',
        "PASSWORD=hush next",
        "authorization: Bearer hush",
        "Authorization=Bearer hush",
        "sent bearer hush.more-x",
        "Error connecting to redis://:hush@h:1, and redis://u:hush@i:2",
        'session_id: "s"\nlease_token: "hu\\"sh"\nturn: 1',
    ],
)
def test_text(text: str) -> None:
    masked = redact_text(text)
    assert "hush" not in masked
    assert "sh" not in masked.replace("'", "").split("***")[-1].split("\n")[0]


@pytest.mark.parametrize(
    "text",
    [
        "prompt_tokens: 5, cached_tokens=3",
        "the lease token is not the one in force for session 'a'",
        "http://10.0.0.1:8000/v1",
        "page_size: 3",
        "",
    ],
)
def test_harmless_text_stays(text: str) -> None:
    assert redact_text(text) == text


def test_fields_by_name_at_any_depth() -> None:
    event = {
        "token": "hush",
        "Lease_Token": "hush",
        "inner": {"authorization": "hush", "list": [{"password": "hush"}, "redis://:hush@h"]},
        "pair": ("redis://:hush@h", 1),
        "prompt_tokens": 5,
        "ready": True,
        "nothing": None,
    }
    masked = redact(event)
    assert "hush" not in str(masked)
    assert masked["prompt_tokens"] == 5
    assert masked["ready"] is True
    assert masked["nothing"] is None
    assert masked["inner"]["list"] == [{"password": "***"}, "redis://***@h"]
