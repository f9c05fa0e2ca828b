"""The examples of rollout loops, run as a user runs them; what the ledger saw must bear out what they say."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from moorage.v1 import inspector_pb2 as ipb
from moorage.v1 import scheduler_pb2 as pb
from tests.integration.processes import PATIENCE_S, Server, Start, environment, eventually

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "client" / "examples"
GROUP_SIZE, STEPS = 4, 4
STEP = re.compile(
    r"step (\d+): (\d+) samples of (\d+) whole groups, resumed (\d+), stale (\d+), paused (\d+),.* hits ([\d.]+)"
)


@dataclass(frozen=True)
class Step:
    """What an example says of a step."""

    number: int
    samples: int
    groups: int
    resumed: int
    stale: int
    paused: int
    hits: float


@dataclass(frozen=True)
class Run:
    """What an example said, and what the ledger saw of it."""

    output: str
    events: list[ipb.WatchEventsResponse]

    @property
    def steps(self) -> list[Step]:
        """Its lines, one a step."""
        return [Step(*map(int, found[:-1]), float(found[-1])) for found in STEP.findall(self.output)]

    @property
    def begun(self) -> int:
        """Groups that it began."""
        found = re.search(r"done: (\d+) groups of 4 begun, 0 sessions left in the pool", self.output)
        assert found, self.output
        return int(found[1])

    def of_kind(self, kind: str) -> list[ipb.WatchEventsResponse]:
        """Events of one kind."""
        return [event for event in self.events if event.kind == kind]

    def ends(self, outcome: str) -> list[str]:
        """Sessions that ended so, in order."""
        return [event.session_id for event in self.events if event.values.get("outcome") == outcome]


def play(server: Server, pool: str, *command: str) -> Run:
    """Runs an example against a server, and checks what holds for all of them."""
    done = subprocess.run(
        [sys.executable, *command, "--server", server.address, "--pool", pool],
        cwd=ROOT, env=environment({}), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run = Run(done.stdout, list(events(server, pool)))
    nothing_is_left(server, pool)
    every_sample_is_complete_and_every_group_whole(run)
    what_was_paused_enters_before_anything_new(run)
    the_stale_are_refused_and_start_over(run)
    return run


def events(server: Server, pool: str) -> Iterator[ipb.WatchEventsResponse]:
    """All that happened in a pool, up to a mark that is set now."""
    mark = "the end"
    server.api.release(mark, server.api.admit(mark, pool).lease.token, pool)
    request = ipb.WatchEventsRequest(pool=pool, resume_token="0")
    stream = server.api.inspector.WatchEvents(request, timeout=PATIENCE_S)
    yield from itertools.takewhile(lambda event: event.session_id != mark, stream)
    stream.cancel()


def nothing_is_left(server: Server, pool: str) -> None:
    """Neither sessions, paused ones included, nor blocks."""
    listed = server.api.inspector.ListSessions(ipb.ListSessionsRequest(pool=pool), timeout=PATIENCE_S)
    assert list(listed.sessions) == []
    state = server.api.inspector.GetPool(ipb.GetPoolRequest(pool=pool), timeout=PATIENCE_S)
    assert (state.active_sessions, state.held_sessions, state.reserved_blocks) == (0, 0, 0)
    assert state.policy_version == STEPS - 1


def every_sample_is_complete_and_every_group_whole(run: Run) -> None:
    """Each sample of each group begun completed once, and the steps got them as whole groups."""
    completed = [session.rpartition(".")[0] for session in run.ends("COMPLETED")]
    assert len(completed) == len({*completed}) == run.begun * GROUP_SIZE
    assert [step.number for step in run.steps] == [1, 2, 3, 4]
    assert all(step.samples == step.groups * GROUP_SIZE for step in run.steps)
    assert sum(step.groups for step in run.steps) == run.begun
    # Continuations found what the turns before had left: what does not fill a block never counts.
    assert all(step.hits > 0.6 for step in run.steps if step.samples)


def what_was_paused_enters_before_anything_new(run: Run) -> None:
    """In every step, by the order of the ledger.

    New is who never had a place in the queue before. While a step is being stopped somebody who waits may still get in,
    where room was made: it is paused as well. One whose caller had hung up by then never heard that it was inside.
    """
    unheard: set[str] = set()
    owed: set[str] = set()
    known: set[str] = set()
    inside: set[str] = set()
    slipped_in: set[str] = set()
    resuming, resumed = False, 0
    for event in run.events:
        session = event.session_id
        if event.values.get("outcome") == "PAUSED":
            slipped_in.discard(session)
            known.add(session)
            if session in inside:
                owed.add(session)
                resuming = False
        elif event.kind == "withdraw":
            known.add(session)
            if session in inside:
                inside.discard(session)
                unheard.add(session)
        elif event.kind == "reject":
            owed.discard(session)
        elif event.kind == "admit" and session in unheard:
            # Admitted once more, to be paused.
            unheard.discard(session)
        elif event.kind == "admit":
            if session in owed:
                owed.remove(session)
                assert not slipped_in, f"new ones before {session}: {slipped_in}"
                resuming, resumed = True, resumed + 1
            elif session not in known and session.endswith(".0"):
                assert not (resuming and owed), f"{session} is new and enters before {owed}"
                if owed:
                    slipped_in.add(session)
            inside.add(session)
        elif "outcome" in event.values:
            slipped_in.discard(session)
    assert not owed
    assert resumed > 0
    assert sum(step.resumed for step in run.steps) >= resumed
    assert sum(step.paused > 0 for step in run.steps) >= 2


def the_stale_are_refused_and_start_over(run: Run) -> None:
    """Nobody who was refused is seen again, and the sample completes as another session."""
    rejects = run.of_kind("reject")
    assert {event.reason for event in rejects} == {"STALENESS_LIMIT"}
    refused = [event.session_id for event in rejects]
    # One that is refused while it is being stopped does not hear of it, asks again, and is refused again.
    heard = re.findall(r"  stale: .*?([0-9a-f]{6}/g\d+-\d+\.\d+)", run.output)
    assert {*refused} == {*heard}
    assert len(heard) == sum(step.stale for step in run.steps)
    done = run.ends("COMPLETED")
    assert not {*refused} & {*done}
    assert {session.rpartition(".")[0] for session in refused} <= {session.rpartition(".")[0] for session in done}
    # The agent that goes round in circles was paused twice before its tokens were too old.
    circling = next(session for session in refused if re.search(r"/g[12]-0\.0$", session))
    assert run.ends("PAUSED").count(circling) >= 2


def weights_changed(run: Run, times: int) -> None:
    """As the trainer said, on both engines."""
    begun = [event.values["version"] for event in run.of_kind("weights") if event.reason == "begun"]
    assert begun == [f"step-{version}" for version in range(1, times + 1) for _ in range(2)]


def somebody_lived_through_an_update(run: Run) -> None:
    """Rollouts go on while weights are loaded."""
    inside: set[str] = set()
    for event in run.events:
        if event.kind == "admit":
            inside.add(event.session_id)
        elif "outcome" in event.values:
            inside.discard(event.session_id)
        elif event.kind == "weights" and event.reason == "ended" and event.values["version"] != "step-0" and inside:
            return
    pytest.fail("nobody was inside when new weights came into force")


def new_ones_wait_for_weights(run: Run) -> None:
    """They ask beside those that were paused, and are held as well."""
    entered: set[str] = set()
    new_and_held: set[str] = set()
    for event in run.events:
        if event.kind == "admit":
            entered.add(event.session_id)
        elif event.kind == "hold" and event.reason == "WEIGHT_UPDATE" and event.session_id not in entered:
            new_and_held.add(event.session_id)
    assert new_and_held


@pytest.fixture
def server(start: Start) -> Server:
    running = start("--embedded")
    eventually(running.api.ready)
    return running


@pytest.mark.timeout(300)
def test_agents_in_asyncio(server: Server, pool: str) -> None:
    run = play(server, pool, str(EXAMPLES / "agent_loop.py"))
    weights_changed(run, times=3)
    somebody_lived_through_an_update(run)


@pytest.mark.timeout(300)
def test_a_pool_of_actors_of_which_one_is_killed(server: Server, pool: str) -> None:
    run = play(server, pool, str(EXAMPLES / "actor_pool.py"))
    weights_changed(run, times=3)
    new_ones_wait_for_weights(run)
    died = re.search(r"a worker died: (\d+) samples go on elsewhere, left to its lease: (\S+)", run.output)
    assert died, run.output
    assert int(died[1]) >= 2
    assert [event.session_id for event in run.of_kind("expire")] == [died[2]], "only what nobody took up ran out"


@pytest.mark.timeout(300)
def test_a_plain_openai_client_without_moorage(server: Server, pool: str) -> None:
    script = EXAMPLES / "openai_loop.py"
    without = (
        "import runpy, sys; sys.modules['moorage'] = None; sys.path.insert(0, sys.argv[1]); "
        "sys.argv = sys.argv[2:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    run = play(server, pool, "-c", without, str(EXAMPLES), str(script))
    weights_changed(run, times=3)
    somebody_lived_through_an_update(run)
    assert sum(map(int, re.findall(r"held \(429\) (\d+) times", run.output))) > 0
    # What the headers say arrived.
    classes = {event.values["class"] for event in run.of_kind("admit")}
    assert classes == {"agentic"}
    assert pb.DECISION_REJECT in {event.decision for event in run.events}


@pytest.mark.parametrize("name", ["agent_loop.py", "actor_pool.py", "openai_loop.py"])
def test_a_single_step_is_refused(name: str) -> None:
    command = [sys.executable, str(EXAMPLES / name), "--steps", "1"]
    done = subprocess.run(command, env=environment({}), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "argument --steps: at least 2" in done.stderr


def test_their_readme_names_what_there_is() -> None:
    readme = (EXAMPLES / "README.md").read_text("utf-8")
    named = {*re.findall(r"python client/examples/(\w+\.py)", readme)}
    assert named == {"agent_loop.py", "actor_pool.py", "openai_loop.py"}
    helps = [
        subprocess.run(
            [sys.executable, str(EXAMPLES / name), "--help"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
        for name in named
    ]
    for option in {*re.findall(r"--[a-z][a-z-]+", readme)}:
        assert any(option in text for text in helps), option
