"""Runs that signals stop: the agreement, the handlers, the way of the last save; and real ranks, at random moments."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import PContext
from torch.distributed.launcher.api import LaunchConfig

import shardwise as sw
from shardwise.checkpoint.run import Situation, way_of
from shardwise.ranks.ranks import Ranks
from shardwise.ranks.stop import Lease, Lender, StopPoint, Stops, StopSignals, numbers_of
from tests.ranks import campaign

NUMBERS = (int(signal.SIGTERM), int(signal.SIGUSR1))


@pytest.mark.parametrize("seed", range(12))
def test_all_ranks_stop_at_one_call(seed: int) -> None:
    """Three ranks as threads over torch's own store: fast and slow calls, repeated steps, late or single requests."""
    rng, store = random.Random(seed), dist.HashStore()
    world = 3
    asked_at = {rank: rng.randrange(5, 60) for rank in rng.sample(range(world), rng.randrange(1, world + 1))}
    steps = [step for step in range(200) for _ in range(rng.choice([1, 1, 1, 4]))]
    pauses = [rng.choice([0.0, 0.0005, 0.003]) for _ in steps]
    points = [StopPoint(store, "stop", rank, 20.0) for rank in range(world)]
    points[0].begin()
    found: dict[int, tuple[int, int]] = {}

    def run(rank: int, own: random.Random) -> None:
        for k, (step, pause_s) in enumerate(zip(steps, pauses, strict=True)):
            time.sleep(pause_s * own.random())
            if points[rank].reached(step, is_asked=k >= asked_at.get(rank, len(steps))):
                found[rank] = (k, step)
                return

    threads = [
        threading.Thread(target=run, args=(rank, random.Random(rng.random()))) for rank in range(world)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == world
    assert len(set(found.values())) == 1, found
    first = min(asked_at.values())
    assert first <= found[0][0], "no rank was asked before"


def test_rank_0_stops_where_its_last_lease_ends() -> None:
    """It is asked while calls are lent ahead: the other rank, which comes later, passes these."""
    store = dist.HashStore()
    first, other = (StopPoint(store, "stop", rank, 20.0) for rank in range(2))
    first.begin()
    while not first.reached(first.calls, is_asked=first.calls >= 20):
        pass
    while not other.reached(other.calls, is_asked=False):
        pass
    assert 20 < first.calls == other.calls


def test_a_lease_takes_back_no_call_of_the_one_before() -> None:
    """Calls that become slow have shorter leases, but another rank may have passed the calls of the long one."""
    lender, lease = Lender(), Lease()
    for calls in range(1, 40):
        now_s = 0.001 * calls if calls < 20 else 0.02 + 0.1 * (calls - 20)
        if lender.is_due(lease, calls, 0):
            later = lender.next(lease, calls, 0, now_s)
            assert later.calls >= lease.calls
            lease = later
    assert lender.next(lease, 40, 1, 2.1).calls < lease.calls + 4, "after a turn all look again"


def test_a_rank_does_not_wait_for_ever(tmp_path: Path) -> None:
    store = dist.HashStore()
    StopPoint(store, "stop", 0, 0.1).begin()
    point = StopPoint(store, "stop", 1, 0.1)
    with pytest.raises(sw.errors.RankError, match="rank 0: no progress"):
        point.reached(1, is_asked=False)


def test_a_checkpointer_that_can_not_begin_listens_no_more(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises((sw.errors.ShardwiseError, OSError)):
        sw.Checkpointer(
            tmp_path / "run",
            preemption=sw.PreemptionPolicy(stop_on=("SIGUSR1",)),
            memory=sw.InMemoryCheckpoints(every=1, directory=str(tmp_path / "file")),
        )
    assert signal.getsignal(signal.SIGUSR1) is before
    sw.Checkpointer(tmp_path / "run").close()  # the directory is free, too


def test_a_deadline_that_torchrun_does_not_wait_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch's own signature and options say how long it waits."""
    for name in ("TORCHELASTIC_RUN_ID", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PET_SHUTDOWN_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)

    def told(rank: int = 0, **policy: Any) -> str:
        caplog.clear()
        Stops(sw.PreemptionPolicy(**{"stop_on": ("SIGTERM",), **policy}), Ranks(rank=rank)).close()
        return caplog.text

    assert not told(deadline_s=60)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert inspect.signature(PContext.close).parameters["timeout"].default == 30
    assert "deadline_s=60, but torchrun kills its ranks 30 s after it forwards SIGTERM" in told(deadline_s=60)
    assert "set deadline_s=30, " in caplog.text
    quiet = [told(deadline_s=30), told(), told(stop_on=("SIGUSR1",), deadline_s=60), told(1, deadline_s=60)]
    assert quiet == [""] * 4
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "90")
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1)
    limit_s = getattr(config, "shutdown_timeout", 30)
    assert not told(deadline_s=limit_s)
    assert f"kills its ranks {limit_s} s after" in told(deadline_s=limit_s + 0.5)


