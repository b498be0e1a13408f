"""What the ranks run in the tests of load() and load_pretrained()."""

from __future__ import annotations

import copy
import logging
import math
import os
import random
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise as sw
from shardwise.errors import ShardError, ShardwiseError
from shardwise.loading.load import LoadReport
from shardwise.tensors.live import reshard
from tests.harness.models import Mixed, Plain, fill_with_noise, hub_model
from tests.harness.payload_reads import before_each_read

# ----------------------------------------------------------------------------------------------------
# Comparing


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Raw bytes, so that NaN equals NaN and -0 differs from 0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer under every name, persistent or not."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def tied_names(tensors: dict[str, torch.Tensor]) -> set[tuple[str, str]]:
    return {(a, b) for (a, x), (b, y) in combinations(tensors.items(), 2) if x is y}


def assert_same_whole(model: nn.Module, ordinary: nn.Module) -> None:
    """Every parameter and buffer of a sharded model has, put together, the bits of an ordinary one."""
    found, expected = tensors_of(model), tensors_of(ordinary)
    assert list(found) == list(expected), set(found) ^ set(expected)
    assert tied_names(found) == tied_names(expected)
    assert list(model.state_dict()) == list(ordinary.state_dict())
    for name, tensor in expected.items():
        mine = whole(found[name])
        assert (mine.dtype, mine.shape) == (tensor.dtype, tensor.shape), (name, mine.dtype, tensor.dtype)
        assert found[name].requires_grad == tensor.requires_grad, name
        assert torch.equal(bits(mine), bits(tensor)), name


def assert_same_shards(model: nn.Module, sharded: nn.Module) -> None:
    """Shard by shard the bits, shapes and strides of a model that torch itself sharded with its values in it."""
    found, expected = tensors_of(model), tensors_of(sharded)
    assert list(found) == list(expected), set(found) ^ set(expected)
    assert tied_names(found) == tied_names(expected)
    for name, tensor in expected.items():
        mine, theirs = found[name], tensor
        assert type(mine) is type(theirs), (name, type(mine), type(theirs))
        assert getattr(mine, "placements", None) == getattr(theirs, "placements", None), name
        assert mine.requires_grad == theirs.requires_grad, name
        assert layout_of(mine) == layout_of(theirs), name
        assert layout_of(local(mine)) == layout_of(local(theirs)), name
        assert torch.equal(bits(local(mine)), bits(local(theirs))), name


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.device.type, tensor.dtype, tensor.shape, tensor.stride()


def surroundings() -> dict[str, Any]:
    """What a load must leave as it was."""
    root = logging.getLogger()
    return {
        "python": random.getstate(),
        "numpy": repr(numpy.random.get_state()),
        "torch": bytes(torch.get_rng_state().tolist()),
        # torch 2.9 sets this where inductor is first imported, which PEFT does through torchao.
        "environ": {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"},
        "handlers": list(root.handlers),
        "level": root.level,
        "disabled": logging.root.manager.disable,
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warnings": list(warnings.filters),
        "directory": os.getcwd(),
    }


@contextmanager
def nothing_else_changes() -> Iterator[None]:
    """The random generators, environment, logging and torch settings are on exit what they were on entry."""
    before = surroundings()
    yield
    after = surroundings()
    changed = {k for k in before if before[k] != after[k]}
    assert not changed, changed


def frozen_state(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """What an in-place load must keep of every parameter."""
    return {
        name: (id(p), type(p), p.dtype, p.requires_grad, p.shape, p.stride(), getattr(p, "placements", None))
        for name, p in model.named_parameters(remove_duplicate=False)
    }


def pointers(model: nn.Module) -> dict[str, int]:
    """Where the local shards lie."""
    reshard(model.modules())
    return {n: local(p).untyped_storage().data_ptr() for n, p in model.named_parameters()}


def after_forward(model: nn.Module, before: dict[str, int]) -> dict[str, int]:
    """Where shards lie after the first forward: where they were. torch 2.9 pads uneven ones again, into new memory."""
    found = pointers(model)
    moved = [model.get_parameter(n) for n, pointer in found.items() if pointer != before[n]]
    assert not moved or torch.__version__.startswith("2.9."), "the first forward moved shards"
    for parameter in moved:
        assert isinstance(parameter, DTensor)
        cut = [
            (p.dim, size)
            for p, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True)
            if isinstance(p, Shard)
        ]
        assert any(
            n % math.prod(size for dim, size in cut if dim == d) for d, n in enumerate(parameter.shape)
        )
    return found


# ----------------------------------------------------------------------------------------------------
# Meshes and sharding

LAYOUTS = {2: ((2,),), 3: ((3,),), 4: ((4,), (2, 2))}


#: Trainable parameters that the tests leave plain beside sharded ones, and so have to name.
LEFT_PLAIN = ("batch_norm.weight", "gate")


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


# ----------------------------------------------------------------------------------------------------
# load_pretrained


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    kind = model.config.model_type
    ids = torch.arange(12).reshape(2, 6) % 90 + 3
    if kind == "vit":
        return {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 12 * 12).reshape(2, 3, 12, 12).to(model.dtype)}
    if kind == "t5":
        return {"input_ids": ids, "decoder_input_ids": ids}
    return {"input_ids": ids}


