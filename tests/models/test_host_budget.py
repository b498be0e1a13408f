"""The host's memory: the lowest limit on the way up, whichever cgroup version, and what can be reclaimed counts as free."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import PlanError
from shardwise.operations.host_budget import HostBudget, host_budget
from tests.harness.models import sparse_file

GIB = 1024**3
TOTAL, AVAILABLE, SWAP = 64 * GIB, 40 * GIB, 8 * GIB
UNLIMITED_1 = 9223372036854771712


def host(root: Path, cgroup: str | None, *, total: int = TOTAL) -> Path:
    """A machine's ``/proc`` under ``root``."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal:       {total // 1024} kB\nMemFree:         1024 kB\nMemAvailable:   {AVAILABLE // 1024} kB\n"
        f"HugePages_Total:       0\nSwapTotal:      {SWAP // 1024} kB\n"
    )
    if cgroup is not None:
        (root / "proc/self/cgroup").write_text(cgroup)
    return root


def version_2(root: Path, path: str, limit: int | str, used: int = 0, **more: int | str) -> None:
    """A directory of the unified hierarchy. ``more``: ``swap`` (its limit), ``inactive_file``, ``slab_reclaimable``."""
    directory = root / "sys/fs/cgroup" / path
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{used}\n")
    if "swap" in more:
        (directory / "memory.swap.max").write_text(f"{more.pop('swap')}\n")
    stat = {"anon": 1, "file": 2, "inactive_anon": 3, **more}
    (directory / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in stat.items()))


def version_1(root: Path, path: str, limit: int, used: int = 0, inactive_file: int = 0) -> Path:
    directory = root / "sys/fs/cgroup/memory" / path
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (directory / "memory.usage_in_bytes").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"inactive_file 7\ntotal_inactive_file {inactive_file}\n")
    return directory


def found(root: Path) -> HostBudget:
    budget = host_budget(root)
    assert budget is not None
    return budget


def is_machine(budget: HostBudget) -> bool:
    limits = (budget.limit_bytes, budget.with_swap_bytes, budget.free_bytes)
    return limits == (TOTAL, TOTAL + SWAP, AVAILABLE) and budget.limit_from == "MemTotal in /proc/meminfo"


def test_no_cgroup(tmp_path: Path) -> None:
    assert is_machine(found(host(tmp_path, None)))


def test_not_linux(tmp_path: Path) -> None:
    assert host_budget(tmp_path) is None


def test_version_2(tmp_path: Path) -> None:
    root = host(tmp_path, "0::/job\n")
    version_2(root, "job", 16 * GIB, 10 * GIB, inactive_file=3 * GIB, slab_reclaimable=GIB, swap=0)
    budget = found(root)
    assert (budget.limit_bytes, budget.limit_from) == (16 * GIB, "/sys/fs/cgroup/job/memory.max")
    assert budget.free_bytes == (16 - (10 - 3 - 1)) * GIB
    assert budget.with_swap_bytes == 16 * GIB


def test_the_lowest_limit_on_the_way_up(tmp_path: Path) -> None:
    root = host(tmp_path, "0::/pod/container/step\n")
    version_2(root, "pod", 8 * GIB, 7 * GIB)
    version_2(root, "pod/container", 24 * GIB, 6 * GIB)
    version_2(root, "pod/container/step", "max", 5 * GIB)
    version_2(root, "pod/neighbor", GIB, GIB)
    budget = found(root)
    assert (budget.limit_bytes, budget.limit_from) == (8 * GIB, "/sys/fs/cgroup/pod/memory.max")
    assert budget.free_bytes == GIB, "what its neighbors use of the pod is gone"


def test_least_free_is_not_always_the_lowest_limit(tmp_path: Path) -> None:
    root = host(tmp_path, "0::/pod/container\n")
    version_2(root, "pod", 32 * GIB, 31 * GIB)
    version_2(root, "pod/container", 8 * GIB, 2 * GIB)
    budget = found(root)
    assert (budget.limit_bytes, budget.free_bytes) == (8 * GIB, GIB)


def test_used_beyond_the_limit_leaves_nothing(tmp_path: Path) -> None:
    root = host(tmp_path, "0::/job\n")
    version_2(root, "job", 2 * GIB, 3 * GIB)
    assert found(root).free_bytes == 0


@pytest.mark.parametrize("limit", ["max", 100 * GIB])
def test_version_2_without_a_limit_below_the_machine(tmp_path: Path, limit: int | str) -> None:
    root = host(tmp_path, "0::/job\n")
    version_2(root, "job", limit, GIB)
    assert is_machine(found(root))


