"""Preemptions at random moments, one after another, of real ranks by real signals.

``python -m tests.ranks.campaign --preemptions 100 --seed 0`` runs all; ``make nightly`` a few of each program. A run is resumed until
it has come to its end, then a new one begins. After each preemption: every rank has the exit status 75 within the deadline, the
newest step is published and is that at which the ranks stopped, and each loss so far is bitwise that of a run that never stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import shardwise as sw
from tests.harness.launch import Launch
from tests.ranks import _fns as fns

_MOMENTS = ("step", "evaluation", "warm-up", "saving")
#: Programs with their options. Slow storage makes a save so long that signals fall into it.
PROGRAMS: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "own loop": (fns.train, {"fsync_s": 0.02}),
    "own loop, async": (fns.train, {"mode": "async", "width": 256}),
    "own loop, workers": (fns.train, {"workers": 2}),
    "Accelerate": (fns.train_accelerate, {}),
    "Accelerate, workers": (fns.train_accelerate, {"workers": 2}),
    "Trainer": (fns.train_trainer, {}),
    "Trainer, workers": (fns.train_trainer, {"workers": 2}),
}
RANKS, DEADLINE_S = 2, 30.0


@dataclass(slots=True)
class Outcome:
    """The figures of a campaign."""

    preemptions: int = 0
    ran_to_the_end: int = 0
    moments: Counter[str] = field(default_factory=Counter)
    steps_late: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """From the signal to the end of the last rank."""
    resumes: int = 0
    """Of a step that was published, to the bitwise losses of at least one further step."""

    def words(self, name: str) -> str:
        found = self.seconds or [0.0]
        return (
            f"{name}: {self.preemptions} preemptions ({dict(self.moments)}), {self.resumes} resumes bitwise; signal to exit: "
            f"median {statistics.median(found):.2f} s, most {max(found):.2f} s; {self.ran_to_the_end} came to the end first"
        )


def events(root: Path, life: int, rank: int = 0) -> list[dict[str, Any]]:
    path = root / f"log-{life}-{rank}"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses(root: Path, life: int) -> dict[tuple[int, int], str]:
    """By rank and step."""
    found = {}
    for rank in range(RANKS):
        found |= {(rank, e["step"]): e["loss"] for e in events(root, life, rank) if e["kind"] == "step"}
    return found


def reference(name: str, root: Path, extra: dict[str, Any]) -> dict[tuple[int, int], str]:
    """The losses of a run that never stops."""
    program, options = PROGRAMS[name]
    with Launch(RANKS, program, root, {**options, **extra, "life": 0}) as job:
        assert job.wait(120) == [0] * RANKS
    return losses(root, 0)


def preempt(job: Launch, root: Path, life: int, moment: str, rng: random.Random) -> float:
    """Wait for a moment, then send a signal to some ranks or to all, or to these and their workers. Returns when."""
    end, number = time.monotonic() + 60, rng.randrange(1, 6)
    while time.monotonic() < end:
        found = events(root, life)
        if [e["kind"] for e in found].count(moment) >= number or any(
            e["kind"] in ("done", "stopped") for e in found
        ):
            break
        time.sleep(0.001)
    time.sleep(rng.random() * 0.03)
    which = rng.choice([(0,), (1,), (0, 1)])
    number = rng.choice([signal.SIGTERM, signal.SIGUSR1])
    sent = time.monotonic()
    for rank in which:
        if rng.random() < 0.5:  # as a scheduler does that signals the process group
            for worker in _children(next((e["pid"] for e in events(root, life, rank) if "pid" in e), 0)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, number)
        with contextlib.suppress(ProcessLookupError):
            job.kill(rank, signal.Signals(number))
    return sent


def _children(pid: int) -> list[int]:
    try:
        return [int(k) for k in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def step_of(path: Path) -> int:
    """The step that is published at a path; -1 for another name."""
    found = re.fullmatch(r"(?:step|checkpoint)-(\d+)", path.name)
    return int(found[1]) if found else -1


def published(root: Path) -> int:
    """The newest published step."""
    return max(map(step_of, (root / "run").glob("*-*")), default=-1)


def is_exact(resumed: dict[str, Any]) -> bool:
    """Whether the report says that a resume is exact, but for random draws in workers, of which these datasets have none."""
    caveats = resumed.get("differences", [])
    return bool(resumed["exact"] or (caveats and all("random draws in them" in line for line in caveats)))


def fell_into(events_of_first: list[dict[str, Any]], sent: float) -> str:
    """What rank 0 did when the signal was sent, by its log."""
    before = [e["kind"] for e in events_of_first if e["time"] <= sent]
    return before[-1] if before else "start"


def campaign(name: str, root: Path, count: int, seed: int, **extra: Any) -> Outcome:
    """``count`` preemptions of one program. Raises AssertionError for the first one that ends wrongly."""
    program, options = PROGRAMS[name]
    rng, outcome = random.Random(f"{name} {seed}"), Outcome()
    (root / "whole").mkdir()
    expected = reference(name, root / "whole", extra)
    run, life = 0, 0
    while outcome.preemptions < count:
        place = root / f"run-{run}"
        place.mkdir(exist_ok=True)
        before = published(place)
        moment = rng.choice(_MOMENTS)
        with Launch(RANKS, program, place, {**options, **extra, "life": life}) as job:
            sent = preempt(job, place, life, moment, rng)
            statuses = job.wait(DEADLINE_S + 30)
            seconds = time.monotonic() - sent
            said = [events(place, life, rank) for rank in range(RANKS)]
            context = (name, seed, outcome.preemptions, moment, statuses, [s[-2:] for s in said])
            for (rank, step), loss in losses(place, life).items():
                assert expected[rank, step] == loss, (context, rank, step)
            first = said[0][0]
            assert all(s[0]["kind"] == "resumed" and is_exact(s[0]) for s in said), context
            if before >= 0:
                from_step = [e["step"] for e in said[0] if e["kind"] == "resumed from"] or [first["step"]]
                assert from_step[0] in (before, -1), context
                outcome.resumes += any(e["kind"] == "step" for e in said[0])
            if any(s[-1]["kind"] == "done" for s in said):  # the signal came too late
                assert all(status in (0, -signal.SIGTERM, -signal.SIGUSR1) for status in statuses), context
                outcome.ran_to_the_end += 1
                run, life = run + 1, 0
                continue
            assert statuses == [75] * RANKS, context
            assert seconds < DEADLINE_S, context
            (newest,) = {s[-1]["newest"] for s in said}
            assert newest == published(place) == said[0][-1]["step"], context
            (path,) = (p for p in (place / "run").glob("*-*") if step_of(p) == newest)
            assert not sw.verify(path).problems, context
        outcome.preemptions += 1
        outcome.moments[fell_into(said[0], sent)] += 1
        outcome.seconds.append(seconds)
        life += 1
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preemptions", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    names = [name for name in PROGRAMS if given.only in name]
    for index, name in enumerate(names):
        count = given.preemptions // len(names) + (index < given.preemptions % len(names))
        with tempfile.TemporaryDirectory(prefix="preemptions-") as directory:
            root = Path(directory)
            extra = {"path": hub(root)} if name.startswith("Trainer") else {}
            print(campaign(name, root, count, given.seed, **extra).words(name), flush=True)


def hub(root: Path) -> str:
    """A model directory for the Trainer."""
    from tests.harness.models import build_reference

    build_reference("qwen3-tied").save_pretrained(root / "hub")
    return str(root / "hub")


if __name__ == "__main__":
    main()
