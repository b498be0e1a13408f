"""Ranks: agreement and collective failure, with real processes, signals and a real store."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from shardwise.errors import RankError
from shardwise.ranks import protocol as beats
from shardwise.ranks import protocol as verdicts
from shardwise.ranks.ranks import Ranks
from tests.harness.process import Process, kill_all, spawn, worker_env
from tests.harness.tiers import nightly

pytestmark = pytest.mark.processes

LAUNCH_S = 150.0
#: A rank is missed after 3 s; without that it would be after the 30 s or more of another limit.
SOON_S = 15.0

Note = dict[str, Any]
Notes = list[dict[str, Note]]


class Job:
    """A scenario of _ranks_fns.py on real processes, which run from here on."""

    def __init__(self, scenario: str, world_size: int, folder: Path, *, first_hosts: bool = False) -> None:
        self.folder = folder
        self._store = (
            None if first_hosts else TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        )
        port = "first" if self._store is None else str(self._store.port)
        self.logs = [folder / f"{rank}.log" for rank in range(world_size)]
        self.processes: list[Process] = []
        for rank, log in enumerate(self.logs):
            words = (scenario, str(rank), str(world_size), port, str(folder))
            self.processes.append(spawn("tests.ranks._ranks_fns", *words, log=log, env=worker_env()))

    def finish(self, during: Callable[[list[Process]], None] | None = None) -> Notes:
        """What each rank noted; nothing if it was killed before it wrote."""
        try:
            end = time.monotonic() + LAUNCH_S
            if during is not None:
                during(self.processes)
            for process in self.processes:
                process.wait(timeout=max(0.1, end - time.monotonic()))
        except BaseException:
            for rank, log in enumerate(self.logs):
                print(f"---- rank {rank}: {self.processes[rank].poll()}\n{log.read_text(errors='replace')}")
            raise
        finally:
            kill_all(self.processes)
        killed = [process.returncode == -signal.SIGKILL for process in self.processes]
        results = [self.folder / f"{rank}.json" for rank in range(len(self.processes))]
        for rank, result in enumerate(results):
            if not killed[rank] and not result.exists():
                texts = "\n".join(f"---- {log.name}\n{log.read_text(errors='replace')}" for log in self.logs)
                pytest.fail(f"rank {rank} ended with {self.processes[rank].returncode}\n{texts}")
        return [json.loads(result.read_text()) if result.exists() else {} for result in results]


def launch(scenario: str, world_size: int, folder: Path, *, first_hosts: bool = False) -> Notes:
    """Run a scenario to its end."""
    return Job(scenario, world_size, folder, first_hosts=first_hosts).finish()


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Job]]:
    """Scenarios that mostly wait, all at once. The one whose ranks the test continues is to be finished first."""

    def start(scenario: str, world_size: int, *, first_hosts: bool = False) -> Job:
        return Job(scenario, world_size, tmp_path_factory.mktemp(scenario), first_hosts=first_hosts)

    jobs = {
        "signaled": start("signaled", 3),
        "slow": start("slow", 2),
        "first killed": start("first_killed", 3),
        "first killed, which hosts the store": start("first_killed", 3, first_hosts=True),
    }
    yield jobs
    for job in jobs.values():
        kill_all(job.processes)


def all_raise(
    notes: Notes, name: str, *parts: str, causes: list[int], missing: list[int] | None = None
) -> None:
    """Every living rank raised the same RankError, which says all of this."""
    living = [note[name] for note in notes if note]
    assert [note.get("error") for note in living] == ["RankError"] * len(living), (name, living)
    assert len({note["text"] for note in living}) == 1, (name, living)
    assert living[0]["causes"] == causes
    assert living[0]["missing"] == (missing or [])
    for part in parts:
        assert part in living[0]["text"], living[0]["text"]


def values(notes: Notes, name: str) -> list[Any]:
    assert all("value" in note[name] for note in notes), [note[name] for note in notes]
    return [note[name]["value"] for note in notes]


@pytest.mark.parametrize("world_size", [3, *nightly(2)])
def test_agreement(world_size: int, tmp_path: Path) -> None:
    notes = launch("calm", world_size, tmp_path)
    last = world_size - 1
    others = list(range(1, world_size))

    for name in ("ok", "after", "two", "gate"):
        assert values(notes, name) == ["fine"] * world_size

    all_raise(notes, "one", "'write' failed", f"rank {last}: OSError: disk is full", causes=[last])
    assert [note["one"]["cause"] for note in notes] == [None] * last + ["OSError"]
    all_raise(notes, "first", "rank 0: OSError: disk is full", causes=[0])
    assert [note["one"]["took_s"] < 1.5 for note in notes] == [True] * world_size  # no grace for one failure

    for name in ("alike", "alike-late"):
        assert [note[name]["error"] for note in notes] == ["PlanError"] * world_size
        assert {note[name]["text"] for note in notes} == {"no cover\n  - a\n  - b"}
    assert notes[0]["unlike"]["error"] == "RankError"
    all_raise(notes, "unlike", "rank 0: PlanError: rank 0", f"PlanError: rank {last}", causes=[0, *others])
    all_raise(notes, "mute", f"rank {last}: KeyError", causes=[last])
    all_raise(notes, "long", "[shortened]", causes=[last])
    assert len(notes[0]["long"]["text"]) < 5_000

    for name, who, error in (("ctrl-c", last, "KeyboardInterrupt"), ("exit-first", 0, "SystemExit")):
        assert notes[who][name]["error"] == error
        all_raise(
            [n for rank, n in enumerate(notes) if rank != who], name, f"rank {who}: {error}", causes=[who]
        )

    all_raise(notes, "nested", "'inner' failed", f"rank {last}: OSError: inside", causes=[last])
    who = "rank 0: ValueError: before the inner one"
    all_raise(notes, "nested-skipped", "'outer' failed", who, causes=[0])
    early = 1 if last > 1 else 0
    causes = [early] if early else [0, last]  # where rank 0 fails it waits: the others may fail alike
    all_raise(notes, "late", f"rank {early}: ValueError: early", causes=causes)
    assert notes[last]["late"]["cause"] == "OSError"

    payloads = [(bytes([rank]) * rank * 10).hex() for rank in range(world_size)]
    assert values(notes, "gather") == [payloads] + [[]] * last
    assert values(notes, "on-first") == ["000aff"] * world_size
    assert values(notes, "first-empty") == [""] * world_size
    for name in ("gather-large", "first-large"):
        assert values(notes, name) == [True] * world_size
    assert [note["first-refuses"]["error"] for note in notes] == ["LockedError"] * world_size
    assert {note["first-refuses"]["text"] for note in notes} == {"held"}
    assert len(set(values(notes, "combine"))) == 1
    assert bytes.fromhex(values(notes, "combine")[0]) == b"-".join(
        bytes([r])[: r * 10] for r in range(world_size)
    )
    everything = {"all": [[r, None] for r in range(world_size)], "text": "ü"}
    assert values(notes, "combine-values") == [everything] * world_size
    assert values(notes, "gather-files") == [True] * world_size
    all_raise(notes, "first-tuple", "rank 0: TypeError: JSON does not give back", causes=[0])
    all_raise(notes, "combine-fails", f"rank {last}: OSError: disk is full", causes=[last])
    all_raise(notes, "combine-undecided", "rank 0: ValueError: no", causes=[0])

    assert values(notes, "equal") + values(notes, "equal-large") == [None] * 2 * world_size
    words = f"'optimizer' failed\n  rank {last}: differs from rank 0: has sgd; rank 0 has adam"
    all_raise(notes, "different", words, causes=[last])
    all_raise(notes, "different-hash", "has a value with hash", "rank 0 has a value", causes=[last])
    all_raise(notes, "different-mute", "ZeroDivisionError", causes=[last])

    disagree = f"rank {last}: ranks disagree on what they are doing: rank {last} is in"
    all_raise(notes, "labels", f"{disagree} 'x', rank 0 in 'y'", causes=[last])
    all_raise(notes, "kinds", f"{disagree} combine('z'), rank 0 in agree('z')", causes=[last])

    # 60 rounds leave nothing; a rank that is ahead may have begun the next one.
    assert notes[0]["growth"]["value"] < 3, "a long run must not grow the store"
    assert notes[0]["destroyed"]["error"] == "CheckpointError"
    all_raise(notes[1:], "anew-left", "rank 0: KeyboardInterrupt", causes=[0])
    all_raise(notes, "anew", "rank 1: OSError: anew", causes=[1])


def test_stopped_and_killed_ranks(waiting: dict[str, Job]) -> None:
    job = waiting["signaled"]

    def continue_when_others_have_raised(processes: list[Process]) -> None:
        for name, stopped in (("stop-last", 2), ("stop-first", 0)):
            end = time.monotonic() + 90  # imports, on a busy machine, too
            others = [job.folder / f"{name}.{rank}" for rank in range(3) if rank != stopped]
            while not all(path.exists() for path in others):
                assert time.monotonic() < end, f"the others hang after {name}"
                time.sleep(0.05)
            processes[stopped].send_signal(signal.SIGCONT)

    notes = job.finish(continue_when_others_have_raised)
    for name, rank in (("stop-first", 0), ("stop-last", 2)):  # the one who slept raises it too
        all_raise(notes, name, f"rank {rank}: no progress for 3 s", causes=[], missing=[rank])
        assert notes[1][name]["took_s"] < SOON_S
        assert values(notes, f"after-{name}") == ["fine"] * 3
    for name in ("kill-last", "after-kill-last"):
        all_raise(notes[:2], name, "rank 2: no progress for 3 s", causes=[], missing=[2])
        assert notes[1][name]["took_s"] < SOON_S


def test_progress_is_not_limited_by_timeout(waiting: dict[str, Job]) -> None:
    notes = waiting["slow"].finish()
    for name in ("slow-last", "slow-first", "after"):
        assert values(notes, name) == ["fine", "fine"]
    assert notes[0]["slow-last"]["took_s"] > 3.5
    assert notes[1]["slow-first"]["took_s"] > 3.5
    all_raise(notes, "silent", "rank 1: no progress for 1.5 s", causes=[], missing=[1])


@pytest.mark.parametrize("name", ["first killed", "first killed, which hosts the store"])
def test_first_rank_killed(waiting: dict[str, Job], name: str) -> None:
    notes = waiting[name].finish()
    assert [bool(note) for note in notes] == [False, True, True]
    assert all(note["kill"]["took_s"] < SOON_S for note in notes[1:])
    if name == "first killed":
        all_raise(notes, "kill", "rank 0: no progress for 3 s", causes=[], missing=[0])
    else:
        all_raise(notes, "kill", "'write' failed", "rank 0: unreachable", causes=[0])


def test_store_ends_with_first_rank(tmp_path: Path) -> None:
    notes = launch("last_word", 3, tmp_path, first_hosts=True)
    assert values(notes, "ok") == ["fine"] * 3
    all_raise(notes, "last", "rank 0: OSError: disk is full", causes=[0])


def test_one_rank_costs_nothing_and_changes_nothing() -> None:
    ranks = Ranks.current(timeout_s=5)
    assert (ranks.rank, ranks.world_size, ranks.timeout_s) == (0, 1, 5)
    with pytest.raises(KeyError) as caught, ranks.agree("read"):
        raise KeyError("own")
    assert caught.value.__cause__ is None
    assert ranks.gather("gather", b"a") == [b"a"]
    assert ranks.on_first("first", lambda: b"a") == b"a"
    assert ranks.combine("combine", lambda: b"a", lambda found: found[0] * 2) == b"aa"
    with ranks.agree("equal") as claim:
        claim.alike(b"a")
    ranks.tick()


def test_timeout_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        Ranks.current(timeout_s=0)


def test_watch_blames_no_rank_for_its_own_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(beats.time, "monotonic", lambda: now)
    watch = beats.Watch(10.0)
    now = 1.0
    assert watch.due()
    assert watch.look({1: b"0"}) == ()
    now = 1_000.0  # the watcher was suspended
    assert watch.look({1: b"0"}) == ()
    for _ in range(8):
        now += 1.0
        idle = watch.look({1: b"0"})
    assert idle == (1,)
    assert watch.look({1: b"1"}) == ()


def test_error_of_very_many_ranks_fits_into_one_value() -> None:
    request = verdicts.Request("agree", "read", 1.0)
    verdict = verdicts.failure(request, dict.fromkeys(range(5_000), "x" * 4_000))
    assert len(verdicts.pack(verdict)) < 4 * 1024**2
    assert isinstance(verdict.error(), RankError)
    with contextlib.suppress(RankError):
        raise verdict.error()
