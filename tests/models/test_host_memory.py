"""Memory that a load allocates on the CPU: tensors as any other's, given back when they die, in huge pages where that pays."""

from __future__ import annotations

import copy
import gc
import io
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from shardwise.models.meta import materialize
from shardwise.tensors.live import HUGE_PAGE_BYTES, LEAST_BYTES, HostMemory, describe
from tests.harness.on_ranks import on_ranks

MIB = 1024**2
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _memory_of_process(field: str) -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _has_huge_pages() -> bool:
    return _SETTING.exists() and "[never]" not in _SETTING.read_text()


@pytest.mark.parametrize(
    ("size", "stride"),
    [
        ((1024, 300), (300, 1)),
        ((1024, 300), (1, 1024)),
        ((3, 70, 1000), (140_000, 1000, 1)),
        ((0, 9), (9, 1)),
        ((), ()),
    ],
)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn, torch.bool]
)
def test_tensors_are_as_torchs(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> None:
    found = HostMemory().empty(size, stride, dtype)
    like = torch.empty_strided(size, stride, dtype=dtype)
    assert (found.size(), found.stride(), found.dtype, found.device) == (
        *(like.size(), like.stride(), like.dtype, like.device),
    )
    assert found.storage_offset() == 0
    assert found.untyped_storage().nbytes() == like.untyped_storage().nbytes()
    assert found.data_ptr() % 64 == 0


def test_each_tensor_has_bytes_of_its_own() -> None:
    memory = HostMemory()
    tensors = [
        memory.empty((n,), (1,), torch.int32) for n in (LEAST_BYTES, 99_999, 7, 40 * MIB, 100_001, 40 * MIB)
    ]
    for k, tensor in enumerate(tensors):
        tensor.fill_(k + 1)
    assert [tuple(v.item() for v in t.aminmax()) for t in tensors] == [(k, k) for k in range(1, 7)]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == 6


def test_a_dead_tensor_gives_its_memory_back() -> None:
    memory = HostMemory()
    tensors = [memory.empty((64 * MIB,), (1,), torch.uint8).fill_(1) for _ in range(4)]
    alias = tensors[0][5:].view(-1)
    before = _memory_of_process("Anonymous")
    del tensors[0], tensors[1]
    gc.collect()
    assert abs(before - _memory_of_process("Anonymous") - 64 * MIB) < 4 * MIB, (
        "an alias keeps its own memory, and no more"
    )
    assert int(alias.sum()) == 64 * MIB - 5
    del alias, tensors
    gc.collect()
    assert before - _memory_of_process("Anonymous") > 250 * MIB


def test_parameters_in_it_do_what_programs_do_with_parameters() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 256, bias=False))
    materialize(describe(model), "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) / 1e6)
    before = [p.clone() for p in model.parameters()]
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    assert stream.tell() < sum(p.nbytes for p in before) + 20_000, "no more than the tensors' own bytes"
    again = copy.deepcopy(model)
    again.share_memory()
    again.load_state_dict(torch.load(io.BytesIO(stream.getvalue())))
    optimizer = torch.optim.AdamW(again.parameters())
    again(torch.ones(2, 512)).sum().backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(before, again.parameters(), strict=True))
    assert again.to(torch.float64)[0].weight.dtype == torch.float64


