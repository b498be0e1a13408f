"""The training that a plan is made for: :class:`TrainingSpec`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["OPTIMIZERS", "Device", "Optimizer", "TrainingSpec"]

Optimizer = Literal["adamw", "adamw8bit", "sgd", "momentum"]
Device = Literal["cuda", "unified", "cpu"]

#: States of an optimizer, each of the parameter's shape: how many, and bytes of each element (None: the parameter's dtype).
OPTIMIZERS: dict[str, tuple[int, float | None]] = {
    "adamw": (2, None),
    "adamw8bit": (2, 1 + 4 / 256),
    "sgd": (0, None),
    "momentum": (1, None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """Describe how a run trains the model, for :func:`shardwise.plan`. Set dtypes and offload with ``policy=`` and ``dtype=``."""

    batch_size: int = 1
    """Samples per rank in one forward."""
    sequence_length: int = 2048
    """Tokens per sample."""
    optimizer: Optimizer = "adamw"
    """``adamw``: two moments in the parameter's dtype. ``adamw8bit``: torchao's, with one byte per element and a scale per block of 256.
    ``sgd``: no state. ``momentum``: SGD with one state."""
    checkpointing: bool = False
    """Activation checkpointing of each block, as with ``gradient_checkpointing_enable``."""
    device: Device = "cuda"
    """Where the shards are. ``unified``: a device that shares the host's memory (GB10, Grace). ``cpu``: no device."""
    max_staging_bytes: int | None = None
    """Staging limit of an async ``Checkpointer``. None: the rank's complete state."""
    bytes_per_s: float = 1e9
    """Total bandwidth of the checkpoint storage for all ranks, in bytes per second."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "sequence_length", "bytes_per_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.max_staging_bytes is not None and self.max_staging_bytes < 1:
            raise ValueError(f"max_staging_bytes must be at least 1 or None, got {self.max_staging_bytes}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}")
        if self.device not in ("cuda", "unified", "cpu"):
            raise ValueError(f"device must be 'cuda', 'unified' or 'cpu', got {self.device!r}")
