"""shard(): which groups there are, that training is unchanged by them, and what is refused."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from shardwise.models.meta import meta_init
from shardwise.sharding.fsdp import ShardPolicy, describe_groups, largest_group, shard
from tests.harness.on_ranks import on_ranks
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly
from tests.harness.versions import is_open
from tests.sharding import _shard_fns as fns

BLOCKS = ["blocks.0", "blocks.1"]
EXPERTS = ["blocks.0.mix", "blocks.1.mix"]


@pytest.mark.parametrize(
    ("kind", "tied", "shape", "groups"),
    [
        ("net", False, None, ["", "embed", *BLOCKS, "head"]),
        ("net", True, None, ["", *BLOCKS]),
        ("moe", False, (2, 2), ["", "embed", *BLOCKS, *EXPERTS, "head"]),
        ("moe", True, (1, 4), ["", *BLOCKS, *EXPERTS]),
    ],
)
def test_training_is_that_of_the_plain_model(
    ranks: RankPool, kind: str, tied: bool, shape: tuple[int, ...] | None, groups: list[str]
) -> None:
    world_size = 4 if shape else 2
    for found in ranks.run_ranks(world_size, fns.train_step_agrees, kind, tied, shape):
        assert sorted(found) == sorted(groups)


@pytest.mark.parametrize("kind", ["mixtral", "t5", *nightly("llama", "gpt2", "mamba")])
@on_ranks(2)
def test_training_a_transformers_model(kind: str) -> None:
    """Loss and gradients of a sharded transformers model are those of the plain one."""
    torch.manual_seed(0)
    model = fns.build(kind).eval()
    plain = copy.deepcopy(model)
    shard(model, fns._mesh())
    inputs = {"input_ids": torch.arange(12).reshape(2, 6), "labels": torch.arange(12).reshape(2, 6)}
    losses = []
    with warnings.catch_warnings():
        # torch's, about T5's stack returning a view; nothing writes into that view.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
        for each in (model, plain):
            losses.append(each(**inputs).loss)
            losses[-1].backward()
    torch.testing.assert_close(*losses)
    mine, theirs = fns._gradients(model), fns._gradients(plain)
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-4, atol=1e-5, msg=name)


@on_ranks(2)
def test_meta_model() -> None:
    with meta_init():
        model = fns.MoENet(tied=True)
    shard(model, fns._mesh())
    assert all(isinstance(p, DTensor) and p.is_meta for p in model.parameters())
    assert model.head.weight is model.embed.weight
    assert model.scale.item() == 1.5


def test_a_layer_in_two_blocks_goes_to_the_group_around_them(ranks: RankPool) -> None:
    assert ranks.run_ranks(2, fns.shared_layer_has_one_owner) == [["", "blocks.1"]] * 2


def test_refusals_name_everything_and_leave_the_model_alone(ranks: RankPool) -> None:
    texts = ranks.run_ranks(2, fns.refusals)[0]
    for kind, parts in {
        "large": ["table (torch.float32, 71,303,168 bytes)", "ShardPolicy(exclude=…)", "freeze"],
        "kinds": ["scale, phase", "ShardPolicy(exclude=…)"],
        "only": ["scale", "nothing to shard"],
        "pattern": ["'no.such.*'", "embed.weight"],
        "class": ["Blok", "Block"],
        "list": ["ModuleList"],
        "strided": ["weight", "contiguous"],
        "lazy": ["0.weight", "0.bias"],
        "dim": ["weight (4, 5): dim 1 does not divide by 2"],
        "unnamed mesh": ["mesh_dim_names"],
    }.items():
        for part in parts:
            assert part in texts[kind], (kind, texts[kind])


def test_sharded_twice(ranks: RankPool) -> None:
    assert "already wrapped" in ranks.run_ranks(2, fns.sharded_twice)[0]


def test_parameters_outside_of_every_wrapped_module(ranks: RankPool) -> None:
    integers = is_open("integers")
    if not integers:
        for text in ranks.run_ranks(2, fns.integers_refused):
            assert "codes" in text
            assert "torch 2.12 or newer" in text
            assert "exclude" in text
    sharded = {"temperature": False, "bias": False, "codes": integers, "lin.weight": True, "lin.bias": True}
    for trainable in (False, True):
        assert ranks.run_ranks(2, fns.scalars_and_integers, trainable) == [sharded] * 2
    sharded |= {"codes": False, "lin.bias": False}
    assert ranks.run_ranks(2, fns.ignored_by_name) == [sharded] * 2


@on_ranks(2)
def test_policy_reaches_every_group() -> None:
    """Mixed precision, offload, placement, reshard: looked at where torch keeps them, and run."""
    model = fns.MoENet()
    policy = ShardPolicy(
        mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        reshard_after_forward=False,
        cpu_offload=True,
        placement=lambda p: Shard(1) if p.ndim == 3 else None,
    )
    shard(model, fns._mesh(), policy)
    placements = model.blocks[0].mix.weight.placements
    assert placements == (Shard(1),), placements
    out = model(torch.arange(6))  # TinyExperts asserts that its fp32 input came through
    assert out.dtype is torch.bfloat16
    out.sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())


# ----------------------------------------------------------------------------------------------------
# Pure: no ranks


def test_groups_have_sizes() -> None:
    model = fns.MoENet()
    policy = ShardPolicy(mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    groups = {g.name: g for g in describe_groups(model, policy)}
    assert sum(g.parameter_count for g in groups.values()) == sum(p.numel() for p in model.parameters())
    mix = groups["blocks.1.mix"]
    assert (mix.kind, mix.parameter_count, mix.stored_bytes, mix.gathered_bytes) == ("experts", 192, 768, 384)
    assert [groups[n].kind for n in ("embed", "head", "blocks.0", "")] == [
        "embedding",
        "head",
        "block",
        "root",
    ]
    assert largest_group(tuple(groups.values())).name == "blocks.0"
    assert list(groups)[-1] == "", "bottom-up, the root last"
    assert list(groups).index("blocks.0.mix") < list(groups).index("blocks.0")


def test_named_block_classes() -> None:
    groups = describe_groups(fns.Net(), ShardPolicy(block_classes=("Linear",)))
    assert {g.name for g in groups if g.kind == "block"} == {
        *(f"blocks.{i}.{n}" for i in (0, 1) for n in ("up", "down")),
        "head",
    }


class Mixture(nn.Module):
    """Experts in a list, called only where tokens go; its name does not say what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(2, 3)
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = Mixture()
        self.inner = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))


