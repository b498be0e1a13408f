"""SIGKILL in the middle of saves: the next resume finds a valid step, and ``verify`` agrees.

``SHARDWISE_KILLS`` says how many instants of each kind (1 by default, 20 for the full number). Instants are
uniform over the time that a save takes, and what they hit is printed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults import _fns as fns
from tests.harness.launch import Launch

pytestmark = [pytest.mark.faults, pytest.mark.slow]

KILLS = int(os.environ.get("SHARDWISE_KILLS", "1"))
#: How long the rank that is left waits for a dead one. Long for a busy disk, short for twenty rounds.
TIMEOUT_S = 4.0


class Victims:
    """Running ranks that train."""

    def __init__(self, directory: Path, job: Launch) -> None:
        self._directory, self._job = directory, job

    def kill(self, which: Iterable[int]) -> None:
        for rank in which:
            self._job.kill(rank)

    def wait(self) -> list[int]:
        """Exit statuses of all; waits for them."""
        return self._job.wait(120)

    def events(self, rank: int) -> list[dict[str, Any]]:
        file = self._directory / f"events-{rank}"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait_for(
        self, kind: str, rank: int = 0, timeout_s: float = 60.0, number: int | None = None
    ) -> dict[str, Any]:
        """The first event of a kind, or that of the save with this number."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            for event in self.events(rank):
                if event["kind"] == kind and number in (None, event.get("number")):
                    return event
            time.sleep(0.001)
        raise AssertionError(f"rank {rank}: no event {kind!r} after {timeout_s} s: {self.events(rank)}")


@contextlib.contextmanager
def victims(directory: Path, world_size: int = 2, **options: Any) -> Iterator[Victims]:
    """Ranks that train in ``directory``. On exit those that still run are killed."""
    for old in directory.glob("events-*"):
        old.unlink()
    with Launch(world_size, fns.train, directory, options) as job:
        yield Victims(directory, job)


def published(directory: Path) -> dict[int, Path]:
    found = (directory / "checkpoints").glob("step-" + "[0-9]" * 8)
    return {int(p.name[5:]): p for p in sorted(found, reverse=True)}


def phase(directory: Path, step: int) -> str:
    """How far a save of ``step`` had come when it was cut off."""
    names = os.listdir(directory / "checkpoints")
    if f"step-{step:08d}" in names:
        pruned = f"step-{step - 2:08d}" not in names and not any(n.startswith(".trash") for n in names)
        return "published, pruned" if pruned else "published, not pruned"
    temporary = [n for n in names if n.startswith(".tmp-step")]
    if not temporary:
        return "nothing written yet"
    manifest = directory / "checkpoints" / temporary[0] / "manifest.json"
    return "manifest written, not published" if manifest.exists() else "payload partly written"


def save_seconds(directory: Path) -> float:
    """How long a save takes here and now."""
    with victims(directory, saves=6) as ranks:
        assert ranks.wait() == [0, 0]
        events = ranks.events(0)
    begun = {e["step"]: e["time"] for e in events if e["kind"] == "saving"}
    return statistics.median(e["time"] - begun[e["step"]] for e in events[3:] if e["kind"] == "saved")


