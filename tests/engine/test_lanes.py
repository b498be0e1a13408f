"""Lanes: what the page cache holds is read by several threads, a tensor each; the rest, and every error, by one reader."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import shardwise as sw
from shardwise.catalog.records import StoredFile
from shardwise.engine import engine as lanes
from shardwise.engine.engine import LEAST_FOR_THREADS, MOST_BYTES
from shardwise.engine.objects import SourceReader
from shardwise.errors import IntegrityError
from tests.harness.page_cache import drop

MIB = 1024**2
#: 61 MiB: one larger than a read of a lane, one that is cast, one scalar, and more than enough others.
_SIZES = {"large": (5, MIB), "cast": (MIB,), "scalar": (), **{f"{n}": (MIB + n,) for n in range(9)}}
_IN_LANES = "plain: all bytes were in the page cache; using 4 threads"


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, size in _SIZES.items():
            self.register_parameter(name, nn.Parameter(torch.empty(size, device="meta")))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files; `cast` is stored in bf16."""
    directory = tmp_path_factory.mktemp("lanes")
    tensors = {name: torch.randn(size) for name, size in _SIZES.items()}
    tensors["cast"] = tensors["cast"].bfloat16()
    for k, names in enumerate((["large", "cast", "scalar", "0"], [str(n) for n in range(1, 9)])):
        save_file({n: tensors[n] for n in names}, directory / f"model-{k}.safetensors")
    return directory


def _stored(source: Path) -> dict[str, torch.Tensor]:
    return {n: t.float() for file in source.iterdir() for n, t in load_file(file).items()}


def _warm(source: Path) -> None:
    for file in source.iterdir():
        file.read_bytes()


def _load(source: Path, count: int = 4, **options: Any) -> tuple[nn.Module, sw.reports.LoadReport]:
    model = _Model()
    return model, sw.load(model, source, io=sw.IOOptions(read_threads=count, **options))


def _assert_equal(model: nn.Module, source: Path) -> None:
    stored = _stored(source)
    assert [n for n, p in model.named_parameters() if not torch.equal(p, stored[n])] == []


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    gc.collect()  # what tests before this one left in cycles
    before = _descriptors()
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("shardwise-lane")]
    assert _descriptors() <= before


def test_as_one_reader(source: Path) -> None:
    _warm(source)
    one, alone = _load(source, 1)
    several, report = _load(source)
    for model in (one, several):
        _assert_equal(model, source)
    assert (
        report.bytes_read
        == alone.bytes_read
        == sum(t.nbytes for f in source.iterdir() for t in load_file(f).values())
    )
    assert report.reads == _IN_LANES
    assert alone.reads == "plain: all bytes were in the page cache"


