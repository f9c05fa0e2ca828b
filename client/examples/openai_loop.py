"""Agents on a plain OpenAI client, with nothing of moorage in the program: `moorage proxy` is its base_url.

    pip install -e '.[examples]'
    python client/examples/openai_loop.py
    python client/examples/openai_loop.py --engines http://gpu1:8000 http://gpu2:8000 --no-tools

Headers say which session, class, group and policy version a request belongs to; `POST /finish_session` ends a session
or pauses it. A held request is answered 429 with Retry-After, a sample that is too stale 422. The loop is that of
`agent_loop.py`: whole groups, batches that stop early, what was paused first in the next step, weights that change
while rollouts run (here with the command `moorage weights`). `--no-tools` is for engines that parse no tool calls.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import uuid
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx
import openai
from rig import Rig, options, standing

GROUP_SIZE = 4
CONCURRENCY = 12
TRAIN_S, LOAD_S = 0.4, 0.4
TURNS_WITHOUT_TOOLS = 3
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Looks something up.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
        },
    }
]


class Stopped(Exception):
    """The batch is full: the conversation goes on in the next step."""


class TooStale(Exception):
    """The conversation began with weights that are too old by now."""


@dataclass
class Conversation:
    """One sample of a group, as far as it got."""

    run: str
    group: str
    number: int
    version: int
    attempt: int = 0
    messages: list[Any] = field(default_factory=list)
    turn: int = 0
    wants_tool: str | None = None
    """Id of the tool call that has no result yet."""
    entered: bool = False
    waited: float = 0.0
    prompted: int = 0
    cached: int = 0
    served_by: set[str] = field(default_factory=set)
    inside: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        words = Random(f"{self.run}:{self.group}").choices(["ship", "berth", "tide", "pilot", "quay"], k=80)
        self.messages = [
            {"role": "system", "content": "You look things up before you answer."},
            {"role": "user", "content": " ".join(words)},
        ]

    @property
    def session_id(self) -> str:
        """Unique in the pool: a sample that starts over is another session."""
        return f"{self.run}/{self.group}-{self.number}.{self.attempt}"

    @property
    def loops(self) -> bool:
        """One agent that goes round in circles, as some do: it is still at it when its answers are too old."""
        return (self.group, self.number, self.attempt) == ("g1", 0, 0)


class Trainer:
    """The loop."""

    def __init__(
        self, rig: Rig, client: openai.AsyncOpenAI, http: httpx.AsyncClient, chosen: argparse.Namespace
    ) -> None:
        self.rig, self.client, self.http = rig, client, http
        self.groups, self.tools = chosen.groups, chosen.tools
        self.run = uuid.uuid4().hex[:6]
        self.version = self.begun = self.stale = self.busy = 0
        self.model = ""
        self.stop = asyncio.Event()
        self.paused: list[Conversation] = []  # were inside
        self.waiting: list[Conversation] = []  # never got in
        self.partial: dict[str, list[Conversation]] = {}  # finished samples of groups that are not whole

    # --- one conversation

    async def converse(self, c: Conversation) -> None:
        """Until the model wants no more tools, or the batch is full. Raises Stopped, TooStale."""
        try:
            while True:
                if c.wants_tool is not None:
                    c.messages.append(await self.tool(c, c.wants_tool))
                    c.wants_tool = None
                await self.ask(c)
                if c.wants_tool is None:
                    break
            await self.finish(c, "COMPLETED")
        except Stopped:
            await self.finish(c, "PAUSED")
            raise
        finally:
            c.inside.set()

    async def ask(self, c: Conversation) -> None:
        """One streamed request. What a stopped one had is lost: OpenAI's API can not go on inside a message."""
        asked = time.monotonic()
        raw = await self.admitted(c)
        c.waited = max(c.waited, time.monotonic() - asked)
        if version := raw.headers.get("X-Moorage-Policy-Version"):
            c.served_by.add(version)  # learns of new weights, turn by turn
        text, call, usage = "", None, None
        async with raw.parse() as stream:
            async for chunk in stream:
                if self.stop.is_set():
                    raise Stopped
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    for piece in choice.delta.tool_calls or ():
                        if call is None:
                            call = piece
                        else:
                            call.function.arguments += piece.function.arguments or ""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if call is not None:
            function = {"name": call.function.name, "arguments": call.function.arguments}
            message["tool_calls"] = [{"id": call.id, "type": "function", "function": function}]
        c.messages.append(message)
        if usage is not None and usage.prompt_tokens_details is not None and c.turn:
            c.prompted += usage.prompt_tokens
            c.cached += usage.prompt_tokens_details.cached_tokens or 0
        c.turn += 1
        if self.tools:
            c.wants_tool = call.id if call is not None else None
        else:
            c.wants_tool = "none" if c.turn < TURNS_WITHOUT_TOOLS or c.loops else None

    async def admitted(self, c: Conversation) -> Any:
        """The answer's beginning, after as many 429 as it takes: who comes back when told keeps its place."""
        headers = {
            "X-Session-ID": c.session_id,
            "X-Workload-Class": "agentic",
            "X-Group-ID": f"{c.run}/{c.group}",
            "X-Group-Size": str(GROUP_SIZE),
            "X-Policy-Version": str(c.version),
            "X-Max-Context-Tokens": "1024",
        }
        while True:
            if self.stop.is_set():
                raise Stopped
            try:
                raw = await self.client.chat.completions.with_raw_response.create(
                    model=self.model,
                    messages=c.messages,
                    tools=TOOLS if self.tools else openai.omit,
                    tool_choice="required" if self.tools and c.loops else openai.omit,
                    max_tokens=6 if c.loops else Random(f"{c.session_id}:{c.turn}").randint(12, 28),
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_headers=headers,
                    extra_body={"ignore_eos": True},
                )
            except openai.APIStatusError as error:
                if error.status_code == 422 and error.code == "STALENESS_LIMIT":
                    print(f"  stale: {error.message}; starts over", flush=True)
                    raise TooStale from error
                if "Retry-After" not in error.response.headers:
                    raise
                self.busy += error.status_code == 429  # held; 503: moorage does not answer just now
                await self.pause_for(float(error.response.headers["Retry-After"]))
            else:
                c.entered = True
                c.inside.set()
                return raw

    async def tool(self, c: Conversation, call: str) -> dict[str, Any]:
        """The tool's result. The session keeps its KV meanwhile: the proxy sees that no request is under way.

        A full batch does not interrupt it, so that what is paused has its next request ready.
        """
        rng = Random(f"{c.session_id}:{c.turn}")
        await asyncio.sleep(0.8 if c.loops else rng.uniform(0.05, 0.3))
        result = " ".join(rng.choices(["found", "nothing", "more", "less"], k=6 if c.loops else 16))
        if self.tools:
            return {"role": "tool", "tool_call_id": call, "content": result}
        return {"role": "user", "content": result}

    async def pause_for(self, seconds: float) -> None:
        """Sleeps. Raises Stopped as soon as the batch is full."""
        try:
            async with asyncio.timeout(seconds):
                await self.stop.wait()
        except TimeoutError:
            return
        raise Stopped

    async def finish(self, c: Conversation, outcome: str) -> None:
        """Ends or pauses the session, or keeps its place in the queue for its next try."""
        answer = await self.http.post("/finish_session", params={"session_id": c.session_id, "outcome": outcome})
        answer.raise_for_status()

    # --- one step

    async def collect(self, update: asyncio.Task[None], *, last: bool) -> list[list[Conversation]]:
        """Until enough groups are whole (the last step: all) and `update` is in; the rest is paused."""
        batch: list[list[Conversation]] = []
        running: dict[asyncio.Task[None], Conversation] = {}

        def start(c: Conversation) -> None:
            c.inside.clear()
            running[asyncio.create_task(self.converse(c))] = c

        self.stop.clear()
        resumed, fresh, self.paused, self.waiting = self.paused, self.waiting, [], []
        for c in resumed:
            start(c)
        first = asyncio.create_task(_all_inside(resumed))
        while True:
            if first.done() and not self.stop.is_set():
                while fresh:
                    start(fresh.pop(0))
                while not last and len(running) + GROUP_SIZE <= CONCURRENCY:
                    self.begun += 1
                    name = f"g{self.begun}"
                    self.partial[name] = []
                    for number in range(GROUP_SIZE):
                        start(Conversation(self.run, name, number, self.version))
            watched = {*running, *(task for task in (first, update) if not task.done())}
            if not watched:
                break
            await asyncio.wait(watched, return_when="FIRST_COMPLETED")
            for task in [task for task in running if task.done()]:
                c = running.pop(task)
                try:
                    task.result()
                except Stopped:
                    (self.paused if c.entered else self.waiting).append(c)
                except TooStale:
                    fresh.append(self.start_over(c))
                else:
                    group = self.partial[c.group]
                    group.append(c)
                    if len(group) == GROUP_SIZE:
                        batch.append(self.partial.pop(c.group))
            if not last and len(batch) >= self.groups and update.done():
                self.stop.set()
        self.waiting += fresh
        return batch

    def start_over(self, c: Conversation) -> Conversation:
        """What to do about a sample that is too stale: the same prompt again, with the present weights."""
        self.stale += 1
        return Conversation(c.run, c.group, c.number, self.version, c.attempt + 1)

    async def update_weights(self, version: int) -> None:
        """Trains on the last batch and loads the weights while rollouts run: new sessions wait, the others go on."""
        await asyncio.sleep(TRAIN_S)
        await asyncio.to_thread(self.rig.moorage, "weights", "begin", f"step-{version}")
        await asyncio.sleep(LOAD_S)
        await asyncio.to_thread(self.rig.moorage, "weights", "end", f"step-{version}", "--policy-version", f"{version}")
        self.version = version


