"""Real ranks that storage slows down, so that the last save would not fit: they end with the step before, in time."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from tests.harness.launch import Launch
from tests.harness.tiers import nightly
from tests.ranks import campaign

RANKS = campaign.RANKS


def stopped(name: str, tmp_path: Path, options: dict[str, Any], second_after_s: float | None) -> float:
    """Signal the ranks in the step after the first save. Returns the seconds to the end of all; kills them at 8 s."""
    program, own = campaign.PROGRAMS[name]
    extra = {"path": campaign.hub(tmp_path)} if name == "Trainer" else {}
    with Launch(RANKS, program, tmp_path, {**own, **extra, "life": 0, **options}) as job:
        end = time.monotonic() + 100
        while not any(e["kind"] == "long" for e in campaign.events(tmp_path, 0)):
            assert time.monotonic() < end
            time.sleep(0.01)
        sent = time.monotonic()
        for rank in range(RANKS):
            job.kill(rank, signal.SIGTERM)
        if second_after_s is not None:
            time.sleep(second_after_s)
            job.kill(1, signal.SIGUSR1)
        while time.monotonic() < sent + 8.0:
            if all(job.status(rank) is not None for rank in range(RANKS)):
                break
            time.sleep(0.01)
        seconds = time.monotonic() - sent
        for rank in range(RANKS):
            job.kill(rank, signal.SIGKILL)  # as the scheduler does
        assert job.wait(10) == [75] * RANKS
        saves = [e for e in campaign.events(tmp_path, 0) if e["kind"] in ("saving", "saved")]
        assert saves[1]["time"] - saves[0]["time"] > 1.5, "a save takes longer than what is left"
    last = campaign.events(tmp_path, 0)[-1]
    before = max(e["step"] for e in saves if e["kind"] == "saved" and e["step"] < 6)
    assert (last["kind"], last["step"], last["newest"]) == ("stopped", 6, before)
    assert campaign.published(tmp_path) == before
    (path,) = (p for p in (tmp_path / "run").glob("*-*") if campaign.step_of(p) == before)
    assert not sw.verify(path).problems
    return seconds


@pytest.mark.timeout(150)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["own loop", *nightly("Accelerate", "Trainer")])
@pytest.mark.parametrize("why", ["deadline", "second signal"])
def test_no_time_for_the_last_save(tmp_path: Path, name: str, why: str) -> None:
    if why == "deadline":
        options = {"fsync_s": 0.4, "long_s": 0.5, "deadline_s": 1.5}
        seconds = stopped(name, tmp_path, options, None)
    else:
        options = {"fsync_s": 0.4, "long_s": 3.0, "deadline_s": 60.0}
        seconds = stopped(name, tmp_path, options, 2.3)
    print(f"{name}, {why}: {seconds:.2f} s from the first signal to the end")
    assert seconds < 8.0
