"""What ``sw.plan(…, training=…)`` says that each phase of a run takes, against what CPU ranks really take.

    OMP_NUM_THREADS=1 python benchmarks/phases.py
    OMP_NUM_THREADS=1 python benchmarks/phases.py --short
    OMP_NUM_THREADS=1 python benchmarks/phases.py --only moe hsdp
    OMP_NUM_THREADS=1 python benchmarks/phases.py --only dense --allow 0.8     # that limits bind: killed
    OMP_NUM_THREADS=1 python benchmarks/phases.py --stored a.json b.json       # what two runs with --json come to, planned anew

Real transformers models train under gloo, save in both modes, export, and resume, in fresh processes. ``measured``: the most anonymous
memory of any rank in the phase, beside what its process held before it had a model; looked at every 2 ms, and by the kernel's own mark
of resident memory, which misses nothing. glibc would keep freed memory for later, at most a few tens of MiB, so the ranks run with
MALLOC_MMAP_THRESHOLD_=65536 and MALLOC_TRIM_THRESHOLD_=0, which give it back at once. ``activations``: of a step of the unsharded model
in one process that drops each gradient at once, beside its parameters; with tensor or expert parallelism in as many processes as these
need, without FSDP2.

In each phase the ranks may hold, all together, what the plan says at most, beside what their processes held before: in a cgroup, where
the kernel kills a rank that wants more; where none can be made, a rank ends itself when it holds more than its own part. The exit status
is 1 if a rank is killed, a phase took more than the upper end of its prediction's error bar, or a prediction is wrong by more than 5 %
(activations: 15 %); ``--short`` tells of it alone, because noise counts for much in tiny models.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import peft
import torch
import torch.distributed as dist
import transformers

import shardwise as sw
from benchmarks.fresh import from_fresh_process, in_fresh_process, on_fresh_ranks
from benchmarks.loading.counters import charged_bytes, marked
from benchmarks.memory_limit import MemoryLimit, limited_memory
from benchmarks.phase_cases import CASES, SHORT, Case, write, write_tiny
from benchmarks.phase_layouts import Layout
from benchmarks.phase_plans import planned_phases
from benchmarks.phase_summary import ACTIVATIONS, PHASES, broken, summary, table

MIB = 2**20
_GLIBC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}


def main() -> None:
    """Measure and print; exit status 1 if a contract is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="two tiny models")
    parser.add_argument(
        "--only",
        nargs="+",
        default=(),
        metavar="TEXT",
        help="cases of these names, or whose names contain one",
    )
    parser.add_argument("--allow", type=float, default=1.0, help="so much of what a plan says at most")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--table", action="store_true", help="the table of docs/notes/measurements.md, too")
    parser.add_argument(
        "--stored",
        nargs="+",
        type=Path,
        metavar="JSON",
        help="no runs: what these measured, the later ones before the earlier, against plans as they are now",
    )
    args = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in _GLIBC.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **_GLIBC})
    wanted = [c for c in CASES if not args.short or c.name in SHORT]
    if args.only:
        wanted = [c for text in args.only for c in CASES if text == c.name]
        wanted = wanted or [c for c in CASES if any(text in c.name for text in args.only)]
    stored = None if args.stored is None else _by_case(args.stored)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as root:
        for case in wanted:
            if stored is None:
                rows += _rows(case, root, args.allow, short=args.short)
            elif case.name in stored:
                rows += _planned_anew(case, root, stored[case.name])
            if args.json:  # after each case, so that a run that is ended leaves what it measured
                args.json.write_text(json.dumps(rows, indent=1))
    print("\n\n".join([table(rows), summary(rows)] if args.table else [summary(rows)]))
    sys.exit(1 if broken(rows) and not args.short else 0)


def _rows(case: Case, root: str, allow: float, *, short: bool) -> list[dict[str, Any]]:
    """Plan and run one case; prints a line for each phase."""
    path = f"{root}/{case.model}"
    if not os.path.isdir(path):
        in_fresh_process(lambda: write(path, case.model, is_short=short))
    planned = from_fresh_process(planned_phases, path, case)
    allowed = {phase: int(planned[phase]["upper"] * allow) for phase in PHASES}
    killed, ranks = _limited_run(case, path, f"{root}/run", allowed)
    measured = {phase: max(rank[phase] for rank in ranks) for phase in PHASES}
    if case.is_parallel:
        measured[ACTIVATIONS] = max(on_fresh_ranks(max(case.tp, case.ep), _parallel_activations, path, case))
    else:
        measured[ACTIVATIONS] = from_fresh_process(_activations, path, case)
    shutil.rmtree(f"{root}/run", ignore_errors=True)
    rows = []
    for phase in (*PHASES, ACTIVATIONS):
        row = {"case": case.name, "phase": phase, "measured": measured[phase], **planned[phase]}
        row["error"], row["killed"] = row["planned"] / row["measured"] - 1, killed
        rows.append(row)
        note = "  TOO LOW" if row["measured"] > row["upper"] else ""
        print(
            f"{case.name:40} {phase:12} planned {row['planned'] / MIB:7.0f}  at most {row['upper'] / MIB:7.0f}  "
            f"measured {row['measured'] / MIB:7.0f} MiB  {row['error']:+6.1%}{note}",
            flush=True,
        )
    return rows


