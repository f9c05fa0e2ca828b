from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from moorage import Client, Held, LeaseLost, MoorageError, Rejected, Usage
from moorage.v1 import scheduler_pb2 as pb
from tests.unit.client.fake_scheduler import FakeScheduler


def test_a_rollout_of_three_turns(fake: FakeScheduler, sync_client: Client) -> None:
    with sync_client.session("s", workload_class="agentic", prompt_tokens=100) as s:
        for prompt, cached in ((100, 0), (130, 112), (170, 128)):
            turn = s.place(prompt_tokens=prompt)
            assert turn.endpoint == "http://engine-0"
            s.report(cached_tokens=cached, output_tokens=10)
            s.tool_wait()
    assert [place.turn for place in fake.calls["Place"]] == [1, 2]
    (release,) = fake.calls["Release"]
    assert release.outcome == pb.OUTCOME_COMPLETED
    assert release.usage == Usage(prompt_tokens=400, cached_tokens=240, output_tokens=30, context_tokens=180)
    assert s.residency is not None


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(ValueError, "FAILED"), (KeyboardInterrupt, "ABORTED"), (SystemExit, "ABORTED")],
)
def test_an_error_decides_the_outcome(
    fake: FakeScheduler, sync_client: Client, error: type[BaseException], outcome: str
) -> None:
    with pytest.raises(error), sync_client.session("s"):
        raise error
    assert fake.outcomes("s") == [outcome]


def test_a_closed_generator_is_aborted(fake: FakeScheduler, sync_client: Client) -> None:
    def roll_out() -> Iterator[str]:
        with sync_client.session("s") as s:
            yield s.endpoint

    generator = roll_out()
    next(generator)
    generator.close()  # type: ignore[attr-defined]
    assert fake.outcomes("s") == ["ABORTED"]


def test_pause_and_early_release(fake: FakeScheduler, sync_client: Client) -> None:
    with sync_client.session("s") as s:
        answer = s.pause()
        assert answer is not None
        assert answer.released
    with sync_client.session("t") as t:
        t.release("ABORTED")
    assert (fake.outcomes("s"), fake.outcomes("t")) == (["PAUSED"], ["ABORTED"])


def test_waiting_and_giving_up(fake: FakeScheduler, sync_client: Client) -> None:
    fake.capacity = 0
    with pytest.raises(Held), sync_client.session("s", wait_timeout=0.05, max_wait=0.01):
        pytest.fail("it was held")
    assert len(fake.calls["Admit"]) >= 2
    assert fake.held == set()
    fake.rejection = pb.Hold(reason=pb.HOLD_REASON_CLASS_REFUSED)
    with pytest.raises(Rejected, match="CLASS_REFUSED"), sync_client.session("s"):
        pytest.fail("it was rejected")


def test_an_interrupted_wait_leaves_nothing(fake: FakeScheduler, sync_client: Client) -> None:
    fake.capacity = 0
    _interrupt_when(fake, lambda: "s" in fake.held)
    with pytest.raises(KeyboardInterrupt), sync_client.session("s"):
        pytest.fail("it was held")
    fake.wait_for(lambda: not fake.held)
    assert fake.living == {}


def test_an_interrupted_release_is_made_again(fake: FakeScheduler, sync_client: Client) -> None:
    with fake.gate("Release") as arrived:
        _interrupt_when(fake, arrived.is_set)
        with pytest.raises(KeyboardInterrupt), sync_client.session("s"):
            pass
    assert fake.living == {}
    first, again = fake.calls["Release"]
    assert first == again


def test_a_lost_lease(fake: FakeScheduler, sync_client: Client) -> None:
    with sync_client.session("s") as s:
        s.place()
        fake.evict("s")
        with pytest.raises(LeaseLost):
            s.place()
    with sync_client.session("t", readmit=True) as t:
        t.place()
        fake.evict("t")
        assert not t.place().moved
    assert fake.outcomes("t") == ["COMPLETED"]


def test_many_threads_share_a_client(fake: FakeScheduler, sync_client: Client) -> None:
    fake.lease_ttl = 0.06

    def roll_out(number: int) -> None:
        with sync_client.session(f"s{number}") as s:
            for _ in range(3):
                s.place()
                s.report(cached_tokens=number, output_tokens=1)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(roll_out, range(100)))
    assert fake.living == {}
    assert {release.usage.cached_tokens for release in fake.calls["Release"]} == {3 * n for n in range(100)}
    assert {release.outcome for release in fake.calls["Release"]} == {pb.OUTCOME_COMPLETED}


def test_closing_the_client_releases_what_is_still_open(fake: FakeScheduler, target: str) -> None:
    client = Client(target)
    session = client.session("s").__enter__()
    with pytest.raises(RuntimeError, match="once"):
        session.__enter__()
    client.close()
    assert fake.outcomes("s") == ["ABORTED"]
    session.__exit__(None, None, None)
    assert len(fake.calls["Release"]) == 1
    with pytest.raises(MoorageError, match="closed"):
        client.admit("s")


def test_closing_the_client_ends_a_wait(fake: FakeScheduler, target: str) -> None:
    fake.capacity = 0
    client = Client(target)
    with ThreadPoolExecutor(1) as pool:
        entering = pool.submit(client.session("s").__enter__)
        fake.wait_for(lambda: "s" in fake.held)
        client.close()
        with pytest.raises(MoorageError, match="the client is closed"):
            entering.result(5)


def _interrupt_when(fake: FakeScheduler, condition: object) -> None:
    """Ctrl-C for the main thread, as soon as the condition holds."""

    def interrupt() -> None:
        fake.wait_for(condition)  # type: ignore[arg-type]
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