@contextmanager
def known_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        # torch's, about T5's stack returning a view; nothing writes into that view.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
        yield


def forward(model: Any) -> torch.Tensor:
    with torch.no_grad(), known_warnings():
        found: torch.Tensor = model(**inputs_of(model))[0]
    return found


def ordinary_model(directory: str, **options: Any) -> Any:
    """What transformers itself gives; called on all ranks, because parts of it may communicate."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    return getattr(transformers, config.architectures[0]).from_pretrained(directory, **options)


def pretrained_equals_ordinary(directories: list[str], **options: Any) -> dict[str, float]:
    """Load each directory in every layout of this world size; returns seconds by directory name."""
    seconds = {}
    for directory in directories:
        started = time.monotonic()
        ordinary = ordinary_model(directory, **options)
        for shape in LAYOUTS[dist.get_world_size()]:
            check_pretrained(directory, ordinary, mesh_of(shape), **options)
        seconds[Path(directory).name] = time.monotonic() - started
    return seconds


def check_pretrained(directory: str, ordinary: Any, mesh: DeviceMesh, **options: Any) -> None:
    with nothing_else_changes():
        model, report = sw.load_pretrained(directory, mesh, **options, return_report=True)
    assert_same_whole(model, ordinary)
    sharded = sw.shard(copy.deepcopy(ordinary), mesh)
    assert_same_shards(model, sharded)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert not model.training
    assert not any(m.training for m in model.modules())
    assert model.name_or_path == ordinary.name_or_path == directory
    assert model.config.name_or_path == directory
    assert model.config.to_dict() == ordinary.config.to_dict()
    assert (model.config.dtype, model.dtype) == (ordinary.config.dtype, ordinary.dtype)
    assert ordinary.can_generate() == model.can_generate()
    if ordinary.can_generate():
        assert model.generation_config.to_dict() == ordinary.generation_config.to_dict()
    assert len(model._weight_conversions) == len(ordinary._weight_conversions)
    distinct = {id(p): p for p in (*ordinary.parameters(), *_persistent_buffers(ordinary))}
    assert report.tensors == len(distinct)
    assert report.model_bytes == sum(p.nbytes for p in distinct.values())
    held = {id(p): local(p) for p in (*model.parameters(), *_persistent_buffers(model))}
    assert report.local_bytes == sum(p.nbytes for p in held.values())
    if not options:
        assert report.bytes_read <= 1.02 * report.local_bytes, "more than this rank's shards was read"
    assert report.initialized == ()
    before = pointers(model)
    torch.testing.assert_close(forward(model), forward(ordinary))
    after_forward(model, before)
    assert_same_whole(model, ordinary)


def _persistent_buffers(model: nn.Module) -> list[torch.Tensor]:
    names = set(model.state_dict())
    return [b for n, b in model.named_buffers() if n in names]


class TwoDtypes(nn.Module):
    """One module with trainable parameters of two dtypes, beside a part that has one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.shift = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow((self.wide(x) + self.shift).to(torch.bfloat16)) * self.scale


