"""Devices of this process."""

from __future__ import annotations

import torch

__all__ = ["own_device"]


def own_device(kind: str) -> torch.device:
    """This process's current device of a type; the CPU if it has none of that type."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != kind:
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())
