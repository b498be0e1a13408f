"""On ranks: quantized experts under transformers' own expert parallelism, beside the plain model whole on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.internals.torch import local_tensor
from tests.loading._load_fns import whole
from tests.quantized._layout_fns import build_meta_of

__all__ = ["like_the_plain_model"]


def _expert_parallel(model: Any, groups: int) -> None:
    """Experts by transformers' plan over all ranks of a group; FSDP2 over ``groups`` of them, and the rest over as many."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (groups, world // groups), mesh_dim_names=("fsdp", "ep"))
    plan = model._expand_parallel_plan(model.ep_plan)
    assert sum(style == "grouped_gemm" for style in plan.values()) >= 4
    apply_expert_parallelism(model, mesh["ep"], mesh["ep"], plan)
    if groups > 1:
        for block in (*model.model.layers, model):
            fully_shard(block, mesh=mesh["fsdp"])


def like_the_plain_model(pairs: Sequence[tuple[str, str]]) -> list[tuple[int, int, int]]:
    """Loads of each quantized directory; ``pairs``: with its dequantized twin. Experts held here, in all, and bytes read."""
    world, found = dist.get_world_size(), []
    for quantized, plain in pairs:
        expected = sw.load_pretrained(plain, dtype="bfloat16")
        for groups in (1, 2) if world > 2 else (1,):
            for strategy in ("own", "node"):
                model = build_meta_of(quantized, "bfloat16")
                _expert_parallel(model, groups)
                report = sw.load(model, quantized, io=sw.IOOptions(strategy=strategy))  # type: ignore[arg-type]
                held, total = 0, 0
                theirs = dict(expected.named_parameters())
                for name, parameter in model.named_parameters():
                    assert torch.equal(whole(parameter.detach()), theirs[name]), (quantized, groups, name)
                    if ".experts." in name:
                        assert isinstance(parameter, DTensor), name
                        held, total = held + local_tensor(parameter).numel(), total + parameter.numel()
                ids = torch.arange(24).view(2, 12)
                with torch.no_grad():
                    own, other = model(input_ids=ids).logits, expected(input_ids=ids).logits
                torch.testing.assert_close(own, other, rtol=0.05, atol=0.02)
                found.append((held, total, report.bytes_read))
    return found