def _by_case(files: list[Path]) -> dict[str, dict[str, dict[str, Any]]]:
    """The rows of earlier runs, by case and phase. Those of a later file replace the case's earlier ones."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for file in files:
        rows = json.loads(file.read_text())
        found |= {
            name: {r["phase"]: r for r in rows if r["case"] == name} for name in {r["case"] for r in rows}
        }
    return found


def _planned_anew(case: Case, root: str, stored: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """What was measured of a case, beside its plan as it is now.

    A limit that has become lower since was not tried: such a case counts as killed.
    """
    path = f"{root}/{case.model}"
    if not os.path.isdir(path):
        in_fresh_process(lambda: write(path, case.model, is_short=False))
    planned, rows = from_fresh_process(planned_phases, path, case), []
    for phase, old in stored.items():
        row = old | planned[phase]
        row["error"] = row["planned"] / row["measured"] - 1
        row["killed"] = old["killed"] or (phase in PHASES and row["upper"] < old["upper"])
        rows.append(row)
    return rows


def _limited_run(
    case: Case, path: str, place: str, allowed: dict[str, int]
) -> tuple[bool, list[dict[str, int]]]:
    """Whether a rank was killed because it took more than allowed, and what each rank took: then in a run without a limit."""
    with limited_memory() as limit:
        try:
            ranks = _both(_Job(path, case, place, allowed, limit))
        except SystemExit as ended:
            print(
                f"{case.name:40} KILLED: {ended}, {limit.kills() if limit else 'by its own account'}",
                flush=True,
            )
        else:
            return False, ranks
    shutil.rmtree(place, ignore_errors=True)
    return True, _both(_Job(path, case, place))


def _both(job: _Job) -> list[dict[str, int]]:
    """The run, and its resume in other processes."""
    ranks, resumed = (on_fresh_ranks(job.case.ranks, work, job) for work in (_run, _resume))
    return [first | second for first, second in zip(ranks, resumed, strict=True)]


# ----------------------------------------------------------------------------------------------------
# Measured


def _activations(path: str, case: Case) -> int:
    """The most anonymous memory of a step of the unsharded model beside its parameters, without whole gradients."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    config = transformers.AutoConfig.from_pretrained(path)
    made = getattr(transformers, config.architectures[0]).from_pretrained(path, dtype=case.compute)
    run = _Run(None, path, case)
    run.use(made if case.adapter() is None else peft.get_peft_model(made, case.adapter()))
    return _peak_of_activations(run)


def _parallel_activations(rank: int, world_size: int, path: str, case: Case) -> int:
    """The same on one of the ranks over which tensor and expert parallelism cut the model, without FSDP2."""
    warnings.simplefilter("ignore")
    run = _Run(Layout(replace(case, ranks=world_size)), path, case)
    run.use(run.layout.cut(run.layout.built(path, case.compute)))
    sw.load(run.model, path)
    return _peak_of_activations(run)


def _peak_of_activations(run: _Run) -> int:
    for parameter in run.model.parameters():
        # Norms keep theirs: transformers' tensor parallelism sums some of them in a hook that comes later.
        if parameter.requires_grad and parameter.ndim > 1:
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    ids = run.ids()
    run.backward(ids)  # what is imported, started and compiled once
    gc.collect()
    before = charged_bytes()
    with marked() as peak:
        run.backward(ids)
    return peak.nbytes - before


