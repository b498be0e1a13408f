"""The host that ``shardwise plan`` runs on: its memory, and what a load would take of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from ..models.host_budget import HostBudget, host_budget
from ..objects import frozen
from ..phases.report import PlanReport
from ..transfer.page_cache import shares_memory

__all__ = ["ThisHost", "nodes_like_this", "this_host"]


@frozen(kw_only=True)
class ThisHost:
    """The memory of this host, and the need of a load whose ranks run here."""

    budget: HostBudget
    ranks: int
    """Ranks of the load that run on one host."""
    device: str
    """Type of the devices that a load here fills."""
    needed_bytes: int
    """Host memory of these ranks at the peak of the load, without what their processes take before it."""

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.budget.free_bytes

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "fits": self.fits}


def nodes_like_this(ranks: int) -> int:
    """How many hosts with the devices of this one ``ranks`` need, a device each; 1 where there are no devices."""
    if torch.accelerator.current_accelerator(check_available=True) is None:
        return 1
    return -(-ranks // torch.accelerator.device_count())


def this_host(report: PlanReport, ranks: int) -> ThisHost | None:
    """The need of ``ranks`` ranks of a planned load on this host; None if the system does not report its memory."""
    budget = host_budget()
    if budget is None:
        return None
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ThisHost(
        budget=budget,
        ranks=ranks,
        device="cpu" if accelerator is None else accelerator.type,
        needed_bytes=report.host_bytes(ranks, shards=accelerator is None or shares_memory(accelerator)),
    )
