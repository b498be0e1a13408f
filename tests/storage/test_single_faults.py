"""One connection that breaks, or one busy reply, at each kind of request of each call: the call does what it does without it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import fsspec
import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import CheckpointError
from shardwise.format.header import parse_head
from shardwise.publish.write import ObjectWriter
from shardwise.storage import bytes_below, files_below, is_file, names_in, read_whole
from shardwise.storage import records as tries
from tests.harness import models
from tests.harness.object_store import BUCKET, Asked, Do, Proxy, Reply, S3Server, use_store
from tests.harness.tiers import nightly_rows
from tests.storage.test_saves import small_state

ROOT = f"s3://{BUCKET}/single"
#: Where a connection can break, and what a busy store replies.
POINTS = {
    "before": Do(refuse=True),
    "before, by a reset": Do(refuse=True, reset=True),
    "after": Do(lose_reply=True),
    "after, by a reset": Do(lose_reply=True, reset=True),
    "in the headers": Do(cut_headers=True),
    "in the body": Do(cut_after=5),
    "in the body, by a reset": Do(cut_after=5, reset=True),
    "busy": Do(status=503),
    "an internal error after": Do(status_after=500),
}
_QUICK = {
    "base": 2,
    "init_backoff": timedelta(milliseconds=1),
    "max_backoff": timedelta(milliseconds=5),
}


def kind_of(asked: Asked) -> str:
    """What a request is, as far as its retries go."""
    if "list-type" in asked.path:
        return "list"
    if asked.path.endswith("?delete"):
        return "delete"
    if "uploadId=" in asked.path:
        return {"PUT": "part", "POST": "complete an upload"}.get(asked.method, "abort an upload")
    if asked.method == "POST":
        return "begin an upload"
    if asked.method == "PUT":
        return "put if" if asked.is_conditional else "put"
    if asked.method == "GET":
        return "get" if asked.first is None else "get a range"
    return asked.method.lower()


@dataclass(frozen=True, slots=True)
class Things:
    """What calls read, on the server and in directories."""

    server: S3Server
    folder: Path
    digests: dict[int, str]
    """Of small states, by seed."""
    run: dict[str, bytes]
    """Objects of a run with steps 1 and 2."""

    def fresh_run(self, key: str) -> None:
        for name, content in self.run.items():
            self.server.put(f"single/{key}/{name}", content)


def wide_state() -> sw.TrainState:
    """Of more than one part."""
    model = nn.Linear(1024, 2048 + 64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    return sw.TrainState(model=model)


@pytest.fixture(scope="module")
def things(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Things:
    folder = tmp_path_factory.mktemp("single")
    use_store(f"http://127.0.0.1:{server.port}")
    digests = {}
    for seed in (1, 2, 3):
        sw.save(small_state(seed), folder / f"{seed}", step=seed)
        digests[seed] = sw.restore(small_state(9), folder / f"{seed}").digest
    sw.save(wide_state(), folder / "wide")
    digests[0] = sw.restore(wide_state(), folder / "wide").digest
    models.write_hub_directory("qwen3", folder / "hub", torch.float32)
    sw.export_hf(folder / "hub", folder / "exported")
    for name in ("1", "wide", "hub"):
        server.put_directory(folder / name, f"single/{name}")
    with sw.Checkpointer(f"{ROOT}/made") as checkpoints:
        for step in (1, 2):
            checkpoints.save(small_state(step), step)
    run = {name: read_whole(f"{ROOT}/made/{name}", 10**6) for name in files_below(f"{ROOT}/made")}
    return Things(server, folder, digests, run)


def below(place: Path | str) -> dict[str, bytes]:
    if isinstance(place, str):
        return {name: read_whole(f"{place}/{name}", 10**9) for name in files_below(place)}
    return {p.relative_to(place).as_posix(): p.read_bytes() for p in place.rglob("*") if p.is_file()}


def is_saved(things: Things, url: str, seed: int) -> None:
    report = sw.verify(url)
    assert report.ok, report.problems
    state = small_state(9) if seed else wide_state()
    assert sw.restore(state, url).digest == things.digests[seed]
    assert not is_file(f"{url}.claim")


def is_run(things: Things, url: str, *steps: int) -> None:
    head = parse_head(read_whole(f"{url}/head.json", 10**6), url)
    assert sorted(head.steps) == list(steps)
    for step, name in head.steps.items():
        is_saved(things, f"{url}/{name}", step)
    assert {name.partition("/")[0] for name in files_below(url)} == {"head.json", *head.steps.values()}


# ----------------------------------------------------------------------------------------------------
# Calls: each gets a URL of its own, and returns a look at what is there afterwards

Look = Callable[[], None]


def save(things: Things, key: str) -> Look:
    sw.save(small_state(1), f"{ROOT}/{key}")
    return lambda: is_saved(things, f"{ROOT}/{key}", 1)


def save_in_parts(things: Things, key: str) -> Look:
    sw.save(wide_state(), f"{ROOT}/{key}")
    return lambda: is_saved(things, f"{ROOT}/{key}", 0)


def start(things: Things, key: str) -> Look:
    with sw.Checkpointer(f"{ROOT}/{key}") as checkpoints:
        assert checkpoints.resume(small_state(9)) is None
        checkpoints.save(small_state(1), 1)
    return lambda: is_run(things, f"{ROOT}/{key}", 1)


def resume(things: Things, key: str) -> Look:
    with sw.Checkpointer(f"{ROOT}/{key}") as checkpoints:
        report = checkpoints.resume(small_state(9))
    assert report is not None
    assert (report.step, report.digest) == (2, things.digests[2])
    assert not report.damaged
    return lambda: is_run(things, f"{ROOT}/{key}", 1, 2)


def keep_one(things: Things, key: str) -> Look:
    with sw.Checkpointer(f"{ROOT}/{key}", keep_last=1) as checkpoints:
        checkpoints.resume(small_state(9))
        checkpoints.save(small_state(3), 3)
    return lambda: is_run(things, f"{ROOT}/{key}", 3)


def load(things: Things, key: str) -> Look:
    _, report = sw.load_pretrained(f"{ROOT}/hub", None, return_report=True)
    _, local = sw.load_pretrained(things.folder / "hub", None, return_report=True)
    assert report.bytes_read == local.bytes_read
    return lambda: None


def verify(things: Things, key: str) -> Look:
    assert sw.verify(f"{ROOT}/1").ok
    return lambda: None


def restore(things: Things, key: str) -> Look:
    assert sw.restore(small_state(9), f"{ROOT}/1").digest == things.digests[1]
    return lambda: None


def copy_into(things: Things, key: str) -> Look:
    sw.copy_checkpoint(things.folder / "wide", f"{ROOT}/{key}")
    return lambda: is_saved(things, f"{ROOT}/{key}", 0)


def copy_out_of(things: Things, key: str) -> Look:
    out = things.folder / key
    sw.copy_checkpoint(f"{ROOT}/wide", out)
    assert below(out) == below(things.folder / "wide")
    return lambda: None


def mirror(things: Things, key: str) -> Look:
    with sw.Checkpointer(things.folder / key, mirror=f"{ROOT}/{key}") as checkpoints:
        checkpoints.save(small_state(1), 1)
        checkpoints.wait()
    assert checkpoints.mirrored == 1
    return lambda: is_run(things, f"{ROOT}/{key}", 1)


def export(things: Things, key: str) -> Look:
    sw.export_hf(things.folder / "hub", f"{ROOT}/{key}")
    return lambda: _same(f"{ROOT}/{key}", things.folder / "exported")


def _same(url: str, path: Path) -> None:
    assert below(url) == below(path)
    assert not is_file(f"{url}.claim")


CALLS = (
    save,
    save_in_parts,
    start,
    resume,
    keep_one,
    load,
    verify,
    restore,
    copy_into,
    copy_out_of,
    mirror,
    export,
)
_WITH_RUN = (resume, keep_one)


@pytest.fixture
def proxy(server: S3Server) -> Iterator[Proxy]:
    with Proxy(server.port) as found:
        use_store(found.endpoint, retry_config={"backoff": _QUICK})
        yield found


def once(proxy: Proxy, things: Things, call: Callable[[Things, str], Look], decide: object) -> None:
    """A call, while ``decide`` decides, and a look at what it did."""
    key = f"{call.__name__}-{os.urandom(6).hex()}"
    if call in _WITH_RUN:
        things.fresh_run(key)
    proxy.reset(decide)  # type: ignore[arg-type]
    try:
        look = call(things, key)
        proxy.decide = lambda asked: None
        look()
    finally:
        proxy.decide = lambda asked: None


def kinds(proxy: Proxy, things: Things, call: Callable[[Things, str], Look]) -> list[str]:
    """The kinds of the requests of a call without a fault, in their order."""
    log: list[str] = []
    lock = threading.Lock()

    def decide(asked: Asked) -> None:
        with lock:
            log.append(kind_of(asked))

    once(proxy, things, call, decide)
    return log


def survived(
    proxy: Proxy, things: Things, call: Callable[[Things, str], Look], point: str, *, last_too: bool
) -> list[str]:
    """Let the fault happen at the first request of each kind, or at the last one too; what went wrong."""
    log, wrong = kinds(proxy, things, call), []
    places = [(kind, 0) for kind in dict.fromkeys(log)]
    places += [(kind, log.count(kind) - 1) for kind, _ in places if last_too and log.count(kind) > 1]
    for kind, number in places:
        seen, lock = [0], threading.Lock()

        def decide(asked: Asked, kind: str = kind, number: int = number, seen: list[int] = seen) -> Do | None:
            if kind_of(asked) != kind:
                return None
            with lock:  # noqa: B023
                seen[0] += 1
                return POINTS[point] if seen[0] == number + 1 else None

        try:
            once(proxy, things, call, decide)
        except Exception as error:
            wrong.append(f"{kind} {number}: {type(error).__name__}: {str(error)[:300]}")
        if seen[0] <= number:
            wrong.append(f"{kind} {number}: never came")
    return wrong


@pytest.mark.parametrize(
    ("call", "point"), nightly_rows(*((call, point) for call in CALLS for point in POINTS))
)
def test_every_single_fault_is_survived(
    proxy: Proxy, things: Things, call: Callable[[Things, str], Look], point: str
) -> None:
    assert survived(proxy, things, call, point, last_too=True) == []


@pytest.mark.parametrize(
    ("call", "point"),
    [
        (save, "before"),
        (save, "in the body"),
        (start, "before, by a reset"),
        (start, "in the body"),
        (keep_one, "before"),
        (resume, "in the body, by a reset"),
        (verify, "in the headers"),
        (copy_into, "after"),
        (copy_into, "in the body"),
        (mirror, "before"),
        (export, "before"),
        (export, "an internal error after"),
    ],
)
def test_a_single_fault_is_survived(
    proxy: Proxy, things: Things, call: Callable[[Things, str], Look], point: str
) -> None:
    """At the first request of each kind."""
    assert survived(proxy, things, call, point, last_too=False) == []


def test_a_completed_upload_whose_reply_was_lost(proxy: Proxy) -> None:
    """A store that put the parts together may know no such upload when it is asked again."""
    unknown = Reply(
        404, "<Error><Code>NoSuchUpload</Code><Message>The upload does not exist.</Message></Error>"
    )
    completions: list[Asked] = []

    def decide(asked: Asked) -> Do | None:
        if kind_of(asked) != "complete an upload":
            return None
        completions.append(asked)
        return Do(lose_reply=True) if len(completions) == 1 else Do(reply=unknown)

    content = os.urandom(9 * 1024**2)
    proxy.reset(decide)
    with ObjectWriter(f"{ROOT}/completed") as file:
        file.write(content)
    assert len(completions) == 2
    assert read_whole(f"{ROOT}/completed", 10**8) == content
    # Another object of that length is not taken for the one that was written.
    proxy.reset(lambda asked: Do(reply=unknown) if kind_of(asked) == "complete an upload" else None)
    file = ObjectWriter(f"{ROOT}/completed")
    file.write(bytes(len(content)))
    with pytest.raises(CheckpointError, match=r"the store has ended the upload: 404 \(NoSuchUpload\)"):
        file.close()
    assert read_whole(f"{ROOT}/completed", 10**8) == content


def test_a_connection_of_a_file_system_that_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fsspec's: also where its own error hides the broken connection."""
    monkeypatch.setattr(tries, "_PAUSE_S", 0.0)
    files = fsspec.filesystem("memory")
    files.pipe("/single/a/file", b"0123456789")
    kept = {name: getattr(type(files), name) for name in ("ls", "info", "cat_file", "find")}
    broken: set[str] = set()

    def once_broken(name: str) -> Callable[..., object]:
        def call(self: object, *args: object, **options: object) -> object:
            if name in broken:
                broken.discard(name)
                try:
                    raise ConnectionResetError("reset by peer")
                except ConnectionResetError as error:
                    raise RuntimeError("the client's own error") from error
            return kept[name](self, *args, **options)

        return call

    for name in kept:
        monkeypatch.setattr(type(files), name, once_broken(name))
    looks: tuple[tuple[str, Callable[[], object], object], ...] = (
        ("ls", lambda: names_in("memory://single/a"), ["file"]),
        ("info", lambda: is_file("memory://single/a/file"), True),
        ("cat_file", lambda: read_whole("memory://single/a/file", 100), b"0123456789"),
        ("find", lambda: bytes_below("memory://single/a"), (1, 10)),
    )
    for name, look, expected in looks:
        broken.add(name)
        assert look() == expected, name
        assert not broken
