"""Parameters that FSDP2 can't shard: whole on every rank, with gradients that shard() reduces; groups for a dtype."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

import shardwise as sw
from shardwise.cli import main
from shardwise.models.meta import meta_init
from shardwise.sharding.fsdp import describe_groups
from tests.harness import models
from tests.harness.command import runner
from tests.harness.on_ranks import on_ranks
from tests.harness.pool import RankPool
from tests.sharding import _replicated_fns as fns
from tests.sharding import _replicated_models as tiny
from tests.sharding._replicated_models import WIDTH

NET = {f"blocks.{i}.scale" for i in (0, 1)} | {"blocks.0.shared", "temperature", "unused"}


@pytest.mark.parametrize(
    ("kind", "shape", "how", "replicated"),
    [
        pytest.param("clip", (2,), "one batch", {"logit_scale": "float32"}, marks=pytest.mark.nightly),
        pytest.param("clip", (3,), "no sync", {"logit_scale": "float32"}, marks=pytest.mark.nightly),
        pytest.param("clip", (2, 2), "every batch", {"logit_scale": "float32"}, marks=pytest.mark.nightly),
        pytest.param("olmo_hybrid", (2,), "every batch", {}, marks=pytest.mark.nightly),
        pytest.param("olmo_hybrid", (2, 2), "no all-reduce", {}, marks=pytest.mark.nightly),
        pytest.param(
            "dinov3", (3,), "one batch", {"embeddings.register_tokens": "float32"}, marks=pytest.mark.nightly
        ),
        pytest.param("net", (3,), "every batch", dict.fromkeys(NET, "float32"), marks=pytest.mark.nightly),
        pytest.param(
            "net", (2, 2), "no all-reduce", dict.fromkeys(NET, "float32"), marks=pytest.mark.nightly
        ),
        ("bf16 net", (2, 2), "no sync", dict.fromkeys(NET, "bfloat16") | {"gain": "float32"}),
        ("run again", (2,), "every batch", dict.fromkeys(NET, "float32")),
        pytest.param(
            "run again, reentrant", (2,), "no sync", dict.fromkeys(NET, "float32"), marks=pytest.mark.nightly
        ),
        ("dtypes", (2,), "every batch", {f"blocks.{i}.mix.wide": "float64" for i in (0, 1)}),
    ],
)
def test_training_is_that_of_one_process(
    ranks: RankPool, kind: str, shape: tuple[int, ...], how: str, replicated: dict[str, str]
) -> None:
    world_size = 4 if len(shape) == 2 else shape[0]
    for found in ranks.run_ranks(world_size, fns.trains_as_one_process, kind, shape, how):
        assert found == replicated


@on_ranks(3, timeout_s=60)
def test_ranks_that_do_not_use_one() -> None:
    """A rank without a gradient counts as zero, one step after the other; None only where no rank has one."""
    model = sw.shard(fns.Branches(), fns.mesh_of())
    plain = fns.Branches()
    fns.follow(plain, model)
    x, world = torch.ones(2, WIDTH), dist.get_world_size()
    for step in range(3):
        holder = step % world
        names = ("one", "all") if dist.get_rank() == holder else ("all",)
        model(x, *names).backward()
        plain.zero_grad()
        for rank in range(world):
            (plain(x, *(("one", "all") if rank == holder else ("all",))) / world).backward()
        for name in ("all", "one", "none", "frozen"):
            mine, theirs = model.get_parameter(name).grad, plain.get_parameter(name).grad
            if name in ("none", "frozen"):
                assert mine is None, name
            else:
                torch.testing.assert_close(mine, theirs, msg=name)
        fns.assert_same_everywhere(model)
        model.zero_grad()
    model(x).backward()
    assert all(model.get_parameter(n).grad is None for n in ("all", "one", "none"))


@on_ranks(2, timeout_s=60)
def test_however_forward_runs() -> None:
    """Twice before one backward; by another method; in a model that is sharded around it; in front of frozen shards."""
    world, x = dist.get_world_size(), torch.ones(2, WIDTH)
    mine = x * (dist.get_rank() + 1)

    def check(model: nn.Module, run: Callable[[], torch.Tensor], uses: int = 1) -> None:
        plain = fns.Branches()
        fns.follow(plain, model)
        run().backward()
        for rank in range(world):
            for _ in range(uses):
                (plain(x * (rank + 1), "all") / world).backward()
        torch.testing.assert_close(model.get_parameter("all").grad, plain.get_parameter("all").grad)
        fns.assert_same_everywhere(model)

    twice = sw.shard(fns.Branches(), fns.mesh_of())
    check(twice, lambda: twice(mine, "all") + twice(mine, "all"), 2)

    named: Any = fns.Branches()
    named.encode = named.forward
    sw.shard(named, fns.mesh_of())
    register_fsdp_forward_method(named, "encode")
    check(named, lambda: named.encode(mine, "all"))

    inner = sw.shard(fns.Branches(), fns.mesh_of())
    outer = fully_shard(fns.Around(inner), mesh=fns.mesh_of())
    check(inner, lambda: outer(mine))  # type: ignore[operator]

    frozen = fns.Branches()
    frozen.lin.requires_grad_(False)
    sw.shard(frozen, fns.mesh_of())
    check(frozen, lambda: frozen(mine, "all"))


def test_settings(ranks: RankPool) -> None:
    """Mean, sum, and what the caller reduces: the input of rank r is r + 1 times the same."""
    (mean, total, mine), (mean_1, total_1, mine_1) = ranks.run_ranks(2, fns.settings)
    assert (mean, total) == (mean_1, total_1)
    assert total == pytest.approx(2 * mean)
    assert mine != pytest.approx(mine_1)
    assert mine + mine_1 == pytest.approx(total)


def test_moved_and_loaded(ranks: RankPool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    file = models.write_state(models.state_of(tiny.Net()), tmp_path)
    ranks.run_ranks(2, fns.moved_and_loaded, str(file))


@on_ranks(2)
def test_frozen_until_later() -> None:
    """A 0-d parameter that is made trainable after ``shard``."""
    torch.manual_seed(0)
    model = sw.shard(fns.Branches(), fns.mesh_of())
    model.get_parameter("frozen").requires_grad_()
    model(torch.ones(2, WIDTH) * (dist.get_rank() + 1), "frozen").backward()
    fns.assert_same_everywhere(model)


@pytest.mark.slow
def test_clipping_and_foreach_optimizers(ranks: RankPool) -> None:
    """Tensors without dims pass beside DTensors, others don't: as the docstring of shard() says."""
    for kind in ("clip", "lonely", "olmo_hybrid"):
        assert ranks.run_ranks(2, fns.clipped_and_stepped, kind) == [("", "")] * 2, kind
    for clip, step in ranks.run_ranks(2, fns.clipped_and_stepped, "bf16 net"):
        assert "mixed torch.Tensor and DTensor" in clip
        assert step == "", "no DTensor of that dtype"
    for clip, step in ranks.run_ranks(2, fns.clipped_and_stepped, "beside"):
        assert all("mixed torch.Tensor and DTensor" in text for text in (clip, step))


