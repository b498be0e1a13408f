"""load(): any module in place, however the caller has sharded it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import shardwise as sw
from tests.harness import models
from tests.harness.models import Plain
from tests.harness.on_ranks import on_ranks
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly
from tests.loading import _load_fns as fns


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A module's own state in one file, and in three without an index."""
    root = tmp_path_factory.mktemp("plain")
    state = models.state_of(fns.plain_reference())
    file = models.write_state(state, root)
    names = list(state)
    for part in range(3):
        models.write_state({n: state[n] for n in names[part::3]}, root / "parts", f"part-{part}.safetensors")
    return str(file), str(root / "parts")


@pytest.fixture(scope="module")
def finite(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same without NaN and infinities, for what computes."""
    state = models.state_of(fns.finite_reference())
    return str(models.write_state(state, tmp_path_factory.mktemp("finite")))


@pytest.mark.parametrize("world_size", [3, *nightly(2, 4)])
def test_a_module_without_transformers(ranks: RankPool, plain: tuple[str, str], world_size: int) -> None:
    ranks.run_ranks(world_size, fns.plain_through_load, *plain)


def test_not_sharded(ranks: RankPool, plain: tuple[str, str]) -> None:
    ranks.run_ranks(2, fns.plain_on_all_ranks, plain[0])
    fns.plain_on_all_ranks(plain[0])  # without a process group too


def test_strides_stay(ranks: RankPool, tmp_path: Path) -> None:
    file = models.write_state(models.state_of(fns.strided_reference()), tmp_path)
    ranks.run_ranks(2, fns.strides_stay, str(file))


@on_ranks(2)
def test_a_real_model_twice_and_after_a_forward(finite: str) -> None:
    """Into a real model, twice, after a forward that left the root gathered, and after training steps."""
    file = finite
    mesh = fns.mesh_of((dist.get_world_size(),))
    ordinary, sharded = fns.finite_reference(), fns.shard_plain(fns.finite_reference(), mesh)
    model = fns.shard_plain(Plain(), mesh)
    fns.check_in_place(model, file, sharded)
    before = fns.pointers(model)
    fns.check_in_place(model, file, sharded)
    assert fns.pointers(model) == before
    ids = torch.arange(10).reshape(2, 5)
    for target in (model.eval(), ordinary.eval()):
        for parameter in target.parameters():
            parameter.grad = None
    with torch.no_grad():
        torch.testing.assert_close(model(ids), ordinary(ids))
    gathered = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
    assert len(gathered) > 3, "the root is expected to stay gathered after a forward"
    sw.load(model, file, allow_plain=fns.LEFT_PLAIN)
    fns.assert_same_shards(model, sharded)
    before = fns.after_forward(model, before)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                fns.local(parameter).fill_(3)
        model.steps.fill_(0)
    sw.load(model, file, allow_plain=fns.LEFT_PLAIN)
    fns.assert_same_shards(model, sharded)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), ordinary(ids))
    assert fns.pointers(model) == before


@on_ranks(2)
def test_into_another_dtype(finite: str) -> None:
    """A model in another floating dtype: values as torch casts them."""
    file = finite
    mesh = fns.mesh_of((dist.get_world_size(),))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        with sw.meta_init():
            model = Plain().convert(dtype)
        fns.shard_plain(model, mesh)
        sw.load(model, file, allow_plain=fns.LEFT_PLAIN)
        loaded, expected = fns.tensors_of(model), fns.tensors_of(fns.finite_reference().convert(dtype))
        for name, tensor in expected.items():
            if name != "frequencies":
                assert fns.whole(loaded[name]).dtype is tensor.dtype, name
                assert torch.equal(fns.bits(fns.whole(loaded[name])), fns.bits(tensor)), name


def test_parameters_of_several_dtypes(ranks: RankPool) -> None:
    """FSDP2 runs no group of two dtypes: a part of another dtype gets its own, what the root holds stays whole."""
    for default, ignored in ranks.run_ranks(2, fns.several_dtypes):
        assert default == (["", "wide"], ["shift"])
        assert ignored == (["", "narrow"], ["scale"])


def test_sharded_on_dim_1(ranks: RankPool, plain: tuple[str, str]) -> None:
    for names in ranks.run_ranks(2, fns.sharded_on_dim_1, plain[0]):
        assert {"embed.weight", "mix.weight", "blocks.0.up.weight", "adapter.weight"} <= set(names)
        assert "blocks.0.down.weight" not in names, "21 columns do not divide"


@pytest.mark.parametrize("sizes", [(1001, 8, 12), (1001, 7, 13), (3, 5, 1)])
def test_fsdp_and_tensor_parallelism(ranks: RankPool, tmp_path: Path, sizes: tuple[int, int, int]) -> None:
    file = models.write_state(models.state_of(fns.parallel_reference(*sizes)), tmp_path)
    # Uneven inner sizes are loaded, but torch itself can't run them: local activations lose their size.
    found = ranks.run_ranks(4, fns.fsdp_and_tp, sizes, str(file), sizes == (1001, 8, 12))[0]
    assert found["embed.weight"] == "(_StridedShard(dim=0, sf=2), Shard(dim=0))", found
    assert found["blocks.0.down.weight"] == "(Shard(dim=0), Shard(dim=1))", found


def test_a_transformers_model_with_fsdp_and_tensor_parallelism(ranks: RankPool, tmp_path: Path) -> None:
    models.write_hub_directory("qwen3-odd", tmp_path, torch.float32)
    placements = ranks.run_ranks(4, fns.transformers_fsdp_and_tp, str(tmp_path))[0]
    assert sum("_StridedShard" in p for p in placements.values()) >= 4


def test_what_the_caller_declares(ranks: RankPool, tmp_path: Path) -> None:
    state = models.state_of(fns.mixed_reference())
    models.write_state({f"wrapped.{n}": t for n, t in state.items()}, tmp_path / "prefixed")
    models.write_state({n.replace("head.", "old_head."): t for n, t in state.items()}, tmp_path / "renamed")
    extra = {"extra.a": torch.ones(2), "extra.b": torch.ones(3), "lonely": torch.tensor(1)}
    models.write_state(state | extra, tmp_path / "more")
    models.write_state({n: t for n, t in state.items() if not n.startswith("head.")}, tmp_path / "less")
    models.write_state({n: t for n, t in state.items() if n != "steps"}, tmp_path / "no-buffer")
    outcomes = {world: ranks.run_ranks(world, fns.declared, str(tmp_path)) for world in (2, 3)}
    values = []
    for found in (found for outcome in outcomes.values() for found in outcome):
        assert sorted(found["unused"]) == [(n, "caller") for n in sorted(extra)]
        assert sorted(found["initialized"]) == [("head.bias", "caller"), ("head.weight", "caller")]
        values.append(found["head"])
    assert all(torch.equal(values[0], v) for v in values), "initial values depend on the number of ranks"
    assert values[0].std() > 0
