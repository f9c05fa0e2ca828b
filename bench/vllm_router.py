"""vllm-router as a peer: started as a child, and told of each session what the policy under test wants to know."""

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from bench.backends import VllmBackend
from bench.children import running, wait_healthy
from bench.control_plane import free_port
from bench.emulator import CostModel
from bench.routers import Progress, RoutedSession
from bench.shim import CONTEXT, FIELD
from bench.workload import SessionPlan

log = logging.getLogger(__name__)

READY_SECONDS = 60.0

# The policy is for requests without a program, of which there are none.
PROGRAM_FLAGS = ("--policy", "consistent_hash", "--enable-program-scheduling")


@dataclass(frozen=True)
class Dialect:
    """How a policy of vllm-router is switched on, and what it wants to be told."""

    flags: tuple[str, ...]
    words: bool = False
    """Prompts as text: the policy matches prefixes of text and is blind to token ids."""
    session_header: bool = False
    """`X-Session-ID` on each request, `POST /finish_session` after the last."""
    program: bool = False
    """`vllm_xargs.agentic_context` in each body; needs the shim."""
    lengths: bool = False
    """With `program`: also how long each answer will get, which no trainer knows."""


DIALECTS: Mapping[str, Dialect] = {
    "cache_aware": Dialect(("--policy", "cache_aware"), words=True),
    # Its thresholds are made for pools with hundreds of requests per engine: with the defaults it never balances here.
    "cache_aware_balanced": Dialect(
        ("--policy", "cache_aware", "--balance-abs-threshold", "4", "--balance-rel-threshold", "1.2"), words=True
    ),
    "sticky_least_loaded": Dialect(("--policy", "sticky_least_loaded"), session_header=True),
    "round_robin": Dialect(("--policy", "round_robin")),
    "program": Dialect(PROGRAM_FLAGS, program=True),
    "program_told_lengths": Dialect(PROGRAM_FLAGS, program=True, lengths=True),
}


def program_config(capacity_tokens: int, costs: CostModel | None = None) -> dict[str, Any]:
    """Return the program scheduler's configuration for engines of so many tokens of KV, at the costs of a step.

    As its documentation recommends: paused programs may resume on either engine, admission is by tokens, and its models
    of prefill and decode are calibrated, here from the emulator's fit to these engines. New programs go where the
    fewest are; the default, a hash, leaves two engines unevenly loaded.
    """
    costs = costs or CostModel()
    return {
        "global_queue": True,
        "token_capacity_per_target": capacity_tokens,
        "binding_strategy": "least_program_count",
        "prefill_cost_model": {
            "intercept_seconds": costs.step_overhead_s,
            "linear_seconds_per_1k_tokens": 1e3 * costs.prefill_token_s,
            "quadratic_seconds_per_1k_tokens_squared": 1e6 * costs.prefill_context_s / 2,
            "decode_throughput_alpha": 0.15,
        },
        "decode_throughput_model": {
            "fixed_step_seconds": costs.step_overhead_s,
            "batch_step_seconds_per_request": costs.decode_seq_s,
            "context_step_seconds_per_token": costs.decode_context_s,
        },
    }


@contextmanager
def vllm_router(executable: Path, name: str, engines: Sequence[str], capacity_tokens: int, logs: Path) -> Iterator[str]:
    """Run vllm-router with the policy of that name, with the shim where it needs one; yields its URL."""
    dialect = DIALECTS[name]
    flags = list(dialect.flags)
    with ExitStack() as stack:
        workers = list(engines)
        if dialect.program:
            flags += ["--program-scheduling-config-json", json.dumps(program_config(capacity_tokens))]
            ports = {free_port(): url for url in engines}
            pairs = [f"{port}={url}" for port, url in ports.items()]
            shim = stack.enter_context(running("shim", [sys.executable, "-m", "bench.shim", *pairs], logs / "shim.log"))
            workers = [f"http://127.0.0.1:{port}" for port in ports]
            wait_healthy(shim, f"{workers[-1]}/health", READY_SECONDS)
        port = free_port()
        command = [str(executable), "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *workers]
        command += ["--worker-startup-check-interval", "1", "--prometheus-port", str(free_port())]
        command += ["--log-level", "error", *flags]
        router = stack.enter_context(running("vllm-router", command, logs / "vllm-router.log"))
        url = f"http://127.0.0.1:{port}"
        wait_healthy(router, f"{url}/health", READY_SECONDS)
        yield url


class VllmRouterBackend(VllmBackend):
    """A vllm-router, both as the server that takes all requests and as the router that sends them there."""

    def __init__(
        self,
        url: str,
        model: str,
        dialect: Dialect,
        vocabulary: Sequence[str] = (),
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`vocabulary` has the words of the model's tokenizer by id, and is needed where prompts go as text."""
        super().__init__(url, model, transport=transport)
        self._dialect = dialect
        self._vocabulary = vocabulary
        self._last_turns: dict[str, int] = {}

    def session(self, plan: SessionPlan) -> RoutedSession:
        """See `Router.session`."""
        return _Session(self, plan)

    def request(
        self, request_id: str, prompt: Sequence[int], output_tokens: int
    ) -> tuple[dict[str, str], dict[str, Any]]:
        """See `VllmBackend.request`; the id is `SESSION/TURN`, as the player makes it."""
        headers, body = super().request(request_id, prompt, output_tokens)
        session, _, turn = request_id.rpartition("/")
        if self._dialect.words:
            body["prompt"] = " ".join(self._vocabulary[token] for token in prompt)
        if self._dialect.session_header:
            headers["X-Session-ID"] = session
        if self._dialect.program:
            # Nothing else ends a program before its retention does, so the scheduler is told what moorage never is:
            # which turn is the last.
            context: dict[str, Any] = {
                "task_id": session,
                "program_id": f"{session}:lead",
                "session_id": session,
                "step_id": int(turn),
                "expected_resume": int(turn) < self._last_turns[session],
            }
            if self._dialect.lengths:
                context["expected_output_length"] = output_tokens
            body[FIELD] = {CONTEXT: context}
        return headers, body

    def begin(self, plan: SessionPlan) -> None:
        """Take note of a session."""
        self._last_turns[plan.session_id] = len(plan.turns) - 1

    async def finish(self, session_id: str) -> None:
        """Tell the router that a session is over, where it listens."""
        del self._last_turns[session_id]
        if not self._dialect.session_header:
            return
        try:
            answer = await self._client.post("/finish_session", params={"session_id": session_id})
            answer.raise_for_status()
        except httpx.HTTPError as error:
            log.warning("the router did not take the end of session %s: %r", session_id, error)


class _Session:
    def __init__(self, backend: VllmRouterBackend, plan: SessionPlan) -> None:
        self._backend = backend
        self._plan = plan

    async def __aenter__(self) -> Self:
        self._backend.begin(self._plan)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._backend.finish(self._plan.session_id)

    async def place(self, turn: int, prompt: Sequence[int]) -> str:
        return self._backend.url

    def report(self, progress: Progress) -> None:
        """Nothing listens: the router sees requests only."""


def vocabulary(tokenizer: Path) -> list[str]:
    """Return the words of a word-level `tokenizer.json`, by id."""
    words: dict[str, int] = json.loads(tokenizer.read_text("utf-8"))["model"]["vocab"]
    return sorted(words, key=lambda word: words[word])
