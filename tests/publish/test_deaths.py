"""Ranks killed in the middle of a step in memory, memory that is full, partners that are slow: never a wrong bit, and training goes on."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.harness.launch import Launch
from tests.publish import _death_fns as deaths
from tests.publish import _memory_fns as fns

RANKS = 4
#: Places of :data:`_death_fns.PLACES`: the step that a resume takes if no host is lost, and those that it may take if the victim's host
#: is lost, too. In the last three the other hosts go on without the victim: their copies are those of step 4, or of step 6.
NEWEST: dict[str, tuple[int, dict[str, set[int]]]] = {
    "in the copy": (4, {"own": {4}}),
    "before hashing": (4, {"own": {4}}),
    "before the manifest": (4, {"own": {4, 3}, "all": {4}}),
    "before copies are received": (6, {"own": {6, 3}, "all": {6, 4}}),
    "while copies are received": (6, {"own": {6, 3}, "all": {6, 4}}),
}


def killed_at(tmp_path: Path, name: str, place: str, **options: str) -> tuple[Path, Path]:
    """A run whose victim was killed at a place, its other ranks after it: directory of its steps, and of its hosts."""
    root, hosts = tmp_path / f"{name}-run", tmp_path / f"{name}-hosts"
    with Launch(RANKS, deaths.die, str(root), str(hosts), place, options) as job:
        job.wait_for_output(deaths.VICTIM, "here")
        job.kill(deaths.VICTIM)
        assert job.wait(30, ranks=[deaths.VICTIM]) == [-signal.SIGKILL]
    return root, hosts


@pytest.mark.slow
def test_a_rank_killed_at_any_place_of_a_step(ranks, tmp_path):
    """Then all hosts are there, or that of the victim is lost, too; with ``during_copies="all"``, the loss costs no step in memory."""
    cases, expected = [], []
    for place, (newest, after_loss) in NEWEST.items():
        for during, allowed in after_loss.items():
            root, hosts = killed_at(tmp_path, f"{len(cases)}", place, during_copies=during)
            again = tmp_path / f"{len(cases)}-lost"
            fns.copied(root, hosts, again / "run", again / "hosts")
            shutil.rmtree(again / "hosts" / f"host-{deaths.VICTIM}")
            cases += [(str(root), str(hosts)), (str(again / "run"), str(again / "hosts"))]
            expected += [(place, during, {newest}), (place, during, allowed)]
    every = ranks.run_ranks(RANKS, fns.resume_each, cases)
    for found, (place, during, allowed) in zip(zip(*every, strict=True), expected, strict=True):
        assert len(set(found)) == 1, (place, during, found)
        step, from_memory, label = found[0]
        assert (step in allowed, from_memory, label) == (True, step != 3, True), (place, during, found)


@pytest.mark.nightly
def test_several_ranks_on_a_host(ranks, tmp_path):
    """Two hosts of two ranks: either may be lost."""
    root, hosts = tmp_path / "run", tmp_path / "hosts"
    ranks.run_ranks(RANKS, fns.train, str(root), str(hosts), per_host=2)
    cases = []
    for lost in ((), (0,), (1,), (0, 1)):
        again = tmp_path / f"lost-{len(cases)}"
        fns.copied(root, hosts, again / "run", again / "hosts")
        for host in lost:
            shutil.rmtree(again / "hosts" / f"host-{host}")
        cases.append((str(again / "run"), str(again / "hosts"), 2))
    every = ranks.run_ranks(RANKS, fns.resume_each, cases)
    assert [set(found) for found in zip(*every, strict=True)] == [{(6, True, True)}] * 3 + [
        {(3, False, True)}
    ]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts a small tmpfs, as root")
@pytest.mark.parametrize(
    ("size", "newest", "is_full_later", "resumed", "warning"),
    [
        ("1m", None, False, 1, "step 2 is not kept in memory"),  # no room for a slot
        ("3m", 2, False, 2, "step 2 in memory lacks copies"),  # for a slot, but for no copy
        ("6m", 2, False, 2, "step 4 is not kept in memory"),  # for a slot and a copy
        (
            "6m",
            2,
            True,
            1,
            "step 4 is not kept in memory",
        ),  # and later not even for the documents of a resume
        ("10m", 8, False, 8, None),  # for all
    ],
)
def test_full_memory_costs_one_warning(tmp_path, size, newest, is_full_later, resumed, warning):
    """Training goes on, steps on disk are sound, and a resume that finds no room for documents takes the step on disk. Slices of other
    hosts take no room."""
    root, hosts = tmp_path / "run", tmp_path / "hosts"
    with Launch(2, deaths.full, str(root), str(hosts), {1: size}, is_full_later) as job:
        assert job.wait(120) == [0, 0], job.output(0) + job.output(1)
        results = [job.result(rank) for rank in range(2)]
    assert [one["newest"] for one in results] == [newest] * 2
    assert [one["resumed"] for one in results] == [resumed] * 2
    assert all(one["is_sound"] for one in results)
    said = [t for t in results[0]["said"] if "memory" in t and not t.startswith(("skipping", "restored"))]
    assert len(said) == (warning is not None), said
    for text in said:
        assert text.startswith(str(warning)), text
        assert "no room for" in text, text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slow", "newest", "warning"),
    [
        (1, [2, 4, 6, 8], "step 4 in memory lacks copies: rank 1's on host host-0"),
        (
            0,
            [2, 4, 6, 8],
            "step 4 in memory lacks copies: rank 0's on host host-1",
        ),  # the manifest comes through the store
    ],
)
def test_a_slow_host_costs_its_copies_and_no_time_of_training(ranks, tmp_path, slow, newest, warning):
    root, hosts = str(tmp_path / "run"), str(tmp_path / "hosts")
    found = ranks.run_ranks(2, deaths.beside_a_slow_partner, root, hosts, slow)
    assert [one["newest"] for one in found] == [newest] * 2
    assert max(s for one in found for s in one["seconds"]) < 1.0, found
    said = [text for text in found[0]["said"] if "in memory" in text]
    assert len(said) == 1, said
    assert said[0].startswith(warning), said


def test_a_tier_that_cannot_begin_leaves_no_server_open(ranks, tmp_path):
    assert ranks.run_ranks(2, deaths.refused, str(tmp_path / "run"), str(tmp_path / "hosts")) == [0, 0]
