"""The Prometheus text format, read by exact series: nothing is summed by accident and no first match is taken."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from prometheus_client.parser import text_string_to_metric_families

Labels = Mapping[str, str]

# Whole numbers that a protobuf int64, and the server, can take.
MAX_WHOLE = 2**63 - 1

# Name, labels if any, a value, and a time if any: what every line of a page looks like that is no comment.
_SAMPLE = re.compile(
    r"([A-Za-z_:][A-Za-z0-9_:]*)\s*(?:\{.*\})?\s+[-+]?(?:[0-9.][-+0-9.eE]*|Inf|inf|NaN|nan)(?:\s+-?[0-9]+)?\s*$"
)


class NotMetrics(ValueError):
    """The text is not a page of metrics."""


class Page:
    """The samples of one scrape, by series name as exposed (`..._total`, `..._sum`).

    Histogram buckets and `_created` series are left out: nobody reads them here, and they are most of a page. Of the
    rest only what is asked for is parsed: an engine tells ten times as much. NotMetrics where that can not be.
    """

    def __init__(self, lines: Mapping[str, list[str]]) -> None:
        self._lines = lines
        self._parsed: dict[str, list[tuple[Labels, float]]] = {}

    def value(self, name: str, **labels: str) -> float | None:
        """Value of the one series with these labels (it may have others); None where there is none, where several
        match, or where the value is not finite.
        """
        matches = [value for _, value in self._matching(name, labels)]
        return matches[0] if len(matches) == 1 and math.isfinite(matches[0]) else None

    def labels(self, name: str, **labels: str) -> Labels | None:
        """Labels of the one series that matches; None where none or several do."""
        matches = [found for found, _ in self._matching(name, labels)]
        return matches[0] if len(matches) == 1 else None

    def label_values(self, name: str, label: str) -> set[str]:
        """All values that `label` takes among the series called `name`."""
        return {labels[label] for labels, _ in self._series(name) if label in labels}

    def samples(self, name: str, **labels: str) -> list[tuple[Labels, float]]:
        """All series called `name` that have these labels, finite or not."""
        return list(self._matching(name, labels))

    def _matching(self, name: str, wanted: Labels) -> Iterator[tuple[Labels, float]]:
        for labels, value in self._series(name):
            if wanted.items() <= labels.items():
                yield labels, value

    def _series(self, name: str) -> list[tuple[Labels, float]]:
        if name not in self._parsed:
            self._parsed[name] = _parse(self._lines[name]) if name in self._lines else []
        return self._parsed[name]


def parse_page(text: str) -> Page:
    """Sorts one scrape by series. Raises NotMetrics when it is something else, or empty."""
    lines: dict[str, list[str]] = defaultdict(list)
    for line in text.splitlines():
        if not line.strip() or line.startswith("#") or "_bucket{" in line:
            continue
        found = _SAMPLE.match(line)
        if found is None:
            raise NotMetrics(f"not the Prometheus text format: {line[:80]!r}")
        if not found[1].endswith("_created"):
            lines[found[1]].append(line)
    if not lines:
        raise NotMetrics("no series at all")
    return Page(lines)


def _parse(lines: list[str]) -> list[tuple[Labels, float]]:
    try:
        families = text_string_to_metric_families("\n".join(lines))
        return [(sample.labels, sample.value) for family in families for sample in family.samples]
    # The parser trips over foreign text in several ways; whichever it is, the page can not be trusted.
    except Exception as error:
        raise NotMetrics(f"not the Prometheus text format: {error}") from error


def whole(value: float | None) -> int | None:
    """The nearest whole number; None where there is none that an int64 holds."""
    return round(value) if value is not None and 0 <= value <= MAX_WHOLE else None
