"""The comparison with the peers as Markdown: every setting, ratios to moorage, targets, CPU."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.cpu import ELSEWHERE
from bench.report import MIN_STEADY_SAMPLES, UNKNOWN, lines_of

SUBJECT, CLAIRVOYANT, UNLIMITED = "moorage", "clairvoyant", "unlimited"

LEAST_RATIO: Mapping[str, float] = {"cache_aware": 1.65, "cache_aware_balanced": 1.65, UNLIMITED: 0.8}
OTHER_LEAST_RATIO = 1.3
LEAST_HITS, MOST_DEVIATION, MOST_HOLD_RATIO = 0.97, 2.7, 3.0

T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Two-sided 95 % quantiles of Student's t by degrees of freedom, from 1 on."""

Setting = tuple[str, int | None]


@dataclass(frozen=True)
class Result:
    """One run in the figures that are compared: of the steady window, or of the whole run where that is too thin."""

    setting: Setting
    """Peer and cap."""
    trial: tuple[int, int]
    """Seed and round: runs of one trial are compared with each other."""
    rate: float
    hits: float | None
    continuation_hits: float | None
    deviation: float | None
    ttft_p95: float | None
    holds: Mapping[str, float]
    """p95 by class, in seconds."""
    failed: int
    cores: Mapping[str, float]
    """CPU seconds per second of the run, by process."""

    @property
    def hold_ratio(self) -> float | None:
        """The longest p95 hold of a class over the shortest; None where a class was never held."""
        if not self.holds or not min(self.holds.values()):
            return None
        return max(self.holds.values()) / min(self.holds.values())


def result(document: Mapping[str, Any]) -> Result:
    """Return the figures of a run as it was kept."""
    settings, summary = document["settings"], document["summary"]
    steady, overall = summary["steady"], summary["overall"]
    figures = steady if steady is not None and steady["completed"] >= MIN_STEADY_SAMPLES else overall
    seconds = overall["end"] - overall["start"]
    return Result(
        setting=(settings["peer"], settings["cap"]),
        trial=(settings["seed"], settings["round"]),
        rate=figures["samples_per_minute"] or 0.0,
        hits=figures["hit_rate"],
        continuation_hits=figures["continuation_hit_rate"],
        deviation=figures["mixture_deviation_points"],
        ttft_p95=figures["ttft_p95_s"],
        holds={name: wait["p95"] for name, wait in summary["holds"].items()},
        failed=summary["outcomes"].get("failed", 0),
        cores={name: used / seconds for name, used in document["cpu_seconds"].items()},
    )


def line(document: Mapping[str, Any]) -> str:
    """Return one run on one line, for a terminal."""
    row = result(document)
    return (
        f"  {row.rate:.1f} samples/min, continuations hit {_number(row.continuation_hits, '.3f')}, "
        f"mixture {_number(row.deviation, '.1f')} points off, {row.failed} failed, "
        f"cores: engines {sum(used for name, used in row.cores.items() if name.startswith('engine')):.2f}, "
        f"others' work {row.cores[ELSEWHERE]:.2f}"
    )


def markdown(documents: Sequence[Mapping[str, Any]], command: str) -> str:
    """Return the whole report."""
    results = [result(document) for document in documents]
    made = documents[0]["settings"]
    lines = [
        "# moorage and its peers on the same real engines",
        "",
        f"Made by `{command}`:",
        f"runs of {made['duration']:g} s, the first {made['warmup']:g} s not counted, {made['live']} rollouts in hand. "
        "Means over runs, with the least and the most.",
        "",
        *_settings(results),
        "",
        "TTFT counts from a request's sending, so it holds the wait inside a router that queues requests (`program`). "
        f"Bounds, not peers: `{CLAIRVOYANT}` knows every plan in advance, `{UNLIMITED}` has KV memory for all.",
        "",
    ]
    ratios = ratios_at_best(results)
    if ratios:
        lines += ["## Ratios", "", *_ratios(ratios), "", "## Targets", "", *_targets(results, ratios), ""]
    lines += ["## CPU", ""]
    lines += [f"Cores used, mean over runs; `{ELSEWHERE}` is what the machine did for others.", "", *_cpu(results)]
    return "\n".join(lines)


@dataclass(frozen=True)
class Ratio:
    """moorage's sample rate over a peer's at its best cap, trial by trial."""

    peer: str
    cap: int | None
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over the trials."""
        return statistics.fmean(self.values)

    @property
    def target(self) -> float | None:
        """What the mean has to reach; None for the bound of admission, which tells what there was to reach."""
        return None if self.peer == CLAIRVOYANT else LEAST_RATIO.get(self.peer, OTHER_LEAST_RATIO)


def ratios_at_best(results: Sequence[Result]) -> list[Ratio]:
    """Return moorage's ratio to every peer, over the trials that both played; the best cap has the highest mean."""
    by_setting = _by_setting(results)
    ours = {row.trial: row.rate for row in by_setting.get((SUBJECT, None), ())}
    ratios = []
    for peer in dict.fromkeys(peer for peer, _ in by_setting if peer != SUBJECT):
        settings = [setting for setting in by_setting if setting[0] == peer]
        best = max(settings, key=lambda setting: statistics.fmean(row.rate for row in by_setting[setting]))
        values = tuple(ours[row.trial] / row.rate for row in by_setting[best] if row.trial in ours and row.rate)
        if values:
            ratios.append(Ratio(peer, best[1], values))
    return ratios


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the mean by Student's t; None for fewer than three values."""
    if len(values) < 3:
        return None
    quantile = T_95[min(len(values) - 1, len(T_95)) - 1]
    half = quantile * statistics.stdev(values) / len(values) ** 0.5
    mean = statistics.fmean(values)
    return mean - half, mean + half


