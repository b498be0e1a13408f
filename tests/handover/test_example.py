"""examples/rl_handover.py: the reward rises, an engine is killed, and the trainer resumes on other ranks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.handover.chaos import free_port
from tests.harness.process import Process, kill_all, spawn, worker_env


@pytest.mark.nightly
def test_the_reward_rises_whoever_is_killed(tmp_path: Path) -> None:
    out, port = tmp_path / "out", str(free_port())
    started: list[Process] = []

    def start(role: str, world: int, steps: int) -> list[Process]:
        store = tmp_path / f"store-{len(started)}"
        own = ("--out", str(out), "--steps", str(steps), "--port", port)
        found = [
            spawn(
                "tests.handover._example",
                *(str(rank), str(world), str(store), role, *own),
                log=tmp_path / f"{role}.log",
                env=worker_env(),
            )
            for rank in range(world)
        ]
        started.extend(found)
        return found

    def logs() -> str:
        return "\n".join(f"---- {path.name}\n{path.read_text()[-4000:]}" for path in tmp_path.glob("*.log"))

    def until(steps: int) -> list[float]:
        end = time.monotonic() + 90
        while time.monotonic() < end:
            rewards = [float(line.split()[1]) for line in _lines(out / "rewards.txt")]
            if len(rewards) >= steps:
                return rewards
            time.sleep(0.05)
        raise AssertionError(f"step {steps} did not come\n{logs()}")

    try:
        trainer, engine = start("trainer", 2, 100), start("engine", 1, 100)
        until(4)
        kill_all(engine)
        engine = start("engine", 2, 100)
        until(8)
        kill_all(trainer)
        saved = len(_lines(out / "rewards.txt"))
        trainer = start("trainer", 3, saved + 8)
        rewards = until(saved + 8)
        for one in (*trainer, *engine):
            assert one.wait(60) == 0, logs()
    finally:
        kill_all(started)
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 2


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
