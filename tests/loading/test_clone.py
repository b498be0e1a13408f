"""clone(): a second, frozen model beside a sharded one, copied shard by shard."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.tensors.live import reshard
from tests.export import _full_fns as fns
from tests.harness import models
from tests.harness.on_ranks import on_ranks
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly

KINDS = ("qwen3-tied", "llava", "qwen3-moe")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("clone")
    for kind in KINDS:
        models.write_hub_directory(kind, found / kind, torch.bfloat16)
    return found


@pytest.mark.parametrize("world_size", [2, *nightly(1, 4)])
def test_as_the_first_is_now(ranks: RankPool, root: Path, world_size: int) -> None:
    ranks.run_ranks(world_size, fns.clone_of, KINDS if world_size == 2 else KINDS[:1], str(root))


def test_any_module_with_build(ranks: RankPool, root: Path) -> None:
    results = ranks.run_ranks(2, fns.clone_with_build, str(root / "qwen3-tied"))
    assert results[0] == results[1]
    unknown, unlike, own_way, peft = results[0]
    assert unknown[0] == "StateError"
    assert "Net is not a transformers model" in unknown[1]
    assert unlike[0] == "LayoutError"
    assert "extra.weight: in one of the two only" in unlike[1]
    assert own_way[0] == "ShardError"
    assert "Give build=" in own_way[1]
    assert peft[0] == "StateError"
    assert "disable_adapter()" in peft[1]


@on_ranks(2)
def test_as_an_accelerator_shards(root: Path) -> None:
    """A model that was sharded as an accelerator says: FSDP2 with all that the plugin can ask for."""
    source = str(root / "qwen3-tied")
    import accelerate

    from shardwise.integrations import accelerate as swa
    from tests.integrations._accelerate_fns import accelerator_with

    plugin = {"transformer_cls_names_to_wrap": ["Qwen3DecoderLayer"], "activation_checkpointing": True}
    with accelerator_with(plugin=plugin, mixed_precision="bf16") as accelerator:
        model = swa.load_pretrained(accelerator, source)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        fns.clone_of_trained(model, optimizer)
        reshard(model.modules())
        assert all(isinstance(p, DTensor) for p in model.parameters())
        if not accelerate.__version__.startswith("1.13."):  # which drops what it casts
            assert {p.dtype for p in model.parameters()} == {torch.float32}
        held = weakref.ref(model)
        del model, optimizer
    del accelerator
    gc.collect()
    assert held() is None, "what is noted for a clone keeps the model"


@pytest.mark.needs("plans")
@on_ranks(2)
def test_as_an_accelerator_cuts_by_plan(root: Path) -> None:
    """A model with an accelerator's tensor parallelism."""
    source = str(root / "qwen3-tied")
    from accelerate import Accelerator, ParallelismConfig

    from shardwise.integrations import accelerate as swa
    from tests.integrations._accelerate_fns import launched

    with launched():
        accelerator = Accelerator(
            cpu=True, parallelism_config=ParallelismConfig(tp_size=dist.get_world_size())
        )
        model = swa.load_pretrained(accelerator, source)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        model, optimizer = accelerator.prepare(model, optimizer)
        fns.clone_of_trained(model, optimizer)
        assert any(isinstance(p, DTensor) for p in model.parameters())
