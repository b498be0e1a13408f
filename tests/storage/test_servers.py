"""The same short list of checks on every store that can run on this machine: moto here, azurite and Ceph by ``make servers``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.engine.objects import PART_BYTES
from shardwise.errors import CheckpointError, IntegrityError, LockedError, ShardwiseError, SourceError
from shardwise.format.header import parse_head
from shardwise.storage import (
    exists,
    fetch,
    files_below,
    files_in,
    folders_in,
    is_file,
    names_in,
    read_whole,
    stat_of,
)
from shardwise.storage.stores import store_of
from tests.harness import models
from tests.harness.object_store import BUCKET, Asked, Do, Proxy
from tests.harness.process import ROOT
from tests.harness.servers import SERVERS, NotInstalled, Running, allow_guest, as_owner
from tests.harness.tiers import nightly_but
from tests.storage.test_saves import digest_of, small_state

pytestmark = pytest.mark.processes

PAGE = ROOT / "docs" / "howto" / "stores" / "s3.md"
#: More than a store lists at a time: S3 1,000, Azure 5,000.
MANY = {"moto": 1_001, "ceph": 1_001, "azurite": 5_001}


@pytest.fixture(scope="module", params=nightly_but(SERVERS, "moto"))
def at(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server; this process uses its bucket."""
    name = request.param
    try:
        with SERVERS[name](tmp_path_factory.mktemp(name)) as running:
            sw.configure_storage(running.root, **running.options)
            yield running
    except NotInstalled as error:
        pytest.skip(str(error))


def test_one_of_two_creates(at: Running) -> None:
    store = store_of(at.root)
    assert store.create("create/one", b"first")
    assert not store.create("create/one", b"second")
    assert store.create("create/one", b"first"), "a reply that was lost"


def test_replaced_if_unchanged(at: Running) -> None:
    """Ceph 16 gives ETags in quotes, and takes them without."""
    store = store_of(at.root)
    assert store.get("replace", 10) is None
    assert store.create("replace", b"1")
    first = store.get("replace", 10)
    assert first is not None
    assert store.replace("replace", b"2", first)
    assert store.replace("replace", b"2", first), "a reply that was lost"
    assert not store.replace("replace", b"3", first)
    second = store.get("replace", 10)
    assert second is not None
    assert second.content == b"2"
    store.delete("replace")
    assert not store.replace("replace", b"4", second)
    assert store.get("replace", 10) is None


def test_a_run(at: Running) -> None:
    """Saves, retention, a resume that supersedes a step, and a run that was taken over."""
    root = f"{at.root}/run"
    with sw.Checkpointer(root, keep_last=2) as first:
        for step in (1, 2, 3):
            first.save(small_state(step), step)
        with sw.Checkpointer(root, mode="async") as second:
            assert second.resume(small_state(9), step=2) is not None
            with pytest.raises(LockedError, match="another run has taken over these steps"):
                first.save(small_state(4), 4)
            second.save(small_state(5), 3)
    with sw.Checkpointer(root) as third:
        report = third.resume(small_state(9))
    assert report is not None
    assert report.step == 3
    assert report.path.startswith(root)
    assert report.digest == digest_of(report.path)
    head = parse_head(read_whole(f"{root}/head.json", 10**6), root)
    assert set(folders_in(root)) == head.names
    assert sorted(head.steps) == [2, 3]
    assert [one.step for one in head.aside] == [3]


def test_ranges_of_an_object_in_parts(at: Running) -> None:
    content = os.urandom(2 * PART_BYTES + 12_345)
    store_of(at.root).write("parts", iter([memoryview(content)]), len(content))
    stat = stat_of(f"{at.root}/parts")
    assert stat is not None
    assert stat.nbytes == len(content)
    for start, stop in ((0, 10), (PART_BYTES - 5, PART_BYTES + 5), (len(content) - 1, len(content))):
        view = bytearray(stop - start)
        fetch(f"{at.root}/parts", start, memoryview(view), version=stat.version)
        assert view == content[start:stop]
    with pytest.raises(IntegrityError, match="fewer than"):
        fetch(f"{at.root}/parts", len(content), memoryview(bytearray(1)))


@pytest.mark.parametrize("name", ["a b", "ü", "50%", "50%25", "a+b", "a&b=c", "~x'(1)!*@,;:$"])
def test_names(at: Running, name: str) -> None:
    store = store_of(at.root)
    folder = f"names/{name}"
    store.write(f"{folder}/{name}", iter([memoryview(b"12345")]), 5)
    assert name in folders_in(f"{at.root}/names")
    assert list(files_in(f"{at.root}/{folder}")) == [name]
    url = f"{at.root}/{folder}/{name}"
    assert is_file(url)
    view = bytearray(3)
    fetch(url, 1, memoryview(view))
    assert view == b"234"


@pytest.mark.nightly
def test_a_listing_of_several_pages(at: Running, request: pytest.FixtureRequest) -> None:
    store, many = store_of(at.root), MANY[request.node.callspec.params["at"]]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda k: store.write(f"many/{k:05}", iter([memoryview(b"1")]), 1), range(many)))
    assert sorted(names_in(f"{at.root}/many")) == [f"{k:05}" for k in range(many)]


