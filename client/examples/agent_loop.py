"""GRPO with tool-calling agents in asyncio, as in prime-rl, verl's AgentLoop or slime, on `moorage.AsyncClient`.

    python client/examples/agent_loop.py                        # starts a control plane and two emulated engines
    python client/examples/agent_loop.py --server 127.0.0.1:50061 --engines http://gpu1:8000 http://gpu2:8000

Every step keeps a fixed number of rollouts going and stops once enough groups are whole (CoPRIS). What is not done by
then is paused, tokens kept, and resumed before anything new in the next step. Weights change while rollouts run. A
paused sample that lags too far behind by then is refused (STALENESS_LIMIT) and starts over from its prompt, so that its
group gets whole all the same. The last step starts nothing new.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from statistics import fmean, pstdev

import httpx
from rig import options, standing

from moorage import AsyncClient, AsyncSession, MoorageError, Rejected, prefix_hashes
from moorage.v1.inspector_pb2 import ListInstancesRequest, ListSessionsRequest
from moorage.v1.operator_pb2 import BeginWeightUpdateRequest, EndWeightUpdateRequest

GROUP_SIZE = 4
CONCURRENCY = 16
PROMPT_TOKENS, MAX_CONTEXT = 96, 1_024
TRAIN_S, LOAD_S = 0.4, 0.4


@dataclass
class Trajectory:
    """One sample of a group, as far as it got."""

    run: str
    group: str
    number: int
    prompt: list[int]
    version: int
    attempt: int = 0
    tokens: list[int] = field(default_factory=list)
    turn: int = 0
    unfinished: int = 0
    """Tokens that the present turn still lacks: it was cut short."""
    wants_tool: bool = False
    lease_token: str = ""
    waited: float = 0.0
    prompted: int = 0
    cached: int = 0
    served_by: set[int] = field(default_factory=set)
    inside: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def session_id(self) -> str:
        """Unique in the pool: a sample that starts over is another session."""
        return f"{self.run}/{self.group}-{self.number}.{self.attempt}"

    @property
    def loops(self) -> bool:
        """One agent that goes round in circles, as some do: it is still at it when its tokens are too old."""
        return (self.group, self.number, self.attempt) == ("g1", 0, 0)

    @property
    def turns(self) -> int:
        """How many turns it takes. A real agent decides that as it goes."""
        return 1_000 if self.loops else Random(self.session_id).randint(2, 4)

    def answer_tokens(self) -> int:
        """How long the present turn's answer gets. A real model decides that."""
        return 6 if self.loops else Random(f"{self.session_id}:{self.turn}").randint(12, 28)

    def start_over(self, version: int) -> Trajectory:
        """The same sample from its prompt, with the present weights."""
        return Trajectory(
            self.run, self.group, self.number, self.prompt, version, self.attempt + 1, tokens=[*self.prompt]
        )


