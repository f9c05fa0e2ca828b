"""The plots of the results."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import use
from matplotlib.figure import Figure

from bench.intervals import Interval

use("Agg")


def bars(names: Sequence[str], series: Mapping[str, Sequence[Interval]], title: str, path: Path) -> None:
    """Draw one horizontal bar per name and series, with its interval."""
    figure = Figure(figsize=(8, 0.9 + 0.45 * len(names)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(series)
    for n, (label, values) in enumerate(series.items()):
        places = [row + n * height for row in range(len(names))]
        errors = [value.half or 0.0 for value in values]
        axes.barh(places, [value.mean for value in values], height, xerr=errors, label=label, capsize=3)
    middle = 0.4 - height / 2
    axes.set_yticks([row + middle for row in range(len(names))], list(names))
    axes.invert_yaxis()
    axes.set_xlabel("samples per minute")
    axes.set_title(title)
    if len(series) > 1:
        axes.legend()
    _save(figure, path)


def sweep(
    points: Sequence[tuple[int, Interval, Interval | None]],
    rate: Interval,
    hits: Interval | None,
    title: str,
    path: Path,
) -> None:
    """Draw sample rate and hit rate over the static cap, with the adaptive policy as a line across."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    caps = [cap for cap, _, _ in points]
    axes.errorbar(
        caps, [r.mean for _, r, _ in points], [r.half or 0.0 for _, r, _ in points], label="static cap: rate", capsize=3
    )
    axes.axhline(rate.mean, color="tab:green", label="misa-t: rate")
    # The knee lies far to the left of the outer bound.
    axes.set_xscale("log")
    axes.set_xticks(caps, [str(cap) for cap in caps], minor=False, fontsize=8)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("sessions per engine (static cap)")
    axes.set_ylabel("samples per minute")
    axes.set_ylim(bottom=0)
    right = axes.twinx()
    known = [(cap, h.mean) for cap, _, h in points if h is not None]
    right.plot([cap for cap, _ in known], [h for _, h in known], "--", color="tab:gray", label="static cap: hits")
    if hits is not None:
        right.axhline(hits.mean, linestyle="--", color="tab:olive", label="misa-t: hits")
    right.set_ylabel("continuation hit rate")
    right.set_ylim(0, 1.05)
    lines = [*axes.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    labels = [*axes.get_legend_handles_labels()[1], *right.get_legend_handles_labels()[1]]
    axes.legend(lines, labels, loc="lower right")
    axes.set_title(title)
    _save(figure, path)


def curves(series: Mapping[str, tuple[Sequence[float], Sequence[float]]], path: Path) -> None:
    """Draw rates over the time since each shift, as shares of the new steady rate: one panel per shift."""
    columns = 3
    top = max(1.5, *(max(shares, default=0.0) for _, shares in series.values()))
    rows = -(-len(series) // columns)
    figure = Figure(figsize=(4 * columns, 2.2 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    for axes, (name, (times, shares)) in zip(panels, series.items(), strict=False):
        axes.plot(times, shares)
        axes.axvline(0, color="tab:red", linewidth=0.8)
        axes.axhline(0.9, color="tab:gray", linewidth=0.8, linestyle="--")
        axes.set_title(name, fontsize=9)
        axes.set_ylim(0, top)
    figure.supxlabel("seconds since the shift")
    figure.supylabel("rate / new steady rate")
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=100)
