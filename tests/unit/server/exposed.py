"""Reads what is exposed the way Prometheus does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from moorage_server.runtime.pool_metrics import PoolMetrics
from moorage_server.runtime.process_metrics import ProcessSample, families

Key = tuple[str, frozenset[tuple[str, str]]]


class Exposed:
    """The samples of one exposition."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples: dict[Key, float] = {}
        for family in self.families.values():
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in self.samples, f"{key} is there twice"
                self.samples[key] = sample.value

    def value(self, name: str, **labels: Any) -> float | None:
        """One sample; None where there is none."""
        return self.samples.get((name, frozenset((key, str(value)) for key, value in labels.items())))

    def labels(self, name: str, label: str) -> set[str]:
        """All values of one label of a metric."""
        return {value for found, pairs in self.samples if found == name for key, value in pairs if key == label}

    def names(self) -> set[str]:
        """Names of the samples of ours."""
        return {name for name, _ in self.samples if name.startswith("moorage_")}


def served() -> dict[str, set[str]]:
    """Every metric of the server as queries name it, with its labels."""
    found: dict[str, set[str]] = {}
    for family in (*families(ProcessSample("1")), *PoolMetrics().families()):
        labels = set(family._labelnames)  # type: ignore[attr-defined]
        if family.type == "histogram":
            found[f"{family.name}_bucket"] = labels | {"le"}
        else:
            found[family.name + ("_total" if family.type == "counter" else "")] = labels
    return found


class _Fixed:
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> list[Metric]:
        return self._families

    def describe(self) -> list[Metric]:
        return []


def exposed(families: Iterable[Metric]) -> Exposed:
    """Written out and read again."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Fixed(families))  # type: ignore[arg-type]
    return Exposed(generate_latest(registry).decode())
