"""sw.plan(): what it promises is what a load on real ranks does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen3Config, Qwen3ForCausalLM

import shardwise as sw
from shardwise import IOOptions, ShardPolicy, TrainState, load_pretrained, save
from shardwise.errors import FormatError, PlanError, ShardError, SourceError
from shardwise.fit import plan as planner
from shardwise.loading import load as loading
from shardwise.planning.plan import Plan
from tests.harness.pool import RankPool


def make_model(path: Path, **changes: Any) -> Path:
    """A tiny model whose vocabulary divides by nothing, in two files."""
    sizes: dict[str, Any] = {
        "vocab_size": 101,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": False,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**{**sizes, **changes})).to(torch.bfloat16)
    model.save_pretrained(path, max_shard_size="40KB")
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("planner") / "qwen")


def bytes_of(path: Path) -> int:
    model = Qwen3ForCausalLM.from_pretrained(path)
    return sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (3, 1), (4, 2), (6, 6), (64, 1)])
def test_ranks_hold_every_replica_once(model: Path, ranks: int, replicas: int) -> None:
    report = sw.plan(model, ranks=ranks, replicas=replicas)
    assert report.model_bytes == report.source_bytes == bytes_of(model)
    assert [cost.rank for cost in report.per_rank] == list(range(ranks))
    assert sum(cost.shard_bytes for cost in report.per_rank) == replicas * report.model_bytes
    assert report.total_shard_bytes == report.total_bytes_read == replicas * report.model_bytes
    shards = ranks // replicas
    assert all(a.shard_bytes == report.per_rank[a.rank % shards].shard_bytes for a in report.per_rank)


def load_and_tell(path: str, replicas: int, dtype: str) -> tuple[dict[str, int], str]:
    """On a rank: what the load reports, and the plan that it ran."""
    world_size = dist.get_world_size()
    plans: list[Plan] = []
    plan_load = loading.plan_load

    def recorded(*args: Any, **options: Any) -> Any:
        planned = plan_load(*args, **options)
        plans.append(planned.plan)
        return planned

    loading.plan_load = recorded
    try:
        shape, names = (world_size,), ("shard",)
        if replicas > 1:
            shape, names = (replicas, world_size // replicas), ("replicate", "shard")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        _, report = load_pretrained(path, mesh, dtype=dtype, return_report=True)
    finally:
        loading.plan_load = plan_load
    assert len(plans) == 1
    return report.to_json(), repr(plans[0])


@pytest.mark.parametrize(("ranks_", "replicas", "dtype"), [(2, 1, "auto"), (3, 1, "float32"), (4, 2, "auto")])
def test_real_ranks_run_these_plans(
    ranks: RankPool, model: Path, monkeypatch: pytest.MonkeyPatch, ranks_: int, replicas: int, dtype: str
) -> None:
    plans: list[Plan] = []
    plan_load = planner.plan_load

    def recorded(*args: Any, **options: Any) -> Any:
        planned = plan_load(*args, **options)
        plans.append(planned.plan)
        return planned

    monkeypatch.setattr(planner, "plan_load", recorded)
    planned = sw.plan(model, ranks=ranks_, replicas=replicas, dtype=dtype)
    found = ranks.run_ranks(ranks_, load_and_tell, str(model), replicas, dtype)
    assert [text for _, text in found] == [repr(plan) for plan in plans]
    for cost, (report, _) in zip(planned.per_rank, found, strict=True):
        assert report["local_bytes"] == cost.shard_bytes
        assert report["bytes_read"] == cost.bytes_read
        assert report["model_bytes"] == planned.model_bytes


def test_a_cast_is_planned_with_its_staging(model: Path) -> None:
    report = sw.plan(model, ranks=2, dtype=torch.float32)
    assert report.dtypes == ("F32",)
    assert report.model_bytes == 2 * report.source_bytes
    assert report.total_bytes_read == report.source_bytes
    assert all(0 < cost.staging_bytes <= IOOptions().staging_bytes for cost in report.per_rank)


def test_buckets_that_ranks_share_are_planned(model: Path) -> None:
    def staging(strategy: Any, staging_bytes: int = 2**20, **given: Any) -> list[int]:
        io = IOOptions(strategy=strategy, staging_bytes=staging_bytes)
        return [cost.staging_bytes for cost in sw.plan(model, ranks=2, io=io, **given).per_rank]

    stored = sw.plan(model, ranks=2).source_bytes
    assert staging("auto") == staging("own") == [0, 0]
    # Two buckets, each of a quarter, but no more than there is to read.
    assert staging("node") == [min(2**19, -(-stored // 2))] * 2
    assert staging("node", 2**25) == [-(-stored // 2)] * 2
    assert staging("once") == [5 * 2**17] * 2


def test_beyond_the_limit_the_extremes_are_those_of_all_ranks(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = {ranks: sw.plan(model, ranks=ranks) for ranks in (5, 7, 40)}
    monkeypatch.setattr(planner, "EVERY_RANK_UP_TO", 4)
    for ranks, full in every.items():
        short = sw.plan(model, ranks=ranks)
        assert [cost.rank for cost in short.per_rank] == [0, ranks - 1]
        assert (short.min_shard_bytes, short.max_shard_bytes) == (full.min_shard_bytes, full.max_shard_bytes)
        assert short.total_shard_bytes == full.total_shard_bytes
        assert (short.is_every_rank, short.total_bytes_read) == (False, None)


def test_plain_parameters_lie_on_every_rank(model: Path) -> None:
    policy = ShardPolicy(exclude=("model.norm.weight",))
    report = sw.plan(model, ranks=4, policy=policy)
    assert report.total_shard_bytes == report.model_bytes + 3 * 32 * 2


def test_tied_weights_count_once(tmp_path: Path) -> None:
    path = make_model(tmp_path / "tied", tie_word_embeddings=True)
    report = sw.plan(path, ranks=2)
    assert report.model_bytes == bytes_of(path) == report.total_shard_bytes
    assert report.largest_group.kind == "block"


def test_the_largest_group_is_in_bytes_of_the_chosen_dtype(model: Path) -> None:
    stored = sw.plan(model, ranks=2)
    wide = sw.plan(model, ranks=2, dtype="float32")
    assert (stored.groups, stored.largest_group.name) == (6, "model.layers.0")
    assert wide.largest_group.gathered_bytes == 2 * stored.largest_group.gathered_bytes


def test_a_checkpoint_can_be_planned_too(model: Path, tmp_path: Path) -> None:
    live = load_pretrained(model)
    save(TrainState(model=live), tmp_path / "step")
    report = sw.plan(tmp_path / "step", ranks=2)
    assert report.total_shard_bytes == report.model_bytes == bytes_of(model)


def test_report_is_plain_json(model: Path) -> None:
    import json

    report = sw.plan(model, ranks=2)
    document = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert document["per_rank"][1]["shard_bytes"] == report.min_shard_bytes == document["min_shard_bytes"]
    assert set(sw.reports.PlanReport.__dataclass_fields__) <= document.keys()


def test_process_state_is_as_before(model: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state(), torch.get_default_dtype(), torch.get_num_threads()
    sw.plan(model, ranks=3)
    assert not dist.is_initialized()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.get_default_dtype(), torch.get_num_threads()) == before[1:]


def test_a_load_that_would_fail_fails_here(model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = make_model(tmp_path / "lost")
    file = path / "model-00001-of-00002.safetensors"
    tensors = load_file(file)
    name, tensor = tensors.popitem()
    save_file({**tensors, "not.in.the.model": tensor}, file)
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(PlanError) as caught:
        sw.plan(path, ranks=4)
    assert any(name in problem for problem in caught.value.problems)
    assert any("not.in.the.model" in problem for problem in caught.value.problems)
    assert not dist.is_initialized()


def test_refuses_to_plan_inside_a_process_group(model: Path) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(ShardError, match="its own process group"):
            sw.plan(model, ranks=2)
        assert dist.get_world_size() == 2
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "options",
    [
        {"ranks": 0},
        {"ranks": -2},
        {"ranks": 10**9},
        {"ranks": 4, "replicas": 0},
        {"ranks": 4, "replicas": -2},
        {"ranks": 4, "replicas": 3},
        {"ranks": 2, "dtype": "float99"},
        {"ranks": 2, "dtype": "int8"},
        {"ranks": 2, "dtype": "nn"},
    ],
)
def test_what_makes_no_sense_is_refused(model: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        sw.plan(model, **options)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"model_type": 7}',
        '{"model_type": "no-such-model"}',
        '{"model_type": "qwen3"}',
        '{"model_type": "qwen3", "architectures": 3}',
        '{"model_type": "qwen3", "architectures": ["os"]}',
        '{"model_type": "qwen3", "architectures": ["Qwen3Config"]}',
        '{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": -4}',
        '{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": "wide"}',
        '{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "dtype": "int3"}',
        '{"a": ' + "[" * 5000,
    ],
)
def test_unreadable_configs_are_named(model: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "model.safetensors").symlink_to(model / "model-00001-of-00002.safetensors")
    with pytest.raises(FormatError) as caught:
        sw.plan(tmp_path, ranks=2)
    assert "config.json" in str(caught.value)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such file or directory"):
        sw.plan(tmp_path / "nowhere", ranks=2)
    with pytest.raises(SourceError, match=r"no \.safetensors file"):
        sw.plan(tmp_path, ranks=2)
