"""Loads from a store onto several ranks: the same bits as from a directory, each byte asked for once, errors alike on all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.errors import ShardwiseError
from tests.harness import models
from tests.harness.object_store import BUCKET, Asked, Do, Proxy, S3Server, use_store
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly_but, nightly_rows
from tests.storage._states import without_staging

ROOT = f"s3://{BUCKET}/loads"
KINDS = ("gpt2", "qwen3-moe", "qwen3-tied")


@pytest.fixture(scope="module")
def hub(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hub")
    for kind in KINDS:
        models.write_hub_directory(kind, root / kind, torch.float32)
        server.put_directory(root / kind, f"loads/{kind}")
    return root


def locals_of(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {n: t.to_local() if isinstance(t, DTensor) else t for n, t in tensors.items()}


def same(found: nn.Module, expected: nn.Module) -> bool:
    mine, theirs = locals_of(found), locals_of(expected)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)


def mesh_of(world_size: int) -> Any:
    if world_size == 4:
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))


# ----------------------------------------------------------------------------------------------------
# On ranks


def load_both(endpoint: str, hub: str, kind: str, strategy: Any) -> dict[str, Any]:
    use_store(endpoint)
    io = sw.IOOptions(strategy=strategy, staging_bytes=1024**2)
    mesh = mesh_of(dist.get_world_size())
    expected = sw.load_pretrained(f"{hub}/{kind}", mesh, io=sw.IOOptions(strategy="own"))
    found, report = sw.load_pretrained(f"{ROOT}/{kind}", mesh, io=io, return_report=True)
    again = sw.load_pretrained(f"{ROOT}/{kind}", mesh, dtype="bfloat16", io=io)
    cast = sw.load_pretrained(f"{hub}/{kind}", mesh, dtype="bfloat16", io=sw.IOOptions(strategy="own"))
    return {
        "same": same(found, expected) and same(again, cast),
        "strategy": report.strategy,
        "bytes_read": report.bytes_read,
        "requests": report.requests,
        "model_bytes": report.model_bytes,
    }


def load_one(endpoint: str, kind: str, strategy: Any) -> str:
    use_store(endpoint)
    try:
        sw.load_pretrained(
            f"{ROOT}/{kind}", mesh_of(dist.get_world_size()), io=sw.IOOptions(strategy=strategy, timeout_s=60)
        )
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [(2, "auto"), *nightly_rows((3, "once"), (3, "own"), (4, "node"), (4, "auto"))],
)
def test_shards_have_the_bits_of_a_local_load(
    hub: Path, proxy: Proxy, ranks: RankPool, world_size: int, strategy: str
) -> None:
    for kind in KINDS:
        proxy.reset()
        found = ranks.run_ranks(
            world_size, load_both, endpoint=proxy.endpoint, hub=str(hub), kind=kind, strategy=strategy
        )
        assert [one["same"] for one in found] == [True] * world_size
        if strategy == "auto":
            assert {one["strategy"] for one in found} == {
                "node: request latency outweighs transfer time, so the ranks on a host share reads"
            }
        stored = sum(f.stat().st_size for f in (hub / kind).iterdir())
        headers = 16 * 1024 * len([*(hub / kind).glob("*.safetensors")])
        if strategy != "own":
            assert sum(one["bytes_read"] for one in found) <= 1.02 * stored
            # Two loads, each with its documents and the guess of the headers, by one rank.
            assert proxy.counts.bytes_out <= 2 * (1.02 * stored + headers + 20_000)


def test_a_plan_and_a_file_and_a_checkpoint(
    hub: Path, proxy: Proxy, server: S3Server, tmp_path: Path
) -> None:
    use_store(proxy.endpoint)
    there, here = sw.plan(f"{ROOT}/gpt2", ranks=3).to_json(), sw.plan(hub / "gpt2", ranks=3).to_json()
    assert there.pop("path") == f"{ROOT}/gpt2"
    assert there.pop("store")
    assert here.pop("store") is None
    assert here.pop("path") == str(hub / "gpt2")
    assert without_staging(there) == without_staging(here)
    expected = sw.load_pretrained(hub / "gpt2", None)
    sw.save(sw.TrainState(model=expected), tmp_path / "step")
    server.put_directory(tmp_path / "step", "loads/step")
    (weights,) = (hub / "gpt2").glob("*.safetensors")
    for source in (f"{ROOT}/gpt2/{weights.name}", f"{ROOT}/step", f"{ROOT}/gpt2/"):
        found = sw.load_pretrained(hub / "gpt2", None)
        for tensor in found.parameters():
            nn.init.constant_(tensor, 7.0)
        report = sw.load(found, source)
        assert same(found, expected)
        assert report.source in (source.rstrip("/"), os.path.dirname(source))
    report_of_step = sw.load(found, f"{ROOT}/step")
    assert report_of_step.verified == "digest"


Decide = Callable[[Asked], Do | None]


def payload_fails(asked: Asked) -> Do | None:
    """Refuse one range in the middle of the weights."""
    return Do(status=403) if asked.path.endswith(".safetensors") and asked.first else None


def cut_often(asked: Asked) -> Do | None:
    return Do(cut_after=3000) if asked.number % 3 == 1 else None


def busy(asked: Asked) -> Do | None:
    return Do(status=503) if asked.number % 4 == 2 else None


@pytest.mark.parametrize("decide", [cut_often, busy])
def test_what_passes_is_not_noticed(hub: Path, proxy: Proxy, ranks: RankPool, decide: Decide) -> None:
    proxy.reset(decide)
    found = ranks.run_ranks(2, load_both, endpoint=proxy.endpoint, hub=str(hub), kind="gpt2", strategy="auto")
    assert [one["same"] for one in found] == [True, True]


@pytest.mark.parametrize("strategy", nightly_but(("own", "node", "once"), "node"))
def test_an_error_of_one_rank_is_raised_on_all(
    hub: Path, proxy: Proxy, ranks: RankPool, strategy: str
) -> None:
    proxy.reset(payload_fails)
    found = ranks.run_ranks(3, load_one, endpoint=proxy.endpoint, kind="gpt2", strategy=strategy)
    assert len(set(found)) == 1
    assert "403 (AccessDenied)" in found[0]
    assert found[0].startswith(("RankError", "SourceError"))


def test_an_object_that_is_replaced_during_a_load(
    hub: Path, proxy: Proxy, server: S3Server, ranks: RankPool
) -> None:
    """After the header was read: no rank takes bytes of the new object."""
    weights = next((hub / "gpt2").glob("*.safetensors"))
    server.put(f"loads/replaced/{weights.name}", weights.read_bytes())
    server.put("loads/replaced/config.json", (hub / "gpt2" / "config.json").read_bytes())
    content = bytearray(weights.read_bytes())
    content[-4:] = os.urandom(4)
    done: list[bool] = []

    def replace(asked: Asked) -> Do | None:
        if asked.path.endswith(".safetensors") and asked.first and not done:
            done.append(True)
            return Do(before=lambda: server.put(f"loads/replaced/{weights.name}", bytes(content)))
        return None

    proxy.reset(replace)
    found = ranks.run_ranks(2, load_one, endpoint=proxy.endpoint, kind="replaced", strategy="auto")
    assert done
    assert len(set(found)) == 1
    assert "was replaced while it was read" in found[0]


def test_nothing_there(hub: Path, proxy: Proxy, ranks: RankPool) -> None:
    found = ranks.run_ranks(2, load_one, endpoint=proxy.endpoint, kind="none", strategy="auto")
    assert len(set(found)) == 1
    assert "no such file or directory" in found[0]