def test_a_single_expert_is_never_a_group() -> None:
    with meta_init():
        model = nn.Module()
        model.layers = nn.ModuleList(Branch() for _ in range(2))
        model.tail = Mixture()
    kinds = {g.name: g.kind for g in describe_groups(model)}
    assert kinds == {
        "layers.0": "block",
        "layers.1": "block",
        "layers.0.moe": "experts",
        "layers.1.moe": "experts",
        "tail": "experts",
        "": "root",
    }


def test_a_tie_within_a_block_costs_the_inner_group_only() -> None:
    with meta_init():
        model = nn.Module()
        model.layers = nn.ModuleList(Branch() for _ in range(2))
        for layer in model.layers:
            layer.inner[0].weight = layer.moe.experts[0].weight
    assert {g.name: g.kind for g in describe_groups(model)} == {
        "layers.0": "block",
        "layers.1": "block",
        "": "root",
    }


def test_what_is_no_group() -> None:
    model = nn.Module()
    model.nested = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2)]) for _ in range(2))
    model.empty = nn.Sequential(nn.ReLU(), nn.ReLU())
    model.single = nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2)])
    assert [g.name for g in describe_groups(model)] == [""]


def test_a_transformers_model() -> None:
    import transformers

    auto, config = fns.tiny_config("mixtral")
    with meta_init():
        model = getattr(transformers, auto).from_config(config)
    assert {g.name: g.kind for g in describe_groups(model)} == {
        "model.layers.0.mlp.experts": "experts",
        "model.layers.1.mlp.experts": "experts",
        "model.layers.0": "block",
        "model.layers.1": "block",
        "model.embed_tokens": "embedding",
        "lm_head": "head",
        "": "root",
    }
