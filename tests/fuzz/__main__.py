"""Run the fuzzer: ``python -m tests.fuzz --seconds 60``, ``--inputs 1000000``, or ``--replay TARGET NUMBER --seed S``.

Every run begins with the corpus: inputs that were findings once (``tests/fuzz/corpus``, and the bombs of
:mod:`tests.fuzz.bombs`). ``--keep DIR`` writes each new kind of finding there as an archive.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import importlib
import json
import logging
import math
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import tests.fuzz.peers  # noqa: F401  # registers targets
from tests.fuzz import bombs, inputs
from tests.fuzz.bombs import BOMBS
from tests.fuzz.guard import CPU_S, WALL_S, Guard
from tests.fuzz.seeds import make_seeds
from tests.fuzz.targets import TARGETS, Seeds

_BATCH = 2000
_CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.tar.xz"))
#: A child gets the next batch of a target until the target has had its share.
_STATUS = struct.Struct("<qddd")  # number, CPU seconds and wall clock at its start, inputs done


def main() -> int:
    """Exit status 0: no finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="time for all targets together")
    parser.add_argument(
        "--inputs", type=int, default=None, help="this many inputs instead, however long that takes"
    )
    parser.add_argument("--seed", type=int, default=0, help="another seed makes other inputs")
    parser.add_argument("--first", type=int, default=0, help="number of each target's first input")
    parser.add_argument(
        "--target", action="append", choices=sorted(TARGETS), help="only these, without the corpus"
    )
    parser.add_argument(
        "--keep", type=Path, help="write an archive of each new kind of finding into this directory"
    )
    parser.add_argument(
        "--replay", nargs=2, metavar=("TARGET", "NUMBER"), help="one input, with its traceback"
    )
    options = parser.parse_args()
    _quiet()
    inputs.prepare()
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None, prefix="fuzz-") as root:
        seeds = make_seeds(Path(root) / "seeds")
        if options.replay:
            return _replay(options.replay[0], int(options.replay[1]), options.seed, seeds, Path(root))
        return _Campaign(options, seeds, Path(root)).run()


def _quiet() -> None:
    """One thread, one malloc arena (the address space is limited), no warnings and no log lines of a million inputs."""
    import torch

    # PEFT imports these when it meets the first adapter; they open libraries and write the environment.
    for name in ("bitsandbytes", "peft.helpers"):
        importlib.import_module(name)
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-8, 1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)


def _input(target: str, number: int, seed: int, seeds: Seeds, place: Path) -> Callable[[], object]:
    """Write an input into ``place``. The call that reads it."""
    shutil.rmtree(place.parent, ignore_errors=True)
    place.mkdir(parents=True)
    if target == "bombs":
        make, call = list(BOMBS.values())[number]
        make(seeds, place)
        return partial(call, place)
    if target == "corpus":
        path = _CORPUS[number]
        with tarfile.open(path) as archive:
            # It holds links and pipes, and is ours. Python 3.11.2 has no filters.
            archive.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
            archive.extractall(place)
        name, call_number, *_ = path.name.rsplit("-", 3)
        return partial(TARGETS[name].calls[int(call_number)], place)
    found = TARGETS[target]
    found.make(random.Random(f"{seed}/{target}/{number}"), seeds, place)
    return partial(found.calls[number % len(found.calls)], place)


def _replay(target: str, number: int, seed: int, seeds: Seeds, root: Path) -> int:
    work = _input(target, number, seed, seeds, root / "input" / "place")
    guard = Guard(str(root))

    def shown() -> None:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            raise

    finding = guard.run(shown)
    print(finding or "no finding")
    return 1 if finding else 0


