"""Looks at this machine as this process sees it. Changes nothing."""

from __future__ import annotations

import os
import resource
import socket
import time
from pathlib import Path

import torch

from ..models.host_budget import host_budget
from ..transfer.page_cache import shares_memory
from .facts import Cores, Limits, Machine, Memory, Network

__all__ = ["look_at_machine"]


def look_at_machine(root: Path = Path("/")) -> Machine:
    """The machine's limits and names. Rank-local; starts no CUDA context. ``root``: holds ``proc``, ``sys`` and ``dev``."""
    return Machine(
        memory=_memory(root),
        limits=Limits(
            open_files=_soft(resource.RLIMIT_NOFILE),
            locked_bytes=_soft(resource.RLIMIT_MEMLOCK),
            file_bytes=_soft(resource.RLIMIT_FSIZE),
        ),
        cores=_cores(root),
        network=_network(),
        clock_s=time.time(),
        gpu_files=sum(p.name[6:].isdecimal() for p in (root / "dev").glob("nvidia*")),
        gpus=_gpus(),
        has_rdma=any((root / "sys/class/infiniband").glob("*")),
    )


def _memory(root: Path) -> Memory | None:
    budget = host_budget(root)
    if budget is None:
        return None
    try:
        shm = os.statvfs(root / "dev/shm")
        shm_bytes: int | None = shm.f_blocks * shm.f_frsize
    except OSError:
        shm_bytes = None
    device = torch.accelerator.current_accelerator(check_available=True)
    return Memory(
        limit_bytes=budget.limit_bytes,
        limit_from=budget.limit_from,
        free_bytes=budget.free_bytes,
        is_unified=device is not None and shares_memory(device),
        shm_bytes=shm_bytes,
    )


def _soft(limit: int) -> int | None:
    soft, _ = resource.getrlimit(limit)
    return None if soft == resource.RLIM_INFINITY else soft


def _gpus() -> int:
    available = torch.accelerator.current_accelerator(check_available=True) is not None
    return torch.accelerator.device_count() if available else 0


def _cores(root: Path) -> Cores:
    machine = os.cpu_count() or 1
    usable: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    quota_from = None
    for file, quota in _quotas(root):
        if quota < usable:
            usable, quota_from = quota, f"/{file.relative_to(root)}"
    return Cores(usable=usable, machine=machine, quota_from=quota_from)


def _quotas(root: Path) -> list[tuple[Path, float]]:
    """Cores that the process's cgroups allow, each with its file. Source: cgroup-v2.rst, scheduler/sched-bwc.rst of Linux."""
    found = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, own = line.split(":", 2)
        if controllers == "":
            mounted = root / "sys/fs/cgroup"
        elif "cpu" in controllers.split(","):
            mounted = root / "sys/fs/cgroup/cpu"
        else:
            continue
        directory = mounted if ".." in own.split("/") else mounted / own.lstrip("/")
        for level in (directory, *directory.parents):
            quota, _, period = _text(level / "cpu.max").strip().partition(" ")
            file = level / "cpu.max"
            if not quota:
                file = level / "cpu.cfs_quota_us"
                quota, period = _text(file).strip(), _text(level / "cpu.cfs_period_us").strip()
            if quota.isdecimal() and period.isdecimal() and int(period):
                found.append((file, int(quota) / int(period)))
            if level == mounted:
                break
    return found


def _network() -> Network:
    host = socket.gethostname()
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        addresses = tuple(dict.fromkeys(str(one[4][0]) for one in found))
    except OSError:
        addresses = ()
    try:
        interfaces = tuple(name for _, name in socket.if_nameindex())
    except OSError:
        interfaces = ()
    owner = next((n for n in interfaces if addresses and _address_of(n) == addresses[0]), None)
    return Network(host=host, addresses=addresses, interface=owner, interfaces=interfaces)


def _address_of(interface: str) -> str | None:
    """The IPv4 address of an interface, as ``netdevice(7)`` gives it; None if it has none, or not on Linux."""
    import fcntl
    import struct

    get_address = 0x8915  # SIOCGIFADDR
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            reply = fcntl.ioctl(one.fileno(), get_address, struct.pack("256s", interface.encode()[:15]))
    except OSError:  # it has none, or this process may open no more files
        return None
    return socket.inet_ntoa(reply[20:24])


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
