"""The table printer, and the two other plain layouts: one per line, and labelled lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table: left-aligned columns as wide as their widest cell, two spaces apart, no trailing spaces."""
    lines = [tuple(headers), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    return ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def labelled(fields: Iterable[tuple[str, str]]) -> list[str]:
    """Lines of `Label:  value`, values aligned."""
    pairs = [(f"{label}:", value) for label, value in fields]
    width = max(len(label) for label, _ in pairs)
    return [f"{label.ljust(width)}  {value}".rstrip() for label, value in pairs]


def indented(lines: Iterable[str], by: int = 2) -> list[str]:
    """The lines, moved to the right."""
    return [f"{'':{by}}{line}".rstrip() for line in lines]
