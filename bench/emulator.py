"""An LLM engine as a step machine: what a real one does to its KV cache and its counters, at costs from a small model.

It follows vLLM's V1 scheduler: continuous batching first come first served, chunked prefill that shares each step's
token budget with decoding, prefix caching by block, preemption of the newest request by recompute, and a queue that
waits for its head to fit. It has no clock of its own: the caller passes the time, in seconds, real or virtual.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.blocks import BlockPool, extend_hashes
from bench.workload import token_ids
from moorage.v1 import scheduler_pb2


@dataclass(frozen=True, slots=True)
class CostModel:
    """Duration of a step, in seconds; the defaults are those of the CPU engine (results/calibration.md)."""

    step_overhead_s: float = 0.004_7
    prefill_token_s: float = 0.000_03
    prefill_context_s: float = 9e-9
    """Per computed prompt token and token of context before it: attention makes long prompts dearer."""
    decode_seq_s: float = 0.000_25
    decode_context_s: float = 1.8e-7
    """Per token of context that a decoding sequence reads."""

    def step_seconds(self, chunks: Iterable[tuple[int, int]]) -> float:
        """Return the duration of a step that computes `chunks`, each (tokens of context before it, tokens)."""
        seconds = self.step_overhead_s
        for context, tokens in chunks:
            if tokens == 1:
                seconds += self.decode_seq_s + self.decode_context_s * context
            else:
                seconds += tokens * (self.prefill_token_s + self.prefill_context_s * (context + tokens / 2))
        return seconds


COSTS: Mapping[str, CostModel] = {
    "cpu": CostModel(),
    # An accelerator: a step of decoding takes about as long for many sequences as for few. Prompts cost what it takes
    # for the paper's collapse at high load (policy.md section 5: half of the rate lost at hit rates near zero).
    "accelerator": CostModel(
        step_overhead_s=0.008,
        prefill_token_s=0.000_06,
        prefill_context_s=6e-9,
        decode_seq_s=0.000_03,
        decode_context_s=1e-8,
    ),
}
"""Kinds of engines to emulate."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Size and name of an emulated engine."""

    instance_id: str = "engine-0"
    endpoint: str = "emulated://engine-0"
    incarnation: str = "1"
    num_blocks: int = 768
    """Blocks in all; as in vLLM one of them is a null block that nobody can use."""
    block_size: int = 32
    max_context: int = 8_192
    max_batched_tokens: int = 2_048
    max_sequences: int = 64
    weight_version: str = "default"
    costs: CostModel = field(default_factory=CostModel)

    def __post_init__(self) -> None:
        if self.max_context > (self.num_blocks - 1) * self.block_size:
            raise ValueError("the KV cache is smaller than one context of max_context tokens")


@dataclass(frozen=True, slots=True)
class Output:
    """One generated token."""

    request_id: str
    token: int
    cached_tokens: int
    """Prompt tokens that came from the cache when the request was first scheduled."""
    finished: bool


@dataclass(slots=True, eq=False)
class _Request:
    request_id: str
    tokens: list[int]
    prompt_tokens: int
    outputs: list[int]
    """Tokens that will be generated, known from the start."""
    hashes: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    cached: int | None = None

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens


@dataclass(slots=True)
class Counters:
    """Cumulative counters since the engine's start, as vLLM counts them."""

    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefill_tokens: int = 0
    """Prompt tokens computed; they appear when a prefill ends, not chunk by chunk."""
    generation_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Gauges:
    """Gauges as of the last step: like vLLM's they stand still while nothing runs."""

    used_blocks: int = 0
    running: int = 0
    waiting: int = 0
    prefill_tokens_per_second: float | None = None