def test_each_read_is_of_one_lane_and_not_too_large(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _warm(source)
    preadv, found = os.preadv, []

    def noted(fd: int, views: Sequence[memoryview], at: int, flags: int = 0) -> int:
        found.append((threading.current_thread().name, views[0].nbytes))
        return preadv(fd, views, at, flags)

    monkeypatch.setattr(os, "preadv", noted)
    _load(source)
    assert max(nbytes for _, nbytes in found) <= MOST_BYTES
    assert len({name for name, _ in found}) > 1
    assert sum(nbytes for name, nbytes in found if "lane" in name) > 0


def test_progress_counts_every_byte_once(source: Path) -> None:
    _warm(source)
    seen: list[sw.reports.Progress] = []
    with sw.progress(seen.append):
        _, report = _load(source)
    assert seen[-1].done_bytes == seen[-1].total_bytes == report.bytes_read


@pytest.mark.parametrize("dropped", [(0,), (1,), (0, 1)])
def test_what_is_not_cached_is_left_to_the_reader(source: Path, dropped: tuple[int, ...]) -> None:
    _warm(source)
    drop(*(source / f"model-{k}.safetensors" for k in dropped))
    model, report = _load(source)
    _assert_equal(model, source)
    assert report.bytes_read == _load(source, 1)[1].bytes_read


def test_the_first_read_that_would_wait_ends_the_lanes(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _warm(source)
    preadv, waits = os.preadv, (source / "model-1.safetensors").stat().st_ino
    in_lanes, refused = [], []

    def would_wait(fd: int, views: Sequence[memoryview], at: int, flags: int = 0) -> int:
        if flags and os.fstat(fd).st_ino == waits:
            refused.append(at)
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        if flags:
            in_lanes.append(views[0].nbytes)
        return preadv(fd, views, at, flags)

    monkeypatch.setattr(os, "preadv", would_wait)
    model, report = _load(source)
    _assert_equal(model, source)
    assert "some bytes weren't in the page cache" in report.reads
    assert 0 < sum(in_lanes) <= (source / "model-0.safetensors").stat().st_size
    assert len(refused) <= 4 + 4, "one for each lane, and one read of the reader, which its threads share"
    assert report.bytes_read == _load(source, 1)[1].bytes_read


def test_a_lane_that_fails_ends_the_others(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _warm(source)
    monkeypatch.setattr(lanes, "MOST_BYTES", MIB // 4)
    preadv, began, later = os.preadv, [], []

    def fails_once(fd: int, views: Sequence[memoryview], at: int, flags: int = 0) -> int:
        name = threading.current_thread().name
        if flags:
            began.append(name)
            if len(began) == 5:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            if len(began) > 5 and name.startswith("shardwise-lane"):
                later.append(at)
            time.sleep(0.002)
        return preadv(fd, views, at, flags)

    monkeypatch.setattr(os, "preadv", fails_once)
    model, _ = _load(source)
    _assert_equal(model, source)
    assert len(later) <= 6, "of more than 200 that were left"


def _reads_of(source: Path, patched: pytest.MonkeyPatch, count: int) -> list[tuple[str, int]]:
    """Files and offsets in the order in which a load reads them, where no read says what is cached."""
    preadv, found = os.preadv, []

    def noted(fd: int, views: Sequence[memoryview], at: int, flags: int = 0) -> int:
        if flags:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        found.append((os.path.basename(os.readlink(f"/proc/self/fd/{fd}")), at))
        return preadv(fd, views, at, flags)

    patched.setattr(os, "preadv", noted)
    _load(source, count)
    return found


@pytest.mark.parametrize("window", [3, lanes.WINDOW])
def test_files_that_are_not_cached_are_read_in_the_plan_s_order(
    source: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """Direct reads and casts lie side by side in the files."""
    monkeypatch.setattr(lanes, "WINDOW", window)
    found = _reads_of(source, monkeypatch, 1)
    assert found == sorted(found)
    assert len({name for name, _ in found}) == 2


@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("count", [1, 4])
def test_windows_of_the_plan(source: Path, monkeypatch: pytest.MonkeyPatch, window: int, count: int) -> None:
    _warm(source)
    monkeypatch.setattr(lanes, "WINDOW", window)
    model, report = _load(source, count)
    _assert_equal(model, source)
    assert report.bytes_read == sum(t.nbytes for f in source.iterdir() for t in load_file(f).values())


@pytest.mark.parametrize("count", [1, 4])
def test_a_file_that_is_replaced_meanwhile_stays_the_one_that_was_opened(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """As with one reader: a tensor that is cast, and so read behind the lanes, is of the same file as the others."""
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    first = tmp_path / "model-0.safetensors"
    preadv, reads = os.preadv, []

    def replaces(fd: int, views: Sequence[memoryview], at: int, flags: int = 0) -> int:
        read = preadv(fd, views, at, flags)
        reads.append(at)
        if len(reads) == 1:
            save_file({n: torch.zeros_like(t) for n, t in load_file(first).items()}, tmp_path / "other")
            os.replace(tmp_path / "other", first)
        return read

    monkeypatch.setattr(os, "preadv", replaces)
    model, _ = _load(tmp_path, count)
    monkeypatch.undo()
    _assert_equal(model, source)


def test_threads_that_can_not_start(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _warm(source)

    start = threading.Thread.start

    def refuses(self: threading.Thread) -> None:
        if self.name.startswith("shardwise-lane"):
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuses)
    model, report = _load(source)
    _assert_equal(model, source)
    assert report.reads.startswith("plain: all bytes were in the page cache")


def test_no_descriptor_left_for_the_lanes(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _warm(source)

    def refuses(fd: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "dup", refuses)
    model, _ = _load(source)
    _assert_equal(model, source)


def test_a_file_system_that_does_not_say_what_is_cached(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _warm(source)
    preadv = os.preadv

    def refuses(fd: int, views: Sequence[memoryview], at: int, flags: int = 0) -> int:
        if flags:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return preadv(fd, views, at, flags)

    monkeypatch.setattr(os, "preadv", refuses)
    model, report = _load(source)
    _assert_equal(model, source)
    assert "the file system does not say what is in the page cache" in report.reads


@pytest.mark.parametrize("options", [{"reads": "plain"}, {"reads": "ahead"}, {"page_cache": "release"}])
def test_no_lanes_where_the_caller_chose_how_to_read(
    source: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _warm(source)
    names: set[str] = set()
    preadv = os.preadv

    def noted(*args: Any) -> int:
        names.add(threading.current_thread().name)
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", noted)
    model, _ = _load(source, **options)
    _assert_equal(model, source)
    assert not [name for name in names if "lane" in name]


def test_a_file_cut_short_is_named_as_by_one_reader(source: Path, tmp_path: Path) -> None:
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    short = tmp_path / "model-1.safetensors"
    content = short.read_bytes()
    said = []
    for count in (1, 4):
        model = _Model()
        short.write_bytes(content)
        with pytest.MonkeyPatch.context() as patched:
            _cut_at_the_first_read(patched, short, len(content) // 2)
            with pytest.raises(IntegrityError, match="truncated") as error:
                sw.load(model, tmp_path, io=sw.IOOptions(read_threads=count))
        said.append(str(error.value))
    assert said[0] == said[1]


def _cut_at_the_first_read(patched: pytest.MonkeyPatch, path: Path, nbytes: int) -> None:
    preadv = os.preadv

    def cuts(fd: int, views: Sequence[memoryview], at: int, flags: int = 0) -> int:
        os.truncate(path, nbytes)
        return preadv(fd, views, at, flags)

    patched.setattr(os, "preadv", cuts)


def test_an_error_of_the_program_in_a_lane_is_raised(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _warm(source)
    preadv = os.preadv

    def fails(*args: Any) -> int:
        if threading.current_thread().name.startswith("shardwise-lane"):
            raise MemoryError("in a lane")
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(MemoryError, match="in a lane"):
        _load(source)


def test_little_is_read_by_one_thread(tmp_path: Path) -> None:
    model = nn.Linear(1024, 1024, device="meta")
    save_file({"weight": torch.ones(1024, 1024), "bias": torch.zeros(1024)}, tmp_path / "model.safetensors")
    assert model.weight.nbytes < LEAST_FOR_THREADS
    report = sw.load(model, tmp_path, io=sw.IOOptions(read_threads=4))
    assert report.reads == "plain: all bytes were in the page cache"


def test_a_resume_reads_an_optimizer_in_lanes(tmp_path: Path) -> None:
    torch.manual_seed(0)

    def state() -> sw.TrainState:
        model = nn.Linear(2048, 2048)
        return sw.TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()))

    first = state()
    first.models["model"](torch.ones(1, 2048)).sum().backward()
    first.optimizers["optimizer"].step()
    sw.save(first, tmp_path / "step", step=1)
    second = state()
    names = set()
    preadv = os.preadv

    def noted(*args: Any) -> int:
        names.add(threading.current_thread().name)
        return preadv(*args)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "preadv", noted)
        report = sw.restore(second, tmp_path / "step", io=sw.IOOptions(read_threads=3))
    assert report.exact
    assert [name for name in names if "lane" in name]
    for one, other in zip(
        first.optimizers["optimizer"].state.values(),
        second.optimizers["optimizer"].state.values(),
        strict=True,
    ):
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_files_that_are_named_twice_are_local_files(source: Path) -> None:
    """Two adapters of one directory: no store is asked."""
    path = source / "model-0.safetensors"
    file = StoredFile(str(path), path.stat().st_size)
    with SourceReader(files=[file, file], io=sw.IOOptions()) as reader:
        with reader.expecting([(str(path), 0, 8)]):
            reader.read_into(str(path), 0, memoryview(bytearray(8)))
        assert reader.describe_reads().startswith("plain: all bytes were in the page cache")
        assert reader.requests == 0
