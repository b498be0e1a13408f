"""A training state of a few kilobytes whose values say which step, of which line, they are of; what ranks do with it."""

from __future__ import annotations

import contextlib
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.errors import RankError, ShardwiseError
from shardwise.publish import write as direct
from shardwise.publish import write as slice_file
from tests.faults.calls import Hook, watched
from tests.harness.logged import warnings_logged

__all__ = ["Attempt", "Found", "Tiny", "attempt", "find", "publish", "step_path"]

#: How long ranks wait for one that is gone: long for a busy machine, short for hundreds of instants.
TIMEOUT_S = 3.0
IO = sw.IOOptions(timeout_s=TIMEOUT_S)


class _Weights(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.first = nn.Linear(columns, rows)
        self.second = nn.Linear(rows, columns, bias=False)
        self.register_buffer("running_mean", torch.zeros(5))


class Tiny:
    """Sharded weights with AdamW, a buffer, an extra of each rank's own, and RNG. Sizes that no world size divides."""

    def __init__(self, line: int = 0, rows: int = 37) -> None:
        # A few kilobytes are written as gigabytes are: past the page cache, by a thread, in several buffers.
        slice_file.LARGE_BYTES, direct.BUFFER_BYTES = 0, 4096
        self.line = line
        self.model = _Weights(rows, rows + 4)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        extra = {"line": line, "of rank": self._of_rank(0)}
        self.state = sw.TrainState(model=self.model, optimizer=self.optimizer, extra=extra)

    @torch.no_grad()
    def set_values(self, step: int) -> None:
        for k, parameter in enumerate(self.model.parameters()):
            parameter.fill_(self._value(step, k))
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(step)),
                "exp_avg": torch.full_like(parameter, -self._value(step, k)),
                "exp_avg_sq": torch.full_like(parameter, 2 * self._value(step, k)),
            }
        self.model.running_mean.fill_(step)
        self.optimizer.param_groups[0]["lr"] = float(step)
        self.state.extra |= {"line": self.line, "of rank": self._of_rank(step)}
        torch.manual_seed(self._seed(step))
        random.seed(self._seed(step))

    def differences(self, step: int) -> list[str]:
        """What is not as this step, of the line that the checkpoint names, saved it."""
        self.line = int(self.state.extra["line"])
        wrong = []

        def expect(what: str, found: object, expected: object) -> None:
            if found != expected:
                wrong.append(f"step {step}: {what} is {found}, expected {expected}")

        for k, (name, parameter) in enumerate(self.model.named_parameters()):
            value, state = self._value(step, k), self.optimizer.state[parameter]
            for what, tensor, expected in (
                ("weights", parameter, value),
                ("exp_avg", state["exp_avg"], -value),
                ("exp_avg_sq", state["exp_avg_sq"], 2 * value),
            ):
                assert isinstance(tensor, DTensor)
                expect(f"{name} {what}", set(tensor._local_tensor.flatten().tolist()), {expected})
            expect(f"{name} step", state["step"].item(), float(step))
        expect("buffer", self.model.running_mean.tolist(), [float(step)] * 5)
        expect("lr", self.optimizer.param_groups[0]["lr"], float(step))
        expect("extra", self.state.extra["of rank"], self._of_rank(step))
        generator = torch.Generator().manual_seed(self._seed(step))
        expect("torch's RNG", torch.rand(1).item(), torch.rand(1, generator=generator).item())
        expect("python's RNG", random.random(), random.Random(self._seed(step)).random())
        return wrong

    def _value(self, step: int, k: int) -> float:
        return step + 1000 * self.line + k / 8

    def _of_rank(self, step: int) -> list[int]:
        return [dist.get_rank(), step, self.line]

    def _seed(self, step: int) -> int:
        return 100 * step + 10 * self.line + dist.get_rank()


