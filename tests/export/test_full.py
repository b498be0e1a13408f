"""iter_full_tensors(): what an export would write, tensor by tensor, at every layout; errors alike, memory bounded."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import shardwise as sw
from tests.export import _full_fns as fns
from tests.export._export_fns import Odd
from tests.harness import models
from tests.harness.on_ranks import on_ranks
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly

KINDS = ("qwen3-moe", "mixtral", "qwen3-tied", "llava")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("full")
    for kind in KINDS:
        models.write_hub_directory(kind, found / kind, torch.bfloat16)
    return found


@pytest.mark.parametrize("world_size", [2, *nightly(3, 4)])
def test_hub_names_are_what_the_export_writes(ranks: RankPool, root: Path, world_size: int) -> None:
    orders = ranks.run_ranks(world_size, fns.as_exported, KINDS, str(root))
    assert all(order == orders[0] for order in orders), "ranks must give tensors in one order"
    moe, _, tied, _ = orders[0]
    assert any("experts.2." in name for name in moe), "stacked experts come apart again"
    assert "lm_head.weight" not in tied


@on_ranks(1, 3, 4)
def test_any_module_in_any_layout() -> None:
    """Module names: mixed dtypes, scalars, empty tensors and shards, buffers, plain parameters; FSDP over TP."""
    torch.manual_seed(3)
    model = Odd()
    expected = {n: t.detach().clone() for n, t in model.state_dict().items()}
    fully_shard(model, mesh=fns.make_mesh(), ignored_params={model.codes})
    fns.assert_equal(dict(sw.iter_full_tensors(model, naming="module", bucket_bytes=20)), expected)
    fns.assert_equal(dict(sw.iter_full_tensors(model)), expected)  # no hub names known: its own
    if dist.get_world_size() != 4:
        return
    run = next(fns._runs)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(f"dp{run}", f"tp{run}"))
    for rows in (37, 5, 1):
        layer = nn.Linear(3, rows)
        expected = {n: t.detach().clone() for n, t in layer.state_dict().items()}
        for name, tensor in expected.items():
            layer.register_parameter(
                name, nn.Parameter(distribute_tensor(tensor, mesh[f"tp{run}"], [Shard(0)]))
            )
        fully_shard(layer, mesh=mesh[f"dp{run}"])
        fns.assert_equal(dict(sw.iter_full_tensors(layer)), expected)


@on_ranks(2)
def test_all_ranks_may_stop_early(root: Path) -> None:
    """All ranks stop at one tensor, in the middle of a bucket or between: nothing hangs, what comes next works."""
    source = str(root / "qwen3-moe")
    model = fns.trained(source)
    whole = dict(sw.iter_full_tensors(model))
    for taken in (0, 1, 3):
        for _ in islice(sw.iter_full_tensors(model, bucket_bytes=3000), taken):
            pass
        handed = sw.iter_full_tensors(model, bucket_bytes=3000)
        for _ in range(taken):
            next(handed)
        handed.close()
        dist.barrier()
    kept = list(sw.iter_full_tensors(model, bucket_bytes=3000))
    with torch.no_grad():
        kept[0][1].zero_()  # the caller's: neither the model nor another tensor changes
    fns.assert_equal(dict(kept[1:]), dict(list(whole.items())[1:]))
    fns.assert_equal(dict(sw.iter_full_tensors(model)), whole)


def test_failures_are_raised_on_every_rank(ranks: RankPool, root: Path) -> None:
    results = ranks.run_ranks(2, fns.fails, str(root / "qwen3-tied"), str(root))
    assert results[0] == results[1]
    broken, unlike, meta, alone = results[0]
    assert broken[0] == "RankError"
    assert "rank 1: MemoryError: no room" in broken[1]
    assert unlike[0] == "RankError"
    assert "rank 1: differs from rank 0" in unlike[1]
    assert meta[0] == "StateError"
    assert "load the model first" in meta[1]
    assert alone[0] == "RankError"
    assert "rank 1: no progress for 2 s" in alone[1]


def test_adapters(ranks: RankPool, root: Path, tmp_path: Path) -> None:
    for kind, text in ranks.run_ranks(
        2, fns.hand_over_adapter, str(root / "qwen3-tied"), str(tmp_path / "a")
    ):
        assert kind == "CheckpointError"
        assert "naming='adapter'" in text


def test_memory_is_the_bucket_and_a_tensor(ranks: RankPool) -> None:
    results = ranks.run_ranks(2, fns.memory)
    assert results[0]["digest"] == results[1]["digest"]
    for result in results:
        if result["added"] is not None:
            assert result["added"] <= (8 + 1 + 6) * 2**20, "bucket, largest tensor, and what gloo takes"