def test_a_cgroup_namespace(tmp_path: Path) -> None:
    """A container sees itself as the top; another one than the process's own may be mounted there."""
    for place, path in enumerate(("/", "/../../other")):
        root = host(tmp_path / str(place), f"0::{path}\n")
        version_2(root, "", 4 * GIB, GIB)
        budget = found(root)
        assert (budget.limit_bytes, budget.limit_from) == (4 * GIB, "/sys/fs/cgroup/memory.max")
        assert budget.free_bytes == 3 * GIB


def test_a_path_that_is_not_mounted(tmp_path: Path) -> None:
    """Docker with version 1 names the host's path, and mounts the container's part of it alone."""
    root = host(tmp_path, "4:memory:/docker/abc\n1:name=systemd:/docker/abc\n")
    version_1(root, "", 4 * GIB, 3 * GIB, inactive_file=GIB)
    budget = found(root)
    assert (budget.limit_bytes, budget.limit_from) == (4 * GIB, "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    assert budget.free_bytes == 2 * GIB


def test_version_1(tmp_path: Path) -> None:
    root = host(tmp_path, "9:cpu,cpuacct:/\n4:hugetlb,memory:/slurm/job/step\n")
    version_1(root, "", UNLIMITED_1, 50 * GIB)
    version_1(root, "slurm", UNLIMITED_1, 20 * GIB)
    version_1(root, "slurm/job", 12 * GIB, 9 * GIB, inactive_file=2 * GIB)
    version_1(root, "slurm/job/step", UNLIMITED_1, GIB)
    budget = found(root)
    assert budget.limit_bytes == 12 * GIB
    assert budget.limit_from == "/sys/fs/cgroup/memory/slurm/job/memory.limit_in_bytes"
    assert (budget.free_bytes, budget.with_swap_bytes) == (5 * GIB, (12 + 8) * GIB)


def test_version_1_that_counts_swap(tmp_path: Path) -> None:
    root = host(tmp_path, "4:memory:/job\n")
    directory = version_1(root, "job", 12 * GIB)
    for limit, expected in ((12 * GIB, 12 * GIB), (14 * GIB, 14 * GIB), (UNLIMITED_1, 20 * GIB)):
        (directory / "memory.memsw.limit_in_bytes").write_text(f"{limit}\n")
        assert found(root).with_swap_bytes == expected


def test_a_hybrid(tmp_path: Path) -> None:
    """systemd's: version 2 without controllers beside version 1, which has them."""
    root = host(tmp_path, "4:memory:/a\n0::/b\n")
    (root / "sys/fs/cgroup/unified/b").mkdir(parents=True)
    version_1(root, "a", 6 * GIB)
    assert found(root).limit_bytes == 6 * GIB


def test_this_host() -> None:
    budget = host_budget()
    if budget is None:
        pytest.skip("not Linux")
    assert 0 < budget.free_bytes <= budget.limit_bytes <= budget.with_swap_bytes


# ------------------------------------------------------------------------------------------------ a load


def test_a_load_that_can_not_fit_reads_nothing(tmp_path: Path) -> None:
    budget = host_budget()
    if budget is None:
        pytest.skip("not Linux")
    rows = 2 * budget.with_swap_bytes // 2**20
    source = sparse_file(tmp_path / "model.safetensors", {"weight": (rows, 2**19)})
    with torch.device("meta"):
        model = nn.Linear(2**19, rows, bias=False, dtype=torch.bfloat16)
    with pytest.raises(PlanError, match="this rank's shards don't fit in the host's memory") as caught:
        sw.load(model, source)
    text = str(caught.value)
    for fact in (
        f"{budget.limit_bytes / GIB:.2f} GiB ({budget.limit_from})",
        f"{rows / 1024:.2f} GiB",
        "Use more ranks",
    ):
        assert fact in text
    assert model.weight.is_meta


def test_a_load_reports_the_host(tmp_path: Path) -> None:
    source = sparse_file(tmp_path / "model.safetensors", {"weight": (4, 8)})
    with torch.device("meta"):
        model = nn.Linear(8, 4, bias=False, dtype=torch.bfloat16)
    report = sw.load(model, source)
    budget = host_budget()
    assert report.host is not None
    assert budget is not None
    assert (report.host.limit_bytes, report.host.limit_from) == (budget.limit_bytes, budget.limit_from)
    assert json.loads(json.dumps(report.to_json()))["host"]["free_bytes"] == report.host.free_bytes > 0
