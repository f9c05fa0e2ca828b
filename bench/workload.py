"""Seeded rollout workload in the shape of the paper's trace, scaled from a 128K context to a small one.

Lengths follow log-normal-like fits through the published p50, p95 and p99, clipped to the context. An agentic session's
70 requests become a few tens; what a turn adds grows in turn, so that contexts still fill up to the cap and the inputs
of all its requests keep the published quantiles. Token ids are a function of (seed, owner, position): the samples of
one prompt share it token by token, and so do the turns of one session.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import NormalDist

import numpy as np

TRACE_CONTEXT = 131_072
"""Context of the trace's model, in tokens."""

TARGET_MIXTURE: Mapping[str, float] = {"agentic": 0.486, "rlvr": 0.331, "rlhf": 0.182}
"""The trainer's mixture in the paper (shares of sessions; they are normalised before use)."""

TOOL_SHARE = (0.066, 0.227)
"""Share of an agentic session's time spent in tools: the two models of the paper."""

FIRST_TOKEN, TOKEN_COUNT = 16, 4_000
"""Ids used: a range that every vocabulary of 4,096 words or more has."""

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A length distribution through three quantiles: linear in log length over normal scores."""

    p50: float
    p95: float
    p99: float

    def draw(self, rng: Random) -> float:
        """Draw one length, in the trace's tokens; unbounded above."""
        z = _NORMAL.inv_cdf(min(max(rng.random(), 1e-9), 1 - 1e-9))
        z95, z99 = _NORMAL.inv_cdf(0.95), _NORMAL.inv_cdf(0.99)
        if z <= z95:
            slope = math.log(self.p95 / self.p50) / z95
            return self.p50 * math.exp(slope * z)
        slope = math.log(self.p99 / self.p95) / (z99 - z95)
        return self.p95 * math.exp(slope * (z - z95))


@dataclass(frozen=True, slots=True)
class SingleTurnClass:
    """A class whose sessions are one request: prompt and output lengths in the trace's tokens."""

    prompt: Quantiles
    output: Quantiles


@dataclass(frozen=True, slots=True)
class MultiTurnClass:
    """A class of many turns with tool gaps; lengths in the trace's tokens.

    Prompt, turns and growth are log-normal (median, sigma); they are fitted so that the inputs of all requests have the
    trace's p50, p95 and p99 (37,757, 103,209 and 123,207) at the scaled-down number of turns.
    """

    output: Quantiles
    prompt: tuple[float, float] = (8_000.0, 0.7)
    turns: tuple[float, float] = (20.0, 0.6)
    min_turns: int = 4
    max_turns: int = 64
    growth: tuple[float, float] = (2_200.0, 0.3)
    growth_sigma_in_session: float = 0.6


CLASSES: Mapping[str, SingleTurnClass | MultiTurnClass] = {
    "agentic": MultiTurnClass(output=Quantiles(148, 1_612, 3_930)),
    "rlhf": SingleTurnClass(prompt=Quantiles(60, 2_564, 2_564), output=Quantiles(7_344, 24_447, 37_101)),
    "rlvr": SingleTurnClass(prompt=Quantiles(156, 1_129, 1_277), output=Quantiles(47_583, 130_815, 130_958)),
}


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    new_tokens: int
    """Tokens a tool adds to the context before the request; 0 in the first turn, which the prompt opens."""
    output_tokens: int
    """Exact number of tokens to generate."""
    tool_gap_s: float
    """Time spent in tools before the request; 0 in the first turn."""


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """Everything one rollout will ask for."""

    session_id: str
    workload_class: str
    group_id: str
    group_size: int
    prompt: tuple[int, ...]
    """Token ids of the first prompt, the same in all samples of the group."""
    turns: tuple[Turn, ...]
    seed: int = 0
    label: str | None = None
    """The class that the caller declares, empty for none at all; None declares the true one."""

    @property
    def declared_class(self) -> str:
        """What the caller says the session is."""
        return self.workload_class if self.label is None else self.label

    def tool_tokens(self, index: int) -> list[int]:
        """Token ids that the tool adds before turn `index`."""
        start = sum(turn.new_tokens for turn in self.turns[:index])
        return token_ids(f"{self.seed}/{self.session_id}", start, self.turns[index].new_tokens)

    @property
    def output_tokens(self) -> int:
        """Tokens generated in all turns."""
        return sum(turn.output_tokens for turn in self.turns)

    @property
    def final_context(self) -> int:
        """Tokens of the context after the last turn."""
        return len(self.prompt) + sum(turn.new_tokens + turn.output_tokens for turn in self.turns)


@dataclass(frozen=True, slots=True)
class WorkloadConfig:
    """Scale and mixture of a workload."""

    max_context: int = 7_000
    """Tokens that stand for the trace's 128K; an engine with a limit of 8,192 takes this with room to spare."""
    group_size: int = 4
    mixture: Mapping[str, float] = field(default_factory=lambda: dict(TARGET_MIXTURE))
    system_tokens: Mapping[str, int] = field(default_factory=dict)
    """Length of a prefix shared by all sessions of a class, by class; none by default."""
    turn_seconds: float = 0.03
    """Nominal time of a turn apart from its output; with `token_seconds` it turns the tools' share into gaps."""
    token_seconds: float = 0.008
    """Nominal time of one generated token."""
    mislabelled: float = 0.0
    """Share of sessions that declare one of the other classes, each as likely."""
    unlabelled: float = 0.0
    """Share of sessions that declare no class; together with `mislabelled` at most 1."""
    tool_slowdown: float = 1.0
    """Factor on the time spent in tools."""
    output_growth: float = 1.0
    """Factor on the length of every output, as a new policy may bring it; contexts stay within `max_context`."""

    @property
    def scale(self) -> float:
        """Tokens here per token of the trace."""
        return self.max_context / TRACE_CONTEXT


