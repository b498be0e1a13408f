"""Steps in memory: any hosts lost, any bit flipped, another number of ranks; the newest step that is held whole wins."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from shardwise.format.manifest import rank_of_file
from tests.publish import _memory_fns as fns

RANKS = 4


def lose(hosts: Path, killed: tuple[int, ...]) -> None:
    for rank in killed:
        shutil.rmtree(hosts / f"host-{rank}")


def is_held(killed: tuple[int, ...]) -> bool:
    """With two copies a slice is lost when its host and the next one are."""
    return not any(rank in killed and (rank + 1) % RANKS in killed for rank in range(RANKS))


SUBSETS = [c for n in range(RANKS + 1) for c in itertools.combinations(range(RANKS), n)]


def test_a_host_brings_what_its_ranks_read(ranks, tmp_path):
    """Rank 1's host is lost: rank 1 brings its slices and documents from where they were copied; the others what it wrote for all."""
    root, hosts = tmp_path / "run", tmp_path / "hosts"
    ranks.run_ranks(3, fns.train, str(root), str(hosts))
    lose(hosts, (1,))
    found = ranks.run_ranks(3, fns.brought, str(root), str(hosts))
    assert [step for step, _ in found] == [6] * 3
    of_rank_1 = [{name for name in names if rank_of_file(name) == 1} for _, names in found]
    folders = [{name.partition("/")[0] for name in names} for names in of_rank_1]
    # Rank 1 also wrote a buffer that all have; host 2 has the copies.
    assert folders == [{"model"}, {"model", "optimizer", "rank"}, set()]


@pytest.mark.parametrize("lost", [(), (1,)])
def test_a_step_after_a_resume_by_fewer_ranks_is_held(ranks, tmp_path, lost):
    """Hosts then make copies of other ranks than before, and have files that the step does not name."""
    root, hosts = tmp_path / "run", tmp_path / "hosts"
    ranks.run_ranks(3, fns.train, str(root), str(hosts))
    left = ranks.run_ranks(2, fns.resumed_and_kept, str(root), str(hosts))
    assert [(step, newest) for step, newest, _ in left] == [(6, 8)] * 2
    assert [held for _, _, held in left] == [{1}, {0}], "copies that a host does not make any more are gone"
    for host in range(2):
        (held,) = hosts.glob(f"host-{host}/shardwise-*/held-0")
        (held / "manifest.json.0a1b2c3d").write_text("of a rank that was killed while it wrote")
    lose(hosts, lost)
    assert ranks.run_ranks(2, fns.resume, str(root), str(hosts)) == [(8, True, True)] * 2


@pytest.mark.parametrize("nbytes", [30, 1_000_000])
def test_bytes_that_arrive_damaged_come_again(ranks, tmp_path, nbytes):
    """Also those of plain buffers, of which no digest is compared: ranks may hold different ones."""
    root, hosts = tmp_path / "run", tmp_path / "hosts"
    ranks.run_ranks(3, fns.train, str(root), str(hosts))
    lose(hosts, (1,))
    found = ranks.run_ranks(3, fns.damaged_on_the_way, str(root), str(hosts), nbytes)
    assert found == [(6, True, True)] * 3


def test_a_step_that_not_all_ranks_keep(ranks, tmp_path):
    """The copy does not wait for the other ranks: what it writes over is never the newest step. Errors are alike on all ranks."""
    root, hosts, kept = tmp_path / "run", tmp_path / "hosts", tmp_path / "kept"
    both = ranks.run_ranks(2, fns.beside_others, str(root), str(hosts), str(kept))
    assert both[0] == both[1]
    first, busy, newest, differ, odd, without, still, last = both[0]
    assert (first, busy, newest, without, still, last) == (True, 0, 2, 0, 2, True)
    assert differ[0] == "StateError"
    assert "ranks hold different values of optimizer" in differ[1]
    assert odd[0] == "RankError"
    assert "extra.odd" in odd[1]
    lose(kept / "hosts", (1,))  # only rank 0 had begun to copy step 4
    found = ranks.run_ranks(2, fns.resume_each, [(f"{kept}/run", f"{kept}/hosts"), (str(root), str(hosts))])
    assert found == [[(2, True, True), (12, True, True)]] * 2


