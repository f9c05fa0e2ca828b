"""Estimates from exposure: by hand, and against the truth of synthetic populations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from moorage_server.core import estimates
from moorage_server.core.config import ClassConfig
from moorage_server.core.estimates import Exposure
from moorage_server.core.view import Class, Published
from tests.unit.core.builders import NOW, config, instance, pool

NOBODY = np.zeros(0)


def summary(exposure: Exposure, settings: ClassConfig | None = None, **changes: object) -> Published:
    given: dict[str, object] = {"starts": NOBODY, "contexts": NOBODY, "block_size": 16.0, "max_context": 8192}
    return estimates.summarise(exposure, settings or ClassConfig(), **(given | changes))  # type: ignore[arg-type]


def test_kbar_and_that_by_hand() -> None:
    """Z = 12000 block-seconds, D = 600 session-seconds, n = 12; prior of 4 pseudo-sessions of 40 blocks and 60 s.

    Evidence 12/16 = 0.75. kbar = 0.75 * 12000/600 + 0.25 * 40 = 25. That = (600 + 4*60)/(12 + 4) = 52.5 s.
    """
    found = summary(Exposure(block_s=12_000, session_s=600, completions=12), ClassConfig(prior_context_tokens=640))
    assert found.evidence == 0.75
    assert found.reference_blocks == pytest.approx(25.0)
    assert found.residency_s == pytest.approx(52.5)


def test_little_holds_once_the_prior_is_outweighed() -> None:
    """kbar * That = Z / n."""
    exposure = Exposure(block_s=4e6, session_s=1e5, completions=2000)
    found = summary(exposure)
    assert found.reference_blocks * found.residency_s == pytest.approx(4e6 / 2000, rel=0.03)


def test_without_any_evidence_there_is_the_prior() -> None:
    """Configured, else declared by callers, else the largest context an instance takes, else a constant."""
    declared = Exposure()
    estimates.declare(declared, 1600.0)
    estimates.declare(declared, 3200.0)
    assert summary(declared, ClassConfig(prior_context_tokens=640)).reference_blocks == 40.0
    assert summary(declared).reference_blocks == 150.0
    assert summary(Exposure()).reference_blocks == 8192 / 16
    assert summary(Exposure(), max_context=None).prior_tokens == estimates.UNKNOWN_CONTEXT
    assert summary(Exposure()).residency_s == estimates.UNKNOWN_RESIDENCY_S
    assert summary(Exposure()).evidence == 0.0


def test_time_alone_is_no_evidence() -> None:
    """Twenty young sessions of two blocks, none of them over: the reference footprint stays the prior's."""
    exposure = Exposure(block_s=400.0, session_s=200.0)
    assert summary(exposure, ClassConfig(prior_context_tokens=640)).reference_blocks == 40.0


def test_growth_by_hand() -> None:
    """6000 tokens in 400 s, prior of (640 - 160) tokens in 60 s by 4 pseudo-sessions: 7920 tokens in 640 s."""
    exposure = Exposure(session_s=400.0, grown_tokens=6000.0)
    found = summary(
        exposure, ClassConfig(prior_context_tokens=640), starts=np.array([160.0]), contexts=np.array([300.0])
    )
    assert found.growth == pytest.approx((6000 + 4 * 480) / (400 + 240))


def test_tool_gap_and_hits_are_unknown_until_seen() -> None:
    assert summary(Exposure()).gap_s is None
    assert summary(Exposure()).hit_rate is None
    seen = summary(Exposure(gap_s=60.0, gaps=12.0, expected_hits=1000.0, found_hits=870.0))
    assert seen.gap_s == pytest.approx((60.0 + 4 * 1.0) / 16)
    assert seen.hit_rate == pytest.approx(0.87)


def test_observe_takes_differences_and_accrues_to_now() -> None:
    """Two sessions with 30 blocks since 5 s ago: 150 block-seconds on top of what the ledger has settled."""
    exposure = Exposure()
    before = Class(active=2, blocks=30, block_ms=100_000, session_ms=10_000, accrued_ms=NOW)
    estimates.observe(exposure, before, NOW, 0.0)
    assert (exposure.block_s, exposure.session_s) == (0.0, 0.0)
    estimates.observe(exposure, before, NOW + 5000, 0.0)
    assert exposure.block_s == pytest.approx(150.0)
    assert exposure.session_s == pytest.approx(10.0)
    after = Class(active=1, blocks=10, block_ms=280_000, session_ms=22_000, accrued_ms=NOW + 6000, gap_ms=2500, gaps=2)
    estimates.observe(exposure, after, NOW + 6000, 0.0)
    assert exposure.block_s == pytest.approx(180.0)
    assert exposure.session_s == pytest.approx(12.0)
    assert (exposure.gap_s, exposure.gaps) == (2.5, 2)


def test_a_session_of_another_class_takes_along_what_it_accrued() -> None:
    exposure = Exposure(block_s=50.0, session_s=5.0, completions=3.0, gap_s=4.0, gaps=2.0)
    before = Class(block_ms=30_000, session_ms=3_000, accrued_ms=NOW, gap_ms=2_000, gaps=1)
    estimates.observe(exposure, before, NOW, 0.0)
    after = Class(block_ms=12_000, session_ms=1_000, accrued_ms=NOW, relabelled=1)
    estimates.observe(exposure, after, NOW, 0.0)
    assert (exposure.block_s, exposure.session_s, exposure.gap_s, exposure.gaps) == (32.0, 3.0, 2.0, 1.0)
    # Of evidence that has faded no more can go than is left.
    exposure.block_s = 1.0
    estimates.observe(exposure, Class(relabelled=2, session_ms=1_000, accrued_ms=NOW), NOW, 0.0)
    assert (exposure.block_s, exposure.session_s) == (0.0, 3.0)


