"""``sw.reports.memory_ledger``: its peaks against the kernel's, its phases, its cost, and what a killed or forked process leaves."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.errors import CheckpointError
from shardwise.operations import operation as recorder
from shardwise.operations.host_budget import cgroups_with
from shardwise.operations.ledger import _SHARE, _Counts, _Pace
from tests.harness import models
from tests.harness.on_ranks import on_ranks
from tests.operations._child import TAKEN_BYTES


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def child(place: Path, *more: object, status: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.operations._child", str(place), *map(str, more)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done.stdout


@pytest.fixture
def cgroup() -> Iterator[Path | None]:
    """A cgroup that counts memory, below this process's own; None where none can be made."""
    for version, level in cgroups_with("memory"):
        place = level / f"shardwise-test-{os.getpid()}"
        try:
            place.mkdir()
        except OSError:
            continue
        if (place / ("memory.current" if version == 2 else "memory.usage_in_bytes")).exists():
            break
        place.rmdir()
    else:
        yield None
        return
    yield place
    with contextlib.suppress(OSError):
        place.rmdir()


@pytest.mark.processes
def test_its_peaks_are_the_kernels_within_two_percent(tmp_path: Path, cgroup: Path | None) -> None:
    """The highest look against VmHWM, and against the peak of a cgroup of the process's own where one can be made."""
    told = json.loads(child(tmp_path, *([] if cgroup is None else [cgroup])))
    found = records(Path(told["file"]))
    end = found[-1]
    assert end["kind"] == "end"
    assert end["peak_resident_bytes"] == pytest.approx(told["high_water_bytes"], rel=0.02)
    large = next(r for r in found if r["kind"] == "phase-end" and r["name"] == "large")
    assert large["peak_is_exact"]
    assert large["peak_resident_bytes"] == large["high_water_bytes"]
    before = next(r for r in found if r["kind"] == "phase" and r["name"] == "large")
    added = large["peak_anonymous_bytes"] - before["anonymous_bytes"]
    assert added == pytest.approx(TAKEN_BYTES, rel=0.02)
    small = next(r for r in found if r["kind"] == "phase-end" and r["name"] == "small")
    assert small["peak_resident_bytes"] < large["peak_resident_bytes"] - 0.9 * TAKEN_BYTES
    if cgroup is not None:
        files = (cgroup / "memory.peak", cgroup / "memory.max_usage_in_bytes")
        peak = int(next(f for f in files if f.exists()).read_text())
        assert peak > TAKEN_BYTES
        assert end["peak_cgroup_bytes"] == pytest.approx(peak, rel=0.02)
        assert found[0]["cgroup"] == str(cgroup)

    # The forked child wrote nothing into its parent's file, and its own ledger is whole.
    assert {r.get("name") for r in found} == {None, "small", "large"}
    (own,) = set(tmp_path.iterdir()) - {Path(told["file"])}
    assert [r["kind"] for r in records(own)] == ["begin", "phase", "phase-end", "end"]


@pytest.mark.processes
def test_a_killed_process_leaves_whole_lines_and_the_phase_that_it_was_in(tmp_path: Path) -> None:
    child(tmp_path, "--killed", status=-signal.SIGKILL)
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("rank-00000.")
    found = records(file)
    begun = [r for r in found if r["kind"] == "phase"]
    ended = [r["id"] for r in found if r["kind"] == "phase-end"]
    assert [(r["name"], r["facts"]) for r in begun if r["id"] not in ended] == [("large", {"step": 7})]
    assert max(r["peak_anonymous_bytes"] for r in found if r["kind"] == "sample") > TAKEN_BYTES