def several_dtypes() -> list[tuple[list[str], list[str]]]:
    """Groups and plain parameters, by default and with one left out; the gradients are those of the plain model."""
    found = []
    for ignored in ((), ("scale",)):
        torch.manual_seed(0)
        model, plain = TwoDtypes(), TwoDtypes()
        plain.load_state_dict(model.state_dict())
        sw.shard(model, mesh_of((dist.get_world_size(),)), sw.ShardPolicy(exclude=ignored))
        for each in (model, plain):
            each(torch.ones(2, 4)).sum().backward()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(whole(dict(model.named_parameters())[name].grad), parameter.grad)
        groups = [n for n, m in model.named_modules() if isinstance(m, FSDPModule)]
        found.append((groups, [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]))
    return found


def declared_by_class_and_caller(root: str) -> dict[str, Any]:
    """What may be left over or missing in load_pretrained, and who says so; values of what is initialized."""
    mesh = mesh_of((dist.get_world_size(),))
    found: dict[str, Any] = {}
    for kind in ("qwen3", "bert"):
        model, report = sw.load_pretrained(f"{root}/{kind}-old", mesh, return_report=True)
        assert_same_whole(model, ordinary_model(f"{root}/{kind}"))
        found[kind] = [(d.name, d.declared_by) for d in report.unused]
    model, report = sw.load_pretrained(
        f"{root}/qwen3-other",
        mesh,
        key_mapping={"^renamed": "model.layers"},
        allow_unused=("score.*",),
        return_report=True,
    )
    assert_same_whole(model, ordinary_model(f"{root}/qwen3"))
    found["caller"] = [(d.name, d.declared_by) for d in report.unused]
    for seed in (0, 1):
        with nothing_else_changes():
            model, report = sw.load_pretrained(
                f"{root}/qwen3-headless", mesh, allow_missing=("lm_head.*",), seed=seed, return_report=True
            )
        found[f"seed {seed}"] = whole(model.lm_head.weight).detach()
        found["initialized"] = [(d.name, d.declared_by) for d in report.initialized]
    return found


# ----------------------------------------------------------------------------------------------------
# load


def plain_reference() -> Plain:
    """The ordinary model: values with NaN, -0 and infinities among them, the same on every rank."""
    torch.manual_seed(7)
    model = Plain()
    fill_with_noise(model)
    with torch.no_grad():
        model.codes.copy_(torch.arange(7) * 1_000_003 - 3)
        model.steps.fill_(41)
        model.blocks[1].up.weight.view(-1)[:4] = torch.tensor([float("nan"), -0.0, float("inf"), 1e-42])
        model.adapter.weight.view(torch.int16)[0, :2] = torch.tensor([0x7FC1, -1], dtype=torch.int16)
    return model