def check_resumed(event: dict[str, Any], expected_step: int) -> None:
    assert event["step"] == expected_step
    assert event["problems"] == []
    assert event["damaged"] == {}
    assert not [n for n in event["names"] if n.startswith((".tmp", ".trash"))], event["names"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("who", ["all ranks", "one rank"])
def test_killed_at_random_instants(tmp_path: Path, who: str) -> None:
    seconds = save_seconds(tmp_path)
    random_instants = random.Random(who)
    phases: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    expected = max(published(tmp_path))
    options = {"timeout_s": TIMEOUT_S} if who == "one rank" else {}
    for number in range(KILLS):
        # Stratified: one instant in each of KILLS equal parts of a save and a little beyond.
        instant = (number + random_instants.random()) / KILLS * 1.1 * seconds
        killed = (0, 1) if who == "all ranks" else (number % 2,)
        with victims(tmp_path, **options) as ranks:
            resumed = ranks.wait_for("resumed")
            check_resumed(resumed, expected)
            # In the second save of these processes: the first takes longer than the measured ones.
            begun = ranks.wait_for("saving", killed[0], number=1)["time"]
            time.sleep(max(0.0, begun + instant - time.monotonic()))
            ranks.kill(killed)
            # On a busy machine the instant may come late, and hit a later save.
            hit = [e["step"] for e in ranks.events(killed[0]) if e["kind"] == "saving"][-1]
            phases[phase(tmp_path, hit)] += 1  # now: a rank that is left cleans up
            statuses = ranks.wait()
            if who == "one rank":
                (left,) = {0, 1} - set(killed)
                assert statuses[left] == 0
                failed = ranks.wait_for("failed", left, 1.0)
                assert failed["missing"] == list(killed), failed["text"]
        assert all(statuses[rank] == -signal.SIGKILL for rank in killed)
        newest = max(published(tmp_path))
        assert newest in (hit - 1, hit), "the step before or the one that was being saved"
        outcomes["new step" if newest == hit else "step before"] += 1
        expected = newest
    with victims(tmp_path, saves=1) as ranks:
        assert ranks.wait() == [0, 0]
        check_resumed(ranks.wait_for("resumed"), expected)
    print(f"{who}: {KILLS} kills in saves of {seconds:.3f} s: {dict(phases)}, then found {dict(outcomes)}")


def test_leftovers_of_four_ranks_do_not_mix_into_a_save_of_two(tmp_path: Path) -> None:
    with victims(tmp_path, saves=2) as ranks:
        assert ranks.wait() == [0, 0]
    with victims(tmp_path, 4, die_at_fsync=2) as ranks:
        assert ranks.wait() == [-signal.SIGKILL] * 4
        check_resumed(ranks.wait_for("resumed"), 2)
    (leftover,) = (tmp_path / "checkpoints").glob(".tmp-step-00000003-*")
    before = sorted(p.name for p in leftover.rglob("*"))
    assert "shard-00004-model-00001-of-00001.safetensors" in before
    kept = tmp_path / leftover.name
    leftover.rename(kept)

    # Through the checkpointer, which sweeps, and by plain save beside leftovers that were not swept.
    for plain in (False, True):
        with victims(tmp_path, saves=1, plain=plain, line=7) as ranks:
            check_resumed(ranks.wait_for("resumed"), 3 if plain else 2)
            if plain:
                kept.rename(tmp_path / "checkpoints" / leftover.name.replace("03-", "04-"))
            assert ranks.wait() == [0, 0]
        step = tmp_path / "checkpoints" / f"step-{4 if plain else 3:08d}"
        assert json.loads((step / "manifest.json").read_text())["world_size"] == 2
        assert not [p.name for p in step.rglob("*") if "shard-00003" in p.name or "shard-00004" in p.name]
        assert not (step / "rank" / "00002.json").exists()
    (leftover,) = (tmp_path / "checkpoints").glob(".tmp-step-00000004-*")
    assert sorted(p.name for p in leftover.rglob("*")) == before
    with victims(tmp_path, saves=0) as ranks:
        assert ranks.wait() == [0, 0]
        resumed = ranks.wait_for("resumed")
    check_resumed(resumed, 4)
    assert resumed["line"] == 7
    assert not leftover.exists()


def test_run_that_went_back_finds_its_own_line(tmp_path: Path) -> None:
    with victims(tmp_path, saves=3, keep_last=9) as ranks:
        assert ranks.wait() == [0, 0]
    # Back to step 1, and killed before its next step is published: not step 3, nor step 2, of the old line.
    with victims(tmp_path, line=1, resume_step=1, die_at_fsync=2, keep_last=9) as ranks:
        assert set(ranks.wait()) == {-signal.SIGKILL}
        assert ranks.wait_for("resumed")["superseded"] == [3, 2]
    # Goes on to a step 2 of its own, and is killed in its step 3.
    with victims(tmp_path, line=1, saves=1, keep_last=9) as ranks:
        assert ranks.wait() == [0, 0]
        check_resumed(ranks.wait_for("resumed"), 1)
    with victims(tmp_path, line=1, die_at_fsync=2, keep_last=9) as ranks:
        assert set(ranks.wait()) == {-signal.SIGKILL}
    with victims(tmp_path, saves=0, keep_last=9) as ranks:
        assert ranks.wait() == [0, 0]
        resumed = ranks.wait_for("resumed")
    check_resumed(resumed, 2)
    assert resumed["line"] == 1
    aside = [n.split(".")[:2] for n in resumed["names"] if ".superseded-" in n]
    assert [a[0] for a in aside] == ["step-00000002", "step-00000003"]