@on_ranks(2)
def test_both_fsdps_shard_a_model_that_lies_in_it() -> None:
    for apply in (_by_fsdp2, partial(FullyShardedDataParallel, device_id=torch.device("cpu"))):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512))
        materialize(describe(model), "cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        sharded = apply(model)
        out = sharded(torch.ones(1, 512))
        assert float(out[0, 0].detach()) == 0.5 * 512 * 0.5 * 512 + 0.5
        out.sum().backward()


def _by_fsdp2(model: nn.Module) -> nn.Module:
    for layer in (*model.children(), model):
        fully_shard(layer)
    return model


class _Clock:
    """CPU time that grows by as much for each byte as a test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _fill(memory: HostMemory, clock: _Clock, mib: int, seconds_per_mib: float) -> None:
    for _ in range(mib // 4):
        with memory.filling(4 * MIB):
            clock.now += 4 * seconds_per_mib


@pytest.mark.skipif(not _has_huge_pages(), reason="the kernel gives no huge pages")
def test_the_pages_that_cost_less_are_used() -> None:
    clock = _Clock()
    memory = HostMemory(cpu_time=clock)
    kept = memory.empty((512 * MIB,), (1,), torch.uint8)
    assert memory.describe().startswith("small"), kept.numel()
    assert memory.first_bytes(64 * MIB) == 4 * MIB, "small pages are tried with little"
    _fill(memory, clock, 4, 1.0)
    assert memory.describe() == f"huge for 0% of {4 * MIB} bytes"
    assert memory.first_bytes(64 * MIB) == 64 * MIB
    _fill(memory, clock, 64, 0.3)  # huge, and cheaper: they stay
    assert memory.describe() == f"huge for 94% of {68 * MIB} bytes"
    _fill(memory, clock, 16, 1.2)  # dearer than small ones were, but not by much
    _fill(memory, clock, 16, 1.5)  # much: back to those
    _fill(memory, clock, 16, 1.2)
    assert memory.describe() == f"huge for {96 / 116:.0%} of {116 * MIB} bytes"
    _fill(memory, clock, 16, 2.0)  # now these are dearer than huge ones were
    _fill(memory, clock, 128, 0.3)
    assert memory.describe() == f"huge for {(96 + 128) / 260:.0%} of {260 * MIB} bytes"


@pytest.mark.skipif(not _has_huge_pages(), reason="the kernel gives no huge pages")
@pytest.mark.parametrize("beyond", [-8, -1, 0, 1, 5 * MIB])
def test_the_trial_of_small_pages_ends(beyond: int) -> None:
    """Whatever has been measured: pieces too small to be measured would never end it, and a negative one would go backwards."""
    memory = HostMemory()
    kept = memory.empty((64 * MIB,), (1,), torch.uint8)
    with memory.filling(4 * MIB - LEAST_BYTES // 2):
        pass
    assert memory.first_bytes(kept.nbytes) == LEAST_BYTES
    memory._measured_bytes = 4 * MIB + beyond  # as another thread has it that is about to choose
    assert memory.first_bytes(kept.nbytes) == LEAST_BYTES
    assert memory.first_bytes(10) == 10


@pytest.mark.skipif(not _has_huge_pages(), reason="the kernel gives no huge pages")
def test_a_read_that_began_with_other_pages_is_not_measured() -> None:
    clock = _Clock()
    memory = HostMemory(cpu_time=clock)
    kept = memory.empty((64 * MIB,), (1,), torch.uint8)
    with memory.filling(kept.nbytes // 8):
        _fill(memory, clock, 4, 1.0)  # another thread's: huge pages from here on
        clock.now += 100
    assert memory.describe() == f"huge for 0% of {4 * MIB} bytes"


@pytest.mark.skipif(not _has_huge_pages(), reason="the kernel gives no huge pages")
def test_nothing_is_tried_where_nothing_is_chosen() -> None:
    assert HostMemory().first_bytes(64 * MIB) == 64 * MIB, "no tensor lies there"
    memory = HostMemory("small")
    kept = memory.empty((64 * MIB,), (1,), torch.uint8)
    assert memory.first_bytes(kept.nbytes) == kept.nbytes


@pytest.mark.skipif(not _has_huge_pages(), reason="the kernel gives no huge pages")
def test_huge_pages_span_tensors() -> None:
    memory = HostMemory("huge")
    tensors = [memory.empty((MIB + 4097,), (1,), torch.uint8) for _ in range(64)]
    before = _memory_of_process("AnonHugePages")
    for tensor in tensors:
        tensor.fill_(1)
    assert _memory_of_process("AnonHugePages") - before > 48 * MIB
    assert len(tensors) * (MIB + 4097) // HUGE_PAGE_BYTES > 30


@pytest.mark.skipif(
    "[madvise]" not in (_SETTING.read_text() if _SETTING.exists() else ""), reason="not the kernel's default"
)
def test_small_pages_on_request() -> None:
    memory = HostMemory("small")
    before = _memory_of_process("AnonHugePages")
    tensor = memory.empty((64 * MIB,), (1,), torch.uint8)
    for start in range(0, tensor.numel(), 4 * MIB):
        with memory.filling(4 * MIB):
            tensor[start : start + 4 * MIB].fill_(1)
    assert _memory_of_process("AnonHugePages") == before
    assert memory.describe() == f"huge for 0% of {64 * MIB} bytes"


@pytest.mark.skipif(not _has_huge_pages(), reason="this system has no huge pages")
def test_no_huge_pages_come_after_the_load() -> None:
    memory = HostMemory("huge")
    tensor, gone = (memory.empty((3 * MIB,), (1,), torch.uint8) for _ in range(2))
    flags = partial(_flags_at, tensor.data_ptr())
    assert "hg" in flags()
    tensor.fill_(1)
    del gone
    memory.settle()
    # khugepaged would fill up the 2 MiB in which the end of the one lies beside the place of the other.
    assert "hg" not in flags()
    assert "nh" in flags()


def _flags_at(address: int) -> list[str]:
    """Flags of the mapping that holds an address, as smaps has them: "hg" and "nh" for and against huge pages."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, stop = (int(part, 16) for part in first.split("-"))
            is_here = start <= address < stop
        elif is_here and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("no such mapping")
