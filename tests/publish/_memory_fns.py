"""What the ranks run in the tests of the memory tier. Each rank is a host of its own, with its own directory."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

import shardwise as sw
from shardwise.checkpoint import held as memory_steps
from shardwise.checkpoint.held import MemorySave
from shardwise.format.manifest import rank_of_file
from shardwise.publish.hosts import Reader, RemoteFiles
from shardwise.publish.ring import Record, Slot, _name_of, write_record
from tests.checkpoint._checkpointer_fns import failure, on_first, set_values, state_at
from tests.checkpoint._resume_fns import assert_same_bits, bits


def copied(root: str | Path, hosts: str | Path, again: str | Path, left: str | Path) -> tuple[str, str]:
    """Copies of a run and of its hosts' memory, as if they had ended on other machines: the memory is that of the copied directory."""
    shutil.copytree(root, again)
    shutil.copytree(hosts, left)
    record = json.loads(Path(again, ".memory.json").read_text())
    name = _name_of(str(again))
    write_record(str(again), Record(name, record["line"]))
    for ring in Path(left).glob(f"host-*/shardwise-{record['name']}"):
        ring.rename(ring.with_name(f"shardwise-{name}"))
    return str(again), str(left)


def tier(hosts: str, per_host: int = 1, **options: Any) -> sw.InMemoryCheckpoints:
    """This rank's host: so many ranks share one."""
    host = dist.get_rank() // per_host
    folder = Path(hosts) / f"host-{host}"
    folder.mkdir(parents=True, exist_ok=True)
    return sw.InMemoryCheckpoints(
        every=2, directory=str(folder), host=f"host-{host}", address="127.0.0.1", **options
    )


def train(root: str, hosts: str, last: int = 6, **options: Any) -> dict[str, Any]:
    """Save step 3 on disk, keep 2, 4 and 6 in memory, and stop without a word."""
    state = state_at(1)
    checkpointer = sw.Checkpointer(root, memory=tier(hosts, **options))
    copied = []
    for step in range(2, last + 1):
        set_values(state, step)
        copied.append(checkpointer.remember(state, step))
        checkpointer.wait_for_memory()
        if step == 3:
            checkpointer.save(state, 3)
    found = checkpointer.wait_for_memory()
    checkpointer.close()
    return {"newest": found, "copied": copied}


def resume(root: str, hosts: str, per_host: int = 1) -> tuple[int | None, bool, bool]:
    """The resumed step, whether it came from memory, and whether every bit is that of the step."""
    state = state_at(9)
    with sw.Checkpointer(root, memory=tier(hosts, per_host)) as checkpointer:
        report = checkpointer.resume(state)
        assert report is not None
        expected = bits(reference(report.step))
        assert_same_bits(bits(state), expected)
    return report.step, report.from_memory, state.extra["label"] == f"at {report.step}"


def brought(root: str, hosts: str) -> tuple[int | None, list[str]]:
    """The resumed step, and the files of which this rank brought anything."""
    state, names = state_at(9), []
    real = RemoteFiles._from_a_holder

    def noted(files: RemoteFiles, name: str, *args: Any) -> None:
        names.append(name)
        real(files, name, *args)

    with (
        mock.patch.object(RemoteFiles, "_from_a_holder", noted),
        sw.Checkpointer(root, memory=tier(hosts)) as checkpointer,
    ):
        report = checkpointer.resume(state)
        assert report is not None
        assert report.from_memory
        assert_same_bits(bits(state), bits(reference(report.step)))
    return report.step, names


def damaged_on_the_way(root: str, hosts: str, nbytes: int) -> tuple[int | None, bool, bool]:
    """Every second receipt of bytes from another host, of at most ``nbytes``, has a flipped bit. The resumed step, with every bit as it was;
    whether it is from memory, and whether anything was flipped. Each unit here comes in one receipt, so that its second try is whole."""
    state, number, real = state_at(9), itertools.count(), Reader._take

    def garble(reader: Reader, view: memoryview, until: float) -> None:
        real(reader, view, until)
        if view.nbytes <= nbytes and next(number) % 2 == 0:
            view[0] ^= 16

    with (
        mock.patch.object(Reader, "_take", garble),
        sw.Checkpointer(root, memory=tier(hosts)) as checkpointer,
    ):
        report = checkpointer.resume(state)
        assert report is not None
    assert_same_bits(bits(state), bits(reference(report.step)))
    return report.step, report.from_memory, next(number) > 1


def resumed_and_kept(root: str, hosts: str) -> tuple[int | None, int | None, set[int | None]]:
    """Resume, keep step 8, and stop without a word. The resumed step, the newest, and the ranks of which this host has copies."""
    state = state_at(9)
    checkpointer = sw.Checkpointer(root, memory=tier(hosts))
    report = checkpointer.resume(state)
    assert report is not None
    for step in range(report.step + 1, 9):
        set_values(state, step)
        checkpointer.remember(state, step)
        checkpointer.wait_for_memory()
    newest = checkpointer.wait_for_memory()
    checkpointer.close()
    (held,) = Path(hosts, f"host-{dist.get_rank()}").glob("shardwise-*/held-0")
    return report.step, newest, {rank_of_file(name) for name in Slot(str(held)).files()}


