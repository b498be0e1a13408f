"""Which ranks can share memory, and which collectives their process group has."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.devices import own_device

__all__ = ["device_of_group", "host_key"]


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