@on_ranks(2)
def test_calls_announce_their_phases_and_reports(tmp_path: Path) -> None:
    """Load, saves, resume, clone and export, on two ranks that share one directory."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    if rank == 0:
        models.write_hub_directory("qwen3", tmp_path / "hub", torch.float32)
    dist.barrier()
    with sw.reports.memory_ledger(tmp_path / "ledger") as ledger:
        model = sw.load_pretrained(tmp_path / "hub", mesh)
        state = sw.TrainState(model=model)
        with sw.Checkpointer(tmp_path / "run") as checkpoints:
            checkpoints.save(state, 1)
        with sw.Checkpointer(tmp_path / "run", mode="async") as checkpoints:
            resumed = checkpoints.resume(state)
            assert resumed is not None
            checkpoints.save(state, 2)
        sw.clone(model)
        sw.export_hf(model, tmp_path / "export")
        sw.verify(tmp_path / "run" / "step-00000001")
    assert recorder.current() is None
    found = records(ledger.file)
    assert (found[0]["rank"], found[0]["world_size"]) == (rank, 2)
    names = {r["id"]: r["name"] for r in found if r["kind"] == "phase"}
    outer = [r["name"] for r in found if r["kind"] == "phase" and r["parent"] is None]
    assert outer == ["load", "save", "resume", "save", "background save", "clone", "export", "verify"]
    within = {(names[r["parent"]], r["name"]) for r in found if r["kind"] == "phase" and r["parent"]}
    assert {("load", "plan"), ("load", "read"), ("save", "collect"), ("save", "write")} <= within
    assert {("resume", "compare digests"), ("resume", "optimizer"), ("background save", "write")} <= within
    assert sorted(r["id"] for r in found if r["kind"] == "phase-end") == sorted(names)
    notes = [(r["name"], r["report"]) for r in found if r["kind"] == "note"]
    assert [name for name, _ in notes] == ["load", "save", "resume", "save", "save", "export", "verify"]
    assert [r["is_published"] for n, r in notes if n == "save"] == [True, False, True]
    assert notes[2][1]["digest"] == resumed.digest
    assert [r["facts"].get("step") for r in found if r["kind"] == "phase" and r["name"] == "save"] == [1, 2]


def test_errors_stand_in_the_records_and_pass(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), sw.reports.memory_ledger(tmp_path) as ledger, ledger.phase("mine"):
        1 / 0  # noqa: B018
    *_, phase_end, end = records(ledger.file)
    assert (phase_end["kind"], phase_end["error"]) == ("phase-end", "ZeroDivisionError: division by zero")
    assert (end["kind"], end["error"]) == ("end", "ZeroDivisionError: division by zero")


def test_where_no_ledger_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, said in (
        (tmp_path / "file", "a ledger can't be written there"),
        ("s3://bucket/x", "a local directory"),
    ):
        with pytest.raises(CheckpointError, match=said), sw.reports.memory_ledger(path):
            pytest.fail("it was opened")
    assert recorder.current() is None


def test_a_full_disk_ends_the_ledger_and_not_the_program(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "shardwise"), sw.reports.memory_ledger(tmp_path) as ledger:
        full = os.open("/dev/full", os.O_WRONLY)
        assert ledger._file._file is not None
        os.dup2(full, ledger._file._file)
        os.close(full)
        for _ in range(3):
            with ledger.phase("after"):
                pass
    assert [r.message for r in caplog.records if "the ledger ends here" in r.message] == [
        f"{ledger.file}: the ledger ends here: No space left on device"
    ]
    assert [r["kind"] for r in records(ledger.file)][:1] == ["begin"]


class Scalars:
    """What TensorBoard's writer is to the ledger."""

    def __init__(self, *, fails: bool = False) -> None:
        self.taken: list[tuple[str, float, int]] = []
        self._fails = fails

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.taken.append((tag, scalar_value, global_step))
        if self._fails:
            raise RuntimeError("closed")


def test_scalars_for_tensorboard(tmp_path: Path) -> None:
    scalars, failing = Scalars(), Scalars(fails=True)
    for writer in (scalars, failing):
        with sw.reports.memory_ledger(tmp_path, tensorboard=writer) as ledger:
            while sum(r["kind"] == "sample" for r in records(ledger.file)) < 2:
                ledger._done.wait(0.05)
    assert len(failing.taken) == 1
    tags = {tag for tag, *_ in scalars.taken}
    assert {"ledger/anonymous_bytes", "ledger/peak_resident_bytes"} <= tags
    assert all(value >= 0 for _, value, _ in scalars.taken)
    assert {step for *_, step in scalars.taken} >= {0, 1}


def test_the_thread_takes_its_share_whatever_a_look_costs() -> None:
    for cost_s in (1e-5, 1e-4, 1e-3, 2e-2):
        pace = _Pace()
        for _ in range(100):
            pace.looked(cost_s)
        assert cost_s / (pace.look_s + cost_s) <= _SHARE * 1.01
        assert pace.look_s >= 0.02


def test_a_week_of_records_is_bounded() -> None:
    """Records by time, and phases by number."""
    pace, seconds, written = _Pace(), 0.0, 0
    while seconds < 7 * 24 * 3600:
        seconds += pace.records_s
        pace.wrote()
        written += 1
    assert written < 30_000
    counts = _Counts()
    kept = [count for count in range(1, 100_001) if counts.next("step") == (count, True)]
    assert kept[:999] == list(range(1, 1000))
    assert kept[999:1001] == [1000, 1010]
    assert len(kept) < 3_000
    for k in range(2_000):
        counts.next(f"name {k}")
    assert len(counts.seen) <= 257


def test_without_a_ledger_nothing_is_announced() -> None:
    assert recorder.phase("load") is recorder.phase("save")
    recorder.note("load", {})


@pytest.mark.processes
def test_a_fork_has_no_ledger(tmp_path: Path) -> None:
    """Neither current, nor by the object of its parent."""
    script = (
        "import os, sys, shardwise as sw\n"
        "from shardwise.operations.operation import current, note\n"
        f"with sw.reports.memory_ledger({str(tmp_path)!r}) as ledger:\n"
        "    if os.fork() == 0:\n"
        "        note('of the child', {}); ledger.note('of the child', {})\n"
        "        os._exit(0 if current() is None else 3)\n"
        "    assert os.wait()[1] == 0\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=60)
    (file,) = tmp_path.iterdir()
    assert {r["kind"] for r in records(file)} <= {"begin", "sample", "end"}
