"""A pool of rollout actors, as in verl, NeMo-RL or OpenRLHF: processes that each have a `moorage.Client` of their own.

    python client/examples/actor_pool.py                # actors are processes of this machine
    python client/examples/actor_pool.py --ray          # actors are Ray's; pip install -e '.[ray]'

The driver hands out samples and gets them back done, paused or stale. Once enough groups are whole it begins the weight
update, tells the actors to stop (each sample is paused after its turn) and hands out the next step's samples while
weights are loaded, new ones first on purpose: all of them wait at moorage, which lets in first what was paused. In the
first step a worker is killed: others go on with its sessions where they are, and the lease of one that nobody takes up
ends by itself. The last step starts nothing new.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
import uuid
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from random import Random

import httpx
from actors import Actor, LocalActor, RayActor
from rig import options, standing

from moorage import Client, Held, Rejected, Session, prefix_hashes
from moorage.v1.inspector_pb2 import GetPoolRequest, ListInstancesRequest, ListSessionsRequest
from moorage.v1.operator_pb2 import BeginWeightUpdateRequest, EndWeightUpdateRequest
from moorage.v1.scheduler_pb2 import PHASE_HELD

ACTORS, THREADS = 3, 6
GROUP_SIZE = 4
PROMPT_TOKENS, MAX_CONTEXT = 96, 1_024
LEASE_S = 5.0
#: How long a worker waits for a place before it looks whether it shall stop, and for a new home where one is lost.
LOOK_S, MOVE_S = 0.5, 60.0


@dataclass(frozen=True)
class Trajectory:
    """One sample of a group, as far as it got; travels between driver and workers."""

    group: str
    number: int
    prompt: tuple[int, ...]
    version: int
    attempt: int = 0
    status: str = "new"
    """new, done, paused, stale"""
    tokens: list[int] = field(default_factory=list)
    turn: int = 0
    wants_tool: bool = False
    lease_token: str = ""
    waited: float = 0.0
    prompted: int = 0
    cached: int = 0

    @property
    def session_id(self) -> str:
        """Unique in the pool: a sample that starts over is another session."""
        return f"{self.group}-{self.number}.{self.attempt}"

    @property
    def loops(self) -> bool:
        """One agent that goes round in circles, as some do: it is still at it when its tokens are too old."""
        return self.group.endswith("/g2") and (self.number, self.attempt) == (0, 0)

    @property
    def turns(self) -> int:
        """How many turns it takes. A real agent decides that as it goes."""
        return 1_000 if self.loops else Random(self.session_id).randint(2, 4)

    def start_over(self, version: int) -> Trajectory:
        """The same sample from its prompt, with the present weights."""
        return Trajectory(self.group, self.number, self.prompt, version, self.attempt + 1, tokens=[*self.prompt])


class RolloutWorker:
    """The actor. Its methods run in threads of one process: several rollouts at once, and `stop` beside them."""

    def __init__(self, server: str, pool: str, model: str, block_size: int) -> None:
        self.client = Client(
            server, pool=pool, timeout=30.0
        )  # made here, in the actor's process: clients do not survive a fork
        self.http = httpx.Client(timeout=60.0, limits=httpx.Limits(max_connections=None), trust_env=False)
        self.model, self.block_size = model, block_size
        self.stopping = threading.Event()

    def pid(self) -> int:
        """Its process."""
        return os.getpid()

    def stop(self) -> None:
        """Rollouts under way are paused after their turn, those that wait at once."""
        self.stopping.set()

    def go_on(self) -> None:
        """Takes samples again."""
        self.stopping.clear()

    def rollout(self, t: Trajectory) -> Trajectory:
        """Plays a sample until it is done, paused or too stale."""
        asked = time.monotonic()
        while True:
            session = self.client.session(
                t.session_id,
                workload_class="agentic",
                group_id=t.group,
                group_size=GROUP_SIZE,
                policy_version=t.version,
                prompt_tokens=len(t.tokens),
                prefix_hashes=prefix_hashes(t.tokens, self.block_size),
                max_context_tokens=MAX_CONTEXT,
                lease_ttl=LEASE_S,
                wait_timeout=LOOK_S,
                keep_place=True,
                readmit=True,
            )
            try:
                with session:
                    t = replace(t, waited=t.waited + time.monotonic() - asked, lease_token=session.lease_token)
                    return self.play(session, t)
            except Held:
                if self.stopping.is_set():
                    self.client.release(t.session_id, outcome="PAUSED")  # of one that waits: its seniority stays
                    return replace(t, status="paused")
            except Rejected as refused:
                if refused.reason != "STALENESS_LIMIT":
                    raise
                return replace(t, status="stale")

    def play(self, session: Session, t: Trajectory) -> Trajectory:
        """Turns, with tools between them."""
        session.resume(t.turn)
        while t.turn < t.turns:
            if t.wants_tool:
                self.stopping.wait(0.8 if t.loops else Random(f"{t.session_id}:{t.turn}").uniform(0.05, 0.3))
                if not self.stopping.is_set():
                    t = replace(t, tokens=[*t.tokens, *self.tool_result(t)], wants_tool=False)
            if self.stopping.is_set():
                session.pause()
                return replace(t, status="paused")
            t = self.take_turn(session, t)
        return replace(t, status="done")

    def take_turn(self, session: Session, t: Trajectory) -> Trajectory:
        """One request: where moorage says, with what it used reported."""
        count = 6 if t.loops else Random(f"{t.session_id}:{t.turn}:length").randint(12, 28)
        hashes = prefix_hashes(t.tokens, self.block_size)
        placed = session.place(prompt_tokens=len(t.tokens), prefix_hashes=hashes, wait_timeout=MOVE_S)
        body = {
            "model": self.model, "prompt": t.tokens, "max_tokens": count, "ignore_eos": True, "return_token_ids": True
        }  # fmt: skip
        answer = self.http.post(f"{placed.endpoint.rstrip('/')}/v1/completions", json=body)
        answer.raise_for_status()
        content = answer.json()
        cached: int | None = (content["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")
        session.report(phase="TOOL_WAIT", cached_tokens=cached, output_tokens=content["usage"]["completion_tokens"])
        return replace(
            t,
            tokens=[*t.tokens, *content["choices"][0]["token_ids"]],
            turn=t.turn + 1,
            wants_tool=True,
            lease_token=session.lease_token,
            prompted=t.prompted + (len(t.tokens) if placed.number and cached is not None else 0),
            cached=t.cached + (cached or 0 if placed.number else 0),
        )

    def tool_result(self, t: Trajectory) -> list[int]:
        """What the tool found."""
        rng = Random(f"{t.session_id}:{t.turn}:result")
        return [rng.randint(16, 4_000) for _ in range(6 if t.loops else 16)]


class Driver:
    """The trainer's side: samples, groups, steps, weights."""

    def __init__(self, client: Client, actors: list[Actor], groups: int) -> None:
        self.client, self.actors, self.groups = client, actors, groups
        self.run = uuid.uuid4().hex[:6]
        self.version = 0
        self.begun = self.stale = 0
        self.partial: dict[str, list[Trajectory]] = {}
        self.paused: list[Trajectory] = []
        self.pids = {id(actor): actor.call("pid").result() for actor in actors}
        self.orphan: Trajectory | None = None
        self.running: dict[Future[Trajectory], tuple[Actor, Trajectory]] = {}

    def load(self, actor: Actor) -> int:
        """Samples that an actor has."""
        return sum(whose is actor for whose, _ in self.running.values())

    def inside(self) -> list[tuple[Actor, Trajectory]]:
        """Samples that moorage has let in and that are not done."""
        living = self.client.inspector.ListSessions(ListSessionsRequest(pool=self.client.pool)).sessions
        inside = {session.session_id for session in living if session.phase != PHASE_HELD}
        running = [sample for call, sample in self.running.items() if not call.done()]
        return [(actor, t) for actor, t in running if t.session_id in inside and not t.loops]

    def start(self, t: Trajectory) -> None:
        """Hands a sample to the actor that has the fewest."""
        actor = min(self.actors, key=self.load)
        self.running[actor.call("rollout", t)] = (actor, t)

    def start_groups(self) -> None:
        """New groups, as many as the actors have threads for."""
        while len(self.running) + len(self.paused) + GROUP_SIZE <= THREADS * len(self.actors):
            self.begun += 1
            group = f"{self.run}/g{self.begun}"
            rng = Random(group)
            prompt = tuple(rng.randint(16, 4_000) for _ in range(PROMPT_TOKENS))
            self.partial[group] = []
            for number in range(GROUP_SIZE):
                self.start(Trajectory(group, number, prompt, self.version, tokens=[*prompt]))

    def collect(self, *, last: bool, kill_after: int | None) -> list[list[Trajectory]]:
        """Until enough groups are whole (the last step: all). `kill_after` so many samples a worker is killed."""
        batch: list[list[Trajectory]] = []
        finished = 0
        while self.running and (last or len(batch) < self.groups):
            done, _ = wait(self.running, return_when=FIRST_COMPLETED)
            for future in done:
                if future in self.running:  # a dead actor's are settled together
                    batch += self.settle(future)
                    finished += 1
            if kill_after is not None and finished >= kill_after and (inside := self.inside()):
                kill_after = None
                actor, self.orphan = inside[0]
                os.kill(self.pids[id(actor)], signal.SIGKILL)
            if not last:
                self.start_groups()
        return batch

    def settle(self, future: Future[Trajectory]) -> list[list[Trajectory]]:
        """Takes a sample back; its group, where that is whole now: an advantage needs all of its rewards."""
        actor, sent = self.running[future]
        try:
            t = future.result()
        except actor.died:
            self.bury(actor)
            return []
        del self.running[future]
        if t.status == "paused":
            self.paused.append(t)
        elif t.status == "stale":
            self.stale += 1
            print(
                f"  stale: {t.session_id} of version {t.version}, weights are at {self.version}: starts over",
                flush=True,
            )
            self.start(sent.start_over(self.version))
        else:
            group = self.partial[t.group]
            group.append(t)
            if len(group) == GROUP_SIZE:
                return [self.partial.pop(t.group)]
        return []

    def bury(self, actor: Actor) -> None:
        """A worker died. Its sessions live on for a lease: who admits one again finds it at its home.

        One that was inside starts over as another session instead, to show that a session nobody takes up goes too.
        """
        self.actors.remove(actor)
        theirs = {future: t for future, (whose, t) in self.running.items() if whose is actor}
        for future in theirs:
            del self.running[future]
        for t in theirs.values():
            self.start(t if t is not self.orphan else t.start_over(self.version))
        left = "none" if self.orphan is None else self.orphan.session_id
        print(f"  a worker died: {len(theirs)} samples go on elsewhere, left to its lease: {left}", flush=True)

    def pause_all(self) -> list[list[Trajectory]]:
        """Stops the actors and takes everything back; a few samples are done by then all the same."""
        batch: list[list[Trajectory]] = []
        for call in [actor.call("stop") for actor in self.actors]:
            call.result()
        while self.running:
            done, _ = wait(self.running, return_when=FIRST_COMPLETED)
            for future in done:
                batch += self.settle(future)
        for call in [actor.call("go_on") for actor in self.actors]:
            call.result()
        return batch

    def begin_update(self) -> None:
        """From here on nobody new gets in; sessions inside go on. What is begun now will begin with these weights."""
        self.version += 1
        begin = BeginWeightUpdateRequest(pool=self.client.pool, weight_version=f"step-{self.version}")
        self.client.operator.BeginWeightUpdate(begin)

    def end_update(self) -> None:
        """The new weights are in force: those that wait get in, the ones with seniority first."""
        name = f"step-{self.version}"
        end = EndWeightUpdateRequest(pool=self.client.pool, weight_version=name, policy_version=self.version)
        self.client.operator.EndWeightUpdate(end)

    def all_wait(self) -> None:
        """Until everything handed out is in moorage's queue."""
        request = GetPoolRequest(pool=self.client.pool)
        while self.client.inspector.GetPool(request).held_sessions < sum(not call.done() for call in self.running):
            time.sleep(0.05)

    def step(self, number: int, *, last: bool) -> None:
        """One step, and a line for it."""
        resumed, stale_before = self.paused, self.stale
        if not last:
            self.start_groups()
        self.paused = []
        for t in resumed:
            self.start(t)
        if number > 1:
            self.all_wait()
            self.end_update()
        batch = self.collect(last=last, kill_after=3 if number == 1 else None)
        if not last:
            self.begin_update()
            batch += self.pause_all()
        samples = [t for group in batch for t in group]
        prompted, cached = sum(t.prompted for t in samples), sum(t.cached for t in samples)
        print(
            f"step {number}: {len(samples)} samples of {len(batch)} whole groups, resumed {len(resumed)}, "
            f"stale {self.stale - stale_before}, paused {len(self.paused)}, hits {cached / max(1, prompted):.2f}, "
            f"longest wait {max((t.waited for t in samples), default=0.0):.1f} s, weights {self.version}",
            flush=True,
        )

    def give_up(self) -> None:
        """Forgets what was paused and will never be resumed; without this moorage remembers it for an hour."""
        for t in self.paused:
            if t.lease_token:
                self.client.release(t.session_id, outcome="ABORTED", lease_token=t.lease_token)


