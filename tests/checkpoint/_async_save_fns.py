"""What the ranks of test_async_save.py run."""

from __future__ import annotations

import contextlib
import os
import resource
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import shardwise as sw
from shardwise.errors import ShardwiseError
from tests.checkpoint._checkpointer_fns import set_values, state_at
from tests.checkpoint._resume_fns import Bits, assert_same_bits, bits

PAGE = resource.getpagesize()


def what(error: BaseException) -> tuple[str, str]:
    return type(error).__name__, str(error)


def same(found: Bits, expected: Bits) -> bool:
    assert_same_bits(found, expected)
    return True


def changed_while_saving(root: str, width: int, budget: int | None) -> dict[str, Any]:
    """Save, overwrite everything at once, and look at what was stored."""
    state = state_at(1, width)
    rng = torch.get_rng_state()
    before = collectives()
    with sw.Checkpointer(root, mode="async", max_staging_bytes=budget) as checkpointer:
        prepared = checkpointer.prepare(state)
        first = checkpointer.save(state, 1)
        expected = [bits(state)]
        set_values(state, 2)  # in place, while the first save is being written
        second = checkpointer.save(state, 2)  # waits for the first
        expected.append(bits(state))
        set_values(state, 3)
        report = checkpointer.wait()
        assert report is not None
        assert checkpointer.wait() is None
        threads = [t.name for t in threading.enumerate() if t.name.startswith("shardwise")]
        kept = checkpointer.staging_bytes
    issued = collectives() - before
    state.model.layer.weight.full_tensor()  # type: ignore[union-attr, operator]
    assert collectives() > before + issued or dist.get_world_size() == 1, "an all-gather is not counted"
    local = sum(v.numel() * v.element_size() for v in _local(state))
    found = []
    for step in (1, 2):
        fresh = state_at(7, width)
        sw.restore(fresh, f"{root}/step-{step:08d}")
        rng_is_restored = torch.equal(torch.get_rng_state(), rng) if step == 1 else True
        found.append(
            same(bits(fresh), expected[step - 1]) and fresh.extra["label"] == f"at {step}" and rng_is_restored
        )
    verified = [sw.verify(f"{root}/step-{step:08d}").ok for step in (1, 2)]
    return {
        "equal": found,
        "verified": verified,
        "staging": (prepared, first.staging_bytes, second.staging_bytes, kept),
        "local": local,
        "published": (first.is_published, second.is_published, report.is_published),
        "threads": threads,
        "collectives": issued,
        "written": report.bytes_written >= second.bytes_written,
    }


def collectives() -> int:
    """How many collectives this process has issued, from any thread, on any process group."""
    return sum(group._get_sequence_number_for_group() for group in distributed_c10d._world.pg_map)


def staging_is_touched(root: str, width: int) -> dict[str, Any]:
    """How much of the staging memory is there after preparing, and whether two saves use the same memory."""
    state = state_at(1, width)
    with sw.Checkpointer(root, mode="async") as checkpointer:
        nbytes = checkpointer.prepare(state)
        assert checkpointer._buffer is not None
        memory = checkpointer._buffer._blocks[0]
        found = {"staging": nbytes, "there": _bytes_there(memory), "memory": [memory.data_ptr()]}
        for step in (1, 2):
            checkpointer.save(state, step)
            checkpointer.wait()
            found["memory"].append(checkpointer._buffer._blocks[0].data_ptr())
    return found


def _bytes_there(memory: torch.Tensor) -> int:
    """Of a tensor, in pages that the system has found for it already (see Linux' pagemap)."""
    first, last = memory.data_ptr() // PAGE, (memory.data_ptr() + memory.nbytes - 1) // PAGE
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        entries = os.pread(file.fileno(), 8 * (last - first + 1), 8 * first)
    present = sum(entry >> 63 for (entry,) in struct.iter_unpack("<Q", entries))
    return present * PAGE


def _local(state: sw.TrainState) -> Iterator[torch.Tensor]:
    tensors = list(state.model.state_dict().values())
    assert state.optimizer is not None
    for states in state.optimizer.state.values():
        tensors += [t for t in states.values() if t.dim()]
    for t in tensors:
        yield t.to_local() if hasattr(t, "to_local") else t


def budget_too_small(root: str) -> tuple[str, str]:
    state = state_at(1, 4096)
    with sw.Checkpointer(root, mode="async", max_staging_bytes=4096) as checkpointer:
        try:
            checkpointer.save(state, 1)
        except ShardwiseError as error:
            return what(error)
    return ("none", "")


