"""What ranks do in test_full.py and test_clone.py."""

from __future__ import annotations

import hashlib
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from shardwise.tensors.live import local_tensor, reshard
from tests.cases._fns import AnonymousPeak, anonymous_bytes
from tests.export._export_fns import failure
from tests.harness import models
from tests.loading._peft_fns import known_warnings

_runs = count()


def make_mesh() -> DeviceMesh:
    """1-D, or HSDP for four ranks. torch caches by equal meshes, so each has its own names."""
    world, run = dist.get_world_size(), next(_runs)
    if world == 4:
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=(f"replicate{run}", f"shard{run}"))
    return init_device_mesh("cpu", (world,))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, tensor in expected.items():
        own = found[name]
        assert (own.dtype, own.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(own), bits(tensor)), name


def trained(source: str) -> Any:
    """A sharded model with other values than those that were loaded."""
    model = sw.load_pretrained(source, make_mesh())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    return model


def as_exported(kinds: tuple[str, ...], root: str) -> list[list[str]]:
    """Hub names: bit for bit what the export writes, whatever the bucket. The names in their order."""
    orders = []
    for kind in kinds:
        model = trained(f"{root}/{kind}")
        out = Path(root, f"{kind}-{dist.get_world_size()}")
        sw.export_hf(model, out)
        expected = load_file(out / "model.safetensors")
        for bucket_bytes in (1, 3000, 2**30):
            found = dict(sw.iter_full_tensors(model, bucket_bytes=bucket_bytes))
            assert_equal(found, expected)
        orders.append(list(found))
        half = dict(sw.iter_full_tensors(model, dtype=torch.float16))
        assert_equal(half, {n: t.half() for n, t in expected.items()})
    return orders


def fails(source: str, root: str) -> list[tuple[str, str]]:
    """Errors, alike on every rank; the next iteration works."""
    import shardwise.export.live as full

    model = trained(source)
    rank, own = dist.get_rank(), full._fill

    def broken(tensor: torch.Tensor, one: Any, parts: Any) -> None:
        if rank == 1 and one.stored.name.endswith("norm.weight"):
            raise MemoryError("no room")
        own(tensor, one, parts)

    full._fill = broken
    try:
        found = [failure(lambda: dict(sw.iter_full_tensors(model, bucket_bytes=3000)))]
    finally:
        full._fill = own
    found.append(failure(lambda: sw.iter_full_tensors(model, bucket_bytes=3000 + rank)))
    with sw.meta_init():
        empty = nn.Linear(4, 4)
    found.append(failure(lambda: sw.iter_full_tensors(empty)))
    handed = sw.iter_full_tensors(model, bucket_bytes=1, timeout_s=2)
    next(handed)
    if rank == 1:  # stops alone
        time.sleep(4)
    found.append(failure(lambda: list(handed)))
    return found


def hand_over_adapter(source: str, out: str) -> tuple[str, str]:
    """``naming="adapter"`` is what ``export_hf`` writes; hub names of a model with adapters are refused."""
    from peft import LoraConfig

    lora = LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=True)
    with known_warnings():
        model = sw.load_pretrained(source, make_mesh(), adapter=lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.5)
    sw.export_hf(model, out)
    expected = load_file(Path(out, "adapter_model.safetensors"))
    assert expected
    assert_equal(dict(sw.iter_full_tensors(model, naming="adapter")), expected)
    return failure(lambda: sw.iter_full_tensors(model))


def memory() -> dict[str, Any]:
    """Anonymous memory that an iteration adds, of a model of 64 matrices of 1 MiB."""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(64)))
    fully_shard(model, mesh=make_mesh())
    for _ in sw.iter_full_tensors(
        model, bucket_bytes=8 * 2**20
    ):  # what is made once: threads, buffers of gloo
        pass
    digest = hashlib.sha256()
    before, peak = anonymous_bytes(), AnonymousPeak()
    peak.start()
    for name, tensor in sw.iter_full_tensors(model, bucket_bytes=8 * 2**20):
        digest.update(name.encode())
        digest.update(tensor.numpy().data)
    return {"added": peak.stop() - before, "digest": digest.hexdigest()}


