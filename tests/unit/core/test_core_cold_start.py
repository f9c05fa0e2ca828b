"""A cold start does not over-admit: young cohorts look small and must not be read as small (policy.md section 7).

One instance of 768 blocks of 16 tokens; sessions of 32 tokens of prompt that grow at 10 tokens/s to about 600 tokens,
38 blocks: about twenty fit. Read by what they hold when they enter, two blocks, 384 would. A hundred and more wait.
"""

from __future__ import annotations

import numpy as np
import pytest

from moorage_server.core.config import MISA, MISA_T, SESSION, STATIC, ClassConfig
from moorage_server.core.view import Ask
from tests.unit.core.builders import config
from tests.unit.core.simulation import Engine, Sample

ADAPTIVE = (SESSION, MISA, MISA_T)
FITS = 768 / 38


def cohort(count: int, declare: str, mean: float = 600.0, spread: float = 0.35) -> list[Sample]:
    """Sessions whose lengths are log-normal, and what their callers say of them."""
    draw = np.random.default_rng(11)
    samples = []
    for n in range(count):
        final = max(48.0, float(mean * np.exp(draw.normal(-(spread**2) / 2, spread))))
        expected = round(final) - 32 if declare == "output" else None
        ceiling = 1024 if declare == "ceiling" else None
        wanted = Ask(f"s{n}", "rlvr", prompt_tokens=32, expected_output_tokens=expected, max_context_tokens=ceiling)
        samples.append(Sample(wanted, 32.0, final, 10.0))
    return samples


@pytest.mark.parametrize("policy", ADAPTIVE)
def test_declared_outputs_bound_the_first_cohort(policy: str) -> None:
    engine = Engine(config(policy=policy), cohort(150, "output")).run(3)
    assert 0.8 * FITS <= len(engine.living) <= 1.1 * FITS
    engine.run(37)
    assert len(engine.living) <= 1.25 * FITS
    assert engine.peak <= 768


@pytest.mark.parametrize("policy", ADAPTIVE)
def test_a_class_default_bounds_it_where_nobody_declares(policy: str) -> None:
    settings = config(policy=policy, classes={"rlvr": ClassConfig(prior_context_tokens=640)})
    engine = Engine(settings, cohort(150, "nothing")).run(30)
    assert 0.8 * FITS <= len(engine.living) <= 1.25 * FITS
    assert engine.peak <= 768


def test_a_declared_ceiling_bounds_it() -> None:
    """1024 tokens at most are 64 blocks: twelve enter."""
    assert len(Engine(config(), cohort(150, "ceiling")).run(3).living) == 12


def test_without_any_word_the_largest_context_bounds_it() -> None:
    """8192 tokens are 512 blocks: one session enters, until there is evidence."""
    assert len(Engine(config(), cohort(150, "nothing")).run(3).living) == 1


@pytest.mark.parametrize("declare", ["output", "ceiling", "nothing"])
def test_evidence_then_relaxes_it(declare: str) -> None:
    """Ages spread, so that more than twenty can live at once, and do; blocks overshoot as seldom as z = 1 says.

    The forecast keeps the mean and one standard deviation free: one second in six may lie above, none far above.
    """
    engine = Engine(config(), cohort(2000, declare), max_context=2048).run(3)
    first = len(engine.living)
    engine.run(600)
    assert len(engine.living) > max(first, 1.25 * FITS)
    held = [engine.run(1).blocks for _ in range(200)]
    assert np.mean(held) > 0.8 * 768
    assert np.mean(np.array(held) > 768) < 0.3
    assert engine.peak < 1.25 * 768


def test_the_short_ones_that_end_first_do_not_open_the_gate() -> None:
    """A tenth of the sessions has 100 tokens, the others 2400, 150 blocks: five fit. The prior says 2400 for all.

    After 15 s the short ones are over, and by completions every session is short: by that reading, 109 would fit.
    """
    samples = cohort(300, "nothing", mean=2400.0, spread=0.05)
    for sample in samples[::10]:
        sample.final = 100.0
    settings = config(classes={"rlvr": ClassConfig(prior_context_tokens=2400)})
    engine = Engine(settings, samples).run(200)
    assert engine.completed >= 1
    assert len(engine.living) <= 8
    assert engine.peak <= 768


def test_two_classes_of_which_one_declares() -> None:
    """Agentic sessions say 640 tokens, rlvr ones nothing (prior 3200): together they stay within the blocks."""
    talkers = cohort(100, "output")
    quiet = [Sample(Ask(f"q{n}", "agentic", prompt_tokens=400), 400.0, 3000.0 - 20 * n, 25.0) for n in range(100)]
    settings = config(classes={"agentic": ClassConfig(0.5, prior_context_tokens=3200), "rlvr": ClassConfig(0.5)})
    engine = Engine(settings, [s for pair in zip(talkers, quiet, strict=True) for s in pair]).run(120)
    assert engine.peak <= 768
    assert engine.blocks >= 200
    assert engine.completed > 5


def test_static_admits_what_it_is_told_to() -> None:
    """The same cohort under a static cap of 87: all of them enter, and would need four times the blocks there are."""
    engine = Engine(config(policy=STATIC, static_cap=87), cohort(150, "output")).run(3)
    assert len(engine.living) == 87
    assert engine.run(50).peak > 2 * 768
