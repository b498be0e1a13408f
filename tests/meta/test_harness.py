"""The harness itself: results by rank, failures that show everything, hangs that end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness.launch import Launch
from tests.harness.on_ranks import on_ranks
from tests.harness.pool import RankPool

#: These tests test the harness, not the package: `make nightly` runs them.
pytestmark = [pytest.mark.processes, pytest.mark.nightly]


def _sum_of_ranks(offset: int) -> tuple[int, int, float]:
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item()


@on_ranks(1, 3)
@pytest.mark.parametrize("offset", [0, 5])
def test_a_body_runs_on_every_rank_with_its_fixtures(tmp_path: Path, offset: int) -> None:
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == dist.get_world_size(), "all ranks share the fixture's directory"
    assert _sum_of_ranks(offset)[2] == sum(rank + offset for rank in range(dist.get_world_size()))


@on_ranks(2)
def _fails_on_rank_1() -> None:
    assert dist.get_rank() != 1, "this rank is the one"


@on_ranks(2)
def _returns_a_value() -> int:
    return 1


def test_a_body_that_fails_on_one_rank_fails_the_test(ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match=r"(?s)1 of 2 ranks failed.*this rank is the one"):
        _fails_on_rank_1(ranks, 2)
    with pytest.raises(AssertionError, match="must return None on every rank"):
        _returns_a_value(ranks, 2)


def test_a_body_on_ranks_says_how_many_and_takes_no_pool() -> None:
    with pytest.raises(ValueError, match="at least one world size"):
        on_ranks()
    with pytest.raises(TypeError, match=r"\['ranks'\] can't be among its arguments"):
        on_ranks(2)(lambda ranks: None)


def _process_id() -> int:
    return os.getpid()


def _draw() -> float:
    return torch.rand(()).item()


def _raise_on(rank: int) -> None:
    print(f"hello from {dist.get_rank()}")
    if dist.get_rank() == rank:
        raise LookupError("nothing here")


def _raise_while_others_wait(rank: int) -> None:
    _raise_on(rank)
    dist.barrier()


def _sleep_on(rank: int) -> None:
    print(f"hello from {dist.get_rank()}")
    if dist.get_rank() == rank:
        time.sleep(1000)


def _exit_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)


def _stop_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _warn() -> None:
    warnings.warn("careful", UserWarning, stacklevel=1)


def _return_a_lambda() -> object:
    return lambda: None


def _sleep_after_ready() -> int:
    dist.barrier()  # rank 0 may host the store, and rank 1 needs it until it has joined
    print("ready", file=sys.stderr)
    if dist.get_rank() == 1:
        time.sleep(1000)
    return dist.get_rank() * 10


def test_results_come_back_by_rank(ranks: RankPool) -> None:
    assert ranks.run_ranks(2, _sum_of_ranks, 1) == [(0, 2, 3.0), (1, 2, 3.0)]
    assert ranks.run_ranks(1, _sum_of_ranks, 1) == [(0, 1, 1.0)]
    assert ranks.run_ranks(3, _sum_of_ranks, offset=0) == [(rank, 3, 3.0) for rank in range(3)]


def test_workers_are_kept(ranks: RankPool) -> None:
    before = ranks.run_ranks(2, _process_id)
    assert ranks.run_ranks(2, _process_id) == before
    assert len(set(before)) == 2


def test_every_call_starts_from_the_same_seed(ranks: RankPool) -> None:
    assert ranks.run_ranks(2, _draw) == ranks.run_ranks(2, _draw)


def test_exception_on_one_rank_shows_all_ranks_output(ranks: RankPool) -> None:
    with pytest.raises(AssertionError) as caught:
        ranks.run_ranks(2, _raise_on, 1)
    message = str(caught.value)
    assert "1 of 2 ranks failed" in message
    assert "LookupError: nothing here" in message
    assert "in _raise_on" in message
    assert "hello from 0" in message
    assert "hello from 1" in message
    assert ranks.run_ranks(2, _sum_of_ranks, 0) == [(0, 2, 1.0), (1, 2, 1.0)]


def test_output_is_that_of_the_call(ranks: RankPool) -> None:
    ranks.run_ranks(2, _raise_on, 5)
    with pytest.raises(AssertionError) as caught:
        ranks.run_ranks(2, _warn)
    assert "UserWarning: careful" in str(caught.value)
    assert "hello" not in str(caught.value)


def test_hanging_rank_is_detected(ranks: RankPool) -> None:
    started = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        ranks.run_ranks(2, _sleep_on, 1, timeout_s=3)
    assert time.monotonic() - started < 60
    message = str(caught.value)
    assert "rank 0: ok" in message
    assert "rank 1: hung" in message
    assert "in _sleep_on" in message
    assert "hello from 0" in message
    assert ranks.run_ranks(2, _sum_of_ranks, 0) == [(0, 2, 1.0), (1, 2, 1.0)]


def test_peers_that_wait_for_a_failed_rank_are_not_waited_for(
    ranks: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.harness.pool.GRACE_S", 1.0)
    with pytest.raises(AssertionError, match="rank 0: hung") as caught:
        ranks.run_ranks(2, _raise_while_others_wait, 1)
    assert "LookupError: nothing here" in str(caught.value)
    assert "in barrier" in str(caught.value)
    assert len(ranks.run_ranks(2, _process_id)) == 2


def test_dead_and_stopped_ranks_are_detected(ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match=r"rank 1: died ----\nexit status 7"):
        ranks.run_ranks(2, _exit_on, 1)
    with pytest.raises(AssertionError, match="rank 0: hung"):
        ranks.run_ranks(1, _stop_itself, timeout_s=1)
    assert len(ranks.run_ranks(2, _process_id)) == 2


def test_what_cannot_be_sent_is_an_error(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="module-level function"):
        ranks.run_ranks(1, lambda: None)
    with pytest.raises(ValueError, match="world_size is 17"):
        ranks.run_ranks(17, _process_id)
    with pytest.raises(AssertionError, match="_return_a_lambda"):
        ranks.run_ranks(1, _return_a_lambda)


@pytest.mark.nightly
def test_extra_ranks_are_started_and_stopped(ranks: RankPool) -> None:
    results = ranks.run_ranks(6, _sum_of_ranks, 0)
    assert results == [(rank, 6, 15.0) for rank in range(6)]
    assert len(ranks._workers) == 4
    assert ranks.run_ranks(4, _sum_of_ranks, 0) == [(rank, 4, 6.0) for rank in range(4)]


def test_launch_with_a_killed_rank() -> None:
    with Launch(2, _sleep_after_ready) as job:
        job.wait_for_output(1, "ready")
        job.kill(1)
        assert job.wait(60) == [0, -signal.SIGKILL]
        assert job.result(0) == 0
        assert "ready" in job.output(0)
        with pytest.raises(FileNotFoundError):
            job.result(1)


def _wait_in_vain_for(rank: int) -> None:
    with Launch(2, _sleep_after_ready, store="rank0") as job:
        job.wait_for_output(rank, "ready")
        job.wait(2, ranks=[rank])


def test_launch_ends_when_a_rank_hangs() -> None:
    with pytest.raises(AssertionError, match="ranks still run after 2 s") as caught:
        _wait_in_vain_for(1)
    (report,) = caught.value.__notes__
    assert "rank 0: return code" in report
    assert "in _sleep_after_ready" in report


def test_launch_reports_an_exception() -> None:
    with Launch(1, _raise_on, 0, env={"LABEL": "x"}) as job:
        assert job.wait(60) == [1]
        assert "LookupError: nothing here" in job.output(0)


def _what_it_has() -> dict[str, object]:
    return {
        "hash": hash("a name"),
        "label": os.environ.get("LABEL"),
        "random": random.random(),
        "session": os.getsid(0) == os.getpid(),
        "transformers": "transformers" in sys.modules,
    }


def test_forked_ranks_differ_as_new_processes_do() -> None:
    with Launch(2, _what_it_has) as job:
        assert job.wait(60) == [0, 0]
        first, second = job.result(0), job.result(1)
    assert first["hash"] != second["hash"], "neighbors must disagree about the order of sets"
    assert first["random"] != second["random"]
    assert first["session"]
    assert first["transformers"], "forked from a process that has imported it"
    assert first["label"] is None


@pytest.mark.nightly
def test_ranks_with_variables_are_new_interpreters() -> None:
    with Launch(1, _what_it_has, env={"LABEL": "x"}) as job:
        assert job.wait(60) == [0]
        assert job.result(0) == {**job.result(0), "label": "x", "session": True}


def test_a_forked_process_ends_as_it_would() -> None:
    with Launch(2, _sleep_after_ready) as job:
        job.wait_for_output(1, "ready")
        with pytest.raises(subprocess.TimeoutExpired):
            job._processes[1].wait(0.1)
        job.kill(1, signal.SIGTERM)
        assert job.wait(30) == [0, -signal.SIGTERM]
        job.kill(1)  # it has ended: no other process gets the signal