def test_interrupted_while_other_ranks_are_late(ranks, tmp_path):
    """The thread beside the copy uses the ranks of the caller's thread until they have compared: Ctrl-C waits for that."""
    first, second = ranks.run_ranks(2, fns.interrupted, str(tmp_path / "run"), str(tmp_path / "hosts"))
    assert (first[0], second[0]) == ("interrupted", True)
    assert first[1:] == second[1:] == [2, True, 6, []]


def test_a_step_on_its_way_is_given_up_by_a_resume_of_an_older_one(ranks, tmp_path):
    root, hosts = tmp_path / "run", tmp_path / "hosts"
    assert ranks.run_ranks(2, fns.resumed_beside, str(root), str(hosts)) == [(3, None, [])] * 2


def test_a_resume_from_memory_past_a_damaged_step(ranks, tmp_path):
    root, hosts = tmp_path / "run", tmp_path / "hosts"
    assert ranks.run_ranks(2, fns.past_damage, str(root), str(hosts)) == [[2, True, [3], []]] * 2
    assert [path.name[:22] for path in root.glob("step-*")] == ["step-00000003.damaged-"]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [RANKS, 3])
def test_every_subset_of_hosts_lost(ranks, tmp_path, world_size):
    root, hosts = tmp_path / "run", tmp_path / "hosts"
    trained = ranks.run_ranks(RANKS, fns.train, str(root), str(hosts))
    assert [one["newest"] for one in trained] == [6] * RANKS
    cases = []
    for number, killed in enumerate(SUBSETS):
        again, left = tmp_path / f"run-{number}", tmp_path / f"hosts-{number}"
        fns.copied(root, hosts, again, left)
        lose(left, killed)
        cases.append((str(again), str(left)))
    every = ranks.run_ranks(world_size, fns.resume_each, cases)
    for found, killed in zip(zip(*every, strict=True), SUBSETS, strict=True):
        held = is_held(killed + tuple(range(world_size, RANKS)))
        assert set(found) == {(6 if held else 3, held, True)}, killed


@pytest.mark.slow
def test_a_flipped_bit_in_every_copy(ranks, tmp_path):
    """Each file of each slot of each host in turn, then all copies of a file: never a wrong bit, and memory as long as one copy is left."""
    root, hosts = tmp_path / "run", tmp_path / "hosts"
    ranks.run_ranks(RANKS, fns.train, str(root), str(hosts))
    files = sorted(
        p.relative_to(hosts)
        for slot in ("own-0", "own-1", "held-0")
        for p in hosts.glob(f"host-*/shardwise-*/{slot}/**/*")
        if p.is_file()
    )
    by_name: dict[str, list[Path]] = {}
    for file in files:
        by_name.setdefault("/".join(file.parts[3:]), []).append(file)
    one_copy = [[file] for file in files]
    cases = []
    for number, flipped in enumerate([*one_copy, *by_name.values()]):
        again, left = tmp_path / f"run-{number}", tmp_path / f"hosts-{number}"
        fns.copied(root, hosts, again, left)
        for file in flipped:
            host, _, *rest = file.parts  # a copy has a ring of its own
            (there,) = left.glob("/".join((host, "shardwise-*", *rest)))
            flip(there, number)
        cases.append((str(again), str(left)))
    every = ranks.run_ranks(RANKS, fns.resume_each, cases)
    for number, found in enumerate(zip(*every, strict=True)):
        assert set(found) == {(6 if number < len(one_copy) else 3, number < len(one_copy), True)}, cases[
            number
        ]


def flip(file: Path, number: int) -> None:
    content = bytearray(file.read_bytes())
    content[number * 977 % len(content)] ^= 1 << number % 8
    file.write_bytes(content)