def test_saved_and_resumed_on_more_ranks(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run_ranks(2, fns.saved, str(tmp_path / "a"))
    first, *others = ranks.run_ranks(3, fns.resumed, str(tmp_path / "a"))
    assert {"temperature", "temperature exp_avg", "blocks.0.shared exp_avg_sq"} <= first.keys()
    (again, *_) = ranks.run_ranks(2, fns.resumed, str(tmp_path / "a"))
    for found in (*others, again):
        assert found.keys() == first.keys()
        assert all(torch.equal(found[n], first[n]) for n in first)


def test_groups_for_dtypes(ranks: RankPool) -> None:
    """The outermost module that is sure to run takes one dtype, the next one another; the block keeps the usual one."""
    expected: dict[str, list[str]] = {"": []}
    for block in ("blocks.0", "blocks.1"):
        usual = ["mix.offset", "lin.weight", "lin.bias", "back.weight", "back.bias"]
        expected[block] = [f"{block}.{n}" for n in usual]
        expected[f"{block}.mix"] = [f"{block}.mix.{n}" for n in ("decay", "conv.weight")]
        expected[f"{block}.listed.0"] = [f"{block}.listed.0.{n}" for n in ("weight", "bias")]
        expected[f"{block}.left.layer"] = [f"{block}.left.layer.{n}" for n in ("weight", "bias")]
        expected[f"{block}.mix.inner"] = [f"{block}.mix.inner.{n}" for n in ("weight", "bias")]
    for found in ranks.run_ranks(2, fns.groups_for_dtypes):
        assert {k: sorted(v) for k, v in found.items()} == {k: sorted(v) for k, v in expected.items()}


# ----------------------------------------------------------------------------------------------------
# Pure: no ranks


def test_described() -> None:
    with meta_init():
        groups = {g.name: g for g in describe_groups(tiny.Net(torch.bfloat16))}
    assert {n: g.replicated_bytes for n, g in groups.items()} == {
        "blocks.0": 2,  # scale
        "blocks.1": 2,
        "": 2 + 2 + 2 + 4 * tiny.WIDTH,  # temperature, unused, shared; gain in fp32
    }
    with meta_init():
        assert sum(g.replicated_bytes for g in describe_groups(tiny.clip())) == 4


@pytest.mark.needs("transformers>=5.3", "has no OlmoHybrid")
def test_a_layer_that_keeps_a_dtype_is_described_apart() -> None:
    with meta_init():
        (group,) = (g for g in describe_groups(tiny.olmo_hybrid()) if g.kind == "dtype")
    assert (group.name, group.stored_bytes) == ("model.layers.0.linear_attn", 2 * 4)


def test_planned(tmp_path: Path) -> None:
    tiny.clip().save_pretrained(tmp_path)
    assert sw.plan(tmp_path, ranks=3).replicated_bytes == 4
    result = runner().invoke(main, ["plan", str(tmp_path), "--ranks", "3"])
    assert re.search(r"replicated +4 B on every rank", result.output), result.output
