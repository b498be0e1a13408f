"""What must hold with Accelerate and the HF Trainer where each host has a disk of its own."""

from __future__ import annotations

from collections.abc import Callable

from tests.hosts import _adapter_fns as fns
from tests.hosts.hosts import DISK, SHARED
from tests.hosts.job import Agents, Job
from tests.launchers.rows import Row

__all__ = ["ADAPTER_CASES", "IMPORTS"]

#: What takes seconds in each rank otherwise.
IMPORTS = ("shardwise.integrations.trainer", "tests.integrations._failing_saves_fns", "tests.harness.models")
_LAST = 9
_TIMEOUT_S = 120  # ranks import transformers


def local_accelerate(agents: Agents) -> Row:
    """As :func:`_killed`, with ``ShardwiseAccelerator(local=True)`` and a loop of its own."""
    return _killed(agents, "accelerate")


def local_trainer(agents: Agents) -> Row:
    """As :func:`_killed`, with ``ShardwiseTrainer(local=True)``."""
    return _killed(agents, "trainer")


def _killed(agents: Agents, adapter: str) -> Row:
    """Two ranks on two own disks, a save at each third step; all processes are killed after step 8, and the run goes on; then one
    host is away."""
    source = str(SHARED / "hub")
    if not (agents.hosts.shared / "hub").exists():
        with Job(agents, (0,), fns.write_model, source) as job:
            job.results(_TIMEOUT_S)

    def train(folder: str, *more: int, places: tuple[int, ...] = (0, 1)) -> Job:
        return Job(
            agents, places, fns.train, adapter, source, str(DISK / f"{adapter}-{folder}"), _LAST, *more
        )

    with train("whole") as job:
        whole = job.results(_TIMEOUT_S)
    with train("run", 8) as job:
        statuses = job.wait(_TIMEOUT_S)
    with train("run") as job:
        again = job.results(_TIMEOUT_S)
    with train("run", places=(0, 0)) as job:
        away = job.results(_TIMEOUT_S)
    # Trainer keeps the losses of the steps before in its state.
    same = all(
        {step: loss for step, loss in one["losses"].items() if step > 6}
        == {step: loss for step, loss in whole[0]["losses"].items() if step > 6}
        for one in again
    )
    same = same and all(one["exact"] and one["from"] == 6 for one in again)
    same = same and again[0]["digest"] == again[1]["digest"] == whole[0]["digest"]
    apart = bool(again[1]["files"]) and not any(name in again[1]["files"] for name in again[0]["files"])
    named = all("rsync -a host1:" in one.get("text", "") for one in away)
    figure = (
        f"killed {statuses}; resumed step {again[0]['from']}, losses and digest bitwise those of a run without a stop: {same}; no file "
        f"of a rank on both disks: {apart}; without host1: {away[0].get('type')} with the rsync line: {named}"
    )
    return Row(f"local=True with {adapter}, two own disks", figure, same and apart and named)


ADAPTER_CASES: list[Callable[[Agents], Row]] = [local_accelerate, local_trainer]
