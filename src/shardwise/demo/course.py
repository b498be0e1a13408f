"""The course of a demo: its lengths, its steps, and the paths of its files."""

from __future__ import annotations

from math import lcm
from pathlib import Path

from ..objects import frozen
from .prepare import Prepared

__all__ = ["Course"]

_MIN_BATCH = 24


@frozen
class Course:
    """The length of the run, the step of the kill, and the paths of its files."""

    out: Path
    """A local directory."""
    checkpoints: str
    """The directory or URL of the checkpoints."""
    model: Prepared
    ranks: int
    steps: int

    @property
    def save_every(self) -> int:
        return max(1, self.steps // 8)

    @property
    def kill_step(self) -> int:
        """The sixth save: after several good ones, and not at the start of the second pass over the pairs."""
        return 6 * self.save_every

    @property
    def kill_rank(self) -> int:
        return min(1, self.ranks - 1)

    @property
    def batch_size(self) -> int:
        """Rows of the global batch. Both starts use it, so both numbers of ranks must divide it."""
        unit = lcm(self.ranks, self.ranks + 1)
        return unit * -(-_MIN_BATCH // unit)

    @property
    def pairs(self) -> int:
        """Number of training pairs. The run sees each pair twice, and its loss falls in the second pass."""
        return self.batch_size * self.pass_steps

    @property
    def pass_steps(self) -> int:
        """Steps in one pass over the pairs."""
        return -(-self.steps // 2)

    @property
    def held_out(self) -> Path:
        return self.out / "held-out.json"
