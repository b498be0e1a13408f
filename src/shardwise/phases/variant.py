"""A run that can be planned: its ranks, how they are arranged, and what they do."""

from __future__ import annotations

from typing import Any

from ..objects import frozen
from ..sharding.groups import ShardPolicy
from .training import TrainingSpec

__all__ = ["Variant"]


@frozen
class Variant:
    """A run that can be planned.

    Ranks lie row-major on a mesh of replicas x shards x ``tp``, and the experts' on one of replicas x expert shards x ``ep``;
    a host has consecutive ranks. As transformers' ``DistributedConfig`` arranges them.
    """

    ranks: int
    replicas: int
    ranks_per_host: int
    policy: ShardPolicy
    training: TrainingSpec
    adapter: Any
    tp: int = 1
    ep: int = 1

    @property
    def shards(self) -> int:
        """Ranks over which FSDP2 cuts a parameter, beside what tensor parallelism cuts."""
        return self.ranks // self.replicas // self.tp

    @property
    def expert_shards(self) -> int:
        """The same of experts: expert parallelism leaves so many ranks with the same ones."""
        return self.ranks // self.replicas // self.ep if self.ep > 1 else self.shards

    @property
    def is_parallel(self) -> bool:
        """Whether tensor or expert parallelism cuts parameters."""
        return self.tp > 1 or self.ep > 1

    @property
    def is_wrapped(self) -> bool:
        """Whether FSDP2 wraps the model. transformers leaves it out where tensor parallelism takes all ranks."""
        needs = self.policy.mixed_precision is not None or self.policy.cpu_offload
        return not self.is_parallel or self.shards * self.replicas > 1 or needs

    @property
    def hosts(self) -> int:
        """Hosts over which the ranks are spread."""
        return -(-self.ranks // self.ranks_per_host)

    def check(self) -> None:
        """Raise :class:`ValueError` if the ranks can't be arranged so."""
        if self.replicas < 1 or self.ranks % self.replicas:
            raise ValueError(
                f"replicas must be at least 1 and divide the {self.ranks} ranks, got {self.replicas}"
            )
        of_replica = self.ranks // self.replicas
        if self.tp < 1 or of_replica % self.tp:
            raise ValueError(
                f"tp must be at least 1 and divide the {of_replica} ranks of a replica, got {self.tp}"
            )
        if self.ep < 1 or of_replica % self.ep or (self.ep > 1 and self.ep % self.tp):
            raise ValueError(
                f"ep must be at least 1, divide the {of_replica} ranks of a replica and be a multiple of tp = {self.tp}, "
                f"got {self.ep}"
            )
