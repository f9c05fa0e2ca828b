"""The survival function of final contexts, against values computed by hand.

Bins are quarter octaves from 64 tokens: 64 lies in bin 0, 128 in bin 4, 256 in bin 8, 512 in bin 12, 1024 in bin 16.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage_server.core import survival
from moorage_server.core.survival import BINS, EDGES, Survival

NOBODY: survival.Floats = np.zeros(0)


def evidence(*ends: tuple[float, float], censored: tuple[tuple[float, float], ...] = ()) -> Survival:
    found = Survival()
    for start, final in ends:
        found.add_end(start, final, completed=True)
    for start, last in censored:
        found.add_end(start, last, completed=False)
    return found


def table(found: Survival, living: tuple[tuple[float, float], ...] = (), weight: float = 0.0) -> survival.Floats:
    starts = np.array([start for start, _ in living])
    return survival.table(found, starts, np.array([now for _, now in living]), 512.0, weight)


def test_bins() -> None:
    assert [survival.bin_of(x) for x in (0, 63, 64, 76, 77, 127.9, 128, 256, 512, 1024)] == [
        0, 0, 0, 0, 1, 3, 4, 8, 12, 16,
    ]  # fmt: skip
    assert survival.bin_of(2**40) == survival.bin_of(2**21) == BINS - 1
    assert EDGES[-1] == 2**21


def test_kaplan_meier_by_hand() -> None:
    """Four sessions of 64 tokens end at 128, 256 and 512; one is still alive at 200 (bin 6).

    Bin 4: 1 of 4 ends, S = 3/4. Bin 8: the living one is past knowing, 1 of 2 ends, S = 3/8. Bin 12: 1 of 1, S = 0.
    """
    values = table(evidence((64, 128), (64, 256), (64, 512)), living=((64, 200),))
    assert values[[0, 4, 5, 8, 9, 12, 13, BINS]] == pytest.approx([1, 1, 0.75, 0.75, 0.375, 0.375, 0, 0])


def test_completions_alone_would_be_shorter() -> None:
    """Without the living session the same ends give S = 2/3, 1/3: censoring is what keeps the estimate up."""
    values = table(evidence((64, 128), (64, 256), (64, 512)))
    assert values[[5, 9]] == pytest.approx([2 / 3, 1 / 3])


def test_left_truncation_by_hand() -> None:
    """Sessions that enter with 256 tokens say nothing of bin 4: there, 1 of 2 ends. In bin 12, 3 of 4 do."""
    values = table(evidence((64, 128), (64, 512), (256, 512), (256, 512), (256, 1024)))
    assert values[[5, 9, 13]] == pytest.approx([1 / 2, 1 / 2, 1 / 8])


def test_a_bin_full_of_living_sessions_is_half_passed() -> None:
    """One session ended in bin 4 where three live: 1 of 1 + 3/2, S = 0.6. Counting completions alone gives 0."""
    assert table(evidence((64, 130)), living=((64, 135),) * 3)[5] == pytest.approx(0.6)


def test_an_aborted_session_is_censored_where_it_was() -> None:
    """Aborted in bin 6: at risk in bin 4 (1 of 2 ends), not in bin 8 (1 of 1 ends)."""
    values = table(evidence((64, 128), (64, 256), censored=((64, 200),)))
    assert values[[5, 9]] == pytest.approx([2 / 3, 0.0])


def test_the_prior_alone_ends_at_its_context() -> None:
    values = table(Survival(), weight=4.0)
    assert values[:13] == pytest.approx(np.ones(13))
    assert values[13:] == pytest.approx(np.zeros(BINS - 12))


def test_the_prior_gives_way_to_evidence() -> None:
    """Four pseudo-sessions end in bin 12, one real one in bin 4: 1 of 5. With 16 real ones: 16 of 20."""
    assert table(evidence((64, 128)), weight=4.0)[5] == pytest.approx(0.8)
    assert table(evidence(*((64, 128),) * 16), weight=4.0)[5] == pytest.approx(0.2)


def test_decay_fades_both_counts() -> None:
    found = evidence((64, 128), (64, 512))
    found.decay(0.5)
    assert table(found)[5] == pytest.approx(0.5)
    assert table(found, weight=4.0)[5] == pytest.approx(1 - 0.5 / 5.0)


def test_reading_off_is_even_over_the_logarithm() -> None:
    """Halfway through bin 4 in the logarithm, half of its drop has happened."""
    values = table(evidence((64, 128), (64, 512)))
    middle = 128.0 * 2.0**0.125
    assert survival.at(values, np.array([0.0, 64.0, 128.0, middle, 152.3])) == pytest.approx(
        [1, 1, 1, 0.75, 0.5], abs=1e-3
    )
    assert survival.at(values, np.array([2.0**40])) == pytest.approx([0.0])


_sessions = st.lists(st.tuples(st.floats(0, 2**22), st.floats(0, 2**41), st.booleans()), max_size=40)


@settings(deadline=None)
@given(ends=_sessions, living=st.lists(st.tuples(st.floats(0, 2**22), st.floats(0, 2**41)), max_size=20))
def test_it_is_a_survival_function_whatever_was_seen(
    ends: list[tuple[float, float, bool]], living: list[tuple[float, float]]
) -> None:
    found = Survival()
    for start, final, completed in ends:
        found.add_end(start, final, completed=completed)
    values = survival.table(
        found, np.array([s for s, _ in living]), np.array([max(s, c) for s, c in living]), 2.0**40, 4.0
    )
    assert values.shape == (BINS + 1,)
    assert values[0] == 1.0
    assert np.all(np.diff(values) <= 1e-12)
    assert np.all((values >= 0.0) & (values <= 1.0))


def test_a_young_cohort_is_not_read_as_short() -> None:
    """200 sessions of one age, 50 tokens/s, log-normal lengths of median 6000 tokens: what is seen at 40 s.

    Truth: 0.67 of the sessions outlive 4000 tokens. None may be written off for standing where the first ones ended.
    """
    draw = np.random.default_rng(7)
    for _ in range(20):
        finals = np.maximum(151.0, np.exp(draw.normal(np.log(6000.0), 0.9, 200)))
        now = 150.0 + 50.0 * 40.0
        done = finals <= now
        values = table(evidence(*((150.0, f) for f in finals[done])), living=((150.0, now),) * int((~done).sum()))
        assert survival.at(values, np.array([4000.0]))[0] > 0.6


def test_it_converges_to_the_truth_under_censoring() -> None:
    """Sessions that came in over 300 s, seen at its end: close to the truth where enough of them got."""
    draw = np.random.default_rng(8)
    finals = np.maximum(151.0, np.exp(draw.normal(np.log(6000.0), 0.9, 4000)))
    now = 150.0 + 50.0 * draw.uniform(0.0, 300.0, 4000)
    done = finals <= now
    ends = evidence(*((150.0, f) for f in finals[done]))
    values = table(ends, living=tuple((150.0, c) for c in now[~done]))
    assert survival.at(values, np.array([1000.0, 4000.0, 8000.0])) == pytest.approx([0.977, 0.674, 0.375], abs=0.03)
    completed_only = table(evidence(*((150.0, f) for f in finals[done])))
    assert survival.at(completed_only, np.array([4000.0]))[0] < 0.55
