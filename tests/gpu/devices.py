"""Devices by their type (``cuda``, ``xpu``, the simulated ``simgpu``, ``cpu``): found, entered by a rank, measured.

The process that starts ranks never touches a device: ranks are its forks, and a driver does not survive a fork.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

__all__ = [
    "GIVES_PINNED_BACK",
    "SIMULATED",
    "Visible",
    "describe",
    "enter",
    "host_waits",
    "peak_bytes",
    "synchronize",
    "waits_in",
]

SIMULATED = "simgpu"
#: Whether this torch can give the system pinned memory back that it keeps: 2.11 can't on every device.
GIVES_PINNED_BACK = hasattr(torch.accelerator, "empty_host_cache") or hasattr(torch._C, "_host_emptyCache")
#: Which devices a rank sees: all of the group, its own alone, or one that all ranks share.
Visible = Literal["all", "own", "shared"]
#: What says which devices a process sees: CUDA and ROCm, XPU.
_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
#: A wait of the host, in the trace of a CUDA or ROCm runtime.
_WAIT = re.compile(r"(?:cuda|hip)(Stream|Event)Synchronize")


def enter(kind: str, rank: int, world_size: int, port: int, visible: Visible = "all") -> torch.device:
    """See the devices that ``visible`` says, take this rank's, and enter a group of their backend alone.

    NCCL takes one rank for each device, so that ranks which share a GPU enter a group of gloo.
    """
    if kind == SIMULATED:
        os.environ["SIMGPU_DEVICES"] = str(world_size if visible == "all" else 1)
        from tests.device import simgpu  # noqa: F401
    elif kind in _VISIBLE and visible == "own":
        every = os.environ.get(_VISIBLE[kind], ",".join(map(str, range(world_size))))
        os.environ[_VISIBLE[kind]] = every.split(",")[rank]
    elif kind in _VISIBLE and visible == "shared":
        os.environ[_VISIBLE[kind]] = os.environ.get(_VISIBLE[kind], "0").split(",")[0]
    where = {"init_method": f"tcp://127.0.0.1:{port}", "rank": rank, "world_size": world_size}
    if kind == "cpu":
        dist.init_process_group("gloo", **where)
        return torch.device("cpu")
    device = torch.device(kind, rank if visible == "all" else 0)
    torch.accelerator.set_device_index(device.index)
    torch.ones(1, device=device).add_(1)  # the driver is up before anything is measured
    by_gloo = visible == "shared" and kind != SIMULATED
    backend = "gloo" if by_gloo else dist.get_default_backend_for_device(kind)
    # NCCL's barrier has to know the device; gloo and the simulated backend take none.
    bound = {} if by_gloo or kind == SIMULATED else {"device_id": device}
    dist.init_process_group(backend, **where, **bound)
    _complete(torch.get_device_module(device))
    return device


def _complete(module: Any) -> None:
    """What ``tests/device`` asks the simulated device and torch 2.12, for real devices and torch 2.11 as far as they say it."""
    if not hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache = getattr(torch._C, "_host_emptyCache", lambda: None)
    if hasattr(module, "counts"):
        return
    module.counts = lambda own=True: {}
    # What torch's host allocator has of the driver, cached blocks included.
    stats = getattr(module, "host_memory_stats", dict)
    module.pinned_bytes = lambda: stats().get("allocated_bytes.current", 0)


def describe(wanted: str | None) -> dict[str, Any] | None:
    """The devices of a type, or of whichever type this process has; None if there is none. Call it in a process of its own."""
    if wanted == SIMULATED:
        count = int(os.environ.get("SIMGPU_DEVICES", "2"))
        return {"type": SIMULATED, "count": count, "name": "simulated accelerator", "driver": "none"}
    if wanted == "cpu":
        return {"type": "cpu", "count": 2, "name": "CPU", "driver": "none"}
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or wanted not in (None, found.type):
        return None
    module: Any = torch.get_device_module(found)
    properties = module.get_device_properties(0) if hasattr(module, "get_device_properties") else None
    return {
        "type": found.type,
        "count": torch.accelerator.device_count(),
        "name": module.get_device_name(0) if hasattr(module, "get_device_name") else found.type,
        "driver": getattr(properties, "driver_version", None) or _kernel_driver(),
        "runtime": _runtime(),
        "memory_bytes": getattr(properties, "total_memory", None),
    }


def _runtime() -> str:
    versions = {name: getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu")}
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version) or "unknown"


def _kernel_driver() -> str:
    for path in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version", "/sys/module/nvidia/version"):
        if Path(path).is_file():
            return Path(path).read_text().splitlines()[0].strip()
    return "unknown"


def synchronize(kind: str) -> None:
    """Wait for all that this rank's device still does."""
    if kind != "cpu":
        torch.accelerator.synchronize()


def peak_bytes(device: torch.device, call: Callable[[], Any]) -> tuple[Any, int | None]:
    """What ``call`` gives, and by how much memory of tensors on the device rose meanwhile; None where nothing counts it."""
    if device.type == "cpu":
        return call(), None
    module: Any = torch.get_device_module(device)
    if hasattr(module, "peak_bytes"):  # the simulated device
        module.reset_peak(device)
        before = module.used_bytes(device)
        return call(), module.peak_bytes(device) - before
    torch.accelerator.reset_peak_memory_stats(device)
    before = _requested(device, "current")
    found, peak = call(), _requested(device, "peak")
    return found, peak - before if peak and before is not None else None


def _requested(device: torch.device, when: str) -> int | None:
    """Bytes that tensors asked of torch's allocator, without its rounding."""
    return torch.accelerator.memory_stats(device).get(f"requested_bytes.all.{when}")


def host_waits(device: torch.device, call: Callable[[], Any]) -> tuple[Any, dict[str, int] | None]:
    """What ``call`` gives, and how often the host waited meanwhile: for streams (blocking copies too), for events.

    None where nothing counts: the profiler traces CUDA and ROCm, and only where the driver lets it. It waits for the whole
    device itself, so such waits are not counted.
    """
    module: Any = torch.get_device_module(device)
    before = module.counts(own=True)
    if before:
        found, after = call(), module.counts(own=True)
        counted = {name: after[name] - before.get(name, 0) for name in after}
        streams = counted.get("waits for a stream", 0) + counted.get("waits for a copy", 0)
        return found, {"streams": streams, "events": counted.get("waits for an event", 0)}
    if device.type != "cuda":
        return call(), None
    both = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=both) as profile:
        found = call()
    return found, waits_in([event.name for event in profile.events()])


def waits_in(names: list[str]) -> dict[str, int] | None:
    """Waits among the calls of a runtime; None if the trace has no call of one."""
    if not any(name.startswith(("cudaMemcpy", "hipMemcpy")) for name in names):
        return None
    kinds = [match[1] for name in names if (match := _WAIT.fullmatch(name))]
    return {"streams": kinds.count("Stream"), "events": kinds.count("Event")}
