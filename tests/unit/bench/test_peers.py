"""The comparison with the peers: its options, its order, what it takes up."""

import json
from pathlib import Path

import pytest

from bench import peers
from bench.peers import Run

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
