"""What ranks do in the tests of slow system calls, lost locks, and what a Checkpointer says when it can't go on."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

import shardwise as sw
from shardwise.ranks.ranks import Ranks
from tests.checkpoint._checkpointer_fns import set_values, state_at
from tests.checkpoint._resume_fns import listing
from tests.harness.logged import warnings_logged

TIMEOUT_S = 1.5
IO = sw.IOOptions(timeout_s=TIMEOUT_S)


def told(call: Callable[[], object]) -> tuple[str, str]:
    """Type and text of what a call raises, or that it is done."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "done", ""


def saved(checkpoints: sw.Checkpointer, state: sw.TrainState, step: int) -> tuple[str, str]:
    """How a save ended."""
    return told(lambda: (checkpoints.save(state, step), checkpoints.wait()))


@contextlib.contextmanager
def slow(name: str, seconds: float) -> Iterator[list[str]]:
    """The next call of ``os.<name>`` takes so long, as on a disk that is behind; the thread sleeps outside of Python."""
    own, calls = getattr(os, name), []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not calls:
            calls.append(name)
            time.sleep(seconds)
        return own(*args, **kwargs)

    setattr(os, name, call)
    try:
        yield calls
    finally:
        setattr(os, name, own)


def slow_calls(root: str) -> dict[str, Any]:
    """A save in which one call of one rank takes three times as long as a rank may be without progress."""
    found: dict[str, Any] = {}
    state = state_at(1, 3000)
    for mode in ("sync", "async"):
        with sw.Checkpointer(f"{root}/{mode}", keep_last=1, mode=mode, io=IO) as checkpoints:
            checkpoints.save(state, 1)
            checkpoints.wait()
            step = 1
            cases = [(0, "fsync"), (1, "fsync"), (1, "close"), (0, "rename"), (0, "unlink"), (0, "rmdir")]
            for rank, name in cases if mode == "sync" else [(1, "fsync"), (0, "unlink")]:
                step += 1
                set_values(state, step)
                is_slow = dist.get_rank() == rank
                with slow(name, 3 * TIMEOUT_S) if is_slow else contextlib.nullcontext([]) as calls:
                    # What retention does slowly after the save is what the other rank waits for in the next round.
                    outcome = saved(checkpoints, state, step)
                found[f"{mode}: {name} on rank {rank}"] = (*outcome, bool(calls) == is_slow)
        found[f"{mode}: left"] = listing(f"{root}/{mode}")
    return found


