"""Runs schedules, replays one, or looks whether schedules find errors.

    python -m tests.simulation --schedules 100000 --jobs 2
    python -m tests.simulation --seed 17 --kind run
    python -m tests.simulation --mutations 3000 --jobs 2

Prints how many schedules there were and each that broke a promise; exit status 1 if there is one.
"""

from __future__ import annotations

import argparse
import sys

from tests.simulation.many import run_many, search, simulated
from tests.simulation.schedules import KINDS, run_seed


def _replay(seed: int, kind: str) -> int:
    with simulated() as on:
        found = run_seed(on, seed, kind, traced=True)
    print("\n".join(found.trace))
    print("\n".join(found.problems) or "no promise was broken")
    return 1 if found.problems else 0


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__.split("\n")[0])
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first schedule")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, help="replay one, with its trace")
    parser.add_argument("--kind", choices=list(KINDS), default="agreement")
    parser.add_argument("--mutations", type=int, help="look for each mutation in at most so many schedules")
    parser.add_argument("--only", default="", help="mutations with this in their name")
    given = parser.parse_args(arguments)
    if given.seed is not None:
        return _replay(given.seed, given.kind)
    if given.mutations is not None:
        return search(given.mutations, given.jobs, given.only)
    return run_many(given.first, given.schedules, given.jobs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
