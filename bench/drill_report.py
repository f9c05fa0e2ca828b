"""What a fire drill left behind, as Markdown: a timeline around each exercise, and what became of the sessions."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from bench.player import RunRecord
from moorage.v1 import inspector_pb2, scheduler_pb2

#: Seconds shown before an exercise, and after its last step; a row every so many seconds, and long after a step.
BEFORE_S, AFTER_S = 4.0, 24.0
ROW_S, NEAR_S, FAR_ROW_S = 2.0, 36.0, 15.0
#: Rates are taken over so many seconds.
RATE_S = 10.0


@dataclass(frozen=True)
class Exercise:
    """One exercise: its name, what it is, and its steps. Times in seconds of the run."""

    name: str
    meaning: str
    start: float
    end: float
    steps: tuple[tuple[float, str], ...]
    victim: str = ""
    """Short name of the instance that dies in it."""


@dataclass(frozen=True)
class Moment:
    """What the control plane showed at one time."""

    time: float
    instances: list[inspector_pb2.Instance]
    pool: inspector_pb2.GetPoolResponse


@dataclass
class Log:
    """All that was seen of a drill."""

    run: RunRecord
    names: dict[str, str]
    """Short names of the instances."""
    exercises: list[Exercise] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    events: list[tuple[float, inspector_pb2.WatchEventsResponse]] = field(default_factory=list)
    end: float = 0.0

    def count(self, kind: str, start: float, end: float) -> int:
        """Events of a kind in a span."""
        return sum(event.kind == kind and start <= at < end for at, event in self.events)

    def completed(self, start: float, end: float) -> int:
        """Sessions completed in a span."""
        return sum(s.outcome == "completed" and s.end is not None and start <= s.end < end for s in self.run.sessions)


def markdown(book: Log) -> Iterator[str]:
    """The report, line by line."""
    outcomes = Counter(s.outcome for s in book.run.sessions)
    rate = 60.0 * outcomes["completed"] / book.end if book.end else 0.0
    yield f"Sessions: {dict(outcomes)}; {rate:.1f} completed per minute over {book.end:.0f} s."
    yield (
        f"Leases that ran out: {book.count('expire', 0.0, book.end)}; sessions that lost their home: "
        f"{book.count('detach', 0.0, book.end)}, moved: {book.count('move', 0.0, book.end)}."
    )
    for number, exercise in enumerate(book.exercises):
        following = book.exercises[number + 1].start if number + 1 < len(book.exercises) else book.end
        yield from _exercise(book, exercise, min(following, exercise.end + AFTER_S))


def _exercise(book: Log, exercise: Exercise, until: float) -> Iterator[str]:
    since = exercise.start
    yield ""
    yield f"### {exercise.name}: {exercise.meaning}"
    yield ""
    yield "Steps: " + ", ".join(f"{what} at {at - since:.1f} s" for at, what in exercise.steps) + "."
    shown = [m for m in book.moments if since - 1.0 <= m.time < until]
    brakes = {
        short: min((i.brake for m in shown for i in m.instances if _name(book, i) == short), default=1.0)
        for short in book.names.values()
    }
    yield (
        f"Expired: {book.count('expire', since, until)}; lost their home: {book.count('detach', since, until)}; "
        f"lowest brake: {', '.join(f'{name} {value:.2f}' for name, value in brakes.items())}."
    )
    if exercise.victim:
        yield from _death(book, exercise)
    yield ""
    yield (
        "| s | " + " | ".join(f"{n}: state, sessions, brake" for n in book.names.values()) + " | held, why | done/min |"
    )
    yield "|---" * (len(book.names) + 3) + "|"
    at = since - BEFORE_S
    for moment in (m for m in book.moments if since - BEFORE_S <= m.time < until):
        if moment.time < at:
            continue
        near = any(0.0 <= moment.time - step < NEAR_S for step, _ in exercise.steps)
        at = moment.time + (ROW_S if near or moment.time < since else FAR_ROW_S)
        cells = {_name(book, i): _cell(i) for i in moment.instances}
        rate = 60.0 / RATE_S * book.completed(moment.time - RATE_S, moment.time)
        homes = " | ".join(cells.get(n, "unknown") for n in book.names.values())
        yield f"| {moment.time - since:.0f} | {homes} | {_held(book, moment)} | {rate:.0f} |"


def _death(book: Log, exercise: Exercise) -> Iterator[str]:
    """When the last session went to an instance between its death and its return, and when its own moved."""
    died = exercise.steps[0][0]
    back = min((at for at, e in book.events if e.kind == "register" and at > died), default=book.end)

    def times(kind: str, instance: str | None) -> list[float]:
        return [
            at - died
            for at, e in book.events
            if e.kind == kind and instance in (None, book.names.get(e.instance_id)) and died <= at < back
        ]

    went = times("admit", exercise.victim) + times("move", exercise.victim)
    last = f", the last one {max(went):.2f} s after the death" if went else ""
    yield f"Sessions sent to {exercise.victim} between its death and its return: {len(went)}{last}."
    for kind, what in (("detach", "lost their home"), ("move", "had a new one")):
        if at := times(kind, None if kind == "move" else exercise.victim):
            yield f"{len(at)} sessions {what} {min(at):.1f} to {max(at):.1f} s after the death."


def _name(book: Log, instance: inspector_pb2.Instance) -> str:
    return book.names.get(instance.snapshot.instance_id, instance.snapshot.instance_id)


def _cell(instance: inspector_pb2.Instance) -> str:
    state = scheduler_pb2.InstanceState.Name(instance.snapshot.state).removeprefix("INSTANCE_STATE_")
    words = [state, inspector_pb2.Freshness.Name(instance.freshness).removeprefix("FRESHNESS_").lower()]
    if instance.updating_weights:
        words.append("updating")
    return f"{' '.join(words)}, {instance.active_sessions}, {instance.brake:.2f}"


def _held(book: Log, moment: Moment) -> str:
    """How many are held, and the reason last given."""
    reasons = [e.reason for at, e in book.events if e.kind == "hold" and moment.time - 1.5 <= at <= moment.time]
    return f"{moment.pool.held_sessions} {reasons[-1] if reasons else ''}".strip()