def slow_cleanup(root: str) -> list[tuple[str, str]]:
    """Rank 0 deletes the remains of a save that failed, slowly; the other rank is at the next call."""
    from shardwise.checkpoint import save as module

    own, state, found = module.write_slices, state_at(1), []

    def write(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError(5, "broken")
        return own(*args, **kwargs)

    with sw.Checkpointer(root, io=IO) as checkpoints:
        module.write_slices = write
        try:
            with slow("unlink", 3 * TIMEOUT_S):
                found.append(told(lambda: checkpoints.save(state, 1)))
                module.write_slices = own
                found.append(told(lambda: checkpoints.save(state, 2)))
        finally:
            module.write_slices = own
    return found


def hangs(seconds: float) -> list[tuple[str, str, float]]:
    """What is no progress: Python that hangs; one call that takes longer than any may, where it is told to be short."""
    from shardwise.ranks.ranks import patiently

    found: list[tuple[str, str, float]] = []
    ranks = Ranks.current(timeout_s=0.3)

    def python_hangs() -> None:
        with ranks.agree("hang in python"):
            patiently(os.stat, "/")
            if dist.get_rank() == 1:
                time.sleep(seconds)

    def call_hangs() -> None:
        with ranks.agree("hang in the kernel"):
            if dist.get_rank() == 1:
                patiently(time.sleep, seconds)

    for work in (python_hangs, call_hangs):
        began = time.monotonic()
        found.append((*told(work), time.monotonic() - began))
        dist.barrier()
    return found


# ------------------------------------------------------------------------------------------------- the lock


def _is_locked(root: str) -> bool:
    """Whether another process would be refused: asked by one that is started for it."""
    code = (
        "import fcntl, sys\nf = open(sys.argv[1], 'r+')\n"
        "try: fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)\nexcept OSError: sys.exit(7)"
    )
    return subprocess.run(["python3", "-c", code, f"{root}/.lock"], check=False).returncode == 7


def lock_survives_readers(root: str) -> dict[str, Any]:
    """Rank 0 reads, copies and hashes what lies in the directory it holds, the lock file, too; and forks."""
    found: dict[str, Any] = {}
    with sw.Checkpointer(root, io=IO) as checkpoints:
        checkpoints.save(state_at(1), 1)
        if dist.get_rank() == 0:
            Path(root, ".lock").read_bytes()
            shutil.copytree(root, f"{root}-copy")
            found["after copying"] = _is_locked(root)
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:  # a worker that outlives this run, and closes nothing itself
                os.close(writer)
                os.read(reader, 1)
                os._exit(0)
            os.close(reader)
            found["with a fork"] = _is_locked(root)
        dist.barrier()
        checkpoints.save(state_at(2), 2)
    if dist.get_rank() == 0:
        found["closed, the fork alive"] = _is_locked(root)
        os.close(writer)
        os.waitpid(child, 0)
    found["steps"] = listing(root)
    return found


def _take(root: str) -> int:
    """As another run that came in: it locks the file that has the name now, and writes that it holds it."""
    fd = os.open(f"{root}/.lock", os.O_RDWR | os.O_CREAT)
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.ftruncate(fd, 0)
    os.pwrite(fd, b'{"host": "elsewhere", "pid": 1}', 0)
    return fd


def lock_is_lost(root: str, mode: str) -> dict[str, Any]:
    """Another run holds the directory: before a save, and while one is being written."""
    found: dict[str, Any] = {}
    for when in ("before", "during"):
        for how in ("replaced", "deleted", "taken"):
            place = f"{root}/{when}-{how}"
            checkpoints = sw.Checkpointer(place, keep_last=1, mode=mode, io=IO)  # type: ignore[arg-type]
            checkpoints.save(state_at(1), 1)
            checkpoints.wait()
            own, opened = os.fsync, []

            def lose(how: str = how, place: str = place, opened: list[int] = opened) -> None:
                if dist.get_rank() == 0 and not opened:
                    if how == "taken":  # as after a server lost its locks: ours is gone, another run has it
                        Path(place, ".lock").write_text('{"host": "elsewhere", "pid": 1}')
                        opened.append(-1)
                        return
                    os.unlink(f"{place}/.lock")
                    opened.append(_take(place) if how == "replaced" else -1)

            def losing(fd: int, own: Callable[[int], None] = own, lose: Callable[[], None] = lose) -> None:
                lose()
                own(fd)

            state = state_at(2)
            if when == "before":
                lose()
                dist.barrier()
            else:
                os.fsync = losing
            try:
                found[f"{when}, {how}"] = saved(checkpoints, state, 2)
            finally:
                os.fsync = own
            dist.barrier()
            found[f"{when}, {how}: left"] = listing(place)
            with warnings_logged():
                told(checkpoints.close)
            dist.barrier()
            if opened and opened[0] >= 0:
                os.close(opened[0])
    return found


# ------------------------------------------------------------------------------------- what can't go on


def closed_too_late(root: str) -> dict[str, Any]:
    """The process group is gone while a save behind still has to agree."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    gate, reached, own = threading.Event(), threading.Event(), os.fsync
    checkpoints = sw.Checkpointer(root, mode="async", io=sw.IOOptions(timeout_s=20.0))
    state = state_at(1)

    def waits(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(
            ".safetensors"
        ):  # the directory and its note come before all ranks write
            reached.set()
            gate.wait(60)
        own(fd)

    def body() -> None:
        with checkpoints:
            raise LookupError("the body's")

    os.fsync = waits
    try:
        checkpoints.save(state, 1)
        assert reached.wait(60), "this rank writes"
        dist.barrier()
        dist.destroy_process_group()
        gate.set()
        with warnings_logged() as texts:
            return {"body": told(body), "warned": list(texts)}
    finally:
        gate.set()
        os.fsync = own
        dist.init_process_group("gloo", init_method=f"file://{root}-store", rank=rank, world_size=world_size)


def no_room_for_staging(root: str, limited_rank: int) -> tuple[str, str]:
    """Where the system gives one rank no more memory."""
    state = state_at(1, 4_000_000, optimizer=False)
    before = resource.getrlimit(resource.RLIMIT_AS)
    with sw.Checkpointer(root, mode="async", io=IO) as checkpoints:
        try:
            if dist.get_rank() == limited_rank:
                used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
                resource.setrlimit(resource.RLIMIT_AS, (used + 48 * 1024**2, before[1]))
            return told(lambda: checkpoints.save(state, 1))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)


def no_thread(root: str, limited_rank: int, budget: int | None) -> tuple[tuple[str, str], list[str]]:
    """Where the system gives one rank no more threads, the save is made at once, or fails on every rank alike."""
    state = state_at(1, 2_000)
    own = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("shardwise"):
            raise RuntimeError("can't start new thread")
        own(thread)

    with sw.Checkpointer(root, mode="async", max_staging_bytes=budget, io=IO) as checkpoints:
        if dist.get_rank() == limited_rank:
            threading.Thread.start = refuse  # type: ignore[method-assign]
        try:
            outcome = told(lambda: (checkpoints.save(state, 1), checkpoints.wait()))
        finally:
            threading.Thread.start = own  # type: ignore[method-assign]
        dist.barrier()
    return outcome, listing(root)