def step_path(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def publish(root: Path, steps: tuple[int, ...], line: int = 0) -> None:
    """Publish steps of a new run. On every rank."""
    run = Tiny(line)
    with sw.Checkpointer(root, io=IO) as checkpoints:
        for step in steps:
            run.set_values(step)
            checkpoints.save(run.state, step)


# ----------------------------------------------------------------------------------------------- a save


@dataclass(frozen=True, slots=True)
class Attempt:
    """How a call ended on a rank that lived to tell."""

    outcome: str
    """``done``, or the type of the error."""
    text: str = ""
    missing: tuple[int, ...] = ()
    causes: tuple[int, ...] = ()
    """Ranks that the error names with a cause."""
    warnings: tuple[str, ...] = ()

    @property
    def is_done(self) -> bool:
        return self.outcome == "done"

    def names(self, rank: int) -> bool:
        return rank in self.missing or rank in self.causes


def outcome_of(call: Callable[[], object]) -> Attempt:
    """Run it. Errors that are not ours are a finding: their outcome starts with ``raw``."""
    with warnings_logged() as texts:
        try:
            call()
        except RankError as error:
            causes = tuple(error.causes)
            return Attempt("RankError", str(error), tuple(error.missing), causes, tuple(texts))
        except ShardwiseError as error:
            return Attempt(type(error).__name__, str(error), warnings=tuple(texts))
        except Exception as error:
            return Attempt(f"raw {type(error).__name__}", traceback.format_exc(), warnings=tuple(texts))
    return Attempt("done", warnings=tuple(texts))


def attempt(
    root: Path,
    mode: str,
    hooks: dict[int, Hook],
    *,
    step: int = 2,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
    keep_last: int = 1,
    rows: int = 37,
    io: sw.IOOptions = IO,
) -> Attempt:
    """Resume the step before, and save ``step`` with this rank's hook around every call that changes the directory.

    ``before`` runs on every rank ahead of the save, and ``after`` behind it, with all ranks waiting.
    """
    run = Tiny(rows=rows)
    rank = dist.get_rank()
    with contextlib.ExitStack() as stack:
        checkpoints = sw.Checkpointer(root, keep_last=keep_last, mode=mode, io=io)  # type: ignore[arg-type]
        stack.callback(checkpoints.close)
        report = checkpoints.resume(run.state)
        assert report is not None
        assert report.step == step - 1, report
        run.set_values(step)
        checkpoints.prepare(run.state)
        if before is not None:
            before()
        dist.barrier()
        hook = hooks.get(rank)
        with watched(root, hook) if hook is not None else contextlib.nullcontext():
            result = outcome_of(lambda: (checkpoints.save(run.state, step), checkpoints.wait()))
        if after is not None:
            after()
    return result


# --------------------------------------------------------------------------------------------- afterwards


@dataclass(frozen=True, slots=True)
class Found:
    """What fresh ranks find in a directory."""

    step: int | None
    line: int = 0
    error: str = ""
    """Of a resume that raised an error of ours: its type and text."""
    damaged: dict[int, str] = field(default_factory=dict)
    superseded: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    """Whatever must not be: other values, a step that does not verify, leftovers, a next save that fails."""


def find(
    root: Path, *, verifies: bool = True, saves_next: bool = True, line: int = 0, own_root: Path | None = None
) -> Found:
    """Resume, compare every value, verify the step, look for leftovers and save the next step. On every rank.

    ``own_root`` is where this rank sees the directory; ``line`` that of the next step.
    """
    run = Tiny()
    report = None

    def resume() -> None:
        nonlocal report
        report = checkpoints.resume(run.state)

    try:
        checkpoints = sw.Checkpointer(own_root or root, keep_last=1, io=IO)
    except ShardwiseError as error:
        return Found(None, error=f"{type(error).__name__}: {error}")
    with checkpoints:
        result = outcome_of(resume)
        if not result.is_done:
            return Found(None, error=f"{result.outcome}: {result.text}", warnings=result.warnings)
        if report is None:
            return Found(None)
        wrong = run.differences(report.step)
        dist.barrier()
        if dist.get_rank() == 0:
            wrong += sw.verify(report.path).problems if verifies else []
            wrong += [f"leftover {p.name}" for p in root.iterdir() if p.name.startswith((".tmp", ".trash"))]
        dist.barrier()
        found_line = run.line
        if saves_next:
            run.line = line or run.line
            wrong += _save_next(run, checkpoints, report.step + 1)
    return Found(
        report.step,
        found_line,
        damaged=dict(report.damaged),
        superseded=tuple(report.superseded),
        warnings=result.warnings,
        wrong=tuple(wrong),
    )


def _save_next(run: Tiny, checkpoints: sw.Checkpointer, step: int) -> list[str]:
    run.set_values(step)
    result = outcome_of(lambda: checkpoints.save(run.state, step))
    if not result.is_done:
        return [f"the next save failed: {result.text}"]
    problems: list[str] = []
    if dist.get_rank() == 0:
        problems = list(sw.verify(step_path(Path(checkpoints.root), step)).problems)
    dist.barrier()
    return problems