def token_ids(owner: str, start: int, count: int) -> list[int]:
    """Return the ids at positions `start` to `start + count` of the endless text that belongs to `owner`."""
    base = np.uint64(Random(owner).getrandbits(64))
    # splitmix64 of (base + position): any position can be had without those before it.
    x = base + np.arange(start, start + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    ids: list[int] = (x % np.uint64(TOKEN_COUNT) + np.uint64(FIRST_TOKEN)).tolist()
    return ids


def lognormal(rng: Random, median: float, sigma: float) -> float:
    """Draw from a log-normal distribution given by its median and the deviation of its logarithm."""
    return median * math.exp(sigma * rng.gauss(0.0, 1.0))


def normalised(shares: Mapping[str, float]) -> dict[str, float]:
    """Return the shares scaled to sum to 1."""
    total = sum(shares.values())
    return {name: share / total for name, share in shares.items()}


class Workload:
    """An endless, reproducible sequence of sessions whose classes follow the mixture."""

    def __init__(self, config: WorkloadConfig | None = None, seed: int = 0) -> None:
        self.config = config or WorkloadConfig()
        self.seed = seed
        self.target = normalised(self.config.mixture)
        self._started = dict.fromkeys(self.target, 0)
        self._numbers = dict.fromkeys(CLASSES, 0)

    def change(self, config: WorkloadConfig) -> None:
        """From the next session on follow another configuration; tools take its time for living sessions too."""
        self.config = config
        self.target = normalised(config.mixture)
        # What was started before is no debt of the new mixture.
        self._started = dict.fromkeys(self.target, 0)

    def gap_s(self, turn: Turn) -> float:
        """Return the time spent in tools before a turn that begins now, in seconds."""
        return turn.tool_gap_s * self.config.tool_slowdown

    def next_session(self) -> SessionPlan:
        """Return the next session: of the class that the sessions started so far lag behind most."""
        total = sum(self._started.values()) + 1
        chosen = max(self.target, key=lambda name: self.target[name] * total - self._started[name])
        index = self._numbers[chosen]
        self._started[chosen] += 1
        self._numbers[chosen] += 1
        return self.session(chosen, index)

    def session(self, workload_class: str, index: int) -> SessionPlan:
        """Return the session with number `index` of a class; it does not depend on what was asked before."""
        group, sample = divmod(index, self.config.group_size)
        group_id = f"{workload_class}-{group:05d}"
        session_id = f"{group_id}-{sample}"
        shape = CLASSES[workload_class]
        prompt = self._prompt(workload_class, group_id, shape)
        rng = Random(f"{self.seed}/{session_id}/turns")
        if isinstance(shape, SingleTurnClass):
            turns: Sequence[Turn] = [Turn(0, self._clipped(shape.output, rng, len(prompt)), 0.0)]
        else:
            turns = self._turns(shape, rng, len(prompt))
        return SessionPlan(
            session_id,
            workload_class,
            group_id,
            self.config.group_size,
            prompt,
            tuple(turns),
            self.seed,
            self._label(workload_class, session_id),
        )

    def _label(self, workload_class: str, session_id: str) -> str | None:
        """The declared class where it is not the true one. Drawn apart: a wrong label changes nothing else."""
        rng = Random(f"{self.seed}/{session_id}/label")
        drawn = rng.random()
        others = sorted(set(self.target) - {workload_class})
        if drawn < self.config.mislabelled and others:
            return rng.choice(others)
        return "" if self.config.mislabelled <= drawn < self.config.mislabelled + self.config.unlabelled else None

    def _prompt(self, workload_class: str, group_id: str, shape: SingleTurnClass | MultiTurnClass) -> tuple[int, ...]:
        rng = Random(f"{self.seed}/{group_id}/prompt")
        drawn = lognormal(rng, *shape.prompt) if isinstance(shape, MultiTurnClass) else shape.prompt.draw(rng)
        system = self.config.system_tokens.get(workload_class, 0)
        # A prompt leaves at least 40 % of the context to what follows.
        own = max(1, min(round(drawn * self.config.scale), int(0.6 * self.config.max_context) - system))
        shared = token_ids(f"{self.seed}/system/{workload_class}", 0, system)
        return tuple(shared + token_ids(f"{self.seed}/{group_id}", 0, own))

    def _clipped(self, lengths: Quantiles, rng: Random, context: int) -> int:
        drawn = round(lengths.draw(rng) * self.config.scale * self.config.output_growth)
        return max(1, min(drawn, self.config.max_context - context))

    def _turns(self, shape: MultiTurnClass, rng: Random, context: int) -> list[Turn]:
        """Draw turns until their number is reached or the next one would overflow the context."""
        count = min(shape.max_turns, max(shape.min_turns, round(lognormal(rng, *shape.turns))))
        growth = lognormal(rng, *shape.growth) * self.config.scale
        share = rng.uniform(*TOOL_SHARE)
        sigma = shape.growth_sigma_in_session
        turns: list[Turn] = []
        for number in range(count):
            new = max(1, round(lognormal(rng, growth * math.exp(-sigma * sigma / 2), sigma))) if number else 0
            before_growth = max(1, round(min(shape.output.draw(rng), shape.output.p99) * self.config.scale))
            output = max(1, round(before_growth * self.config.output_growth))
            if context + new + output > self.config.max_context:
                break
            # Longer outputs do not make the tools slower.
            nominal = self.config.turn_seconds + before_growth * self.config.token_seconds
            gap = nominal * share / (1.0 - share) * lognormal(rng, math.exp(-0.5), 1.0) if number else 0.0
            turns.append(Turn(new, output, gap))
            context += new + output
        return turns