class EmulatedEngine:
    """One engine. `submit` requests, then call `step` at the times it returns, and `drain` what was generated."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        self.pool = BlockPool(self.config.num_blocks - 1)
        self.counters = Counters()
        self.gauges = Gauges()
        self._running: list[_Request] = []
        self._waiting: deque[_Request] = deque()
        self._batch: list[tuple[_Request, int]] = []
        self._due: float | None = None
        self._outputs: list[Output] = []
        self._prefill_rate: float | None = None
        self._sequence = 0

    @property
    def running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait for blocks, or for the next step."""
        return len(self._waiting)

    def submit(self, request_id: str, prompt: Sequence[int], output_tokens: int) -> None:
        """Queue a request for exactly `output_tokens` tokens; ValueError where it can not fit the context."""
        if not prompt or output_tokens < 1 or len(prompt) + output_tokens > self.config.max_context:
            raise ValueError(
                f"{len(prompt)} + {output_tokens} tokens do not fit a context of {self.config.max_context}"
            )
        request = _Request(request_id, list(prompt), len(prompt), token_ids(request_id, 0, output_tokens))
        extend_hashes(request.hashes, request.tokens, self.config.block_size)
        self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        """Drop a request, wherever it is; its blocks stay cached. An unknown id is ignored."""
        for request in self._running:
            if request.request_id == request_id:
                self._running.remove(request)
                self._batch = [item for item in self._batch if item[0] is not request]
                self.pool.release(request.blocks)
                return
        self._waiting = deque(request for request in self._waiting if request.request_id != request_id)

    def step(self, now: float) -> float | None:
        """End the step that is due and start the next; return when that one ends, or None while there is no work.

        A call before the step is due changes nothing and returns the same time again.
        """
        if self._due is not None and now < self._due:
            return self._due
        self._finish_batch()
        self._batch = self._schedule()
        self.gauges = Gauges(self.pool.total - self.pool.free, self.running, self.waiting, self._prefill_rate)
        if not self._batch:
            self._due = None
            return None
        seconds = self.config.costs.step_seconds((request.computed, count) for request, count in self._batch)
        prefill = sum(count for _, count in self._batch if count > 1)
        if prefill >= self.config.block_size:
            rate = prefill / seconds
            self._prefill_rate = rate if self._prefill_rate is None else 0.9 * self._prefill_rate + 0.1 * rate
        self._due = now + seconds
        return self._due

    def drain(self) -> list[Output]:
        """Return what was generated since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def snapshot(self, now: float) -> scheduler_pb2.InstanceSnapshot:
        """Return what a collector would read at `now`, given as Unix time. Cached but free blocks are not told."""
        self._sequence += 1
        snapshot = scheduler_pb2.InstanceSnapshot(
            instance_id=self.config.instance_id,
            endpoint=self.config.endpoint,
            incarnation=self.config.incarnation,
            sequence=self._sequence,
            state=scheduler_pb2.INSTANCE_STATE_SERVING,
            block_size=self.config.block_size,
            total_blocks=self.pool.total,
            used_blocks=self.gauges.used_blocks,
            running=self.gauges.running,
            waiting=self.gauges.waiting,
            waiting_capacity=self.gauges.waiting,
            prefix_query_tokens_total=self.counters.prefix_query_tokens,
            prefix_hit_tokens_total=self.counters.prefix_hit_tokens,
            prefill_tokens_total=self.counters.prefill_tokens,
            generation_tokens_total=self.counters.generation_tokens,
            preemptions_total=self.counters.preemptions,
            prefill_tokens_per_second=self.gauges.prefill_tokens_per_second,
            weight_version=self.config.weight_version,
            cache_epoch=0,
            max_context_tokens=self.config.max_context,
        )
        snapshot.observed_time.FromNanoseconds(round(now * 1e9))
        return snapshot

    def _finish_batch(self) -> None:
        for request, count in self._batch:
            request.computed += count
            if request.computed == len(request.tokens):
                self._generate(request)
        self._batch = []

    def _generate(self, request: _Request) -> None:
        cached = request.cached or 0
        if request.generated == 0:
            self.counters.prefill_tokens += request.prompt_tokens - cached
        token = request.outputs[request.generated]
        request.tokens.append(token)
        self.counters.generation_tokens += 1
        finished = request.generated == len(request.outputs)
        if finished:
            self._running.remove(request)
            self.pool.release(request.blocks)
        self._outputs.append(Output(request.request_id, token, cached, finished))

    def _schedule(self) -> list[tuple[_Request, int]]:
        """Choose the next batch as (request, tokens to compute): running requests first, then new ones in order."""
        budget = self.config.max_batched_tokens
        batch: list[tuple[_Request, int]] = []
        preempted = False
        index = 0
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            count = min(len(request.tokens) - request.computed, budget)
            while not self._grow(request, request.computed + count):
                preempted = True
                if self._preempt_newest() is request:
                    return batch
            batch.append((request, count))
            budget -= count
            index += 1
        while self._waiting and budget > 0 and not preempted and self.running < self.config.max_sequences:
            if not self._admit(self._waiting[0]):
                break
            request = self._waiting.popleft()
            self._running.append(request)
            count = min(len(request.tokens) - request.computed, budget)
            self._grow(request, request.computed + count)
            batch.append((request, count))
            budget -= count
        return batch

    def _admit(self, request: _Request) -> bool:
        """Give a waiting request what is cached of it, if the whole of it fits; else leave it waiting."""
        # At least one token has to be computed for there to be an output.
        usable = request.hashes[: (len(request.tokens) - 1) // self.config.block_size]
        matched = self.pool.match(usable)
        if self.pool.cost(matched, self._blocks_for(len(request.tokens))) > self.pool.free:
            return False
        self.pool.take(matched)
        request.blocks = matched
        request.computed = len(matched) * self.config.block_size
        if request.cached is None:
            request.cached = request.computed
            self.counters.prefix_query_tokens += request.prompt_tokens
            self.counters.prefix_hit_tokens += request.computed
        return True

    def _grow(self, request: _Request, tokens: int) -> bool:
        """Give a request the blocks for its first `tokens` tokens and publish those that get full; False if short."""
        missing = self._blocks_for(tokens) - len(request.blocks)
        if missing > self.pool.free:
            return False
        if missing > 0:
            request.blocks += self.pool.allocate(missing)
        extend_hashes(request.hashes, request.tokens, self.config.block_size)
        full = tokens // self.config.block_size
        for position in range(request.computed // self.config.block_size, full):
            self.pool.publish(request.blocks[position], request.hashes[position])
        return True

    def _preempt_newest(self) -> _Request:
        """Take the newest request's blocks and queue it first, to be computed again from what is still cached."""
        request = self._running.pop()
        self.pool.release(request.blocks)
        request.blocks = []
        request.computed = 0
        self.counters.preemptions += 1
        self._waiting.appendleft(request)
        return request

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)
