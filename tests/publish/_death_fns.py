"""What the ranks run in the tests of deaths, full memory and slow partners. The victim stops at a place of the real code, says so, and
waits for its SIGKILL."""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

import shardwise as sw
from shardwise.checkpoint import held as memory_save
from shardwise.publish.hosts import Server
from tests.checkpoint._checkpointer_fns import failure, on_first, set_values, state_at
from tests.checkpoint._resume_fns import assert_same_bits, bits
from tests.faults.mounts import _leave_mounts, mount_tmpfs
from tests.publish._memory_fns import tier

VICTIM = 1


def _stop() -> None:
    print("here", flush=True)
    time.sleep(600)


def _before(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *_, **__: _stop()


def _in_second(call: Callable[..., Any]) -> Callable[..., Any]:
    """The first call is made, the second one is not."""
    calls = []

    def called(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return call(*args, **kwargs) if len(calls) == 1 else _stop()

    return called


#: By place: what is replaced there, by what.
PLACES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "in the copy": (memory_save, "copy_tensors", _in_second),
    "before hashing": (memory_save, "write_rank", _before),
    "before the manifest": (memory_save.MemorySave, "_take_manifest", _before),
    "before copies are received": (memory_save.MemorySave, "_copy_others", _before),
    "while copies are received": (memory_save, "copy_units", _in_second),
}


def die(root: str, hosts: str, place: str, options: dict[str, Any]) -> None:
    """Step 3 on disk, 2 and 4 in memory with all copies; in step 6 the victim stops at a place."""
    state = state_at(1)
    checkpointer = sw.Checkpointer(root, memory=tier(hosts, **options))
    for step in range(2, 7):
        set_values(state, step)
        if step == 6 and dist.get_rank() == VICTIM:
            where, name, stopping = PLACES[place]
            setattr(where, name, stopping(getattr(where, name)))
        checkpointer.remember(state, step)
        if step == 6:
            dist.barrier()
            break
        assert checkpointer.wait_for_memory() in (None, 2, 4)
        if step == 3:
            checkpointer.save(state, 3)
    time.sleep(600)


class Said(logging.Handler):
    """The warnings of the memory tier on this rank."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("shardwise").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def full(root: str, hosts: str, sizes: dict[int, str], is_full_later: bool) -> dict[str, Any]:
    """Steps 2 to 8, on hosts with as much memory as said; then a resume on the same hosts, of which something else may have filled all."""
    rank, said = dist.get_rank(), Said()
    folder = Path(hosts) / f"host-{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    if rank in sizes:
        _leave_mounts()
        mount_tmpfs(folder, f"size={sizes[rank]}")
    state = state_at(1, 40_000)
    found: list[int | None] = []
    checkpointer = sw.Checkpointer(root, memory=tier(hosts))
    checkpointer.save(state, 1)
    saved = {1: bits(state)}
    for step in range(2, 9):
        set_values(state, step)
        saved[step] = bits(state)
        checkpointer.remember(state, step)
        found.append(checkpointer.wait_for_memory())
    checkpointer.save(state, 8)
    found.append(checkpointer.wait_for_memory())
    is_sound = sw.verify(f"{root}/step-00000008").ok
    on_first(lambda: shutil.rmtree(f"{root}/step-00000008"))
    checkpointer._on_disk = 1  # so that closing leaves what is in memory
    checkpointer.close()
    if rank in sizes and is_full_later:
        with contextlib.suppress(OSError), open(folder / "other", "wb", buffering=0) as other:
            while other.write(bytes(4096)):
                pass
    again = state_at(9, 40_000)
    with sw.Checkpointer(root, memory=tier(hosts)) as checkpointer:
        report = checkpointer.resume(again)
        assert report is not None
    assert_same_bits(bits(again), saved[report.step])
    return {"newest": found[-1], "said": said.texts, "resumed": report.step, "is_sound": is_sound}


def beside_a_slow_partner(root: str, hosts: str, slow_rank: int) -> dict[str, Any]:
    """One host answers nothing for longer than the others wait, in steps 4 and 6."""
    said, rank = Said(), dist.get_rank()
    state, seconds, found = state_at(1), [], []
    real = Server._answer
    checkpointer = sw.Checkpointer(root, memory=tier(hosts, timeout_s=0.5))
    for step in (2, 4, 6, 8):
        set_values(state, step)
        is_slow = rank == slow_rank and step in (4, 6)
        slow = mock.patch.object(Server, "_answer", lambda self, link: (time.sleep(2.0), real(self, link)))
        if is_slow:
            slow.start()
        dist.barrier()
        started = time.perf_counter()
        checkpointer.remember(state, step)
        seconds.append(time.perf_counter() - started)
        found.append(checkpointer.wait_for_memory())
        dist.barrier()
        if is_slow:
            slow.stop()
    checkpointer.close()
    return {"seconds": seconds, "newest": found, "said": said.texts}


def refused(root: str, hosts: str) -> int:
    """Rank 1 can't begin the tier. The number of servers that are still open afterwards, of all that were made."""
    made: list[Server] = []
    real = Server.__init__

    def note(self: Server, *args: Any) -> None:
        real(self, *args)
        made.append(self)

    given = tier(hosts)
    if dist.get_rank() == 1:
        given = sw.InMemoryCheckpoints(
            every=2, directory=f"{hosts}/nowhere/at/all", host="host-1", address="127.0.0.1"
        )
    with mock.patch.object(Server, "__init__", note):
        kind, text = failure(lambda: sw.Checkpointer(root, memory=given))
        assert "nowhere" in text, (kind, text)
    assert len(made) == (dist.get_rank() == 0)
    return sum(not server._closed for server in made)