class _Campaign:
    """All targets in turn, a batch each, until time or inputs are used up."""

    def __init__(self, options: argparse.Namespace, seeds: Seeds, root: Path) -> None:
        self.options, self.seeds, self.root = options, seeds, root
        self.names = options.target or list(TARGETS)
        self.done: Counter[str] = Counter()
        self.spent_s: Counter[str] = Counter()
        self.next = dict.fromkeys(self.names, options.first)
        self.findings: dict[tuple[str, str], list[int]] = {}

    def run(self) -> int:
        started = time.monotonic()
        if self.options.target is None:
            self._all_of("bombs", len(BOMBS))
            self._all_of("corpus", len(_CORPUS))
            started = time.monotonic()
        weights = {name: TARGETS[name].weight for name in self.names}
        total = sum(weights.values())
        said = started
        while True:
            if time.monotonic() - said > 60:
                said = time.monotonic()
                print(
                    f"{sum(self.done[n] for n in self.names)} inputs after {said - started:.0f} s", flush=True
                )
            elapsed = time.monotonic() - started
            if self.options.inputs is None and elapsed >= self.options.seconds:
                break
            if (
                self.options.inputs is not None
                and sum(self.done[n] for n in self.names) >= self.options.inputs
            ):
                break
            # The target that is furthest behind its share.
            name = min(self.names, key=lambda n: self.done[n] / weights[n])
            short = self.options.inputs is None and self.options.seconds < 600  # every target gets its turn
            count = max(4, int((_BATCH // 10 if short else _BATCH) * weights[name] / 90))
            if self.options.inputs is not None:
                count = min(count, math.ceil(self.options.inputs * weights[name] / total))
            left = None if self.options.inputs is not None else self.options.seconds - elapsed
            self._batch(name, count, left)
        self._print(time.monotonic() - started)
        return 1 if self.findings else 0

    def _all_of(self, name: str, count: int) -> None:
        self.next[name] = 0
        while self.next[name] < count:
            self._batch(name, count - self.next[name], None)

    def _batch(self, name: str, count: int, seconds: float | None) -> None:
        first, began = self.next[name], time.monotonic()
        shared = mmap.mmap(-1, 4096)
        shared[: _STATUS.size] = _STATUS.pack(first - 1, 0.0, time.monotonic(), 0)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _child(name, first, count, seconds, self, shared, writer)
        os.close(writer)
        stuck = self._watch(child, shared)
        with os.fdopen(reader, "rb") as stream:
            lines = stream.read().splitlines()
        number, _, _, done = _STATUS.unpack(shared[: _STATUS.size])
        for line in lines:
            found = json.loads(line)
            self._add(name, found["finding"], found["number"])
        if stuck is not None:
            self._add(name, stuck, int(number))
            done += 1
        self.next[name] = int(number) + 1
        self.done[name] += int(done)
        self.spent_s[name] += time.monotonic() - began  # type: ignore[assignment]

    def _add(self, name: str, finding: str, number: int) -> None:
        kind = finding.split(": ")[0]
        kind = kind if kind.startswith(("raw", "time", "memory", "hang")) else finding[:60]
        if name == "bombs":
            kind = f"{list(BOMBS)[number]}: {kind}"
        if name == "corpus":
            kind = f"{_CORPUS[number].name}: {kind}"
        key = (name, kind)
        if key not in self.findings:
            print(f"FINDING {name} {number} (seed {self.options.seed}): {finding}", flush=True)
            if self.options.keep is not None and name in TARGETS:
                self._keep(name, number)
        self.findings.setdefault(key, []).append(number)

    def _keep(self, name: str, number: int) -> None:
        """The input as an archive, which can hold links and pipes."""
        place = self.root / "kept" / "place"
        _input(name, number, self.options.seed, self.seeds, place)
        call = number % len(TARGETS[name].calls)
        self.options.keep.mkdir(parents=True, exist_ok=True)
        with tarfile.open(
            self.options.keep / f"{name}-{call}-{self.options.seed}-{number}.tar.xz", "w:xz"
        ) as archive:
            archive.add(place, ".")
        shutil.rmtree(place.parent)

    def _watch(self, child: int, shared: mmap.mmap) -> str | None:
        """Wait for the child. What was wrong if it had to be killed, or died."""
        ticks = os.sysconf("SC_CLK_TCK")
        while True:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return None if status == 0 else f"the process died with status {status}"
            time.sleep(0.05)
            number, cpu, wall, _ = _STATUS.unpack(shared[: _STATUS.size])
            try:
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            spent = (int(fields[11]) + int(fields[12])) / ticks - cpu
            if number >= 0 and (spent > 2 * CPU_S + 2 or time.monotonic() - wall > WALL_S):
                os.kill(child, signal.SIGUSR1)  # its stack, on stderr
                time.sleep(0.2)
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                kind = "time" if spent > 2 * CPU_S + 2 else "hang"
                return f"{kind}: no end after {spent:.0f} s of CPU, {time.monotonic() - wall:.0f} s"

    def _print(self, seconds: float) -> None:
        names = [*self.names, *(n for n in ("bombs", "corpus") if n in self.next)]
        width = max(map(len, names))
        print(f"\n{'target'.ljust(width)}   inputs  findings  inputs/s")
        for name in names:
            found = sum(len(numbers) for (n, _), numbers in self.findings.items() if n == name)
            rate = self.done[name] / self.spent_s[name] if self.spent_s[name] else 0.0
            print(f"{name.ljust(width)}  {self.done[name]:7}  {found:8}  {rate:8.0f}")
        total = sum(self.done.values())
        print(
            f"\n{total} inputs over {len(self.names)} targets in {seconds:.0f} s ({total / max(seconds, 0.001):.0f} inputs/s): "
            f"{len(self.findings)} kinds of findings"
        )
        for (name, text), numbers in sorted(self.findings.items()):
            print(
                f"  {name}: {len(numbers)} × {text}  (python -m tests.fuzz --seed {self.options.seed} --replay {name} {numbers[0]})"
            )


def _child(
    name: str,
    first: int,
    count: int,
    seconds: float | None,
    campaign: _Campaign,
    shared: mmap.mmap,
    writer: int,
) -> None:
    """Run inputs one after another; never returns. Ends early where memory grew too much for the next one."""
    status = 1
    try:
        faulthandler.register(signal.SIGUSR1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        limits = {"cpu_s": bombs.CPU_S, "memory_bytes": bombs.MEMORY_BYTES} if name == "bombs" else {}
        guard = Guard(str(campaign.root), **limits)
        deadline = None if seconds is None else time.monotonic() + seconds
        place = campaign.root / "input" / "place"
        done = 0
        for number in range(first, first + count):
            # Before the input is made: where making it fails, the next child begins after it.
            shared[: _STATUS.size] = _STATUS.pack(number, time.process_time(), time.monotonic(), done)
            try:
                work = _input(name, number, campaign.options.seed, campaign.seeds, place)
            except (RecursionError, ValueError, TypeError):
                continue  # a mutation that no file can hold
            shared[: _STATUS.size] = _STATUS.pack(number, time.process_time(), time.monotonic(), done)
            finding = guard.run(work)
            done += 1
            shared[: _STATUS.size] = _STATUS.pack(number, time.process_time(), time.monotonic(), done)
            if finding is not None:
                os.write(writer, (json.dumps({"number": number, "finding": finding}) + "\n").encode())
            if guard.is_spent or (deadline is not None and time.monotonic() > deadline):
                break
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