def test_deleted(at: Running) -> None:
    store = store_of(at.root)
    store.write("gone/x", iter([memoryview(b"1")]), 1)
    store.delete("gone/x")
    store.delete("gone/x")
    assert not exists(f"{at.root}/gone")
    assert not is_file(f"{at.root}/gone/x")


def test_saved_verified_restored(at: Running, tmp_path: Path) -> None:
    url = f"{at.root}/run/step-00000001"
    sw.save(small_state(), url, step=1)
    sw.save(small_state(), tmp_path / "step", step=1)
    assert digest_of(url) == digest_of(str(tmp_path / "step"))
    with pytest.raises(CheckpointError, match="exists already"):
        sw.save(small_state(1), url, step=1)
    store_of(at.root).create("run/claimed.claim", b'{"nonce": "1", "began": "now"}')
    with pytest.raises(LockedError):
        sw.save(small_state(1), f"{at.root}/run/claimed")
    assert not exists(f"{url}.claim")


@pytest.mark.nightly
def test_bytes_that_change_on_their_way_are_refused(at: Running, request: pytest.FixtureRequest) -> None:
    """By the store, which compares each body with the SHA-256 in the request's signature: in one request, and in parts."""
    if request.node.callspec.params["at"] != "ceph":
        pytest.skip("this server compares no checksums")
    changed: list[str] = []

    def decide(asked: Asked) -> Do:
        def sent(body: bytes, headers: Mapping[str, str]) -> bytes:
            if wanted not in asked.path or not body:
                return body
            changed.append(asked.path)
            return body[:-1] + bytes([body[-1] ^ 1])

        return Do(sent=sent)

    port = int(at.options["endpoint"].rpartition(":")[2])
    state = sw.TrainState(model=torch.nn.Linear(3000, 1000))
    try:
        with Proxy(port, decide) as proxy:
            sw.configure_storage(at.root, **{**at.options, "endpoint": proxy.endpoint})
            for wanted in ("manifest.json", "partNumber=2", ".safetensors"):
                changed.clear()
                with pytest.raises(ShardwiseError, match="XAmzContentSHA256Mismatch"):
                    sw.save(small_state() if wanted == ".safetensors" else state, f"{at.root}/changed/step")
                assert changed, wanted
                assert not exists(f"{at.root}/changed/step/manifest.json")
    finally:
        sw.configure_storage(at.root, **at.options)


def test_copied_and_loaded(at: Running, tmp_path: Path) -> None:
    models.write_hub_directory("qwen3", tmp_path / "qwen3", torch.float32)
    url = f"{at.root}/models/with space/qwen3"
    sw.copy_checkpoint(tmp_path / "qwen3", url)
    assert {name: stat and stat.nbytes for name, stat in files_below(url).items()} == {
        file.name: file.stat().st_size for file in (tmp_path / "qwen3").iterdir()
    }
    found, report = sw.load_pretrained(url, None, return_report=True)
    expected = sw.load_pretrained(tmp_path / "qwen3", None)
    assert report.requests
    for (name, mine), theirs in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    sw.copy_checkpoint(url, tmp_path / "back")
    for file in (tmp_path / "qwen3").iterdir():
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes()


def test_the_least_rights(at: Running, tmp_path: Path) -> None:
    """Those that docs/howto/stores/s3.md gives: for loads, for saves, and the rule for unfinished uploads."""
    if at.guest is None:
        pytest.skip("this server has no users")
    reading, saving, rule = map(json.loads, re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL))
    models.write_hub_directory("qwen3", tmp_path / "qwen3", torch.float32)
    sw.copy_checkpoint(tmp_path / "qwen3", f"{at.root}/models/qwen3")
    sw.save(small_state(), f"{at.root}/models/step")
    as_owner(at.options["endpoint"]).put_bucket_lifecycle_configuration(
        Bucket=BUCKET, LifecycleConfiguration=rule
    )
    try:
        sw.configure_storage(at.root, **{**at.options, "access_key_id": at.guest})
        with pytest.raises(SourceError, match=r"403 .AccessDenied."):
            sw.verify(f"{at.root}/models/step")
        allow_guest(at, reading)
        sw.load_pretrained(f"{at.root}/models/qwen3", None)
        digest_of(f"{at.root}/models/step")
        with pytest.raises(ShardwiseError, match=r"403 .AccessDenied."):
            sw.save(small_state(), f"{at.root}/models/other")
        allow_guest(at, saving)
        sw.save(small_state(), f"{at.root}/runs/step")
        digest_of(f"{at.root}/runs/step")
        sw.copy_checkpoint(tmp_path / "qwen3", f"{at.root}/runs/qwen3")
        with pytest.raises(SourceError, match=r"403 .AccessDenied."):
            sw.verify(f"{at.root}/models/step")
    finally:
        sw.configure_storage(at.root, **at.options)
