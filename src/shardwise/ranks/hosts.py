"""Which ranks can share memory, and which collectives their process group has."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.devices import own_device
from shardwise.errors import StateError

__all__ = ["device_of_group", "device_where_ranks_sum", "host_key"]


def host_key() -> str:
    """Equal on two ranks if they can open each other's memory by process id: same system, same process ids, same user."""
    try:
        system = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        processes = os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # not Linux
        return f"{socket.gethostname()} {os.getpid()}"
    return f"{system} {processes} {os.getuid()}"


def device_of_group(preferred: torch.device) -> torch.device | None:
    """A device of this process on which the default process group has collectives; ``preferred`` if that is one.

    None if this process has no such device.
    """
    kinds = [part.partition(":")[0] for part in str(dist.get_backend_config()).split(",")]
    if preferred.type in kinds:
        return preferred
    return next((own for own in map(own_device, kinds) if own.type in kinds), None)


def device_where_ranks_sum(device: torch.device) -> torch.device:
    """``device`` if the default process group supports it, else this process's device of a supported type. Raises
    :class:`StateError` if this process has none."""
    found = device_of_group(device)
    if found is None:
        raise StateError(
            f"the default process group ({dist.get_backend_config()}) works on devices that this process does not have; "
            f"the tensors are on {device.type}. Start the group with a backend for {device.type}"
        )
    return found
