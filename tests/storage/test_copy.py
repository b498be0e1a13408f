"""Copies between directories and a store: the same bytes, damage found, stopped ones go on, nothing half done looks whole."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import CheckpointError, IntegrityError, SourceError
from shardwise.operations import operation as operations
from shardwise.publish.lock import mark
from shardwise.storage import files_below
from tests.harness.object_store import BUCKET, SIGNED, Asked, Do, Proxy, S3Server
from tests.harness.tiers import nightly_but

ROOT = f"s3://{BUCKET}/copies"


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with files of several pieces, and of several blocks."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("run") / "step-00000003"
    model = nn.Sequential(nn.Linear(1000, 5000), nn.Linear(3, 3))
    sw.save(sw.TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters())), path, step=3)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_there_and_back(step: Path, proxy: Proxy, tmp_path: Path) -> None:
    url = f"{ROOT}/back/{step.name}"
    seen: list[sw.reports.Progress] = []
    with sw.progress(seen.append):
        report = sw.copy_checkpoint(step, url)
    assert report.files == report.files_sent == len(contents(step))
    assert report.nbytes == report.bytes_sent == sum(map(len, contents(step).values()))
    assert (seen[-1].done_bytes, seen[-1].total_bytes) == (2 * report.nbytes, 2 * report.nbytes)
    assert [one.done_bytes for one in seen] == sorted(one.done_bytes for one in seen)
    assert sw.verify(url).ok
    again = sw.copy_checkpoint(url, tmp_path / "new" / step.name)
    assert contents(tmp_path / "new" / step.name) == contents(step)
    assert again.nbytes == report.nbytes
    assert [p.name for p in (tmp_path / "new").iterdir()] == [step.name]
    assert sw.copy_checkpoint(step, url).files_sent == 0  # all is there


def test_the_manifest_is_written_last(step: Path, proxy: Proxy) -> None:
    sw.copy_checkpoint(step, f"{ROOT}/last")
    written = [a.path for a in proxy.log if a.method in ("PUT", "POST")]
    assert "manifest.json" in written[-1]


def test_what_says_that_it_is_whole_comes_last(proxy: Proxy, tmp_path: Path) -> None:
    for name in ("manifest.json.txt", "a.json", "config.json", "model.safetensors.index.json", "z"):
        (tmp_path / name).write_bytes(name.encode())
    sw.copy_checkpoint(tmp_path, f"{ROOT}/order")
    written = [a.path.rpartition("/")[2] for a in proxy.log if a.method == "PUT"]
    assert written[-2:] == ["config.json", "model.safetensors.index.json"]


def test_a_directory_of_a_model(proxy: Proxy, tmp_path: Path) -> None:
    """Names as they stand, folders, empty files."""
    folder = tmp_path / "hub"
    (folder / "deep er").mkdir(parents=True)
    for name in ("config.json", "deep er/ü 50%.txt", "empty"):
        (folder / name).write_bytes(b"" if name == "empty" else name.encode())
    sw.copy_checkpoint(folder, f"{ROOT}/hub")
    sw.copy_checkpoint(f"{ROOT}/hub", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(folder)
    sw.copy_checkpoint(folder, tmp_path / "beside")
    assert contents(tmp_path / "beside") == contents(folder)


def test_an_upload_that_is_given_up_holds_up_no_request(proxy: Proxy) -> None:
    """Of the harness. A copy that finds damage gives up the parts on their way, and then lists what lies there."""
    host, _, port = proxy.endpoint.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as given_up:
        head = f"PUT /{BUCKET}/given-up HTTP/1.1\r\nHost: {host}\r\nAuthorization: {SIGNED}\r\nContent-Length: 1000"
        given_up.sendall(f"{head}\r\n\r\nnot as much".encode())
    listed = http.client.HTTPConnection(host, int(port), timeout=20)
    with contextlib.closing(listed):
        listed.request("GET", f"/{BUCKET}?list-type=2&prefix=given-up", headers={"Authorization": SIGNED})
        assert b"<Key>" not in listed.getresponse().read()
    assert [a.method for a in proxy.log] == ["GET"]


def test_damage_is_not_copied(step: Path, proxy: Proxy, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(step, damaged)
    name = next(n for n in sorted(contents(step)) if n.startswith("model/"))
    with (damaged / name).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(bytes([contents(step)[name][-1] ^ 1]))
    with pytest.raises(IntegrityError, match="damaged, and not copied"):
        sw.copy_checkpoint(damaged, f"{ROOT}/damaged")
    assert "manifest.json" not in files_below(f"{ROOT}/damaged")
    with pytest.raises(IntegrityError, match=name):
        sw.copy_checkpoint(damaged, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_place_that_holds_something_else(
    step: Path, proxy: Proxy, server: S3Server, tmp_path: Path
) -> None:
    """Nothing there is overwritten: not another checkpoint, and not a model of which some files would stay."""
    other = tmp_path / "step-00000009"
    sw.save(sw.TrainState(model=nn.Linear(2, 2)), other, step=9)
    sw.copy_checkpoint(other, f"{ROOT}/taken")
    with pytest.raises(CheckpointError, match=r"holds something else: manifest\.json"):
        sw.copy_checkpoint(step, f"{ROOT}/taken")
    assert sw.verify(f"{ROOT}/taken").ok
    server.put("copies/model/model.safetensors.index.json", b"{}")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"index\.json"):
        sw.copy_checkpoint(tmp_path / "hub", f"{ROOT}/model")


def test_within_itself(step: Path, proxy: Proxy) -> None:
    for source, out in ((step, step / "x"), (step, step.parent), (f"{ROOT}/n", f"{ROOT}/n/x")):
        with pytest.raises(CheckpointError, match="is inside the source"):
            sw.copy_checkpoint(source, out)


def test_what_is_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").write_bytes(b"1")
    (folder / "link").symlink_to(folder / "a")
    sw.copy_checkpoint(folder, tmp_path / "one")
    assert contents(tmp_path / "one") == {"a": b"1", "link": b"1"}
    assert not (tmp_path / "one" / "link").is_symlink()
    (folder / "elsewhere").symlink_to(tmp_path / "one")
    with pytest.raises(SourceError, match="link to a directory"):
        sw.copy_checkpoint(folder, tmp_path / "two")
    (folder / "elsewhere").unlink()
    os.mkfifo(folder / "pipe")
    with pytest.raises(SourceError, match="not a regular file"):
        sw.copy_checkpoint(folder, tmp_path / "two")


def test_leftovers_of_another_copy(step: Path, tmp_path: Path) -> None:
    """Files, links and folders in the unfinished directory do not come into the copy."""
    unfinished = tmp_path / f"out.copying-{'ab' * 8}"
    (unfinished / "old" / "deep").mkdir(parents=True)
    mark(str(unfinished))
    (unfinished / "old" / "file").write_bytes(b"1")
    name = next(n for n in contents(step) if "/" not in n)
    (unfinished / name).symlink_to(step / name)
    (unfinished / "folder").symlink_to(step)
    sw.copy_checkpoint(step, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(step)
    assert not [p for p in (tmp_path / "out").rglob("*") if p.is_symlink()]
    assert not (tmp_path / "out" / "old").exists()
    assert step.exists()
    assert not list(tmp_path.glob("out.*"))


def test_what_another_program_has_left_is_no_unfinished_copy(step: Path, tmp_path: Path) -> None:
    """Neither taken for one nor written through: a name proves nothing, not even with a nonce."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "file").write_text("precious")
    links = [tmp_path / "out.copying", tmp_path / f"out.copying-{'ab' * 8}"]
    for link in links:
        link.symlink_to(theirs)
    folder = tmp_path / f"out.copying-{'cd' * 8}"
    folder.mkdir()
    (folder / "file").write_text("precious")
    sw.copy_checkpoint(step, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(step)
    assert contents(theirs) == contents(folder) == {"file": b"precious"}
    assert all(link.is_symlink() for link in links)


def test_a_source_that_changes(
    proxy: Proxy, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No copy is a mixture: of a file that is written to, of an object that is replaced."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "large").write_bytes(b"a" * 20_000_000)

    def rewrite(found: sw.reports.Progress) -> None:
        if found.done_bytes and not written:
            written.append(1)
            (folder / "large").write_bytes(b"b" * 20_000_000)

    written: list[int] = []
    monkeypatch.setattr(operations, "PERIOD_S", 0.0)
    with sw.progress(rewrite), pytest.raises(IntegrityError, match="was changed while it was copied"):
        sw.copy_checkpoint(folder, tmp_path / "out")
    server.put("copies/changing/large", b"a" * 40_000_000)

    def replace(asked: Asked) -> Do | None:
        late = asked.first and asked.first >= 20_000_000
        return Do(before=lambda: server.put("copies/changing/large", b"b" * 40_000_000)) if late else None

    proxy.reset(replace)
    with pytest.raises(IntegrityError, match="was replaced"):
        sw.copy_checkpoint(f"{ROOT}/changing", tmp_path / "other")


def test_what_is_in_the_way(step: Path, proxy: Proxy, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        sw.copy_checkpoint(step, tmp_path / "there")
    with pytest.raises(SourceError, match="no such directory"):
        sw.copy_checkpoint(tmp_path / "none", f"{ROOT}/none")
    with pytest.raises(SourceError, match="no such directory"):
        sw.copy_checkpoint(f"{ROOT}/none", tmp_path / "out")
    with pytest.raises(CheckpointError, match="only read"):
        sw.copy_checkpoint(step, "memory://box/step")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="contains no file"):
        sw.copy_checkpoint(tmp_path / "empty", f"{ROOT}/empty")


def busy(asked: Asked) -> Do | None:
    return Do(status=503) if asked.number % 5 == 1 else None


def lost_replies(asked: Asked) -> Do | None:
    return Do(lose_reply=True) if asked.method in ("PUT", "POST") and asked.number % 3 == 0 else None


def cut_reads(asked: Asked) -> Do | None:
    return Do(cut_after=1_000_000) if asked.method == "GET" and asked.number % 4 == 0 else None


@pytest.mark.parametrize("decide", nightly_but((busy, lost_replies, cut_reads), lost_replies))
def test_faults_that_pass(step: Path, proxy: Proxy, decide: object, tmp_path: Path) -> None:
    proxy.reset(decide)  # type: ignore[arg-type]
    url = f"{ROOT}/{getattr(decide, '__name__', '')}"
    sw.copy_checkpoint(step, url)
    assert sw.verify(url).ok
    sw.copy_checkpoint(url, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(step)


def test_a_write_that_is_refused(step: Path, proxy: Proxy) -> None:
    proxy.reset(lambda asked: Do(status=403) if asked.method in ("PUT", "POST") else None)
    with pytest.raises(CheckpointError, match=r"403 .AccessDenied."):
        sw.copy_checkpoint(step, f"{ROOT}/refused")
    proxy.reset()
    assert not files_below(f"{ROOT}/refused")


def test_a_part_that_is_refused(proxy: Proxy, tmp_path: Path) -> None:
    """The error is the store's, though the upload ends in the middle of the file."""
    (tmp_path / "large.bin").write_bytes(os.urandom(2**26))
    proxy.reset(lambda asked: Do(status=403) if "partNumber" in asked.path else None)
    with pytest.raises(CheckpointError, match=r"large\.bin: "):
        sw.copy_checkpoint(tmp_path, f"s3://{BUCKET}/{os.urandom(6).hex()}")


def test_another_program_that_writes_there(step: Path, proxy: Proxy, server: S3Server) -> None:
    """What is read back differs from what was sent."""
    name = next(n for n in sorted(contents(step)) if n.startswith("rank/") and n.endswith(".json"))

    def overwrite(asked: Asked) -> Do | None:
        if asked.method == "GET" and asked.path.split("?")[0].endswith(name):
            return Do(before=lambda: server.put(f"copies/both/{name}", b"x" * len(contents(step)[name])))
        return None

    proxy.reset(overwrite)
    with pytest.raises((CheckpointError, IntegrityError)):
        sw.copy_checkpoint(step, f"{ROOT}/both")
    proxy.reset()
    assert "manifest.json" not in files_below(f"{ROOT}/both")
    assert sw.copy_checkpoint(step, f"{ROOT}/both").files_sent  # and the next one mends it
    assert sw.verify(f"{ROOT}/both").ok


_CHILD = """
import sys, shardwise as sw
sw.configure_storage("s3://{bucket}", endpoint="{endpoint}", region="us-east-1", access_key_id="A", secret_access_key="s")
sw.copy_checkpoint("{source}", "{target}")
"""


def begun(proxy: Proxy, target: str, step: Path) -> bool:
    """Whether at least one file is there."""
    if target.startswith("s3://"):
        return len(proxy.log) >= 14
    found = [contents(place) for place in Path(target).parent.glob(f"{Path(target).name}.copying-*")]
    return any(contents(step).get(name) == content for one in found for name, content in one.items())


@pytest.mark.slow
@pytest.mark.parametrize("there", [True, False])
def test_a_killed_copy_goes_on(step: Path, proxy: Proxy, tmp_path: Path, there: bool) -> None:
    url = f"{ROOT}/killed"
    if not there:
        sw.copy_checkpoint(step, url)
    source, target = (str(step), f"{ROOT}/killed-{there}") if there else (url, str(tmp_path / "back"))
    proxy.reset(lambda asked: Do(wait_s=0.15))
    code = _CHILD.format(bucket=BUCKET, endpoint=proxy.endpoint, source=source, target=target)
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        deadline = time.monotonic() + 60
        while not begun(proxy, target, step) and time.monotonic() < deadline and child.poll() is None:
            time.sleep(0.01)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    proxy.reset()
    if there:
        assert "manifest.json" not in files_below(target)
    else:
        assert not Path(target).exists()
    report = sw.copy_checkpoint(source, target)
    assert report.files_sent < report.files
    assert sw.verify(target).ok
    if not there:
        assert contents(Path(target)) == contents(step)


@pytest.mark.processes
@pytest.mark.nightly
def test_the_command(step: Path, tmp_path: Path) -> None:
    target = tmp_path / "copied"
    command = [sys.executable, "-m", "shardwise", "copy", str(step), str(target)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["files"] == len(contents(step))
    assert contents(target) == contents(step)
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "exists already" in again.stderr
