"""verify(): good for every world size, and every kind of damage is named."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.errors import FormatError, IntegrityError, SourceError
from shardwise.format.manifest import read_manifest
from tests.checkpoint import _checkpointer_fns as fns
from tests.harness.pool import RankPool
from tests.harness.process import worker_env


@pytest.fixture(scope="module")
def checkpoint(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by two ranks."""
    path = tmp_path_factory.mktemp("verify") / "step"
    ranks.run_ranks(2, fns.save_for_verify, str(path), (2,))
    return path


@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (2, 2)])
def test_good_and_written_once(ranks: RankPool, tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = tmp_path / "step"
    expected = ranks.run_ranks(math.prod(shape), fns.save_for_verify, str(path), shape)[0]
    report = sw.verify(path)
    assert report.ok
    assert (report.problems, report.step) == ((), 3)
    assert report.files == len([p for p in path.rglob("*") if p.is_file()])
    assert report.tensors == 4 + 4 + 1  # model; moments; the packed step counters
    manifest = read_manifest(path)
    for kind, nbytes in expected.items():
        payload = [
            e.nbytes - e.header_bytes
            for n, e in manifest.files.items()
            if n.startswith(f"{kind}/") and n.endswith(".safetensors")
        ]
        assert sum(payload) == nbytes, "replicas are written once"
        if len(shape) == 2:
            assert len(payload) == 4, "and by all of them"


#: What a report must say of each damage; None where there is no readable manifest.
NAMED: dict[str, str | None] = {
    "model payload": "model/shard-00002-model-00001-of-00001.safetensors: bytes",
    "optimizer payload": "optimizer/shard-00001-optimizer-00001-of-00001.safetensors: bytes",
    "header": "model/shard-00001-model-00001-of-00001.safetensors: header differs",
    "header length": "optimizer/shard-00002-optimizer-00001-of-00001.safetensors: header differs",
    "manifest": None,
    "manifest's first byte": None,
    "state.json": "state.json: content differs",
    "rank file": "rank/00001.json: content differs",
    "rank tensors": "rank/00000.safetensors: content differs",
    "truncated payload": "model/shard-00001-model-00001-of-00001.safetensors: 100 bytes, expected",
    "truncated manifest": None,
    "grown file": "state.json: 9999 bytes, expected",
    "deleted slice": "optimizer/shard-00001-optimizer-00001-of-00001.safetensors: lost",
    "deleted rank file": "rank/00001.json: lost",
    "deleted folder": "model/shard-00001-model-00001-of-00001.safetensors: lost",
    "deleted manifest": None,
    "manifest a folder": None,
    "empty": None,
}


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_find_the_same(checkpoint: Path, tmp_path: Path, threads: int) -> None:
    path = tmp_path / "step"
    shutil.copytree(checkpoint, path)
    for damage in ("model payload", "optimizer payload", "header", "state.json"):
        fns.DAMAGES[damage](path)
    found = sw.verify(path, threads=threads)
    assert [p.split(":")[0].rsplit("/", 1)[0] for p in found.problems] == [
        "model",
        "model",
        "optimizer",
        "state.json",
        "model tensor 'layer.weight'",
        "optimizer tensor 'layer.weight.exp_avg_sq'",
    ], found.problems
    assert found.bytes_read == sum(e.nbytes for e in read_manifest(path).files.values()), "all of it, once"
    with pytest.raises(ValueError, match="threads"):
        sw.verify(path, threads=0)


def test_tensors_that_lie_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks of 64 bytes, every kind of piece of a tensor is summed, and a flipped bit anywhere is found."""
    for module in ("shardwise.format.manifest", "shardwise.checkpoint.verify"):
        monkeypatch.setattr(f"{module}.BLOCK_BYTES", 64)
    torch.manual_seed(0)
    model = torch.nn.ParameterDict(
        {
            "a": torch.randn(3, 5, 7).double(),
            "b": torch.randn(11, 3),
            "c": torch.randn(101).bfloat16(),
            "d": torch.randn(()),
        }
    )
    path = tmp_path / "step"
    sw.save(sw.TrainState(model=model), path)
    assert sw.verify(path).ok
    (file,) = (path / "model").glob("*.safetensors")
    content = file.read_bytes()
    entry = read_manifest(path).files[f"model/{file.name}"]
    assert len(entry.blocks) > 15
    for at in range(entry.header_bytes, entry.nbytes, 37):
        damaged = bytearray(content)
        damaged[at] ^= 4
        file.write_bytes(damaged)
        block, tensor = sw.verify(path, threads=2).problems
        low, high = map(int, block.partition(": bytes ")[2].split()[:3:2])
        assert low <= at < high
        assert "content differs from its digest" in tensor


@pytest.mark.parametrize("damage", fns.DAMAGES)
def test_damage_is_named(checkpoint: Path, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "step"
    shutil.copytree(checkpoint, path)
    fns.DAMAGES[damage](path)
    expected = NAMED[damage]
    if expected is None:
        with pytest.raises(SourceError) as caught:
            sw.verify(path)
        kinds = {"manifest": (FormatError, IntegrityError), "manifest's first byte": FormatError}
        assert isinstance(caught.value, kinds.get(damage, SourceError))
        assert caught.value.path is not None
        return
    report = sw.verify(path)
    assert not report.ok
    assert any(p.startswith(expected) for p in report.problems), report.problems
    assert all(p.count(str(tmp_path)) <= 1 for p in report.problems)


def test_payload_damage_names_the_tensor(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "step"
    shutil.copytree(checkpoint, path)
    fns.DAMAGES["model payload"](path)
    report = sw.verify(path)
    assert len(report.problems) == 2
    assert "model tensor 'layer." in report.problems[1]
    assert report.to_json()["ok"] is False


def test_files_of_no_manifest(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "step"
    shutil.copytree(checkpoint, path)
    extra = path / "model" / "shard-00009-model-00001-of-00001.safetensors"
    extra.write_bytes(b"left over")
    assert sw.verify(path).problems == (f"model/{extra.name}: not listed in the manifest",)


def test_manifest_with_another_story(checkpoint: Path, tmp_path: Path) -> None:
    """A manifest that is intact by its own checksum, but not true: swapped digests, a file from elsewhere."""
    from shardwise.format.manifest import checksum_of

    path = tmp_path / "step"
    shutil.copytree(checkpoint, path)
    document = json.loads((path / "manifest.json").read_text())
    tensors = document["models"]["model"]
    weight, bias = tensors["layer.weight"], tensors["layer.bias"]
    weight["digest"], bias["digest"] = bias["digest"], weight["digest"]
    document["xxh3"] = checksum_of(document)
    (path / "manifest.json").write_text(json.dumps(document))
    problems = sw.verify(path).problems
    assert len(problems) == 2
    assert all("content differs from its digest" in p for p in problems)
    document["files"]["../outside"] = document["files"]["state.json"]
    document["xxh3"] = checksum_of(document)
    (path / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(FormatError, match="leaves the checkpoint directory"):
        sw.verify(path)


@pytest.mark.slow
def test_memory_is_bounded(ranks: RankPool, tmp_path: Path) -> None:
    """A tensor of 128 MiB is verified in less than 64 MiB."""
    path = tmp_path / "step"
    ranks.run_ranks(1, fns.save_large, str(path), 128)
    script = (
        "import resource, sys, shardwise as sw\n"
        "sw.verify(sys.argv[1])\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert sw.verify(sys.argv[2]).ok\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    small = tmp_path / "small"
    ranks.run_ranks(1, fns.save_large, str(small), 1)
    done = subprocess.run(
        [sys.executable, "-c", script, str(small), str(path)],
        env=worker_env(),
        check=True,
        capture_output=True,
        text=True,
    )
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(done.stdout) * unit < 64 * fns.MIB
