"""The comparison with the peers: its options, its order, what it takes up."""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from bench import peers
from bench.backends import VllmBackend
from bench.clairvoyant import ClairvoyantRouter
from bench.peers import Run
from bench.workload import SessionPlan, Turn

DIRECTORIES = ["--vllm-dir", "v", "--serve-script", "s.sh", "--out", "out"]


def test_every_peer_plays_every_seed_and_round_and_the_bound_comes_last() -> None:
    caps = {"unlimited": (64,), "moorage": (None,), "cache_aware": (12, 16)}
    runs = peers.order(caps, seeds=[1, 2], rounds=2)
    assert len(runs) == len(set(runs)) == 16
    assert [run.peer for run in runs[12:]] == ["unlimited"] * 4
    assert [(run.round, run.seed) for run in runs[:12:3]] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    for start in range(0, 12, 3):
        block = {(run.peer, run.cap) for run in runs[start : start + 3]}
        assert block == {("moorage", None), ("cache_aware", 12), ("cache_aware", 16)}


def test_the_order_is_shuffled_and_the_same_each_time() -> None:
    caps = {"cache_aware": tuple(range(1, 9))}
    first, again = peers.order(caps, [1, 2], 1), peers.order(caps, [1, 2], 1)
    assert first == again
    assert [run.cap for run in first[:8]] != [run.cap for run in first[8:]]


def test_caps_are_given_by_peer() -> None:
    options = peers.parse([*DIRECTORIES, "--peers", "moorage", "program", "--caps", "program=8,live"])
    assert options.caps == {"moorage": (None,), "program": (8, None)}
    assert options.vllm_router == Path("v/venv/bin/vllm-router")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--caps", "program=0"], "below 1"),
        (["--caps", "program=many"], "many"),
        (["--peers", "moorage", "--caps", "program=8"], "do not play: program"),
        (["--caps", "moorage=8"], "moorage admits by itself"),
        (["--caps", "clairvoyant=8"], "clairvoyant admits by itself"),
        (["--duration", "30"], "--warmup is 45"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        peers.parse([*DIRECTORIES, *arguments])
    assert said in capsys.readouterr().err


def test_a_finished_run_is_taken_up_only_with_the_same_settings(tmp_path: Path) -> None:
    options = peers.parse([*DIRECTORIES[:4], "--out", str(tmp_path)])
    run = Run(1, 1, "cache_aware", 12)
    assert peers.kept(options, run) is None
    document = {"settings": peers.settings(options, run), "summary": {}, "cpu_seconds": {}, "run": {"sessions": []}}
    (tmp_path / run.file).write_text(json.dumps(document))
    found = peers.kept(options, run)
    assert found is not None
    assert found["settings"]["peer"] == "cache_aware"
    assert "run" not in found
    with pytest.raises(RuntimeError, match="other settings"):
        peers.kept(peers.parse([*DIRECTORIES[:4], "--out", str(tmp_path), "--duration", "60"]), run)


class Engine(VllmBackend):
    """An engine whose metrics page shows so many requests, page by page."""

    def __init__(self, running: list[int], blocks: int = 768) -> None:
        self._running = running
        self._blocks = blocks
        self.resets = 0
        super().__init__("http://e", "m", transport=httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/reset_prefix_cache":
            self.resets += 1
            return httpx.Response(200, json={})
        running = self._running.pop(0) if len(self._running) > 1 else self._running[0]
        return httpx.Response(
            200,
            text=f'vllm:num_requests_running{{engine="0"}} {running}.0\nvllm:num_requests_waiting{{engine="0"}} 0.0\n'
            f'vllm:cache_config_info{{engine="0",num_gpu_blocks="{self._blocks}"}} 1.0\n',
        )


def test_an_engine_is_emptied_once_it_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "IDLE_PAUSE_S", 0.0)
    engine = Engine([2, 1, 0])
    asyncio.run(peers._prepare(engine, 768))
    assert engine.resets == 1


def test_an_engine_that_others_use_or_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "IDLE_PAUSE_S", 0.0)
    busy = Engine([1])
    with pytest.raises(RuntimeError, match="who else"):
        asyncio.run(peers._prepare(busy, 768))
    with pytest.raises(RuntimeError, match="has 6000 KV blocks, and 768 are asked for"):
        asyncio.run(peers._prepare(Engine([0], blocks=6000), 768))
    assert busy.resets == 0


def test_the_bound_of_admission_has_the_blocks_that_the_peers_have() -> None:
    options = peers.parse([*DIRECTORIES, "--blocks", "300", "--block-size", "16"])
    run = Run(1, 1, "clairvoyant", None)
    assert peers.settings(options, run)["blocks"] == 300

    async def main() -> None:
        async with AsyncExitStack() as stack:
            direct = [await stack.enter_async_context(Engine([0], blocks=300))]
            router, backends = await peers._peer(options, run, direct, stack)
            assert isinstance(router, ClairvoyantRouter)
            assert list(backends) == ["http://e"]
            # 4,784 tokens in blocks of 16 hold five contexts of 880.
            plan = SessionPlan("s", "rlvr", "g", 1, tuple(range(80)), (Turn(0, 800, 0.0),))
            tasks = [asyncio.create_task(router.session(plan).__aenter__()) for _ in range(20)]
            await asyncio.sleep(0)
            assert (router.living, router.waiting) == ({"http://e": 5}, 15)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())
