"""The records of a plan by phases. Bytes are those of the rank that holds most, rank 0."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from ..objects import frozen

__all__ = ["Amount", "Checkpoint", "Files", "Flow", "Phase", "RunPlan", "Where"]

Where = Literal["device", "host", "page cache"]


@frozen
class Amount:
    """One part of the memory of a phase, at its peak."""

    what: str
    where: Where
    nbytes: int
    upper_bytes: int
    """The upper end of the error bar."""
    formula: str
    """How the number comes about."""


@frozen
class Phase:
    """One phase of a run: what a rank holds at its peak."""

    name: str
    amounts: tuple[Amount, ...]

    def nbytes(self, where: Where) -> int:
        """Bytes of all amounts at one place."""
        return sum(a.nbytes for a in self.amounts if a.where == where)

    def upper_bytes(self, where: Where) -> int:
        """The same at the upper ends of the error bars."""
        return sum(a.upper_bytes for a in self.amounts if a.where == where)


@frozen(kw_only=True)
class Checkpoint:
    """What one save stores."""

    nbytes: int
    """Payload over all ranks: parameters, buffers, optimizer state; replicas once."""
    files: int
    seconds: float
    """At the bandwidth of :class:`TrainingSpec`."""
    requests: int
    """Writes of parts to an object store: each file's parts, and one that begins and one that ends it."""


@frozen
class Flow:
    """Bytes over the network in one step, for one purpose."""

    what: str
    rank_bytes: int
    """What each rank receives from other ranks."""
    node_bytes: int
    """What each node receives from other nodes."""
    formula: str


@frozen
class Files:
    """What a phase reads from the storage of models and checkpoints, or writes to it."""

    phase: str
    verb: Literal["reads", "writes"]
    rank_bytes: int
    """Of the rank with most."""
    node_bytes: int
    """Of all ranks of a node."""
    total_bytes: int
    seconds: float
    """Of all ranks together, at the bandwidth of :class:`TrainingSpec`."""


@frozen(kw_only=True)
class RunPlan:
    """What a training run takes on each rank, by phases."""

    phases: tuple[Phase, ...]
    nodes: int
    """Hosts of the run."""
    ranks_per_host: int
    is_unified: bool
    """Whether device and host are one pool of memory."""
    largest_gather_bytes: int
    """Buffer of FSDP2's largest all-gather, with its padding, in the dtype of the forward."""
    largest_reduce_bytes: int
    """Input of FSDP2's largest reduce-scatter, in the dtype of the reduction."""
    network: tuple[Flow, ...]
    """Bytes over the network in one step, by their purpose."""
    files: tuple[Files, ...]
    """Bytes of files, by phase."""
    checkpoint: Checkpoint
    assumptions: tuple[str, ...]
    """What the numbers rest on, and a plan can't see."""

    def phase(self, name: str) -> Phase:
        """The phase of this name. Raises :class:`KeyError`."""
        return {p.name: p for p in self.phases}[name]

    @property
    def network_bytes_per_step(self) -> int:
        """Bytes that a rank receives from other ranks in one step."""
        return sum(flow.rank_bytes for flow in self.network)

    @property
    def node_bytes_per_step(self) -> int:
        """Bytes that a node receives from other nodes in one step."""
        return sum(flow.node_bytes for flow in self.network)

    @property
    def device_bytes(self) -> int:
        """Device memory of a rank at the upper end of the error bar, in the phase that needs most."""
        return max(self.needed(p)[0] for p in self.phases)

    @property
    def host_bytes(self) -> int:
        """Host memory of all ranks of a host at the upper end of the error bar, in the phase that needs most."""
        return max(self.needed(p)[1] for p in self.phases)

    def needed(self, phase: Phase) -> tuple[int, int]:
        """Upper bounds of a phase: of the device of a rank, and of the host of ``ranks_per_host`` ranks, without page cache.

        One pool of memory counts as the host's; each rank's share of it is then the first number, too.
        """
        device, host = phase.upper_bytes("device"), phase.upper_bytes("host")
        if self.is_unified:
            return device + host, (device + host) * self.ranks_per_host
        return device, host * self.ranks_per_host

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        document = asdict(self)
        for phase, entry in zip(self.phases, document["phases"], strict=True):
            entry["device_upper_bytes"], entry["host_upper_bytes"] = self.needed(phase)
        return document | {
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "network_bytes_per_step": self.network_bytes_per_step,
            "node_bytes_per_step": self.node_bytes_per_step,
        }