def shard_plain(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """As a user does it: flags and scalars stay plain, and one trainable parameter is left out by name."""
    return sw.shard(model, mesh, sw.ShardPolicy(exclude=("flags", "temperature", "batch_norm.weight")))


def plain_through_load(file: str, directory: str) -> None:
    """A module without transformers, in every layout of this world size, from a file and from a directory."""
    ordinary = plain_reference()
    for shape in LAYOUTS[dist.get_world_size()]:
        for source in (file, directory):
            with sw.meta_init():
                model = Plain()
            shard_plain(model, mesh_of(shape))
            check_in_place(model, source, shard_plain(plain_reference(), mesh_of(shape)))
            assert_same_whole(model, ordinary)
            assert model.head.weight is model.embed.weight
            assert model.blocks[0].scale is model.shared_scale


def check_in_place(model: nn.Module, source: str, sharded: nn.Module, **options: Any) -> LoadReport:
    """Load, and check what has to stay and what has to be there."""
    before = frozen_state(model)
    wrapping = [type(m) for m in model.modules()]
    buffers = {n: id(b) for n, b in model.named_buffers() if not b.is_meta}
    with nothing_else_changes():
        report = sw.load(model, source, allow_plain=LEFT_PLAIN, **options)
    assert frozen_state(model) == before
    assert [type(m) for m in model.modules()] == wrapping
    assert {n: id(b) for n, b in model.named_buffers() if n in buffers} == buffers
    assert_same_shards(model, sharded)
    return report


def plain_on_all_ranks(file: str) -> None:
    """Not sharded at all, from meta and in place."""
    ordinary = plain_reference()
    with sw.meta_init():
        model = Plain()
    for target in (model, Plain()):
        check_in_place(target, file, ordinary)


class Strided(nn.Module):
    """Parameters and a buffer whose elements do not lie in order, one with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.arange(15.0).reshape(3, 5).t())
        self.channels_last = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
        self.sliced = nn.Parameter(torch.randn(4, 10)[:, 1:4])
        self.register_buffer("buffer", torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1))


def strides_stay(file: str) -> None:
    """Memory that is not contiguous is filled where it lies."""
    ordinary = strided_reference()
    around = [torch.zeros(4, 10), torch.zeros(4, 10)]
    target = Strided()
    target.sliced.data = around[0][:, 1:4]
    check_in_place(target, file, ordinary)
    around[1][:, 1:4] = ordinary.sliced.detach()
    assert torch.equal(*around), "what lies between the elements was written"
    with sw.meta_init():
        target = Strided()
    sw.load(target, file)
    for name, tensor in tensors_of(ordinary).items():
        assert torch.equal(tensors_of(target)[name], tensor), name


def strided_reference() -> nn.Module:
    torch.manual_seed(2)
    model = Strided()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.mul_(-1)
    return model


def finite_reference() -> Plain:
    torch.manual_seed(7)
    model = Plain()
    fill_with_noise(model)
    return model


def sharded_on_dim_1(file: str) -> list[str]:
    """``shard_placement_fn`` puts matrices on dim 1 where it divides; returns their names."""
    mesh = mesh_of((dist.get_world_size(),))

    def place(parameter: nn.Parameter) -> Shard | None:
        fits = parameter.ndim >= 2 and parameter.shape[1] % mesh.size() == 0
        return Shard(1) if fits else None

    def apply(model: Plain) -> Plain:
        plain = {model.flags, model.temperature}
        for block in model.blocks:
            fully_shard(block, mesh=mesh, shard_placement_fn=place)
        fully_shard(model, mesh=mesh, shard_placement_fn=place, ignored_params=plain)
        return model

    with sw.meta_init():
        model = Plain()
    check_in_place(apply(model), file, apply(plain_reference()))
    assert_same_whole(model, plain_reference())
    return [n for n, p in model.named_parameters() if getattr(p, "placements", None) == (Shard(1),)]


class Parallel(nn.Module):
    """Embedding, two blocks and a head that tensor parallelism cuts."""

    def __init__(self, vocab: int, width: int, inner: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(width, inner), "down": nn.Linear(inner, width)}) for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block["down"](torch.relu(block["up"](x)))
        return self.head(self.norm(x))


def parallelize(model: Parallel, mesh: DeviceMesh) -> Parallel:
    """Tensor parallelism first, then FSDP over what it left, as torch documents it."""
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)
    for block in model.blocks:
        fully_shard(block["up"], mesh=mesh["dp"])
        fully_shard(block["down"], mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def parallel_reference(vocab: int, width: int, inner: int) -> Parallel:
    torch.manual_seed(11)
    model = Parallel(vocab, width, inner)
    fill_with_noise(model)
    return model


def fsdp_and_tp(sizes: tuple[int, int, int], file: str, forward_too: bool) -> dict[str, str]:
    """FSDP 2 × TP 2; returns the placements."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with sw.meta_init():
        model = Parallel(*sizes)
    parallelize(model, mesh)
    check_in_place(model, file, parallelize(parallel_reference(*sizes), mesh))
    if forward_too:
        ids = torch.arange(12).reshape(2, 6) * 83
        before = pointers(model)
        with torch.no_grad():
            torch.testing.assert_close(model(ids), parallel_reference(*sizes)(ids))
        after_forward(model, before)
    return {n: str(p.placements) for n, p in model.named_parameters() if isinstance(p, DTensor)}


def transformers_fsdp_and_tp(directory: str) -> dict[str, str]:
    """A transformers model that the caller parallelized, with vocab 1001, through ``load``."""
    import transformers

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    config = transformers.AutoConfig.from_pretrained(directory)
    ordinary = ordinary_model(directory)

    def apply(model: Any) -> Any:
        plan: dict[str, Any] = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "model.layers.*.mlp.gate_proj": ColwiseParallel(),
            "model.layers.*.mlp.up_proj": ColwiseParallel(),
            "model.layers.*.mlp.down_proj": RowwiseParallel(),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], plan)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"])

    with sw.meta_init():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=ordinary.dtype)
    apply(model.eval())
    check_in_place(model, directory, apply(copy.deepcopy(ordinary)))
    torch.testing.assert_close(forward(model), forward(ordinary))
    return {n: str(p.placements) for n, p in model.named_parameters() if isinstance(p, DTensor)}


