"""Log lines as `event key=value ...`, so that they can be grepped and parsed."""

import logging

logger = logging.getLogger("moorage.collect")


def line(event: str, **fields: object) -> str:
    """One log message; values with blanks, quotes or line breaks are quoted."""
    return " ".join([f"event={event}", *(f"{key}={_value(value)}" for key, value in fields.items())])


def _value(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return text if text and text.isprintable() and not set(text) & set(" \"'=") else repr(text)
