"""A checkpoint that was uploaded: verified, looked at, resumed from on another number of ranks, exported and compared, by URL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.cli.render import CheckpointContents, contents_of
from shardwise.errors import IntegrityError, SourceError
from tests.harness import models
from tests.harness.object_store import BUCKET, Do, Proxy, S3Server, use_store
from tests.harness.pool import RankPool
from tests.storage._states import trained

ROOT = f"s3://{BUCKET}/checkpoints"


def save_there(hub: str, path: str) -> None:
    sw.save(trained(hub, 1), path, step=1)


def resume(hub: str, endpoint: str, url: str, path: str) -> dict[str, Any]:
    use_store(endpoint)
    state, other = trained(hub, 2), trained(hub, 3)
    report = sw.restore(state, url)
    expected = sw.restore(other, path)
    return {"digest": report.digest, "expected": expected.digest, "step": report.step, "path": report.path}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hub")
    models.write_hub_directory("qwen3", root / "qwen3", torch.float32)
    return root


@pytest.fixture(scope="module")
def step(server: S3Server, hub: Path, ranks: RankPool) -> Path:
    path = hub / "step-00000001"
    ranks.run_ranks(2, save_there, hub=str(hub), path=str(path))
    server.put_directory(path, f"checkpoints/{path.name}")
    return path


def test_resumed_on_another_number_of_ranks(hub: Path, step: Path, proxy: Proxy, ranks: RankPool) -> None:
    url = f"{ROOT}/{step.name}"
    for world_size in (2, 3):
        found = ranks.run_ranks(
            world_size, resume, hub=str(hub), endpoint=proxy.endpoint, url=f"{url}/", path=str(step)
        )
        assert len({one["digest"] for one in found}) == 1
        assert all(one["digest"] == one["expected"] and one["step"] == 1 for one in found)
        assert {one["path"] for one in found} == {url}


def test_verified_and_described(step: Path, proxy: Proxy) -> None:
    url = f"{ROOT}/{step.name}"
    there, here = sw.verify(url), sw.verify(step)
    assert there.ok
    assert (there.files, there.tensors, there.bytes_read) == (here.files, here.tensors, here.bytes_read)
    contents = contents_of(url)
    assert isinstance(contents, CheckpointContents)
    assert contents.problems == ()
    assert contents.step == 1
    assert contents.source.tensor_bytes == contents_of(str(step)).source.tensor_bytes  # type: ignore[union-attr]


def test_exported_and_compared(hub: Path, step: Path, proxy: Proxy, tmp_path: Path) -> None:
    url = f"{ROOT}/{step.name}"
    assert sw.diff(url, step).changed == ()
    there = sw.export_hf(url, tmp_path / "there", config=hub / "qwen3")
    here = sw.export_hf(step, tmp_path / "here", config=hub / "qwen3")
    assert there.tensors == here.tensors
    for file in (tmp_path / "here").iterdir():
        assert (tmp_path / "there" / file.name).read_bytes() == file.read_bytes(), file.name
    assert sw.diff(url, hub / "qwen3").changed


def test_a_model_is_exported_with_its_config(
    hub: Path, proxy: Proxy, server: S3Server, tmp_path: Path
) -> None:
    server.put_directory(hub / "qwen3", "checkpoints/qwen3")
    sw.export_hf(f"{ROOT}/qwen3", tmp_path / "there", dtype="bfloat16")
    sw.export_hf(hub / "qwen3", tmp_path / "here", dtype="bfloat16")
    here, there = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("here", "there"))
    assert here == there
    assert "config.json" in there


def test_an_object_that_is_replaced_after_its_header_was_read(
    hub: Path, proxy: Proxy, server: S3Server, tmp_path: Path
) -> None:
    """By an export and by a comparison, too."""
    weights = next((hub / "qwen3").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    for work in (
        lambda url: sw.export_hf(url, tmp_path / "out", dtype="bfloat16"),
        lambda url: sw.diff(url, hub / "qwen3"),
    ):
        server.put_directory(hub / "qwen3", "checkpoints/moving")
        asked: list[Any] = []

        def replace(one: Any, asked: list[Any] = asked) -> Do | None:
            if one.method == "GET" and one.path.endswith(weights.name):
                asked.append(one)
                if len(asked) == 2:
                    return Do(before=lambda: server.put(f"checkpoints/moving/{weights.name}", bytes(content)))
            return None

        proxy.reset(replace)
        with pytest.raises(SourceError, match="was replaced"):
            work(f"{ROOT}/moving")


def test_damage_is_found(step: Path, proxy: Proxy, server: S3Server) -> None:
    """A lost object, a short one, one changed bit, one that is not listed: each is named."""
    manifest = json.loads((step / "manifest.json").read_text())
    name = next(n for n in sorted(manifest["files"]) if n.startswith("model/"))
    content = (step / name).read_bytes()
    changed = bytearray(content)
    changed[-1] ^= 1
    for kind, damaged, said in (
        ("short", content[:-1], "truncated"),
        ("changed", bytes(changed), "checksum"),
        ("lost", None, "lost"),
    ):
        server.put_directory(step, f"checkpoints/{kind}")
        if damaged is None:
            server.call("DELETE", f"/{BUCKET}/checkpoints/{kind}/{name}")
        else:
            server.put(f"checkpoints/{kind}/{name}", damaged)
        report = sw.verify(f"{ROOT}/{kind}")
        assert not report.ok
        assert any(name in line and said in line for line in report.problems), report.problems
    server.put(f"checkpoints/short/{name}", content)
    server.put("checkpoints/short/model/more", b"1")
    assert sw.verify(f"{ROOT}/short").problems == ("model/more: not listed in the manifest",)


def test_what_is_not_there(step: Path, proxy: Proxy) -> None:
    with pytest.raises(SourceError, match="no such directory"):
        sw.verify(f"{ROOT}/none")
    with pytest.raises(SourceError, match="contains step 1; give s3://bucket/checkpoints/step-00000001"):
        sw.verify(f"{ROOT}/")
    with pytest.raises((SourceError, IntegrityError)):
        sw.restore(sw.TrainState(model=torch.nn.Linear(2, 2)), f"{ROOT}/none")