class _Phases:
    """Runs phases one after the other, and keeps the peak of each above what the process held before."""

    def __init__(self, rank: int, allowed: dict[str, int] | None, limit: MemoryLimit | None) -> None:
        self.peaks: dict[str, int] = {}
        self._rank, self._allowed, self._limit = rank, allowed, limit
        gc.collect()
        dist.barrier()
        self._before, self._all_before = charged_bytes(), 0 if limit is None else limit.held_bytes()
        dist.barrier()

    def run(self, name: str, work: Callable[[], Any]) -> None:
        """One phase, with no more memory than is allowed for it. Collective."""
        gc.collect()
        dist.barrier()
        most = None
        if self._allowed is not None and self._limit is None:
            most = self._before + self._allowed[name]
        elif self._allowed is not None and self._limit is not None and self._rank == 0:
            self._limit.set(self._all_before + dist.get_world_size() * self._allowed[name])
        dist.barrier()
        with marked(most) as peak:
            work()
            dist.barrier()
        self.peaks[name] = max(1, peak.nbytes - self._before)


@dataclass(frozen=True, slots=True)
class _Job:
    """What the ranks of a case do, and under which limit."""

    path: str
    case: Case
    root: str
    allowed: dict[str, int] | None = None
    limit: MemoryLimit | None = None

    def begin(self, rank: int) -> tuple[_Run, _Phases]:
        warnings.simplefilter("ignore")
        if self.limit is not None:
            self.limit.join()
        layout = Layout(self.case)
        _train_tiny(layout, self.case)
        run = _Run(layout, self.path, self.case)
        return run, _Phases(rank, self.allowed, self.limit)


def _run(rank: int, world_size: int, job: _Job) -> dict[str, int]:
    """One rank: all phases but the resume."""
    run, phases = job.begin(rank)
    root = job.root
    phases.run("load", run.load)
    phases.run("first step", run.step)
    phases.run("steady state", run.steady_step)
    phases.run("save, sync", lambda: sw.save(run.state(), f"{root}/sync"))
    with sw.Checkpointer(f"{root}/async", mode="async") as run.checkpoints:
        phases.run("save, async", run.save_and_step)
    run.checkpoints = None  # and its staging
    phases.run("export", lambda: sw.export_hf(run.model, f"{root}/export"))
    return phases.peaks


def _resume(rank: int, world_size: int, job: _Job) -> dict[str, int]:
    """One rank of the processes that go on."""
    run, phases = job.begin(rank)
    phases.run("resume", lambda: run.resume(f"{job.root}/sync"))
    return phases.peaks


class _Run:
    def __init__(self, layout: Any, path: str, case: Case) -> None:
        self.layout, self.path, self.case = layout, path, case
        self.model: Any = None
        self.optimizer: Any = None
        self.checkpoints: Any = None

    def ids(self) -> torch.Tensor:
        return torch.randint(0, 1000, (self.case.batch, self.case.tokens))

    def load(self) -> None:
        self.use(self.layout.loaded(self.path, self.case))

    def use(self, model: Any) -> None:
        self.model = model
        self.model.train()
        if self.case.checkpointing:
            if self.case.lora:
                self.model.enable_input_require_grads()
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = {
            "adamw": lambda: torch.optim.AdamW(trained),
            "sgd": lambda: torch.optim.SGD(trained, lr=1e-3),
            "momentum": lambda: torch.optim.SGD(trained, lr=1e-3, momentum=0.9),
        }[self.case.optimizer]()

    def state(self) -> sw.TrainState:
        return sw.TrainState(model=self.model, optimizer=self.optimizer)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward(self.ids())
        self.optimizer.step()

    def backward(self, ids: torch.Tensor) -> None:
        self.model(input_ids=ids, labels=ids, **self._more()).loss.backward()

    def steady_step(self) -> None:
        for _ in range(self.case.steps_before_steady + 1):
            self.step()

    def save_and_step(self) -> None:
        self.checkpoints.save(self.state(), 1)
        self.step()
        self.checkpoints.wait()

    def _more(self) -> dict[str, Any]:
        return {} if self.case.model == "encoder" else {"use_cache": False}

    def resume(self, path: str) -> None:
        self.load()
        sw.restore(self.state(), path)


def _train_tiny(layout: Layout, case: Case) -> None:
    """All phases once, so that what is imported and started only once is there before."""
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as own:
        found = [own]
        dist.broadcast_object_list(found, src=0)
        root = found[0]
        if dist.get_rank() == 0:
            write_tiny(f"{root}/tiny", with_experts=case.ep > 1)
        dist.barrier()
        run = _Run(layout, f"{root}/tiny", Case("tiny", tp=case.tp, ep=case.ep, batch=1, tokens=8))
        run.load()
        run.step()
        sw.save(run.state(), f"{root}/sync")
        with sw.Checkpointer(f"{root}/async", mode="async") as checkpoints:
            checkpoints.save(run.state(), 1)
            run.step()
        sw.export_hf(run.model, f"{root}/export")
        run.resume(f"{root}/sync")
        dist.barrier()


if __name__ == "__main__":
    main()
