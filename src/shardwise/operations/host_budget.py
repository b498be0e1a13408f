"""How much memory this process may use on its host, and how much of that is free: cgroup limits before the machine's total.

A container or a job of a scheduler ends where its cgroup's limit is, however much the machine has. Free is what the
system can give after it reclaimed what it may: page cache and caches of the kernel count as free. Where a device shares
the host's memory, that is its free memory, too: a driver's own counter takes page cache for used.

Sources: Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst and filesystems/proc.rst of Linux.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..errors import PlanError
from ..objects import frozen
from .operation import size


@frozen(kw_only=True)
class HostBudget:
    """The memory of a host for a process, with all other processes that share it."""

    limit_bytes: int
    """The lowest of the machine's memory and the limits of the process's cgroups."""
    limit_from: str
    """The file that says so."""
    with_swap_bytes: int
    """The same with the swap that may be used beside."""
    free_bytes: int
    """What is not in use, or can be reclaimed, now."""

    def __str__(self) -> str:
        return f"{size(self.free_bytes)} free of {size(self.limit_bytes)} ({self.limit_from})"


def host_budget(root: Path = Path("/")) -> HostBudget | None:
    """The budget of this process; None if the system does not report it (not Linux). Rank-local, takes a fraction of 1 ms.

    ``root``: the directory that holds ``proc`` and ``sys``.
    """
    machine = _fields(root / "proc/meminfo")
    if "MemAvailable" not in machine:
        return None
    swap = machine.get("SwapTotal", 0)
    levels = [
        HostBudget(
            limit_bytes=machine["MemTotal"],
            limit_from="MemTotal in /proc/meminfo",
            with_swap_bytes=machine["MemTotal"] + swap,
            free_bytes=machine["MemAvailable"],
        ),
        *_cgroups(root, swap),
    ]
    lowest = min(levels, key=lambda level: level.limit_bytes)
    return HostBudget(
        limit_bytes=lowest.limit_bytes,
        limit_from=lowest.limit_from,
        with_swap_bytes=min(level.with_swap_bytes for level in levels),
        free_bytes=min(level.free_bytes for level in levels),
    )


def refuse_too_large(nbytes: int, budget: HostBudget | None) -> None:
    """Raise :class:`PlanError` if memory for ``nbytes`` on the CPU can't be had, whatever else is freed before."""
    if budget is not None and nbytes > budget.with_swap_bytes:
        gib = 1024**3
        raise PlanError(
            f"this rank's shards don't fit in the host's memory: they take {nbytes / gib:.2f} GiB on the CPU, and the "
            f"limit is {budget.limit_bytes / gib:.2f} GiB ({budget.limit_from}), {budget.with_swap_bytes / gib:.2f} GiB with "
            f"swap. Use more ranks on more hosts, a device, or a smaller dtype; or raise the limit of the container or job"
        )


def cgroups_with(controller: str, root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """The cgroups of this process that may have ``controller``, from its own to the top, each with its version, 1 or 2.

    In a hybrid, one version has the controller; the other's directories lack its files.
    """
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, own = line.split(":", 2)
        if controllers == "":
            mounted, version = root / "sys/fs/cgroup", 2
        elif controller in controllers.split(","):
            mounted, version = root / "sys/fs/cgroup" / controller, 1
        else:
            continue
        # Where the path is that of another namespace, no such directory is mounted: the top is the process's own.
        directory = mounted if ".." in own.split("/") else mounted / own.lstrip("/")
        for level in (directory, *directory.parents):
            yield version, level
            if level == mounted:
                break


#: By version of cgroups: the file of the limit, of the limit with swap (1) or of swap (2), of the bytes in use, and what of
#: memory.stat can be reclaimed.
_FILES = {
    2: ("memory.max", "memory.swap.max", "memory.current", ("inactive_file", "slab_reclaimable")),
    1: (
        "memory.limit_in_bytes",
        "memory.memsw.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file",),
    ),
}


def _cgroups(root: Path, swap: int) -> Iterator[HostBudget]:
    """The limits of this process's cgroups."""
    for version, level in cgroups_with("memory", root):
        file, swap_file, used_file, reclaimable = _FILES[version]
        limit, swap_limit = _number(level / file), _number(level / swap_file)
        if limit is None:
            continue
        most_swap = swap  # where there is no such file
        if swap_limit is not None:
            most_swap = min(swap, swap_limit if version == 2 else swap_limit - limit)
        stat = _fields(level / "memory.stat")
        used = (_number(level / used_file) or 0) - sum(stat.get(name, 0) for name in reclaimable)
        yield HostBudget(
            limit_bytes=limit,
            limit_from=f"/{(level / file).relative_to(root)}",
            with_swap_bytes=limit + most_swap,
            free_bytes=max(0, limit - max(0, used)),
        )


def text_of(path: Path) -> str:
    """What a file of the kernel says; empty if there is no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """The number in a file; None if there is no such file, or it says ``max``."""
    text = text_of(path).strip()
    return int(text) if text.isdecimal() else None


def _fields(path: Path) -> dict[str, int]:
    """Lines ``name number`` or ``name: number kB``, in bytes."""
    found = {}
    for line in text_of(path).splitlines():
        name, *rest = line.split()
        if rest and rest[0].isdecimal():
            found[name.rstrip(":")] = int(rest[0]) * (1024 if rest[1:] == ["kB"] else 1)
    return found