def test_handlers_are_chained_and_given_back() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    own = signal.getsignal(signal.SIGUSR1)
    try:
        signals = StopSignals(NUMBERS)
        signals.listen()
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.first is not None
        assert signals.first.number == signal.SIGUSR1
        assert not signals.came_again, "a launcher passes on what the scheduler sent, too"
        assert heard == [signal.SIGUSR1]
        signals.first = type(signals.first)(signals.first.number, time.monotonic() - 5)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.came_again
        signals.close()
        assert signal.getsignal(signal.SIGUSR1) is own
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_only_in_the_main_thread() -> None:
    found: list[BaseException] = []

    def listen() -> None:
        try:
            StopSignals(NUMBERS).listen()
        except ValueError as error:
            found.append(error)

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert "main thread" in str(found[0])


@pytest.mark.parametrize("names", ["SIGTERM", ("TERM",), ("SIGKILL",), (15,), ("SIG_IGN",)])
def test_names_of_signals(names: Any) -> None:
    with pytest.raises(ValueError, match="stop_on"):
        numbers_of(names)


def _sleep(seconds: float, queue: Any) -> None:
    queue.put(os.getpid())
    time.sleep(seconds)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_forked_processes() -> None:
    """A worker obeys its parent alone; a plain fork has the handlers of before; neither sets the flag."""
    signals = StopSignals(NUMBERS)
    signals.listen()
    try:
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        worker = context.Process(target=_sleep, args=(60.0, queue))
        worker.start()
        pid = queue.get(timeout=20)
        for number in ("-TERM", "-USR1"):
            os.spawnlp(os.P_WAIT, "kill", "kill", number, str(pid))  # another process sends it
        worker.join(0.3)
        assert worker.is_alive(), "a scheduler that signals the process group does not end it"
        worker.terminate()
        worker.join(20)
        assert worker.exitcode == -signal.SIGTERM, "its parent does"

        plain = os.fork()
        if plain == 0:
            os._exit(0 if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(plain, 0)[1]) == 0
        assert signals.first is None
    finally:
        signals.close()


@pytest.mark.parametrize(
    ("situation", "saves"),
    [
        (Situation(7, 7, None, 0.0, 9.0, 0.0), False),  # it is saved
        (Situation(7, 5, 7, 1.0, 9.0, 0.0), False),  # it is about to be
        (Situation(7, None, None, 0.0, 0.0, 0.0), True),  # no step yet: try
        (Situation(7, 5, None, 0.0, 9.0, None), True),  # no deadline
        (Situation(7, 5, None, 0.0, 9.0, 12.0), True),
        (Situation(7, 5, None, 0.0, 9.0, 10.0), False),
        (Situation(7, 5, 6, 8.0, 9.0, 13.0), True),  # one second of the pending save, and a save
        (Situation(7, 5, 6, 1.0, 9.0, 13.0), False),
    ],
)
def test_the_last_save(situation: Situation, saves: bool) -> None:
    assert way_of(situation)[0] is saves


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [
        "own loop, workers",
        pytest.param("own loop", marks=pytest.mark.nightly),
        pytest.param("own loop, async", marks=pytest.mark.nightly),
        pytest.param("Trainer", marks=[pytest.mark.nightly, pytest.mark.needs("trainer")]),
        pytest.param("Accelerate", marks=pytest.mark.nightly),
    ],
)
def test_preempted_at_random_moments(tmp_path: Path, name: str) -> None:
    extra = {"path": campaign.hub(tmp_path)} if name.startswith("Trainer") else {}
    outcome = campaign.campaign(name, tmp_path, 3, seed=1, **extra)
    print(outcome.words(name))
    assert outcome.preemptions == 3