def renames_of_a_sharded_class(directory: str) -> None:
    """``load`` finds the renames of a model whose class ``fully_shard`` swapped."""
    import transformers

    name, config = hub_model("llava")
    with sw.meta_init():
        model = getattr(transformers, name)._from_config(config, dtype=torch.float32)
    mesh = mesh_of((dist.get_world_size(),))
    sw.shard(model, mesh)
    check_in_place(model, directory, sw.shard(ordinary_model(directory), mesh))


def declared(directory: str) -> dict[str, Any]:
    """names=, allow_unused= and allow_missing= in their forms; returns what the reports say."""
    mesh = mesh_of((dist.get_world_size(),))
    found: dict[str, Any] = {}

    def fresh() -> Mixed:
        with sw.meta_init():
            model = Mixed()
        return sw.shard(model, mesh, sw.ShardPolicy(exclude=("gate",)))

    def value(model: nn.Module, name: str) -> torch.Tensor:
        return whole(dict(model.named_parameters())[name]).detach()

    reference = mixed_reference()
    model = fresh()
    left: dict[str, Any] = {"allow_plain": LEFT_PLAIN}
    sw.load(model, f"{directory}/prefixed", names=lambda n: n.removeprefix("wrapped."), **left)
    assert_same_whole(model, reference)
    model = fresh()
    renames = {"old_head.weight": "head.weight", "old_head.bias": "head.bias"}
    sw.load(model, f"{directory}/renamed", names=renames, **left)
    assert_same_whole(model, reference)
    model = fresh()
    report = sw.load(model, f"{directory}/more", allow_unused=("extra.*", "lonely"), **left)
    assert_same_whole(model, reference)
    found["unused"] = [(d.name, d.declared_by) for d in report.unused]
    model = fresh()
    with nothing_else_changes():
        report = sw.load(model, f"{directory}/less", allow_missing=("head.*",), **left)
    found["initialized"] = [(d.name, d.declared_by) for d in report.initialized]
    found["head"] = value(model, "head.weight")
    assert model.steps.item() == reference.steps.item()
    again = fresh()
    report = sw.load(again, f"{directory}/no-buffer", allow_missing=("steps",), **left)
    assert [(d.name, d.declared_by) for d in report.initialized] == [("steps", "caller")]
    assert again.steps.item() == 5, "a buffer that is not stored has its value from construction"
    for name, parameter in reference.named_parameters():
        if not name.startswith("head."):
            assert torch.equal(bits(value(model, name)), bits(parameter)), name
    return found


def mixed_reference() -> Mixed:
    torch.manual_seed(3)
    model = Mixed()
    fill_with_noise(model)
    return model


# ----------------------------------------------------------------------------------------------------
# Errors


class Refusal(Exception):
    """No payload may be read here."""


@contextmanager
def no_payload() -> Iterator[None]:
    """Reading payload raises, as long as this lasts."""

    def refuse(*_: object) -> None:
        raise Refusal("payload was read")

    with before_each_read(refuse):
        yield


def outcome_of(
    build: Callable[[], nn.Module], source: str, *, payload: bool = False, **options: Any
) -> dict[str, Any]:
    """Error class and text of a load that must fail with the model untouched."""
    model = build()
    try:
        with nullcontext() if payload else no_payload():
            sw.load(model, source, allow_plain=LEFT_PLAIN, **options)
    except ShardwiseError as error:
        if not payload:
            assert all(p.is_meta for p in model.parameters()), "memory was allocated for nothing"
        return {"kind": type(error).__name__, "text": str(error)}
    except Refusal:
        raise AssertionError(f"payload of {source} was read") from None
    raise AssertionError(f"no error for {source}")