def _by_setting(results: Sequence[Result]) -> dict[Setting, list[Result]]:
    groups: dict[Setting, list[Result]] = {}
    for row in sorted(results, key=lambda row: (row.setting[0], row.setting[1] or 1 << 30, row.trial)):
        groups.setdefault(row.setting, []).append(row)
    return groups


def _settings(results: Sequence[Result]) -> list[str]:
    headings = ["peer", "cap", "runs", "samples/min", "prompt tokens from cache", "continuation hits"]
    headings += ["mixture deviation, points", "TTFT p95, s", "hold p95 by class, s", "failed"]

    def rows() -> Iterator[Sequence[str]]:
        for (peer, cap), group in _by_setting(results).items():
            classes = sorted({name for row in group for name in row.holds})
            holds = (f"{name} {statistics.fmean(row.holds.get(name, 0.0) for row in group):.1f}" for name in classes)
            yield (
                peer,
                _cap(cap),
                str(len(group)),
                _spread(group, lambda row: row.rate, ".1f"),
                _spread(group, lambda row: row.hits, ".3f"),
                _spread(group, lambda row: row.continuation_hits, ".3f"),
                _spread(group, lambda row: row.deviation, ".1f"),
                _spread(group, lambda row: row.ttft_p95, ".2f"),
                ", ".join(holds) or UNKNOWN,
                str(sum(row.failed for row in group)),
            )

    return lines_of(headings, rows())


def _ratios(ratios: Sequence[Ratio]) -> list[str]:
    def rows() -> Iterator[Sequence[str]]:
        for ratio in ratios:
            bounds = interval(ratio.values)
            yield (
                ratio.peer,
                _cap(ratio.cap),
                f"{ratio.mean:.2f}",
                f"{min(ratio.values):.2f} to {max(ratio.values):.2f}",
                UNKNOWN if bounds is None else f"{bounds[0]:.2f} to {bounds[1]:.2f}",
                str(len(ratio.values)),
            )

    return lines_of(("moorage to", "at its best cap", "ratio", "least to most", "95 % interval", "trials"), rows())


def _targets(results: Sequence[Result], ratios: Sequence[Ratio]) -> list[str]:
    ours = [row for row in results if row.setting == (SUBJECT, None)]

    def rows() -> Iterator[Sequence[str]]:
        for ratio in ratios:
            if (least := ratio.target) is not None:
                name = f"samples/min to {ratio.peer} at its best, at least {least:g}"
                yield _verdict(name, ratio.mean, ratio.mean >= least)
        hits = _mean(row.continuation_hits for row in ours)
        yield _verdict(f"continuation hits, at least {LEAST_HITS:g}", hits, hits is not None and hits >= LEAST_HITS)
        off = _mean(row.deviation for row in ours)
        name = f"mixture deviation in points, at most {MOST_DEVIATION:g}"
        yield _verdict(name, off, off is not None and off <= MOST_DEVIATION)
        unfair = _mean(row.hold_ratio for row in ours)
        name = f"longest p95 hold of a class to the shortest, at most {MOST_HOLD_RATIO:g}"
        yield _verdict(name, unfair, unfair is not None and unfair <= MOST_HOLD_RATIO)

    return lines_of(("target", "measured", ""), rows())


def _verdict(target: str, value: float | None, reached: bool) -> Sequence[str]:
    return target, _number(value, ".3g"), "reached" if reached else "not reached"


def _cpu(results: Sequence[Result]) -> list[str]:
    names = list(dict.fromkeys(name for row in results for name in row.cores))
    # Engines of unlimited memory have ports of their own: one column for the engines of all.
    columns = list(dict.fromkeys("engines" if name.startswith("engine ") else name for name in names))

    def cores(row: Result, column: str) -> float | None:
        used = [row.cores[name] for name in row.cores if name == column or (column == "engines" and "engine " in name)]
        return sum(used) if used else None

    def rows() -> Iterator[Sequence[str]]:
        for (peer, cap), group in _by_setting(results).items():
            means = [_mean(cores(row, column) for row in group) for column in columns]
            yield peer, _cap(cap), *(_number(mean, ".2f") for mean in means)

    return lines_of(("peer", "cap", *columns), rows())


def _spread(group: Sequence[Result], value: Callable[[Result], float | None], form: str) -> str:
    known = [number for row in group if (number := value(row)) is not None]
    if not known:
        return UNKNOWN
    mean = format(statistics.fmean(known), form)
    return mean if len(known) == 1 else f"{mean} ({min(known):{form}} to {max(known):{form}})"


def _mean(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _cap(cap: int | None) -> str:
    return "live" if cap is None else str(cap)


def _number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)
