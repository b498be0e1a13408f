"""Many schedules, and many mutations, in several processes."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import time
from collections.abc import Iterator

from tests.simulation.installed import Stage, installed
from tests.simulation.mutations import HARMLESS, found_at, mutations
from tests.simulation.programs import without_tensors
from tests.simulation.schedules import KINDS, Schedule, kind_and_seed, run_seed

__all__ = ["labels_of", "run_many", "search", "simulated"]

_BATCH = 200


@contextlib.contextmanager
def simulated() -> Iterator[Stage]:
    """The production code on the simulation."""
    on = Stage()
    with installed(on), without_tensors():
        yield on


def _batch(first: int, last: int) -> tuple[int, list[tuple[str, Schedule]]]:
    """How many operations the schedules of these numbers had, and those with problems."""
    operations, bad = 0, []
    gc.collect()
    gc.freeze()  # a sixth of the time went into looking through modules
    with simulated() as on:
        for number in range(first, last):
            kind, seed = kind_and_seed(number)
            found = run_seed(on, seed, kind)
            operations += found.operations
            if found.problems:
                bad.append((kind, found))
    return operations, bad


def labels_of(schedules: int) -> set[str]:
    """The kinds of messages and calls in the first schedules."""
    labels: set[str] = set()
    with simulated() as on:
        for number in range(schedules):
            kind, seed = kind_and_seed(number)
            run_seed(on, seed, kind, labels=labels)
    return labels


def run_many(first: int, count: int, jobs: int) -> int:
    """Run schedules by number, and print those that broke a promise. Returns the exit status."""
    started, operations, bad = time.monotonic(), 0, 0
    each = dict.fromkeys(KINDS, 0)
    starts = range(first, first + count, _BATCH)
    ends = [(s, min(s + _BATCH, first + count)) for s in starts]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        # In order, so that each line that is printed tells of all schedules up to a number.
        for done, (some, found) in enumerate(pool.imap(_pair, ends), 1):
            operations += some
            bad += len(found)
            begin, end = ends[done - 1]
            for number in range(begin, end):
                each[kind_and_seed(number)[0]] += 1
            for kind, one in found:
                print(f"--seed {one.seed} --kind {kind}: {one.problems[0]}", flush=True)
            if done % 25 == 0 or done == len(ends):
                print(
                    f"{first} to {end - 1}: {end - first} schedules ({each}), {operations} operations, "
                    f"{time.monotonic() - started:.0f} s: {bad} broke a promise",
                    flush=True,
                )
    return 1 if bad else 0


def _pair(ends: tuple[int, int]) -> tuple[int, list[tuple[str, Schedule]]]:
    return _batch(*ends)


def _look_for(
    name: str, index: int, labels: frozenset[str], schedules: int
) -> tuple[str, tuple[str, int, str] | None]:
    mutation = mutations(set(labels))[index]
    assert mutation.name == name
    gc.collect()
    gc.freeze()
    with simulated() as on:
        return name, found_at(on, mutation, schedules)


def search(schedules: int, jobs: int, only: str) -> int:
    """Look for each mutation, and print which schedule finds it. Returns the exit status."""
    labels = frozenset(labels_of(2000))
    chosen = [(m.name, k) for k, m in enumerate(mutations(set(labels))) if only in m.name]
    missed = []
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        looks = [pool.apply_async(_look_for, (name, k, labels, schedules)) for name, k in chosen]
        for look in looks:
            name, found = look.get()
            if found is None:
                missed.append(name)
            missed_why = HARMLESS.get(name, "NOT FOUND")
            where = missed_why if found is None else f"--kind {found[0]} --seed {found[1]}: {found[2][:90]}"
            print(f"{name:75} {where}", flush=True)
    print(
        f"{len(chosen) - len(missed)} of {len(chosen)} mutations found within {schedules} schedules; not found: {missed}"
    )
    return 0