def build_mixed() -> nn.Module:
    with sw.meta_init():
        model = Mixed()
    return sw.shard(model, mesh_of((dist.get_world_size(),)), sw.ShardPolicy(exclude=("gate",)))


def build_plain() -> nn.Module:
    with sw.meta_init():
        model = Plain()
    return shard_plain(model, mesh_of((dist.get_world_size(),)))


def refused(directory: str) -> dict[str, dict[str, Any]]:
    """What each broken directory under ``directory`` leads to; the group stays usable."""
    found = {
        path.name: outcome_of(build_mixed, str(path))
        for path in sorted(Path(directory).iterdir())
        if not path.name.startswith("ties")
    }
    good = f"{directory}/ties-equal"
    found["names-lost"] = outcome_of(build_plain, good, names={"no.such": "embed.weight"})
    found["names-twice"] = outcome_of(build_plain, good, names=lambda n: n.replace("blocks.1.", "blocks.0."))
    found["ties-differ"] = outcome_of(build_plain, f"{directory}/ties-differ", payload=True)
    dist.barrier()
    return found


def different_structure(directory: str, change: str) -> dict[str, Any]:
    """The last rank builds something else than the others."""
    odd = dist.get_rank() == dist.get_world_size() - 1

    def build() -> nn.Module:
        with sw.meta_init():
            if change == "layer":
                model: nn.Module = Plain(blocks=3 if odd else 2)
            else:
                model = Plain().convert(torch.bfloat16 if odd else torch.float32)
        return shard_plain(model, mesh_of((dist.get_world_size(),)))

    found = outcome_of(build, directory)
    model = build_plain()
    sw.load(model, directory, allow_plain=LEFT_PLAIN)  # the group works as before
    assert_same_whole(model, plain_reference())
    return found


def left_plain_unnamed(directory: str) -> dict[str, dict[str, Any]]:
    """Trainable parameters that are neither sharded nor declared plain, as when the caller forgets to wrap the root."""
    mesh = mesh_of((dist.get_world_size(),))

    def without_root() -> nn.Module:
        with sw.meta_init():
            model = Mixed()
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return model

    def attempt(build: Callable[[], nn.Module], **options: Any) -> str:
        model = build()
        try:
            sw.load(model, directory, **options)
        except ShardError as error:
            assert all(p.is_meta for p in model.parameters()), "memory was allocated for nothing"
            return str(error)
        model.gate.requires_grad_()
        assert_same_whole(model, mixed_reference())
        return ""

    def frozen() -> nn.Module:
        model = build_mixed()
        model.gate.requires_grad_(False)
        return model

    return {
        "gate": attempt(build_mixed),
        "root": attempt(without_root),
        "named": attempt(build_mixed, allow_plain=("ga*",))
        + attempt(without_root, allow_plain=("gate", "head.*")),
        "frozen": attempt(frozen),
    }


def wrapped_transformers(directory: str, out: str) -> None:
    """A compiled model has the config, the renames, the ties and the tokenizer of the model inside."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    with sw.meta_init():
        inner = getattr(transformers, config.architectures[0])._from_config(config, dtype=torch.float32)
    model: Any = sw.shard(inner, mesh_of((dist.get_world_size(),)))
    report = sw.load(torch.compile(model, backend="eager"), directory)
    assert report.tensors == len(list(model.parameters()))
    assert_same_whole(model, ordinary_model(directory))
    sw.export_hf(torch.compile(model, backend="eager"), out)


def pretrained_refused(directory: str) -> dict[str, Any]:
    """An error of ``load_pretrained``, before payload."""
    try:
        with no_payload():
            sw.load_pretrained(directory, mesh_of((dist.get_world_size(),)))
    except ShardwiseError as error:
        return {"kind": type(error).__name__, "text": str(error)}
    raise AssertionError(f"no error for {directory}")


def without_times(outcome: dict[str, Any]) -> tuple[str, str]:
    """Class and text, to be compared between ranks."""
    return outcome["kind"], re.sub(r"\d+\.\d+ s", "… s", outcome["text"])
