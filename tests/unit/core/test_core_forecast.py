"""What sessions will hold: moments against brute force, and the corners where a ratio of survivals goes wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage_server.core import forecast, survival
from moorage_server.core.forecast import HORIZONS, PROVEN, WIDTH, Growth, Living
from tests.unit.core.builders import IMMORTAL, ask, published


def halving(first: int) -> survival.Floats:
    """S = 1 up to edge ``first``, then half per bin."""
    return np.array([0.5 ** max(0, n - first) for n in range(survival.BINS + 1)])


def growth(
    rate: float = 0.0, evidence: float = 1.0, prior: float = 640.0, table: survival.Floats | None = None
) -> Growth:
    return Growth(rate, evidence, prior, np.array(IMMORTAL) if table is None else table)


def living(*rows: tuple[int, int, float, float, float, float]) -> Living:
    """Rows of instance, class, tokens, shared blocks, ceiling, declared."""
    columns = list(zip(*rows, strict=True)) or [()] * 6
    homes, names = (np.array(c, dtype=np.int64) for c in columns[:2])
    return Living(homes, names, *(np.array(c, dtype=np.float64) for c in columns[2:]))


def test_moments_by_hand() -> None:
    """160 tokens growing by 16 per second in blocks of 16: 10, 14, 18, 26, 40 blocks at 0, 4, 8, 16, 30 s.

    Three blocks are booked elsewhere. Nobody ends, so there is no variance, and what is proven is what 8 s bring.
    """
    mean, variance, proven = forecast.moments(
        living((0, 0, 160.0, 3.0, math.inf, math.nan)), {0: growth(16.0)}, np.array([16.0]), 1
    )
    assert mean.tolist() == [[7, 11, 15, 23, 37]]
    assert not variance.any()
    assert proven.tolist() == [15]


def test_the_chance_to_end_by_hand() -> None:
    """S halves from 128 to 152.2 tokens. At 128 + 6.05 * 4 = 152.2 tokens the chance is 1/2: k = 10, m = 5, v = 25."""
    step = float(survival.EDGES[5] - survival.EDGES[4])
    mean, variance, proven = forecast.moments(
        living((0, 0, 128.0, 0.0, math.inf, math.nan)), {0: growth(step / 4.0, table=halving(4))}, np.array([16.0]), 1
    )
    assert mean[0, :2] == pytest.approx([8.0, 5.0])
    assert variance[0, :2] == pytest.approx([0.0, 25.0])
    assert proven[0] == math.ceil((128.0 + step / 4.0 * HORIZONS[PROVEN]) / 16.0)
    assert forecast.need(mean, variance, proven, np.array([2.0]), 1.0)[0, :2].tolist() == [10, 5 + 5 + 2]


_row = st.tuples(
    st.integers(0, 2),
    st.integers(0, 1),
    st.floats(1.0, 2**22),
    st.floats(0.0, 50.0).map(round).map(float),
    st.one_of(st.just(math.inf), st.floats(16.0, 2**20)),
    st.one_of(st.just(math.nan), st.floats(1.0, 2**20)),
)


@settings(deadline=None)
@given(
    rows=st.lists(_row, max_size=12), rates=st.tuples(st.floats(0, 5000), st.floats(0, 5000)), evidence=st.floats(0, 1)
)
def test_moments_are_what_a_loop_finds(
    rows: list[tuple[int, int, float, float, float, float]], rates: tuple[float, float], evidence: float
) -> None:
    sizes, models = (
        np.array([16.0, 64.0, 1.0]),
        {
            0: growth(rates[0], evidence, 900.0, halving(10)),
            1: growth(rates[1], 1.0 - evidence, 4096.0),
        },
    )
    mean, variance, proven = forecast.moments(living(*rows), models, sizes, 3)
    expected = np.zeros((3, 2, len(HORIZONS)))
    held = np.zeros(3)
    for home, name, tokens, shared, ceiling, declared in rows:
        model, most = models[name], max(ceiling, tokens)
        for h, tau in enumerate(HORIZONS):
            grown = tokens + model.tokens_per_s * tau
            ahead = min(grown, most)
            alive = float(survival.at(model.survival, np.array(tokens)))
            chance = 1.0 if alive < 1e-4 else float(survival.at(model.survival, np.array(grown))) / alive
            final = model.prior_tokens if math.isnan(declared) else declared
            context = model.evidence * ahead + (1 - model.evidence) * min(max(tokens, final), most)
            blocks = max(1.0, math.ceil(context / sizes[home]) - shared)
            expected[home, 0, h] += chance * blocks
            expected[home, 1, h] += chance * (1 - chance) * blocks**2
            held[home] += blocks if h == PROVEN else 0.0
    assert mean == pytest.approx(expected[:, 0], rel=1e-9)
    assert variance == pytest.approx(expected[:, 1], rel=1e-6, abs=1e-6)
    assert proven == pytest.approx(held)


def test_nobody_and_nothing() -> None:
    mean, variance, proven = forecast.moments(living(), {0: growth()}, np.array([16.0, 16.0]), 2)
    assert forecast.need(mean, variance, proven, np.array([0.0, 5.0]), 1.0).tolist() == [
        [0] * WIDTH,
        [5] * WIDTH,
    ]
    empty = forecast.moments(living(), {}, np.zeros(0), 0)
    assert forecast.need(*empty, np.zeros(0), 1.0).shape == (0, WIDTH)


def test_who_would_have_grown_past_its_ceiling_is_over() -> None:
    """At 1000 tokens/s a context of 6000 with a ceiling of 7000 does not last 4 s: what it held is free by then."""
    model = growth(1000.0, 1.0, 100.0, np.where(survival.EDGES < 8000.0, 1.0, 0.0))
    mean, _, proven = forecast.moments(living((0, 0, 6000.0, 0.0, 7000.0, math.nan)), {0: model}, np.array([16.0]), 1)
    assert mean.tolist() == [[375.0, 0.0, 0.0, 0.0, 0.0]]
    assert proven.tolist() == [438.0], "what is proven does not count on it"


def test_a_session_larger_than_all_that_were_seen_stays() -> None:
    """Nobody got past 1024 tokens: that says nothing of one who did, and it may not vanish from the forecast."""
    table = np.where(survival.EDGES <= 1024.0, 1.0, 0.0)
    mean, variance, _ = forecast.moments(
        living((0, 0, 32_000.0, 0.0, math.inf, math.nan)), {0: growth(1.0, table=table)}, np.array([16.0]), 1
    )
    assert mean[0, 0] == 2000.0
    assert np.all(mean >= 2000.0)
    assert not variance.any()
    assert forecast.newcomer(ask(prompt=32_000), growth(0.0, table=table), 16, 0, None) == (2000,) * WIDTH


def test_a_newcomer_is_booked_with_its_growth_and_its_chance_to_end() -> None:
    table = halving(4)
    step = float(survival.EDGES[5] - survival.EDGES[4])
    asks = forecast.newcomer(ask(prompt=128), growth(step / 4.0, table=table), 16, 0, None)
    assert asks[:2] == (8, 5)
    assert asks[-1] == math.ceil((128.0 + step / 4.0 * HORIZONS[PROVEN]) / 16.0)


@pytest.mark.parametrize(
    ("wanted", "blocks"),
    [
        (ask(prompt=160), 40),
        (ask(prompt=160, expected_output_tokens=480), 40),
        (ask(prompt=160, expected_output_tokens=1440), 100),
        (ask(prompt=160, expected_output_tokens=1440, max_context_tokens=800), 50),
        (ask(prompt=160, max_context_tokens=320), 20),
        (ask(prompt=None), 40),
        (ask(prompt=None, max_context_tokens=320), 20),
        (ask(prompt=None, expected_output_tokens=8000), 40),
        (ask(prompt=900), 57),
    ],
)
def test_without_evidence_a_newcomer_is_charged_what_it_declared(wanted: object, blocks: int) -> None:
    """Else its class's prior, here 640 tokens; never less than its prompt, and never more than its ceiling."""
    model = growth(rate=10.0, evidence=0.0)
    assert forecast.newcomer(wanted, model, 16, 0, 4096) == (blocks,) * WIDTH  # type: ignore[arg-type]