def train(server: str, pool: str, chosen: argparse.Namespace) -> None:
    """Actors, steps, and what is left afterwards."""
    with ExitStack() as stack:
        client = stack.enter_context(Client(server, pool=pool, timeout=30.0))
        found = client.inspector.ListInstances(ListInstancesRequest(pool=pool)).instances
        with httpx.Client(trust_env=False) as http:
            model = http.get(f"{found[0].snapshot.endpoint}/v1/models").json()["data"][0]["id"]
        arguments = (server, pool, model, found[0].snapshot.block_size or 16)
        if chosen.ray:
            import ray

            ray.init(include_dashboard=False, log_to_driver=False, logging_level="WARNING")
            stack.callback(ray.shutdown)
        kind = RayActor if chosen.ray else LocalActor
        # Two threads more than rollouts, for the calls beside them.
        actors: list[Actor] = [kind(RolloutWorker, arguments, THREADS + 2) for _ in range(ACTORS)]
        driver = Driver(client, actors, chosen.groups)
        driver.end_update()
        stack.callback(driver.give_up)
        for number in range(1, chosen.steps + 1):
            driver.step(number, last=number == chosen.steps)
        ends = time.monotonic() + 3 * LEASE_S
        while left := client.inspector.ListSessions(ListSessionsRequest(pool=pool)).sessions:
            if time.monotonic() > ends:
                break
            time.sleep(0.2)
        print(f"done: {driver.begun} groups of {GROUP_SIZE} begun, {len(left)} sessions left in the pool", flush=True)


def main() -> None:
    """Runs the loop on what is there, or on what it starts."""
    parser = options(__doc__)
    parser.add_argument("--ray", action="store_true", help="actors of Ray's instead of local processes")
    chosen = parser.parse_args()
    with standing(chosen, "--lease-ttl", f"{LEASE_S:.0f}s", blocks=112) as rig:
        rig.moorage("config", "class", "agentic", "--prior-context-tokens", "256")
        train(rig.server, rig.pool, chosen)


if __name__ == "__main__":
    main()
