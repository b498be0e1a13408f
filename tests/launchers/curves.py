"""The losses of a run over all its lives, as examples/preemptible.py and examples/ray_train.py write them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Curve", "curve_of", "until_step"]


@dataclass(frozen=True, slots=True)
class Curve:
    """A run's losses."""

    losses: dict[int, float]
    """By step, of the last life that computed it."""
    lives: list[tuple[int, int]]
    """Of each life: the step from which it resumed, and its last one."""
    repeated_alike: bool
    """Whether steps that two lives computed have the same loss, bit for bit."""

    @property
    def words(self) -> str:
        return ", ".join(f"{first + 1}–{last}" if last > first else "none" for first, last in self.lives)


def curve_of(path: Path) -> Curve:
    """Read ``losses.jsonl``. A line that a kill has torn does not count."""
    losses: dict[int, float] = {}
    lives: list[tuple[int, int]] = []
    alike = True
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "resumed" in row:
            lives.append((row["resumed"], row["resumed"]))
        elif "loss" in row:
            alike = alike and losses.get(row["step"], row["loss"]) == row["loss"]
            losses[row["step"]] = row["loss"]
            lives[-1] = (lives[-1][0], row["step"])
    return Curve(losses, lives, alike)


def until_step(path: Path, step: int, *, of_life: int, timeout_s: float, said: Callable[[], str]) -> None:
    """Wait until the life has computed the step. Raises :class:`TimeoutError` with what ``said`` returns."""
    end = time.monotonic() + timeout_s
    while True:
        lives = curve_of(path).lives
        if len(lives) > of_life and lives[of_life][1] >= step:
            return
        if time.monotonic() > end:
            raise TimeoutError(f"life {of_life} did not come to step {step}: {lives}\n{said()}")
        time.sleep(0.05)
