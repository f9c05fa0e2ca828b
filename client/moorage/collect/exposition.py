"""The Prometheus text format, read by exact series: nothing is summed by accident and no first match is taken."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

from prometheus_client.parser import text_string_to_metric_families

Labels = Mapping[str, str]

# Whole numbers that a protobuf int64, and the server, can take.
MAX_WHOLE = 2**63 - 1


class NotMetrics(ValueError):
    """The text is not a page of metrics."""


class Page:
    """The samples of one scrape, by series name as exposed (`..._total`, `..._sum`).

    Histogram buckets and `_created` series are left out: nobody reads them here, and they are most of a page.
    """

    def __init__(self, samples: Mapping[str, list[tuple[Labels, float]]]) -> None:
        self._samples = samples

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
        return {labels[label] for labels, _ in self._samples.get(name, ()) if label in labels}

    def samples(self, name: str, **labels: str) -> list[tuple[Labels, float]]:
        """All series called `name` that have these labels, finite or not."""
        return list(self._matching(name, labels))

    def _matching(self, name: str, wanted: Labels) -> Iterator[tuple[Labels, float]]:
        for labels, value in self._samples.get(name, ()):
            if wanted.items() <= labels.items():
                yield labels, value


def parse_page(text: str) -> Page:
    """Parses one scrape. Raises NotMetrics when it is something else, or empty."""
    samples: dict[str, list[tuple[Labels, float]]] = defaultdict(list)
    kept = "\n".join(line for line in text.splitlines() if "_bucket{" not in line)
    try:
        for family in text_string_to_metric_families(kept):
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    samples[sample.name].append((sample.labels, sample.value))
    # The parser trips over foreign text in several ways; whichever it is, the page can not be trusted.
    except Exception as error:
        raise NotMetrics(f"not the Prometheus text format: {error}") from error
    if not samples:
        raise NotMetrics("no series at all")
    return Page(dict(samples))


def whole(value: float | None) -> int | None:
    """The nearest whole number; None where there is none that an int64 holds."""
    return round(value) if value is not None and 0 <= value <= MAX_WHOLE else None
