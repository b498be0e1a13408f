"""What hooks and the log hear of operations: exactly the bytes of the reports, on every rank, also of failures."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shardwise as sw
from shardwise.operations import operation as operations
from shardwise.publish.lock import mark
from tests.harness import models
from tests.harness.pool import RankPool
from tests.operations import _progress_fns as fns
from tests.planning import _fallback_fns
from tests.quantized._made import fp8_directory

LOG = "shardwise.progress"


@pytest.fixture(autouse=True)
def every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks hear of each piece of this process, not ten times a second."""
    monkeypatch.setattr(operations, "PERIOD_S", 0.0)


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("progress") / "step-00000003"
    model, optimizer = fns.trained()
    sw.save(sw.TrainState(model=model, optimizer=optimizer), path, step=3)
    return path


def test_one_process(tmp_path: Path) -> None:
    fns.each_operation(str(tmp_path))


def test_two_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """Each rank counts its own bytes."""
    ranks.run_ranks(2, fns.each_operation, str(tmp_path))


def test_a_failure_comes_last(step: Path, tmp_path: Path) -> None:
    """As a failure, after what was read; nothing comes after it."""
    damaged = tmp_path / step.name
    sw.copy_checkpoint(step, damaged)
    damage(str(damaged))
    model, _ = fns.trained()
    heard: fns.Found = []
    with sw.progress(heard.append), pytest.raises(sw.errors.IntegrityError):
        sw.load(model, damaged)
    assert [one.state for one in heard].count("failed") == 1
    assert heard[-1].state == "failed"
    assert heard[-1].error.startswith("IntegrityError: ")
    assert heard[-1].done_bytes == heard[-1].total_bytes, "all was read; the digest differs"
    heard.clear()
    with sw.progress(heard.append):
        assert not sw.verify(damaged).ok
    assert heard[-1].state == "done", "it has verified, and reports what is wrong"


def test_all_ranks_hear_of_one_that_fails(ranks: RankPool, tmp_path: Path) -> None:
    """Rank 1 fails while it reads, and rank 0 when it has read its own bytes and the ranks agree."""
    source = tmp_path / "model.safetensors"
    save_file({n: t.contiguous() for n, t in fns.trained()[0].state_dict().items()}, source)
    first, second = ranks.run_ranks(2, fns.a_rank_fails, str(source))
    assert first == ("running", "failed", "RankError", "[1]")
    assert second == ("running", "failed", "RankError", "[1]")


def test_a_hook_that_fails_stops_nothing(ranks: RankPool, step: Path) -> None:
    (first, content), (second, same) = ranks.run_ranks(2, fns.a_hook_that_fails, str(step))
    assert second == 1, "it failed, and was not called again"
    assert first >= 4, "the other rank's goes on: begin and end of two loads"
    assert content == same