def test_counters_that_start_again_take_nothing_away() -> None:
    exposure = Exposure(block_s=50.0, session_s=5.0, completions=3.0)
    estimates.observe(exposure, Class(block_ms=900_000, session_ms=90_000, accrued_ms=NOW), NOW, 0.0)
    estimates.observe(exposure, Class(block_ms=1000, session_ms=100, accrued_ms=NOW + 1000), NOW + 1000, 1.0)
    assert (exposure.block_s, exposure.session_s, exposure.completions) == (50.0, 5.0, 3.0)


def test_evidence_fades_with_use_and_waits_while_idle() -> None:
    """The window is 12 mean residencies: after that much of use a factor e is gone. An idle hour costs nothing."""
    exposure = Exposure(session_s=5000.0, completions=100.0)
    busy = Class(active=1, accrued_ms=NOW)
    estimates.observe(exposure, busy, NOW, 0.0)
    residency = estimates.residency_s(exposure, 60.0)
    estimates.observe(exposure, busy, NOW + 600_000, 12 * residency)
    assert exposure.completions == pytest.approx(100.0 / np.e)
    idle = Class(session_ms=600_000, accrued_ms=NOW + 600_000)
    estimates.observe(exposure, idle, NOW + 4_200_000, 3600.0)
    assert exposure.completions == pytest.approx(100.0 / np.e)


def test_a_class_never_seen_has_its_prior() -> None:
    view = pool(
        instance(max_context=4096), settings=config(classes={"b": ClassConfig(prior_context_tokens=99)}), known={}
    )
    assert estimates.growth_of(view, "a").prior_tokens == 4096
    assert estimates.growth_of(view, "b").prior_tokens == 99
    assert estimates.growth_of(pool(known={}), "a").prior_tokens == estimates.UNKNOWN_CONTEXT
    assert estimates.growth_of(view, "a").evidence == 0.0


@dataclass(frozen=True)
class Population:
    """Sessions that enter at a rate, each for a time of its own, and hold blocks that grow with their age."""

    entered: np.ndarray
    stay: np.ndarray
    blocks_per_s: float

    def watch(self, until_s: float) -> tuple[Exposure, float, float]:
        """The exposure at ``until_s``, and kbar and That as the completed sessions alone would have it."""
        exposure = Exposure()
        for at in np.arange(0.0, until_s + 1.0, 1.0):
            age = np.clip(at - self.entered, 0.0, self.stay)
            ledger = Class(
                block_ms=round(1000 * float(np.sum(self.blocks_per_s * age**2 / 2))),
                session_ms=round(1000 * float(age.sum())),
                accrued_ms=NOW + round(1000 * at),
            )
            estimates.observe(exposure, ledger, ledger.accrued_ms, 0.0)
        done = self.entered + self.stay <= until_s
        exposure.completions = float(done.sum())
        stay = self.stay[done]
        return exposure, float(np.sum(self.blocks_per_s * stay**2 / 2) / stay.sum()), float(stay.mean())


def test_exposure_converges_where_completions_lie() -> None:
    """400 sessions at once with exponential stays of 100 s, seen after 50 s: the 39 % that are over are the short ones.

    Residency does not depend on how long we looked (Little's law under censoring); the completed ones take it for a
    third of what it is, and less.
    """
    draw = np.random.default_rng(3)
    cohort = Population(np.zeros(400), draw.exponential(100.0, 400), 0.5)
    exposure, _, completed_stay = cohort.watch(50.0)
    assert estimates.residency_s(exposure, 60.0) == pytest.approx(100.0, rel=0.15)
    assert completed_stay < 30.0


def test_exposure_finds_footprint_and_residency_of_a_steady_population() -> None:
    """Two sessions per second, stays log-normal(60 s, 0.6): E[T] = 60 e^0.18 = 71.8 s, E[T^2] = 60^2 e^0.72.

    With 0.5 blocks per second of age, kbar = 0.5 E[T^2] / (2 E[T]) = 15 e^0.54 = 25.7 blocks. The exposure has
    it after 1500 s. After 60 s the completions see half of it, where the exposure errs on the long, the safe side.
    """
    draw = np.random.default_rng(4)
    stays = 60.0 * np.exp(draw.normal(0.0, 0.6, 3000))
    population = Population(draw.uniform(0.0, 1500.0, 3000), stays, 0.5)
    truth_s, truth_blocks = 60.0 * np.exp(0.18), 15.0 * np.exp(0.54)
    exposure, _, _ = population.watch(1500.0)
    assert estimates.residency_s(exposure, 60.0) == pytest.approx(truth_s, rel=0.05)
    assert estimates.reference_blocks(exposure, 1.0) == pytest.approx(truth_blocks, rel=0.1)
    early, early_blocks, early_stay = population.watch(60.0)
    assert early_stay < 0.6 * truth_s
    assert early_blocks < 0.5 * truth_blocks
    assert estimates.residency_s(early, 60.0) > truth_s
    assert estimates.reference_blocks(early, truth_blocks) > early_blocks
