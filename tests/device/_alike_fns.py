"""The life of a model on the simulated device and on the CPU: the same parts on both, whose results tests compare bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from tests.device._save_fns import spent
from tests.harness import models
from tests.loading._peft_fns import known_warnings

#: Kinds of models in the directory of sources, with their dtypes there.
SOURCES = {"gpt2": torch.float32, "qwen3-tied": torch.bfloat16, "mixtral": torch.float32}
Bits = dict[str, torch.Tensor]


def write_sources(root: Path) -> None:
    for kind, dtype in SOURCES.items():
        models.write_hub_directory(kind, root / kind, dtype)


def mesh_on(device: torch.device) -> DeviceMesh:
    return init_device_mesh(device.type, (dist.get_world_size(),))


def own(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, on the CPU."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def sharded(tensor: torch.Tensor, dim: int, mesh: DeviceMesh) -> DTensor:
    """Without a collective: gloo takes not every dtype."""
    local = tensor.chunk(mesh.size(), dim)[mesh.get_local_rank()]
    return DTensor.from_local(local, mesh, [Shard(dim)], shape=tensor.shape, stride=tensor.stride())


def full(model: nn.Module, **options: Any) -> Bits:
    return {name: tensor.cpu() for name, tensor in sw.iter_full_tensors(model, **options)}


def payload(path: Path | str, pattern: str = "*.safetensors") -> dict[str, str]:
    """Hashes of the files that hold tensors; not of random generators, one for each device."""
    found = {str(p.relative_to(path)): p for p in sorted(Path(path).rglob(pattern)) if "rank" not in p.parts}
    assert found
    return {name: hashlib.sha256(p.read_bytes()).hexdigest() for name, p in found.items()}


def steps(model: Any, optimizer: torch.optim.Optimizer, device: torch.device, count: int = 2) -> list[str]:
    """Steps of training on fixed tokens, without dropout; the losses, exactly."""
    model.eval()
    generator = torch.Generator().manual_seed(7)
    losses = []
    for _ in range(count):
        ids = torch.randint(3, 101, (2, 16), generator=generator).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()).hex())
    return losses


def bits_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Bits:
    """Every shard of parameters, buffers and optimizer state of this rank, on the CPU."""
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, parameter in model.named_parameters():
        found |= {f"{name}.{k}": v for k, v in optimizer.state[parameter].items() if torch.is_tensor(v)}
    return {name: own(t) for name, t in found.items()}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, foreach=False)


# --------------------------------------------------------------------------------------------------- parts


def loaded(sources: str, root: str, device: torch.device) -> Any:
    """Renamed, tied, converted and cast tensors; names of the hub and of modules, with a dtype and small buckets."""
    found: dict[str, Any] = {}
    for kind in SOURCES:
        model, report = sw.load_pretrained(
            f"{sources}/{kind}", mesh_on(device), dtype=torch.bfloat16, return_report=True
        )
        assert all(p.device == device for p in model.parameters())
        found[kind] = [
            full(model),
            full(model, naming="module", dtype=torch.float16, bucket_bytes=20_000),
            sw.digest(model),
            report.bytes_read,
        ]
    return found


def handed_over(sources: str, root: str, device: torch.device) -> Any:
    """Full tensors and digests of a model that every rank holds whole, and of a small one that lies on the CPU."""
    found = {}
    for name, where in (("replicated", device), ("on the cpu", torch.device("cpu"))):
        torch.manual_seed(3)
        model = models.Plain().to(where)
        model.blocks[0].scale = model.shared_scale  # to() unties buffers
        for dtype, bucket_bytes in ((None, 2**20), (torch.bfloat16, 100)):
            tensors = list(
                sw.iter_full_tensors(model, naming="module", dtype=dtype, bucket_bytes=bucket_bytes)
            )
            assert {t.device for _, t in tensors} == {where}
            found[f"{name} {dtype}"] = {n: t.cpu() for n, t in tensors}
        found[f"{name}, digest"] = sw.digest(model)
    return found


def digested(sources: str, root: str, device: torch.device) -> Any:
    """Of every kind of element, of any memory order, of shards; and what many tensors cost."""
    generator = torch.Generator().manual_seed(1)
    bytes_ = torch.randint(0, 256, (33, 48), generator=generator, dtype=torch.uint8)
    found: dict[str, Any] = {}
    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int64,
        torch.uint8,
        torch.float8_e4m3fn,
    ):
        tensor = bytes_.view(dtype).to(device)
        for name, view in (
            ("whole", tensor),
            ("transposed", tensor.t()),
            ("cut", tensor[3:, 1:-1]),
            ("empty", tensor[:0]),
            ("number", tensor[0, 0]),
        ):
            found[f"{dtype} {name}"] = sw.digest(view)
        found[f"{dtype} sharded"] = [sw.digest(sharded(tensor, dim, mesh_on(device))) for dim in (0, 1)]
    model = nn.ModuleList(nn.Linear(8, 8) for _ in range(60)).to(device)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    found["many"] = sw.digest(model)
    return found


def cloned(sources: str, root: str, device: torch.device) -> Any:
    """As the first was, also after that has changed."""
    model = sw.load_pretrained(f"{sources}/qwen3-tied", mesh_on(device))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    second = sw.clone(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(p.device == device for p in second.parameters())
    sw.export_hf(second, f"{root}/hub")
    return full(second), sw.digest(second), payload(f"{root}/hub")


def initialized(sources: str, root: str, device: torch.device) -> Any:
    """By the class's own rule, and by PEFT's."""
    import peft

    found: list[Any] = []
    with sw.meta_init():
        name, config = models.hub_model("gpt2")
        model = getattr(transformers, name)._from_config(config)
    sw.shard(model, mesh_on(device))
    filled = sw.init_weights(model, seed=5)
    assert all(p.device == device for p in model.parameters())
    found += [filled, {n: own(p) for n, p in model.named_parameters()}]
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True)
    with known_warnings():
        model = sw.load_pretrained(f"{sources}/qwen3-tied", mesh_on(device), adapter=lora, seed=5)
    return [*found, full(model, naming="adapter")]


def adapted(sources: str, root: str, device: torch.device) -> Any:
    """An adapter trained, saved, restored, exported, and loaded from its directory."""
    import peft

    base, options = f"{sources}/gpt2", {"attn_implementation": "eager"}

    def fresh(adapter: Any) -> Any:
        with known_warnings():
            return sw.load_pretrained(base, mesh_on(device), adapter=adapter, **options)

    config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, modules_to_save=["ln_f"])
    model = fresh(config)
    optimizer = adamw(model)
    losses = steps(model, optimizer, device)
    sw.save(sw.TrainState(model=model, optimizer=optimizer), f"{root}/step", step=2)
    sw.export_hf(model, f"{root}/adapter")
    trained = full(model, naming="adapter")
    again = fresh(config)
    sw.restore(sw.TrainState(model=again, optimizer=(other := adamw(again))), f"{root}/step")
    assert_alike(full(again, naming="adapter"), trained)
    assert_alike(full(fresh(f"{root}/adapter"), naming="adapter"), trained)
    assert_alike(steps(again, other, device), steps(model, optimizer, device))
    return (
        losses,
        trained,
        sw.digest(model),
        payload(f"{root}/step", "model*/**/*.safetensors"),
        payload(f"{root}/adapter"),
    )


def saved_in_both_ways(model: Any, optimizer: Any, root: str, device: torch.device) -> list[str]:
    """Losses of steps before a sync and an async save, and of steps while the async save writes."""
    state = sw.TrainState(model=model, optimizer=optimizer)
    losses = steps(model, optimizer, device)
    sw.save(state, f"{root}/sync", step=2)
    with sw.Checkpointer(f"{root}/async", mode="async") as checkpoints:
        checkpoints.save(state, 2)
        losses += steps(model, optimizer, device)
    return losses


def trained(sources: str, root: str, device: torch.device) -> Any:
    """Saved in both ways, restored, and exported while training goes on."""
    mesh = mesh_on(device)
    model = sw.load_pretrained(f"{sources}/gpt2", mesh, attn_implementation="eager")
    optimizer = adamw(model)
    losses = saved_in_both_ways(model, optimizer, root, device)
    sw.export_hf(model, f"{root}/hub")
    again = sw.load_pretrained(f"{sources}/gpt2", mesh, attn_implementation="eager")
    other = adamw(again)
    with sw.Checkpointer(f"{root}/async") as checkpoints:
        checkpoints.resume(sw.TrainState(model=again, optimizer=other))
    assert steps(again, other, device) == losses[2:]
    assert_alike(bits_of(again, other), bits_of(model, optimizer))
    return (
        losses,
        full(again),
        bits_of(again, other),
        payload(f"{root}/sync"),
        payload(f"{root}/async/step-00000002"),
        payload(f"{root}/hub"),
    )


def offloaded(sources: str, root: str, device: torch.device) -> Any:
    """Shards on the CPU under a mesh of the device."""

    def fresh() -> Any:
        with sw.meta_init():
            config = transformers.AutoConfig.from_pretrained(f"{sources}/gpt2")
            model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="eager")
        policy = CPUOffloadPolicy(pin_memory=device.type != "cpu")
        for part in (*model.transformer.h, model):
            fully_shard(part, mesh=mesh_on(device), offload_policy=policy)
        if device.type == "cpu":
            sw.load(model, f"{sources}/gpt2")
        else:
            _, counts = spent(device, lambda: sw.load(model, f"{sources}/gpt2", device="cpu"))
            assert not counts, "nothing goes to the device"
        return model

    model = fresh()
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    optimizer = adamw(model)
    losses = saved_in_both_ways(model, optimizer, root, device)
    again = fresh()
    other = adamw(again)
    report = sw.restore(sw.TrainState(model=again, optimizer=other), f"{root}/async/step-00000002")
    assert steps(again, other, device) == losses[2:]
    assert {t.device.type for states in other.state.values() for t in states.values()} == {"cpu"}
    return losses, full(again), sw.digest(again), report.exact, payload(f"{root}/sync")


PARTS: dict[str, Callable[[str, str, torch.device], Any]] = {
    part.__name__: part
    for part in (loaded, handed_over, digested, cloned, initialized, adapted, trained, offloaded)
}


def assert_alike(found: Any, expected: Any, where: str = "") -> None:
    """Equal to the bit, in all that a part gives."""
    assert type(found) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (found, expected))
        assert torch.equal(a, b), f"{where}: {(a != b).sum()} of {len(a)} bytes differ"
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), f"{where}: {found.keys() ^ expected.keys()}"
        for key, value in expected.items():
            assert_alike(found[key], value, f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for index, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_alike(a, b, f"{where}/{index}")
    else:
        assert found == expected, where


# ------------------------------------------------------------------------------------------- operators


class Names(TorchDispatchMode):
    """The operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.add(op.overloadpacket.__name__)
        return op(*args, **(kwargs or {}))


def attended(device: torch.device) -> Any:
    """By way of attention: gradients of a training step, and the operators that made them."""
    found = {}
    for attention in ("eager", "sdpa"):
        torch.manual_seed(0)
        name, config = models.hub_model("gpt2")
        model: Any = getattr(transformers, name)._from_config(config, attn_implementation=attention)
        models.fill_with_noise(model)
        model.eval().to(device)
        ids = torch.arange(3, 35).view(2, 16).to(device)
        with Names() as names:
            model(input_ids=ids, labels=ids).loss.backward()
        found[attention] = ({n: own(p.grad) for n, p in model.named_parameters()}, names.found)
    return found