def test_a_hook_that_fails_is_logged_once(step: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []

    def hook(found: sw.reports.Progress) -> None:
        calls.append(found.state)
        raise ValueError("of the hook")

    with caplog.at_level(logging.WARNING, "shardwise"), sw.progress(hook):
        assert sw.verify(step).ok
        assert sw.verify(step).ok
    assert calls == ["running"]
    (record,) = caplog.records
    assert "the progress hook failed, and is not called again; the verify continues" in record.getMessage()
    assert record.exc_info is not None
    assert "of the hook" in str(record.exc_info[1])
    with sw.progress(hook):
        sw.verify(step)
    assert calls == ["running"] * 2, "another block calls it again"


def test_metrics_are_the_numbers_of_the_report(tmp_path: Path) -> None:
    """Of each operation once, when it has ended."""
    model, optimizer = fns.trained()
    state = sw.TrainState(model=model, optimizer=optimizer)
    found: list[dict[str, float]] = []
    with sw.progress(lambda one: found.append(one.metrics()) if one.metrics() else None):
        with sw.Checkpointer(tmp_path / "run") as checkpoints:
            saved = checkpoints.save(state, 7)
            resumed = checkpoints.resume(state)
        damage(saved.path)
        with pytest.raises(sw.errors.IntegrityError):
            sw.load(model, saved.path)
    save, resume, load = found
    assert save["shardwise/save/step"] == 7
    assert save["shardwise/save/bytes"] == saved.bytes_written
    assert save["shardwise/save/seconds"] == save["shardwise/save/stall_seconds"] == saved.seconds
    assert save["shardwise/save/failed"] == 0
    assert resumed is not None
    assert resume["shardwise/resume/exact"] == 1
    assert resume["shardwise/resume/tensors"] == resumed.tensors
    assert load.keys() == {f"shardwise/load/{name}" for name in ("seconds", "bytes", "failed")}
    assert load["shardwise/load/failed"] == 1


def damage(step: str) -> None:
    """Flip a bit of the largest file of a step's model."""
    file = max(Path(step).glob("model/*.safetensors"), key=lambda p: p.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)


def test_the_stall_of_a_save_in_the_background_counts_the_wait_for_the_one_before(tmp_path: Path) -> None:
    """The report of the published step has the stall, and the time until it was published."""
    model, optimizer = fns.trained()
    state = sw.TrainState(model=model, optimizer=optimizer)
    reports: list[sw.reports.SaveReport] = []

    def hook(found: sw.Progress) -> None:
        if found.state == "running" and found.done_bytes == 0:
            time.sleep(0.5)
        elif found.report is not None:
            reports.append(found.report)

    with sw.progress(hook), sw.Checkpointer(tmp_path / "run", mode="async") as checkpoints:
        copied = [checkpoints.save(state, 1), checkpoints.save(state, 2)]
        checkpoints.wait()
    assert [one.step for one in reports] == [1, 2]
    assert all(one.is_published for one in reports)
    assert [one.stall_seconds for one in reports] == [one.stall_seconds for one in copied]
    assert reports[1].stall_seconds > 0.1, "it waits for the first"


def test_ctrl_c_in_a_hook_is_ctrl_c(step: Path) -> None:
    model, _ = fns.trained()

    def hook(found: sw.reports.Progress) -> None:
        if found.state == "running":
            raise KeyboardInterrupt

    with sw.progress(hook), pytest.raises(KeyboardInterrupt):
        sw.load(model, step)


def test_two_lines_of_the_log(step: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the number of tensors; and none below INFO."""
    model, _ = fns.trained()
    with caplog.at_level(logging.INFO, "shardwise"):
        report = sw.load(model, step)
    amount = f"{report.bytes_read / 1024:.0f} KiB"
    begin, end = [record.getMessage() for record in caplog.records if record.name == LOG]
    assert begin == f"loading {step}: {amount}"
    assert end.startswith(f"loading {step}: done, {amount} in 0.")
    assert end.endswith("iB/s")
    caplog.clear()
    with caplog.at_level(logging.INFO, "shardwise"), pytest.raises(sw.errors.CheckpointError):
        sw.save(sw.TrainState(model=nn.Linear(2, 2)), step, step=3)
    assert [r for r in caplog.records if r.name == LOG] == [], "it had not begun"
    caplog.clear()
    with caplog.at_level(logging.WARNING, "shardwise"):
        sw.load(model, step)
    assert caplog.records == []


def test_nothing_is_counted_for_nobody(step: Path) -> None:
    """Without a listener an operation gets its own function back, and no total is made."""

    def tick(nbytes: int) -> None:
        raise AssertionError

    def total() -> int:
        raise AssertionError

    with operations.operation("load", str(step)) as counted:
        assert counted.counting(tick) is tick
        counted.expect(total)
        counted.guess(total)
        counted.add(1)
    with sw.progress(lambda found: None), operations.operation("load", str(step)) as counted:
        assert counted.counting(tick) is not tick


def test_background_saves_and_mirrors(tmp_path: Path) -> None:
    """Threads of a Checkpointer tell the same hook; never two at a time of one operation."""
    model, optimizer = fns.trained()
    state = sw.TrainState(model=model, optimizer=optimizer)
    heard: fns.Found = []
    threads: set[str] = set()

    def hook(found: sw.reports.Progress) -> None:
        heard.append(found)
        threads.add(threading.current_thread().name)

    with sw.progress(hook):
        with sw.Checkpointer(tmp_path / "run", mode="async", mirror=tmp_path / "mirror") as checkpoints:
            checkpoints.save(state, 1)
            report = checkpoints.wait()
        assert report is not None
    by_name = {name: [one for one in heard if one.operation == name] for name in ("save", "copy")}
    fns.check(by_name["save"], "save", report.bytes_written)
    copied = sum(p.stat().st_size for p in (tmp_path / "mirror/step-00000001").rglob("*") if p.is_file())
    fns.check(by_name["copy"], "copy", 2 * copied)
    assert all(one.is_background for one in heard)
    assert "MainThread" not in threads
    count = len(heard)
    sw.verify(tmp_path / "run" / "step-00000001")
    assert len(heard) == count, "the block was left"


def test_a_resume_that_skips_a_damaged_step_is_one_operation(tmp_path: Path) -> None:
    """Its bytes are those of both tries; its total is that of the second one, once that has begun."""
    model, optimizer = fns.trained()
    state = sw.TrainState(model=model, optimizer=optimizer)
    with sw.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state, 1)
        checkpoints.save(state, 2)
        file = max((tmp_path / "step-00000002").glob("model/*.safetensors"), key=lambda p: p.stat().st_size)
        content = bytearray(file.read_bytes())
        content[-9] ^= 1
        file.write_bytes(content)
        report, (found,) = fns.recorded(lambda: checkpoints.resume(state))
    assert report is not None
    assert (report.step, list(report.damaged)) == (1, [2])
    assert [one.state for one in found[:-1]] == ["running"] * (len(found) - 1)
    assert [Path(found[k].path).name for k in (0, -1)] == ["step-00000002", "step-00000001"]
    begun = next(k for k, one in enumerate(found) if one.path.endswith("step-00000001"))
    before = found[begun - 1].done_bytes
    assert before > 0
    assert found[-1].done_bytes == before + report.bytes_read == found[-1].total_bytes
    assert found[begun].total_bytes == pytest.approx(before + report.bytes_read, rel=0.1)
    assert [one.done_bytes for one in found] == sorted(one.done_bytes for one in found)


def test_what_was_expected_of_a_damaged_step_is_forgotten() -> None:
    """Where a try ended amid its reads."""
    with sw.progress((heard := []).append), operations.operation("resume") as counted:
        counted.begin_again("second")
        counted.expect(lambda: 100)
        counted.add(40)
        counted.begin_again("first")
        counted.guess(lambda: 50)
        counted.add(10)
        assert (heard[-1].path, heard[-1].done_bytes, heard[-1].total_bytes) == ("first", 50, 90)
        counted.expect(lambda: 50)
        counted.add(40)
    assert (heard[-1].state, heard[-1].done_bytes, heard[-1].total_bytes) == ("done", 90, 90)


def test_no_call_after_the_block(tmp_path: Path) -> None:
    """A background save that outlives the block goes on in silence."""
    model, optimizer = fns.trained()
    begun, calls = threading.Event(), []

    def hook(found: sw.reports.Progress) -> None:
        begun.set()
        calls.append(found)

    with sw.Checkpointer(tmp_path / "run", mode="async") as checkpoints:
        with sw.progress(hook):
            checkpoints.save(sw.TrainState(model=model, optimizer=optimizer), 1)
            assert begun.wait(30)
        count = len(calls)
        assert checkpoints.wait() is not None
    assert len(calls) == count


def test_the_block_waits_for_a_call_that_has_begun() -> None:
    """Of another thread: what a hook uses may be closed behind the block."""
    begun, ended = threading.Event(), []

    def hook(found: sw.reports.Progress) -> None:
        if found.state == "running" and not begun.is_set():
            begun.set()
            time.sleep(0.3)
            ended.append(found)

    def work() -> None:
        with operations.operation("load") as counted:
            counted.expect(lambda: 100)

    with sw.progress(hook):
        thread = threading.Thread(target=work)
        thread.start()
        assert begun.wait(30)
    assert len(ended) == 1
    thread.join()


def test_what_a_hook_reads_is_not_counted(step: Path) -> None:
    model, _ = fns.trained()
    heard: fns.Found = []

    def hook(found: sw.reports.Progress) -> None:
        heard.append(found)
        if found.state == "running" and len(heard) == 1:
            assert sw.verify(step).ok

    with sw.progress(hook):
        report = sw.load(model, step)
    loads = [one for one in heard if one.operation == "load"]
    fns.check(loads, "load", report.bytes_read)


def test_a_hook_is_not_called_for_each_piece(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "PERIOD_S", 3600.0)
    model, _ = fns.trained()
    _, (found,) = fns.recorded(lambda: sw.load(model, step))
    assert [one.state for one in found] == ["running", "done"]


def test_rate_and_remaining_time() -> None:
    with sw.progress((heard := []).append), operations.operation("load", "x") as counted:
        counted.expect(lambda: 1000)
        assert heard[0].remaining_s is None
        time.sleep(0.05)
        counted.add(250)
        last = heard[-1]
        assert last.bytes_per_s == pytest.approx(250 / last.seconds)
        assert last.remaining_s == pytest.approx(3 * last.seconds)


def test_a_hook_must_be_callable() -> None:
    with pytest.raises(TypeError, match="hook must be callable"), sw.progress("bars"):  # type: ignore[arg-type]
        pass


def test_a_copy_that_goes_on_never_falls_back(tmp_path: Path) -> None:
    """A file with other content is read twice, and counted once."""
    source = tmp_path / "source"
    source.mkdir()
    for k in range(6):
        (source / f"{k}.bin").write_bytes(bytes([k]) * 100_000)
    begun = tmp_path / f"copy.copying-{'ab' * 8}"
    begun.mkdir()
    mark(str(begun))
    for k in range(5):
        (begun / f"{k}.bin").write_bytes(bytes([k * (k % 2)]) * 100_000)
    report, (found,) = fns.recorded(lambda: sw.copy_checkpoint(source, tmp_path / "copy"))
    fns.check(found, "copy", 2 * report.nbytes)
    assert report.files_sent == 3


def test_what_a_load_converts_and_dequantizes(ranks: RankPool, tmp_path: Path) -> None:
    """It counts what is read from files, not what becomes of it."""
    _fallback_fns.make_checkpoint(tmp_path / "no-map")
    models.write_hub_directory("qwen3", tmp_path / "plain", torch.bfloat16)
    fp8_directory(tmp_path / "plain", tmp_path / "fp8", (4, 8))
    named = ranks.run_ranks(2, fns.converted_and_dequantized, str(tmp_path / "no-map"), str(tmp_path / "fp8"))
    assert named == [["6 1 own", "6 1 node", "6 1 once"]] * 2


def test_second_copies_of_ties_count(ranks: RankPool, tmp_path: Path) -> None:
    """They are read to be compared, by each rank or by one for all."""
    source = tmp_path / "model.safetensors"
    weight = torch.rand(301, 64)
    save_file({"0.weight": weight, "1.weight": weight.clone()}, source)
    first, second = ranks.run_ranks(2, fns.ties_stored_twice, str(source))
    assert [a + b for a, b in zip(first, second, strict=True)] == [2 * weight.nbytes] * 3
