"""The controller's state as text, so that another process can carry on where the last holder of the epoch stopped."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np

from moorage_server.core.controller import State
from moorage_server.core.estimates import Exposure
from moorage_server.core.labels import ENCODED
from moorage_server.core.pace import Pace
from moorage_server.core.pressure import Brake, Sample
from moorage_server.core.survival import BINS, Survival
from moorage_server.core.view import Class
from moorage_server.core.watch import Watched

#: Raised whenever the text's layout changes; a state of another layout is dropped, and learnt anew.
LAYOUT = 3


def dump(state: State) -> str:
    """``state`` as JSON."""

    def plain(value: Any) -> Any:
        return [round(float(v), 4) for v in value] if isinstance(value, np.ndarray) else value

    exposures = {}
    for name, exposure in state.exposures.items():
        row = asdict(exposure)
        row["survival"] = {k: plain(v) for k, v in row["survival"].items()}
        exposures[name] = row
    watched = {key: asdict(w) for key, w in state.watched.items()}
    samples = {label: "".join(kept) for label, kept in state.labels.samples.items()}
    return json.dumps(
        {"layout": LAYOUT, "at_ms": state.at_ms, "exposures": exposures, "watched": watched, "labels": samples}
    )


def load(text: str) -> State:
    """The state that ``dump`` wrote; a fresh one for no text, a text of another layout, or one that makes no sense.

    What was learnt is learnt again within minutes, while a pool whose controller can not begin stands still.
    """
    if not text:
        return State()
    try:
        data = json.loads(text)
        return _state(data) if data.get("layout") == LAYOUT else State()
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return State()


def _state(data: dict[str, Any]) -> State:
    state = State(at_ms=data["at_ms"])
    for name, row in data["exposures"].items():
        counts = row.pop("survival")
        seen = row.pop("seen")
        exposure = Exposure(**row)
        if len(counts["ended"]) == BINS:
            exposure.survival = Survival(np.array(counts["ended"]), np.array(counts["at_risk"]))
        exposure.seen = None if seen is None else Class(**seen)
        state.exposures[name] = exposure
    for key, row in data["watched"].items():
        brake = row.pop("brake")
        samples = [_sample(s) for s in brake.pop("samples")]
        done, pace = tuple(row.pop("done")), Pace(**row.pop("pace"))
        state.watched[key] = Watched(**row, done=done, pace=pace, brake=Brake(**brake, samples=samples))
    for label, text in data.get("labels", {}).items():
        state.labels.samples[label] = [text[n : n + ENCODED] for n in range(0, len(text), ENCODED)]
    return state


def _sample(row: dict[str, Any]) -> Sample:
    turns = {name: (expected, found) for name, (expected, found) in row.pop("turns").items()}
    return Sample(**row, turns=turns)