async def _all_inside(conversations: list[Conversation]) -> None:
    for c in conversations:
        await c.inside.wait()


async def train(rig: Rig, chosen: argparse.Namespace) -> None:
    """Steps, and a line for each."""
    assert rig.proxy is not None
    async with (
        httpx.AsyncClient(base_url=rig.proxy, timeout=60.0, trust_env=False) as http,
        openai.DefaultAsyncHttpxClient(trust_env=False) as direct,
        openai.AsyncOpenAI(base_url=f"{rig.proxy}/v1", api_key="none", max_retries=0, http_client=direct) as client,
    ):
        trainer = Trainer(rig, client, http, chosen)
        trainer.model = (await client.models.list()).data[0].id
        rig.moorage("weights", "end", "step-0", "--policy-version", "0")
        try:
            for step in range(1, chosen.steps + 1):
                resumed, stale, busy = len(trainer.paused), trainer.stale, trainer.busy
                update = asyncio.create_task(trainer.update_weights(step - 1) if step > 1 else asyncio.sleep(0))
                batch = await trainer.collect(update, last=step == chosen.steps)
                await update
                samples = [c for group in batch for c in group]
                prompted, cached = sum(c.prompted for c in samples), sum(c.cached for c in samples)
                wait = max((c.waited for c in samples), default=0.0)
                versions = max((len(c.served_by) for c in samples), default=0)
                print(
                    f"step {step}: {len(samples)} samples of {len(batch)} whole groups, resumed {resumed}, "
                    f"stale {trainer.stale - stale}, paused {len(trainer.paused)}, waiting {len(trainer.waiting)}, "
                    f"hits {cached / max(1, prompted):.2f}, held (429) {trainer.busy - busy} times, "
                    f"longest wait {wait:.1f} s, weights {trainer.version}, up to {versions} versions in a sample",
                    flush=True,
                )
        finally:
            for c in trainer.paused + trainer.waiting:
                await trainer.finish(c, "ABORTED")
    left = rig.moorage("get", "sessions", "-o", "name").split()
    print(f"done: {trainer.begun} groups of {GROUP_SIZE} begun, {len(left)} sessions left in the pool", flush=True)


def main() -> None:
    """Runs the loop on what is there, or on what it starts."""
    parser = options(__doc__)
    parser.add_argument("--no-tools", dest="tools", action="store_false", help="results come as messages of the user")
    chosen = parser.parse_args()
    with standing(chosen, blocks=72, proxy=("--max-hold", "1s")) as rig:
        rig.moorage("config", "class", "agentic", "--prior-context-tokens", "256")
        asyncio.run(train(rig, chosen))


if __name__ == "__main__":
    main()
