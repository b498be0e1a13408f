"""load_pretrained(): bit for bit what from_pretrained gives, only sharded."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import shardwise as sw
from tests.harness import models
from tests.harness.on_ranks import on_ranks
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly
from tests.loading import _load_fns as fns

#: Every kind in fp32; the other dtypes where they make a difference (T5 keeps some modules in fp32).
DIRECTORIES = (
    *((kind, torch.float32) for kind in models.KINDS),
    ("qwen3", torch.bfloat16),
    ("qwen3", torch.float16),
    ("qwen3-tied", torch.bfloat16),
    ("qwen3-tied", torch.float16),
    ("gemma", torch.bfloat16),
    ("t5", torch.float16),
)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("hub")
    found = []
    for kind, dtype in DIRECTORIES:
        found.append(str(root / f"{kind}-{str(dtype).removeprefix('torch.')}"))
        models.write_hub_directory(kind, Path(found[-1]), dtype)
    several = root / "qwen3-several-files"
    models.write_hub_directory("qwen3", several, torch.float32, max_shard_size="8KB")
    assert len(list(several.glob("*.safetensors"))) > 3
    return [*found, str(several)]


@pytest.mark.parametrize("world_size", [3, *nightly(2, 4)])
def test_equals_the_ordinary_load(ranks: RankPool, directories: list[str], world_size: int) -> None:
    ranks.run_ranks(world_size, fns.pretrained_equals_ordinary, directories, timeout_s=160)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *nightly(torch.float32, torch.float16)])
def test_in_another_dtype(ranks: RankPool, directories: list[str], dtype: torch.dtype) -> None:
    chosen = [d for d in directories if Path(d).name in ("qwen3-bfloat16", "t5-float32", "gemma-float32")]
    assert len(chosen) == 3
    ranks.run_ranks(3, fns.pretrained_equals_ordinary, chosen, dtype=dtype)


@pytest.mark.parametrize("world_size", [2, *nightly(3, 4)])
def test_the_real_minilm(ranks: RankPool, world_size: int) -> None:
    ranks.run_ranks(world_size, fns.pretrained_equals_ordinary, [str(models.minilm_directory())])


@on_ranks(2)
def test_without_a_mesh(directories: list[str]) -> None:
    """Without a mesh: the whole model on each rank."""
    directory = directories[0]
    ordinary = fns.ordinary_model(directory)
    with fns.nothing_else_changes():
        model, report = sw.load_pretrained(directory, return_report=True)
    fns.assert_same_whole(model, ordinary)
    assert report.local_bytes == report.model_bytes
    assert type(model) is type(ordinary)


@on_ranks(2)
def test_under_every_policy(directories: list[str]) -> None:
    """Whatever the policy says of wrapping, the values are those of the ordinary model."""
    directory = directories[0]
    mesh = fns.mesh_of((dist.get_world_size(),))
    ordinary = fns.ordinary_model(directory)
    for policy in (
        sw.ShardPolicy(cpu_offload=True),
        sw.ShardPolicy(reshard_after_forward=False),
        sw.ShardPolicy(mixed_precision=MixedPrecisionPolicy(param_dtype=torch.float32)),
        sw.ShardPolicy(placement=lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % 2 == 0 else None),
        sw.ShardPolicy(exclude=("*norm.weight", "lm_head.*")),
        sw.ShardPolicy(block_classes=("Qwen3MLP",)),
    ):
        with fns.nothing_else_changes():
            model = sw.load_pretrained(directory, mesh, policy=policy)
        fns.assert_same_whole(model, ordinary)
        fns.assert_same_shards(model, sw.shard(copy.deepcopy(ordinary), mesh, policy))
        before = fns.pointers(model)
        torch.testing.assert_close(fns.forward(model), fns.forward(ordinary))
        fns.after_forward(model, before)


def test_renames_of_a_model_that_is_already_sharded(ranks: RankPool, directories: list[str]) -> None:
    (llava,) = [d for d in directories if Path(d).name.startswith("llava")]
    ranks.run_ranks(2, fns.renames_of_a_sharded_class, llava)


def test_a_compiled_model_is_the_model_inside(
    ranks: RankPool, directories: list[str], tmp_path: Path
) -> None:
    (llava,) = [d for d in directories if Path(d).name.startswith("llava")]
    ranks.run_ranks(2, fns.wrapped_transformers, llava, str(tmp_path / "out"))
    assert (tmp_path / "out" / "config.json").is_file()
    stored = [set(load_file(f)) for d in (Path(llava), tmp_path / "out") for f in d.glob("*.safetensors")]
    assert stored[0] == stored[1], "exported under hub names"


@pytest.mark.parametrize("world_size", [2, *nightly(4)])
def test_experts_stored_one_by_one(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    """Three experts, stacked and concatenated from one stored tensor each; with 4 ranks one gets none."""
    directories = []
    for kind, dtype in (("mixtral", torch.float32), ("qwen3-moe", torch.bfloat16)):
        directories.append(str(tmp_path / kind))
        models.write_hub_directory(kind, tmp_path / kind, dtype)
        assert len(load_file(tmp_path / kind / "model.safetensors")) > 30
    ranks.run_ranks(world_size, fns.pretrained_equals_ordinary, directories)


def test_what_class_and_caller_declare(ranks: RankPool, tmp_path: Path) -> None:
    stored = {}
    for kind in ("qwen3", "bert"):
        models.write_hub_directory(kind, tmp_path / kind, torch.float32)
        stored[kind] = load_file(tmp_path / kind / "model.safetensors")

    def variant(name: str, state: dict[str, torch.Tensor]) -> None:
        shutil.copytree(tmp_path / name.partition("-")[0], tmp_path / name)
        models.write_state(state, tmp_path / name)

    frequencies, positions = "model.layers.0.self_attn.rotary_emb.inv_freq", "embeddings.position_ids"
    variant("qwen3-old", stored["qwen3"] | {frequencies: torch.ones(3)})
    variant("bert-old", stored["bert"] | {positions: torch.arange(33)[None] * 0})
    renamed = {n.replace("model.layers.", "renamed."): t for n, t in stored["qwen3"].items()}
    variant("qwen3-other", renamed | {"score.weight": torch.ones(2)})
    variant("qwen3-headless", {n: t for n, t in stored["qwen3"].items() if n != "lm_head.weight"})
    heads: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for world_size in (2, 3):
        for found in ranks.run_ranks(world_size, fns.declared_by_class_and_caller, str(tmp_path)):
            assert [n for n, _ in found["qwen3"]] == [frequencies]
            assert [n for n, _ in found["bert"]] == [positions]
            assert all(who.startswith("model (") for _, who in (*found["qwen3"], *found["bert"])), found
            assert found["caller"] == [("score.weight", "caller")]
            assert found["initialized"] == [("lm_head.weight", "caller")]
            for seed, values in heads.items():
                values.append(found[f"seed {seed}"])
    for values in heads.values():
        assert all(torch.equal(v, values[0]) for v in values), "depends on the number of ranks"
    assert not torch.equal(heads[0][0], heads[1][0])
    assert 0.01 < heads[0][0].std() < 0.03, "not the model's own rule"
