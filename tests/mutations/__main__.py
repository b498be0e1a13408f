"""``python -m tests.mutations``: is each mutation of the table caught by one of its tests?

For each mutation this copies ``src/shardwise``, changes the copy, and runs the mutation's tests on it with pytest, in a fork
that has imported torch but nothing of ours. The copy comes first in the path, and in the PYTHONPATH that ranks get. A test
that fails or hangs has caught the mutation. First all tests of the table run once on an unchanged copy: one that fails there
proves nothing.

``--only TEXT`` tries the mutations whose path, tests or description contain TEXT, ``--sample N --seed S`` some of them,
``--jobs N`` at a time (default: one for each core), ``--trust`` leaves out the run on the unchanged copy. The exit
status is 1 if a mutation survived, or if the table is wrong.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutations.table import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "shardwise"
#: More than pytest's own limit for a test.
LIMIT_S = 240.0
CAUGHT, SURVIVED, WRONG = "caught", "SURVIVED", "WRONG"


@dataclass(frozen=True, slots=True)
class Run:
    """The outcome of one run of pytest: its status (None: it was stopped), and what the guard says of it."""

    status: int | None
    collected: tuple[str, ...]
    broken: tuple[str, ...]
    failed: tuple[str, ...]
    output: str

    @property
    def verdict(self) -> str:
        """Whether a mutation was caught: only by a test that was collected and failed, or that did not end."""
        if self.status is None or (self.status == 1 and not self.broken):
            return CAUGHT
        return SURVIVED if self.status == 0 else WRONG

    @property
    def first(self) -> str:
        """The test that failed."""
        if self.status is None:
            return "did not end"
        return self.failed[0] if self.failed else "-"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Try seeded mutations: each must be caught by a test.")
    parser.add_argument("--only", metavar="TEXT", help="those whose path, tests or description contain TEXT")
    parser.add_argument("--sample", type=int, metavar="N", help="so many of them")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="so many at a time"
    )
    parser.add_argument("--trust", action="store_true", help="don't run the tests on an unchanged copy first")
    options = parser.parse_args(argv)
    chosen = _chosen(options.only, options.sample, options.seed)
    if not chosen:
        print(f"no mutation contains {options.only!r}", file=sys.stderr)
        return 1
    started = time.monotonic()
    _preload()
    problems = [] if options.trust else _problems_without(chosen)
    for problem in problems:
        print(f"{WRONG}: {problem}", flush=True)
    if problems:
        return 1
    if not options.trust:
        print(f"the tests pass without mutations: {time.monotonic() - started:.0f} s", flush=True)
    rooms: Counter[str] = Counter()
    bad = 0
    for mutation, run, seconds in _try_all(chosen, options.jobs):
        _print(mutation, run, seconds)
        rooms[mutation.room] += 1
        bad += run.verdict != CAUGHT
    print(", ".join(f"{room} {count}" for room, count in rooms.items()))
    minutes = (time.monotonic() - started) / 60
    print(f"{len(chosen) - bad} of {len(chosen)} mutations caught, {minutes:.1f} minutes", flush=True)
    return int(bad > 0)


def _chosen(only: str | None, sample: int | None, seed: int) -> list[Mutation]:
    found = [m for m in MUTATIONS if only is None or only in " ".join((m.path, m.about, *m.caught_by))]
    if sample is None or sample >= len(found):
        return found
    return [found[k] for k in sorted(random.Random(seed).sample(range(len(found)), sample))]


def _print(mutation: Mutation, run: Run, seconds: float) -> None:
    where = mutation.path.partition("/")[2] or mutation.path
    what = f"{where}: {mutation.about}"
    print(f"{run.verdict:8}  {mutation.room:12}  {what:78}  {seconds:5.1f} s  {run.first}", flush=True)
    if run.verdict == WRONG:
        print(run.output, flush=True)


def _problems_without(chosen: Sequence[Mutation]) -> list[str]:
    """A line for each test of the table that is not there, or does not pass on an unchanged copy."""
    tests = list(dict.fromkeys(test for mutation in chosen for test in mutation.caught_by))
    whole = {test for test in tests if "::" not in test}
    asked = [test for test in tests if test in whole or test.partition("::")[0] not in whole]
    trial = Trial(asked, ("--maxfail=1000",), LIMIT_S * len(asked))
    trial.start()
    while (run := trial.ended()) is None:
        time.sleep(0.5)
    found = [f"{name} can't be collected" for name in run.broken]
    found += [f"{name} fails without a mutation" for name in run.failed]
    found += [
        f"{test}: `make test` has no such test"
        for test in tests
        if not any(name == test or name.startswith((f"{test}::", f"{test}[")) for name in run.collected)
    ]
    if run.status != 0 and not found:
        found.append(f"pytest ended with status {run.status}")
    return [*found, run.output] if found else []


def _try_all(chosen: Sequence[Mutation], jobs: int) -> Iterator[tuple[Mutation, Run, float]]:
    """Each mutation, its outcome and its seconds, as they end. All forks are of this thread: it holds no lock of another one."""
    waiting = deque(chosen)
    running: list[tuple[Mutation, float, Trial]] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                mutation = waiting.popleft()
                running.append((mutation, time.monotonic(), _try(mutation)))
            for item in list(running):
                mutation, began, trial = item
                if (run := trial.ended()) is not None:
                    running.remove(item)
                    yield mutation, run, time.monotonic() - began
            time.sleep(0.05)
    finally:
        for _, _, trial in running:
            trial.stop()


def _try(mutation: Mutation) -> Trial:
    trial = Trial(mutation.caught_by, ("-x",), LIMIT_S)
    file = trial.copy / mutation.path
    file.write_text(mutation.mutated(file.read_text(encoding="utf-8")), encoding="utf-8")
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()
    trial.start()
    return trial


class Trial:
    """One run of pytest on tests of ``make test`` and a copy of the package, as ``python -m pytest`` would, in a fork of this process.

    The copy stays in a folder of its own. Its compiled files stay valid: a copy keeps the times of its source.
    """

    def __init__(self, tests: Sequence[str], options: Sequence[str], limit_s: float) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mutation-"))
        self.copy = self.folder / "src" / "shardwise"
        shutil.copytree(SOURCE, self.copy)
        self.arguments = ["-q", "-p", "no:cacheprovider", "-p", "tests.mutations.guard"]
        self.arguments += ["-m", "not slow and not nightly"]
        # Plugins that torch or transformers imported before: no test of ours is in them.
        self.arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        self.arguments += ["--hypothesis-seed=0", f"--basetemp={self.folder / 'tmp'}", *options, *tests]
        self.limit_s = limit_s
        self.child = 0

    def start(self) -> None:
        """Fork."""
        sys.stdout.flush()
        self.end = time.monotonic() + self.limit_s
        self.child = os.fork()
        if not self.child:
            status = 3
            try:
                status = _in_child(self.copy, self.arguments)
            except BaseException:
                traceback.print_exc()
            finally:  # nothing of the parent's is run or written a second time
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)

    def ended(self) -> Run | None:
        """What came of it; None while it runs. Past its limit it is killed."""
        found, status = os.waitpid(self.child, os.WNOHANG)
        if not found and time.monotonic() <= self.end:
            return None
        if not found:
            os.killpg(self.child, signal.SIGKILL)
            os.waitpid(self.child, 0)
        self.child = 0
        report, log = self.folder / "report.json", self.folder / "log"
        said = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
        collected, broken, failed = (tuple(said.get(name, ())) for name in ("collected", "broken", "failed"))
        output = log.read_text(encoding="utf-8", errors="replace")[-6000:]
        shutil.rmtree(self.folder, ignore_errors=True)
        return Run(os.waitstatus_to_exitcode(status) if found else None, collected, broken, failed, output)

    def stop(self) -> None:
        """Kill it, if it still runs."""
        if self.child:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child, signal.SIGKILL)
            os.waitpid(self.child, 0)
            shutil.rmtree(self.folder, ignore_errors=True)


def _in_child(copy: Path, arguments: list[str]) -> int:
    """Run pytest on the copy: it comes first in this process's path, and in that of processes which tests start."""
    os.setsid()
    folder = copy.parents[1]
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    given = os.environ.get("PYTHONPATH")
    os.environ |= {
        "PYTHONPATH": os.pathsep.join([str(copy.parent), *([given] if given else [])]),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),
        "SHARDWISE_MUTATED": str(copy),
        "SHARDWISE_MUTATION_REPORT": str(folder / "report.json"),
    }
    sys.path.insert(0, str(copy.parent))
    return int(pytest.main(arguments))


#: They take seconds to import; neither shardwise nor the tests are among them.
PRELOADED = (
    *("torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.utils.data", "safetensors.torch"),
    *("transformers", "hypothesis.strategies", "click.testing", "rich.console"),
)


def _preload() -> None:
    """Do once what every run needs: each run of pytest is a fork of this process."""
    os.chdir(ROOT)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    compileall.compile_dir(SOURCE, quiet=1)
    for name in PRELOADED:
        importlib.import_module(name)
    assert not any(name.partition(".")[0] == "shardwise" for name in sys.modules)


if __name__ == "__main__":
    sys.exit(main())