# ----------------------------------------------------------------------------------------------------
# Clones


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """What this rank holds: local shards and all buffers, also those that are not stored."""
    reshard(model.modules())  # a forward leaves the root's parameters gathered
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    return {name: local_tensor(tensor).detach().clone() for name, tensor in named}


def clone_of(kinds: tuple[str, ...], root: str) -> None:
    """As the first is now: values, ties, buffers, names for the hub; frozen, and on its own."""
    for kind in kinds:
        model = trained(f"{root}/{kind}")
        model.train()
        ids = torch.arange(8).reshape(2, 4)
        inputs = {"input_ids": ids, "labels": ids}
        model(**inputs)  # FSDP2 keeps the root's parameters gathered after this
        second = sw.clone(model)
        before = state(second)
        assert_equal(before, state(model.eval()))
        assert not second.training
        assert not any(p.requires_grad for p in second.parameters())
        assert all(p.requires_grad for p in model.parameters())
        for tied, name in second.all_tied_weights_keys.items():
            assert second.get_parameter(tied) is second.get_parameter(name), tied
        assert_equal(dict(sw.iter_full_tensors(second)), dict(sw.iter_full_tensors(model)))
        with torch.no_grad():
            expected, found = model(**inputs).loss, second(**inputs).loss
        assert torch.equal(found, expected), kind
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(**inputs).loss.backward()
        optimizer.step()
        assert not torch.equal(model(**inputs).loss, expected), "a step that changes nothing shows nothing"
        assert_equal(state(second), before)
        with torch.no_grad():
            assert torch.equal(second(**inputs).loss, expected)


class Net(nn.Module):
    """No transformers model: a tie, and buffers of which one is not stored and one grows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.outer = nn.Linear(5, 5, bias=False)
        self.outer.weight = self.inner.weight
        self.register_buffer("steps", torch.tensor(5))
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.outer(self.inner(x)) + self.cache.sum()
        return found


def build_net(width: int | None = None) -> nn.Module:
    with sw.meta_init():
        model = Net()
        if width is not None:
            model.extra = nn.Linear(width, 1)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def clone_with_build(source: str) -> list[tuple[str, str]]:
    """Any module that the caller can build again, sharded in any way; what can't be done is refused alike."""
    model = build_net()
    sw.init_weights(model, seed=1)
    model.cache = torch.arange(6.0)
    second = sw.clone(model, build=build_net)
    assert_equal(state(second), state(model))
    assert second.outer.weight is second.inner.weight
    found = [failure(lambda: sw.clone(model)), failure(lambda: sw.clone(model, build=lambda: build_net(3)))]
    name, config = models.hub_model("qwen3")
    import transformers

    with sw.meta_init():
        own_way = getattr(transformers, name)(config)
    fully_shard(own_way, mesh=make_mesh())
    found.append(failure(lambda: sw.clone(own_way)))
    from peft import LoraConfig

    lora = LoraConfig(r=3, target_modules=["q_proj"])
    with known_warnings():
        adapted = sw.load_pretrained(source, make_mesh(), adapter=lora)
    found.append(failure(lambda: sw.clone(adapted)))
    return found


def clone_of_trained(model: Any, optimizer: Any) -> None:
    ids = torch.arange(8).reshape(2, 4)
    before = state(model)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    second = sw.clone(model)
    assert_equal(state(second), state(model))
    assert not all(torch.equal(tensor, before[name]) for name, tensor in state(second).items())
    assert not any(p.requires_grad for p in second.parameters())
    with torch.no_grad():
        logits = [m.eval()(input_ids=ids).logits.float() for m in (model, second)]
    assert torch.equal(*logits)