def fails_behind(root: str) -> dict[str, Any]:
    """Step 1 is published; the disk of rank 1 is full at step 2; then there is room again."""
    state = state_at(1, 4096)
    checkpointer = sw.Checkpointer(root, mode="async")
    checkpointer.save(state, 1)
    checkpointer.wait()
    set_values(state, 2)
    found: dict[str, Any] = {}
    with _file_limit(2048 if dist.get_rank() == 1 else None):
        checkpointer.save(state, 2)  # returns: the failure comes behind
        try:
            checkpointer.save(state, 3)
        except ShardwiseError as error:
            found["next save"] = what(error)
    found["steps"] = sorted(n for n in os.listdir(root) if n.startswith("step-"))
    checkpointer.save(state, 4)
    checkpointer.wait()
    with _file_limit(2048 if dist.get_rank() == 1 else None):
        checkpointer.save(state, 5)
        try:
            checkpointer.close()
        except ShardwiseError as error:
            found["close"] = what(error)
    fresh = state_at(9, 4096)
    with sw.Checkpointer(root) as again:
        report = again.resume(fresh)
        assert report is not None
        found["resumed"] = report.step
    found["equal"] = same(bits(fresh), bits(state))
    return found


@contextlib.contextmanager
def _file_limit(nbytes: int | None) -> Iterator[None]:
    """No file of this process may grow beyond this: writes fail with EFBIG (Python ignores the signal)."""
    if nbytes is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def retention_behind(root: str) -> list[str]:
    state = state_at(1)
    with sw.Checkpointer(root, mode="async", keep_last=2) as checkpointer:
        for step in range(1, 6):
            set_values(state, step)
            checkpointer.save(state, step)
    return sorted(name for name in os.listdir(root) if name != ".lock")  # rank 0 may still hold it


def resume_waits(root: str) -> list[Any]:
    """Resume right after a save: it finds that step."""
    state = state_at(1, 4096)
    with sw.Checkpointer(root, mode="async") as checkpointer:
        checkpointer.save(state, 1)
        expected = bits(state)
        set_values(state, 5)
        report = checkpointer.resume(state)
        assert report is not None
        return [report.step, same(bits(state), expected)]


EXITS = """
import sys
import torch
import shardwise as sw
model = torch.nn.Linear(1024, 2048)
checkpointer = sw.Checkpointer(sys.argv[1], mode="async")
checkpointer.save(sw.TrainState(model=model), 1)
"""


def script(folder: Path) -> Path:
    """A program that ends while its save goes on behind."""
    file = folder / "exits.py"
    file.write_text(EXITS)
    return file


def two_at_a_time(root: str) -> list[int]:
    """Two Checkpointers that write behind the training at once."""
    state = state_at(1, 50_000)
    with (
        sw.Checkpointer(f"{root}/a", mode="async") as first,
        sw.Checkpointer(f"{root}/b", mode="async") as second,
    ):
        for step in (1, 2, 3):
            first.save(state, step)
            second.save(state, step)
    return sorted(int(n[5:]) for r in ("a", "b") for n in os.listdir(f"{root}/{r}") if n.startswith("step-"))


def interrupted_wait(root: str) -> dict[str, Any]:
    """Ctrl-C while a call waits for the save behind; the next save must not touch its staging."""
    import signal

    state = state_at(1, 3_000_000)
    found: dict[str, Any] = {}
    with sw.Checkpointer(root, mode="async") as checkpointer:
        gate, own = threading.Event(), os.fsync
        os.fsync = lambda fd: (gate.wait(), own(fd))[1]  # the save can't end before the interrupt
        checkpointer.save(state, 1)
        expected = bits(state)
        timer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        timer.start()
        try:
            checkpointer.wait()
            found["interrupted"] = False
        except KeyboardInterrupt:
            found["interrupted"] = True
            found["still there"] = checkpointer.is_saving
        finally:
            timer.join()
            signal.signal(signal.SIGINT, before)
            gate.set()
            os.fsync = own
        set_values(state, 2)
        checkpointer.save(state, 2)
        checkpointer.wait()
    fresh = state_at(9, 3_000_000)
    sw.restore(fresh, f"{root}/step-00000001")
    found["first"] = same(bits(fresh), expected)
    sw.restore(fresh, f"{root}/step-00000002")
    found["second"] = same(bits(fresh), bits(state))
    return found
