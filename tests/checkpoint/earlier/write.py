"""Writes the checkpoints of this folder with an earlier shardwise, and what that restores of them.

    git worktree add /tmp/earlier COMMIT
    PYTHONPATH=/tmp/earlier/src:. python -m tests.checkpoint.earlier.write tests/checkpoint/earlier/COMMIT

Further arguments choose kinds. Makes ``COMMIT/<kind>.tar.gz`` and ``COMMIT/expected.json``.
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

import shardwise as sw
from tests.checkpoint.earlier import runs
from tests.harness.pool import RankPool


def save(root: str, kind: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Train and save. Gives what was saved, what comes next, and what the run is after two more steps."""
    run = runs.build(kind, seed=1)
    runs.scramble(3)
    local: dict[str, Any] = {"local": True} if kind == "parts" else {}
    place = Path(root, f"host-{dist.get_rank()}") if local else root
    with sw.Checkpointer(place, mode=run.mode, **local) as checkpoints:  # type: ignore[arg-type]
        runs.train(run, runs.STEPS, spare_gradients=kind == "tied")
        checkpoints.save(run.state, runs.STEPS)
        checkpoints.wait()
    return runs.content(run), runs.to_come(run), after(run)


def resume(root: str, kind: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Resume in a new run. Gives the report, and what ``save`` gives."""
    run = runs.build(kind, seed=99)
    runs.scramble(55)
    with sw.Checkpointer(root) as checkpoints:
        report = checkpoints.resume(run.state)
    assert report is not None
    return report.to_json(), runs.content(run), runs.to_come(run), after(run)


def after(run: runs.Run) -> dict[str, Any]:
    """The run after two more steps."""
    losses = runs.train(run, 2)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, losses)
    return {**runs.content(run), "losses": found}


def where() -> str:
    """The shardwise of the ranks."""
    return str(sw.__file__)


def _merge(root: Path) -> None:
    """The parts of the hosts into one directory, as a copy does it."""
    for host in sorted(root.glob("host-*")):
        (step,) = host.glob("step-*")
        shutil.copytree(step, root / step.name, dirs_exist_ok=True)
        shutil.rmtree(host)


def main(out: Path, kinds: list[str]) -> None:
    """Write and resume every kind, or these."""
    out.mkdir(parents=True)
    expected: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        pool = RankPool(Path(folder))
        print(f"written by {pool.run_ranks(1, where)[0]}")
        for kind in kinds or runs.KINDS:
            root = Path(folder) / kind
            saved = pool.run_ranks(2, save, str(root), kind)
            _merge(root)
            expected[kind] = {"content": saved[0][0], "to come": [rank[1] for rank in saved]}
            _pack(root, out / f"{kind}.tar.gz")
            for world_size in (2, 3):
                resumed = pool.run_ranks(world_size, resume, str(root), kind)
                report, content, to_come, _ = resumed[0]
                assert content == saved[0][0], (kind, world_size)
                assert to_come["samples"] == saved[0][1]["samples"], (kind, world_size)
                told = {
                    k: report[k]
                    for k in ("exact", "differences", "caveats", "rng", "tensors", "optimizer_tensors")
                }
                print(f"{kind}, {world_size} ranks: {told}")
                if world_size == 2:
                    assert [rank[2:] for rank in resumed] == [rank[1:] for rank in saved], kind
                    assert report["exact"], kind
                expected[kind][f"{world_size} ranks"] = {
                    k: report[k] for k in ("tensors", "optimizer_tensors", "digest")
                }
        pool.close()
    (out / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


def _pack(root: Path, archive: Path) -> None:
    with tarfile.open(archive, "w:gz", compresslevel=9) as tar:
        for path in sorted(root.iterdir()):
            if path.name != ".lock":  # names the host
                tar.add(path, arcname=path.name, filter=_anonymous)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    from tests.checkpoint.earlier import write  # the ranks import its functions by the name of their module

    write.main(Path(sys.argv[1]), sys.argv[2:])
