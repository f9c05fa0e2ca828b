"""What a process counts, and how it shows it."""

from __future__ import annotations

import asyncio
import contextvars

import pytest

from moorage.v1 import scheduler_pb2 as pb
from moorage_server.meters import OTHER, POOLS, Histograms, Labels, Meters, Wait, waited_s
from moorage_server.runtime.process_metrics import ProcessSample, families
from tests.unit.server.exposed import exposed


def test_names_beyond_the_bound_share_a_label() -> None:
    labels = Labels(2)
    assert labels.of("a") == OTHER
    for name in ("a", "b", "a", "c"):
        labels.know(name)
    assert [labels.of(name) for name in ("a", "b", "c", "d")] == ["a", "b", OTHER, OTHER]
    assert labels.known() == ["a", "b"]


def test_histograms_are_cumulative_and_hold_their_upper_edges() -> None:
    histograms = Histograms((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        histograms.observe(("admit",), value)
    rows = histograms.rows()
    histograms.observe(("admit",), 1.0)
    found = exposed(families(ProcessSample("1", scripts=rows)))
    buckets = {edge: found.value("moorage_store_seconds_bucket", script="admit", le=edge) for edge in (0.1, 1.0)}
    assert buckets == {0.1: 2, 1.0: 3}
    assert found.value("moorage_store_seconds_bucket", script="admit", le="+Inf") == 4
    assert found.value("moorage_store_seconds_count", script="admit") == 4
    assert found.value("moorage_store_seconds_sum", script="admit") == pytest.approx(7.65)


def test_decisions_are_told_in_words() -> None:
    counts = {
        ("p", "Admit", int(pb.DECISION_HOLD), int(pb.HOLD_REASON_POOL_CAP)): 2,
        ("p", "Place", int(pb.DECISION_PLACE), 0): 3,
    }
    found = exposed(families(ProcessSample("1", decisions=counts)))
    assert found.value("moorage_decisions_total", pool="p", rpc="Admit", decision="hold", reason="POOL_CAP") == 2
    assert found.value("moorage_decisions_total", pool="p", rpc="Place", decision="place", reason="") == 3


@pytest.mark.parametrize(
    ("error", "outcome"), [(None, "place"), (RuntimeError(), "failed"), (asyncio.CancelledError(), "cancelled")]
)
def test_a_wait_is_counted_by_its_outcome(error: BaseException | None, outcome: str) -> None:
    meters = Meters()
    meters.pools.know("p")

    def wait() -> float:
        try:
            with Wait(meters, "p") as this:
                if error is not None:
                    raise error
                this.outcome = "place"
        except (RuntimeError, asyncio.CancelledError):
            pass
        return waited_s.get()

    seconds = contextvars.copy_context().run(wait)
    assert {labels: row.count for labels, row in meters.waits.rows().items()} == {("p", outcome): 1}
    assert seconds == meters.waits.rows()["p", outcome].total > 0
    assert waited_s.get() == 0, "the next call has its own"


def test_unknown_pools_have_no_label_of_their_own() -> None:
    meters = Meters()
    for n in range(POOLS + 5):
        meters.pools.know(f"p-{n}")
    with Wait(meters, f"p-{POOLS}"):
        pass
    assert list(meters.waits.rows()) == [(OTHER, "failed")]
    assert len(meters.pools.known()) == POOLS