class Trainer:
    """The loop. `client` asks moorage, `http` the engines."""

    def __init__(self, client: AsyncClient, http: httpx.AsyncClient, model: str, block_size: int, groups: int) -> None:
        self.client, self.http, self.model = client, http, model
        self.block_size, self.groups = block_size, groups
        self.run = uuid.uuid4().hex[:6]
        self.version = 0
        self.paused: list[Trajectory] = []  # were inside
        self.waiting: list[Trajectory] = []  # never got in
        self.partial: dict[str, list[Trajectory]] = {}  # finished samples of groups that are not whole
        self.begun = 0
        self.stale = 0

    # --- one rollout

    async def rollout(self, t: Trajectory) -> bool:
        """Plays a sample to its end; False where it is too stale to go on. Cancelled, it is paused wherever it is."""
        session = self.client.session(
            t.session_id,
            workload_class="agentic",
            group_id=f"{t.run}/{t.group}",
            group_size=GROUP_SIZE,
            policy_version=t.version,
            prompt_tokens=len(t.tokens),
            prefix_hashes=prefix_hashes(t.tokens, self.block_size),
            max_context_tokens=MAX_CONTEXT,
            on_cancel="PAUSED",
            readmit=True,
        )
        asked = time.monotonic()
        try:
            async with session:
                t.waited += time.monotonic() - asked
                t.lease_token = session.lease_token
                t.inside.set()
                session.resume(t.turn)
                while t.turn < t.turns:
                    if t.wants_tool:
                        t.tokens += await self.tool(t)
                        t.wants_tool = False
                    await self.take_turn(session, t)
        except Rejected as refused:
            if refused.reason != "STALENESS_LIMIT":
                raise
            print(f"  stale: {t.session_id}: {refused.hold.detail}; starts over", flush=True)
            return False
        finally:
            t.inside.set()
        return True

    async def take_turn(self, session: AsyncSession, t: Trajectory) -> None:
        """One request: where moorage says, with what it used reported."""
        prompt = len(t.tokens)
        hashes = prefix_hashes(t.tokens, self.block_size)  # PrefixHasher where prompts are long
        placed = await session.place(prompt_tokens=prompt, prefix_hashes=hashes)
        t.unfinished = t.unfinished or t.answer_tokens()
        cached: int | None = None
        async for tokens, told in self.generate(placed.endpoint, t):
            t.tokens += tokens
            t.unfinished -= len(tokens)
            cached = told if told is not None else cached
            session.progress(context_tokens=len(t.tokens), output_tokens=len(t.tokens) - prompt)
        session.report(phase="TOOL_WAIT", cached_tokens=cached, output_tokens=len(t.tokens) - prompt)
        if placed.placement.HasField("policy_version"):
            t.served_by.add(placed.placement.policy_version)  # learns of new weights, turn by turn
        if placed.number and cached is not None:
            t.prompted, t.cached = t.prompted + prompt, t.cached + cached
        t.turn += 1
        t.wants_tool = True

    async def generate(self, endpoint: str, t: Trajectory) -> AsyncIterator[tuple[list[int], int | None]]:
        """Tokens as they come, and cached tokens where the engine tells them."""
        body = {
            "model": self.model, "prompt": t.tokens, "max_tokens": t.unfinished, "ignore_eos": True, "stream": True,
            "return_token_ids": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        async with self.http.stream("POST", f"{endpoint.rstrip('/')}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                tokens = [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
                details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
                yield tokens, details.get("cached_tokens")

    async def tool(self, t: Trajectory) -> list[int]:
        """The tool's result. Meanwhile the session keeps its KV, and moorage knows that it waits."""
        rng = Random(f"{t.session_id}:{t.turn}:tool")
        await asyncio.sleep(0.8 if t.loops else rng.uniform(0.05, 0.3))
        return [rng.randint(16, 4_000) for _ in range(6 if t.loops else 16)]

    # --- one step

    async def collect(self, update: asyncio.Task[None], *, last: bool) -> list[list[Trajectory]]:
        """Rolls out until enough groups are whole (the last step: all) and `update` is in, then pauses the rest."""
        batch: list[list[Trajectory]] = []
        running: dict[asyncio.Task[bool], Trajectory] = {}

        def start(t: Trajectory) -> None:
            t.inside.clear()
            running[asyncio.create_task(self.rollout(t))] = t

        resumed, self.paused = self.paused, []
        fresh, self.waiting = self.waiting, []
        for t in resumed:
            start(t)
        first = asyncio.create_task(_all_inside(resumed))
        try:
            while last or len(batch) < self.groups or not update.done():
                if first.done():
                    while fresh:
                        start(fresh.pop(0))
                    while not last and len(running) + GROUP_SIZE <= CONCURRENCY:
                        for t in self.new_group():
                            start(t)
                watched = {*running, *(task for task in (first, update) if not task.done())}
                if not watched:
                    break
                await asyncio.wait(watched, return_when="FIRST_COMPLETED")
                for task in [task for task in running if task.done()]:
                    t = running.pop(task)
                    if task.result():
                        batch += self.finished(t)
                    else:
                        start(self.refused(t))
        finally:
            first.cancel()
            batch += await self.pause(running)
            self.waiting += fresh
        return batch

    async def pause(self, running: dict[asyncio.Task[bool], Trajectory]) -> list[list[Trajectory]]:
        """Cancels rollouts, which pauses them; groups that got whole in that moment."""
        batch: list[list[Trajectory]] = []
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        for task, t in running.items():
            if task.cancelled() and t.turn < t.turns:
                (self.paused if t.lease_token else self.waiting).append(t)
            elif task.cancelled() or task.result():  # cancelled while it was released as COMPLETED: that stands
                batch += self.finished(t)
            else:
                self.waiting.append(self.refused(t))
        return batch

    def new_group(self) -> list[Trajectory]:
        """All samples of the next prompt."""
        self.begun += 1
        group = f"g{self.begun}"
        rng = Random(f"{self.run}:{group}")
        prompt = [rng.randint(16, 4_000) for _ in range(PROMPT_TOKENS)]
        self.partial[group] = []
        return [
            Trajectory(self.run, group, number, prompt, self.version, tokens=[*prompt]) for number in range(GROUP_SIZE)
        ]

    def finished(self, t: Trajectory) -> list[list[Trajectory]]:
        """The group of a finished sample, once it is whole: an advantage needs all of its rewards."""
        group = self.partial[t.group]
        group.append(t)
        return [self.partial.pop(t.group)] if len(group) == GROUP_SIZE else []

    def refused(self, t: Trajectory) -> Trajectory:
        """What to do about a sample that is too stale."""
        self.stale += 1
        return t.start_over(self.version)

    async def update_weights(self, version: int) -> None:
        """Trains on the last batch and loads the weights while rollouts run: new sessions wait, the others go on."""
        await asyncio.sleep(TRAIN_S)
        name, pool = f"step-{version}", self.client.pool
        await self.client.operator.BeginWeightUpdate(BeginWeightUpdateRequest(pool=pool, weight_version=name))
        await asyncio.sleep(LOAD_S)  # engines load here; say cache_cleared=True below where that empties their caches
        end = EndWeightUpdateRequest(pool=pool, weight_version=name, policy_version=version)
        await self.client.operator.EndWeightUpdate(end)
        self.version = version

    async def give_up(self) -> None:
        """Forgets what was paused and will never be resumed; without this moorage remembers it for an hour."""
        for t in self.paused:
            with suppress(MoorageError):
                await self.client.release(t.session_id, outcome="ABORTED", lease_token=t.lease_token)


async def _all_inside(trajectories: list[Trajectory]) -> None:
    for t in trajectories:
        await t.inside.wait()


def advantages(group: list[Trajectory]) -> list[float]:
    """Rewards of a group, normalised. The reward is made up: short answers are good ones."""
    rewards = [1.0 - len(t.tokens) / MAX_CONTEXT for t in group]
    return [(reward - fmean(rewards)) / (pstdev(rewards) + 1e-6) for reward in rewards]


async def train(server: str, pool: str, chosen: argparse.Namespace) -> None:
    """Steps, and a line for each."""
    async with (
        AsyncClient(server, pool=pool, timeout=30.0) as client,
        httpx.AsyncClient(timeout=60.0, limits=httpx.Limits(max_connections=None), trust_env=False) as http,
    ):
        found = (await client.inspector.ListInstances(ListInstancesRequest(pool=pool))).instances
        model = (await http.get(f"{found[0].snapshot.endpoint}/v1/models")).json()["data"][0]["id"]
        trainer = Trainer(client, http, model, found[0].snapshot.block_size or 16, chosen.groups)
        await client.operator.EndWeightUpdate(
            EndWeightUpdateRequest(pool=pool, weight_version="step-0", policy_version=0)
        )
        try:
            for step in range(1, chosen.steps + 1):
                resumed, stale = len(trainer.paused), trainer.stale
                update = asyncio.create_task(trainer.update_weights(step - 1) if step > 1 else asyncio.sleep(0))
                batch = await trainer.collect(update, last=step == chosen.steps)
                await update
                samples = [t for group in batch for t in group]
                assert all(abs(sum(advantages(group))) < 1e-3 for group in batch)
                prompted, cached = sum(t.prompted for t in samples), sum(t.cached for t in samples)
                wait = max((t.waited for t in samples), default=0.0)
                versions = max((len(t.served_by) for t in samples), default=0)
                print(
                    f"step {step}: {len(samples)} samples of {len(batch)} whole groups, resumed {resumed}, "
                    f"stale {trainer.stale - stale}, paused {len(trainer.paused)}, waiting {len(trainer.waiting)}, "
                    f"hits {cached / max(1, prompted):.2f}, longest wait {wait:.1f} s, "
                    f"weights {trainer.version}, up to {versions} versions in a sample",
                    flush=True,
                )
        finally:
            await trainer.give_up()
        left = (await client.inspector.ListSessions(ListSessionsRequest(pool=pool))).sessions
        print(f"done: {trainer.begun} groups of {GROUP_SIZE} begun, {len(left)} sessions left in the pool", flush=True)


def main() -> None:
    """Runs the loop on what is there, or on what it starts."""
    chosen = options(__doc__).parse_args()
    with standing(chosen, blocks=112) as rig:
        rig.moorage("config", "class", "agentic", "--prior-context-tokens", "256")
        asyncio.run(train(rig.server, rig.pool, chosen))


if __name__ == "__main__":
    main()