def test_an_unknown_prompt_is_booked_within_what_the_instance_takes() -> None:
    model = growth(evidence=0.0, prior=8192.0)
    assert forecast.newcomer(ask(prompt=None), model, 16, 0, 4096) == (256,) * WIDTH
    assert forecast.tokens_to_book(ask(prompt=None), model) == 8192
    assert forecast.tokens_to_book(ask(prompt=None, max_context_tokens=100), model) == 100
    assert forecast.tokens_to_book(ask(prompt=0), model) == 1


def test_evidence_moves_the_charge_from_the_declaration_to_the_forecast() -> None:
    """Half of what growth says, half of what was declared: at 30 s (160 + 300)/2 + 640/2 = 550 tokens, 35 blocks."""
    asks = forecast.newcomer(ask(prompt=160, expected_output_tokens=480), growth(10.0, evidence=0.5), 16, 0, 8192)
    assert asks == (25, 27, 28, 30, 35, 28)


def test_tokens_of_any_size_stay_finite() -> None:
    huge = ask(prompt=2**40, expected_output_tokens=2**40)
    assert forecast.newcomer(huge, growth(1.0), 16, 0, None)[0] == 2**36
    assert forecast.newcomer(huge, growth(1.0), 1, 0, 8192)[-1] == 2**40
    rows = living(*((0, 0, float(2**40), 0.0, math.inf, math.nan),) * 50)
    mean, variance, proven = forecast.moments(rows, {0: growth(10.0, 0.5, 2.0**40)}, np.array([1.0]), 1)
    assert int(forecast.need(mean, variance, proven, np.zeros(1), 1.0)[0, 0]) == 50 * 2**40


def test_budget_keeps_the_lru_slack_free() -> None:
    """768 blocks, 30 blocks/s for 2 s of gap, brake 0.88: (768 - 60) * 0.88 = 623. Slack takes 35 % at most."""
    assert forecast.budget(768, 30.0, 2.0, 0.88) == 623
    assert forecast.budget(768, 0.0, 2.0, 1.0) == 768
    assert forecast.budget(768, 1e9, 60.0, 1.0) == int(768 * 0.65)
    assert forecast.budget(1, 1e9, 60.0, 0.4) == 1


def test_published_estimates_become_a_model_once() -> None:
    one = published(growth=3.0, evidence=0.25)
    assert forecast.growth(one) is forecast.growth(published(growth=3.0, evidence=0.25))
    assert (forecast.growth(one).tokens_per_s, forecast.growth(one).evidence) == (3.0, 0.25)


def test_more_than_there_is_only_where_it_is_allowed() -> None:
    assert forecast.budget(800, 10.0, 2.0, 1.0) == 780
    assert forecast.budget(800, 10.0, 2.0, 1.0, over=0.5) == 1170