def resume_each(cases: list[tuple[Any, ...]]) -> list[tuple[int | None, bool, bool]]:
    """:func:`resume` for each run and its hosts."""
    return [resume(*case) for case in cases]


def reference(step: int) -> sw.TrainState:
    """The state that :func:`train` had at a step."""
    state = state_at(1)
    for one in range(2, step + 1):
        set_values(state, one)
    return state


def beside_others(root: str, hosts: str, kept: str) -> list[Any]:
    """Step 2 has ended on rank 0, and not yet on rank 1, when step 4 comes: ``kept`` gets the run of that moment. In step 6 the ranks
    differ, in step 8 rank 1's state can't be stored, in step 10 it has no thread. What each call said, and the newest step."""
    state, rank = state_at(1), dist.get_rank()
    may_end, real = threading.Event(), MemorySave._publish

    def late(save: MemorySave, collected: Any) -> None:
        real(save, collected)
        if save.step == 2 and rank == 1:
            may_end.wait(60)

    def keep(step: int) -> Any:
        return checkpointer.remember(state, step)

    def train_to(step: int) -> None:
        for one in (step - 1, step)[step == 2 :]:
            set_values(state, one)

    said = []
    with (
        mock.patch.object(MemorySave, "_publish", late),
        sw.Checkpointer(root, memory=tier(hosts)) as checkpointer,
    ):
        train_to(2)
        said.append(keep(2) > 0)
        if rank == 0:
            checkpointer.wait_for_memory()
        dist.barrier()
        train_to(4)
        said.append(keep(4))
        on_first(lambda: list(copied(root, hosts, f"{kept}/run", f"{kept}/hosts")))
        may_end.set()
        said.append(checkpointer.wait_for_memory())
        train_to(6)
        group = state.optimizer.param_groups[0]
        lr = group["lr"]
        group["lr"] = lr * (1 + rank)
        said.append(failure(lambda: keep(6)))
        group["lr"] = lr
        train_to(8)
        state.extra["odd"] = object() if rank == 1 else "even"
        said.append(failure(lambda: keep(8)))
        del state.extra["odd"]
        train_to(10)
        no_thread = mock.patch.object(
            threading.Thread, "start", side_effect=RuntimeError("can't start new thread")
        )
        with no_thread if rank == 1 else contextlib.nullcontext():
            said.append(keep(10))
        said.append(checkpointer.wait_for_memory())
        train_to(12)
        said.append(keep(12) > 0)
    return said


def resumed_beside(root: str, hosts: str) -> tuple[int | None, int | None, list[int]]:
    """Resume an older step while the newest is on its way into memory: the resumed step, the newest and all that memory holds then."""
    state, real = state_at(1), MemorySave._take_manifest

    def late(save: MemorySave, text: bytes) -> None:
        time.sleep(0.5)
        real(save, text)

    with (
        mock.patch.object(MemorySave, "_take_manifest", late),
        sw.Checkpointer(root, memory=tier(hosts)) as checkpointer,
    ):
        checkpointer.save(state, 3)
        checkpointer.remember(state, 4)
        report = checkpointer.resume(state, 3)
        assert report is not None
        newest, memory = checkpointer.wait_for_memory(), checkpointer._memory
        assert memory is not None
        return report.step, newest, [one.step for one in memory.candidates(checkpointer._ranks())]


def past_damage(root: str, hosts: str) -> list[Any]:
    """Step 2 in memory, step 3 on disk, which is damaged then: the resumed step, whether it is from memory, and the damaged steps."""
    state = state_at(1)
    with sw.Checkpointer(root, memory=tier(hosts)) as checkpointer:
        checkpointer.remember(state, 2)
        checkpointer.wait_for_memory()
        checkpointer.save(state, 3)
        on_first(lambda: Path(root, "step-00000003", "state.json").write_text("{}") and None)
        report = checkpointer.resume(state)
        assert report is not None
        return [report.step, report.from_memory, sorted(report.damaged), list(report.superseded)]


def interrupted(root: str, hosts: str) -> list[Any]:
    """Ctrl-C on rank 0 while it waits for rank 1, which is late with step 4. What the call said, whether a save and step 6 worked after
    it, and threads that are left."""
    state, rank, real = state_at(1), dist.get_rank(), memory_steps.take
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def late(*args: Any) -> Any:
        time.sleep(1.0)
        return real(*args)

    try:
        with sw.Checkpointer(root, memory=tier(hosts)) as checkpointer:
            checkpointer.remember(state, 2)
            checkpointer.wait_for_memory()
            dist.barrier()
            set_values(state, 3)
            set_values(state, 4)
            if rank == 0:
                threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
            with mock.patch.object(memory_steps, "take", late if rank else real):
                try:
                    said: list[Any] = [checkpointer.remember(state, 4) > 0]
                except KeyboardInterrupt:
                    said = ["interrupted"]
            checkpointer.save(state, 4)
            said.append(checkpointer.wait_for_memory())
            set_values(state, 5)
            set_values(state, 6)
            said.append(checkpointer.remember(state, 6) > 0)
            said.append(checkpointer.wait_for_memory())
        said.append(
            [t.name for t in threading.enumerate() if t.name.removeprefix("shardwise-memory-").isdigit()]
        )
    finally:
        signal.signal(signal.SIGINT, before)
    return said
