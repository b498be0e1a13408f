"""What the ranks run in the tests of exports, and of other projects' readers on our files."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import shardwise as sw
from shardwise.names import named_tensors
from shardwise.publish.write import FileWriter
from tests.checkpoint._checkpointer_fns import failure
from tests.harness.versions import is_open

VOCAB = 37
ROWS = 22 if is_open("packed") else 24  # of packed weights: two halves, cut in 2 or 4


def save_source(directory: str, kind: str) -> None:
    """A tiny model of a hub class in hub format, one file or several. Rank-local."""
    torch.manual_seed(21)
    sizes = {"hidden_size": 12, "intermediate_size": 22, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if kind.startswith("llama"):
        config: Any = transformers.LlamaConfig(
            **sizes, **special, vocab_size=VOCAB, tie_word_embeddings=kind == "llama-tied"
        )
        model: Any = transformers.LlamaForCausalLM(config)
    elif kind == "gpt2":
        ids = {k: v for k, v in special.items() if k != "pad_token_id"}
        config = transformers.GPT2Config(n_embd=12, n_layer=2, n_head=2, vocab_size=VOCAB, **ids)
        model = transformers.GPT2LMHeadModel(config)
    else:
        assert kind == "bert"  # a base class, whose stored names may carry a prefix
        config = transformers.BertConfig(**sizes, vocab_size=VOCAB, pad_token_id=0)
        model = transformers.BertForMaskedLM(config)
    if kind == "llama-bf16":
        model = model.to(torch.bfloat16)
    model.save_pretrained(directory, max_shard_size="4KB" if kind.startswith("llama") else "1GB")
    Path(directory, "tokenizer_config.json").write_text('{"model_max_length": 16}\n')
    Path(directory, "vocab.txt").write_text("a\nb\n")


def save_trained(source: str, path: str) -> dict[str, torch.Tensor]:
    """Load sharded, take one step of AdamW, save a checkpoint. The values, whole, by module name."""
    model = sw.load_pretrained(source, _mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ids = torch.arange(8).reshape(2, 4)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    sw.save(sw.TrainState(model=model, optimizer=optimizer), path, step=1)
    return whole_values(model)


def export_both_ways(source: str, out: str, options: dict[str, Any]) -> dict[str, Any]:
    """Export a trained live model, and its checkpoint. The reports and the values."""
    model = sw.load_pretrained(source, _mesh())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    live = sw.export_hf(model, f"{out}/live", **options)
    sw.save(sw.TrainState(model=model), f"{out}/checkpoint")
    stored = sw.export_hf(f"{out}/checkpoint", f"{out}/stored", **options)
    again = failure(lambda: sw.export_hf(model, f"{out}/live"))
    return {
        "live": live.to_json(),
        "stored": stored.to_json(),
        "again": again,
        "values": whole_values(model) if dist.get_rank() == 0 else whole_values(model) and {},
    }


def export_fails(source: str, out: str, failing_rank: int) -> tuple[str, str]:
    """One rank fails to write: an error on all, and nothing is left."""
    from shardwise.publish.write import FileFiller

    model = sw.load_pretrained(source, _mesh())
    own = FileFiller.write_at

    def write_at(self: FileFiller, name: str, offset_bytes: int, view: memoryview) -> None:
        if dist.get_rank() == failing_rank and self.bytes_written > 500:
            raise OSError(5, "broken")
        own(self, name, offset_bytes, view)

    FileFiller.write_at = write_at  # type: ignore[method-assign]
    try:
        error = failure(lambda: sw.export_hf(model, out))
    finally:
        FileFiller.write_at = own  # type: ignore[method-assign]
    dist.barrier()
    assert os.listdir(os.path.dirname(out)) == []
    dist.barrier()
    sw.export_hf(model, out)
    return error


def small_module() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6))


def save_small(path: str) -> None:
    model = small_module()
    fully_shard(model, mesh=_mesh())
    sw.save(sw.TrainState(model=model), path, step=1)


def export_damaged(path: str, out: str) -> list[tuple[str, str]]:
    """A checkpoint with one flipped bit: export and load of it, on all ranks."""
    model = small_module()
    fully_shard(model, mesh=_mesh())
    sw.save(sw.TrainState(model=model), path)
    sw.export_hf(path, f"{path}-sound")
    if dist.get_rank() == 0:
        file = sorted(Path(path, "model").glob("*.safetensors"))[-1]
        content = bytearray(file.read_bytes())
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        end = header["0.bias"]["data_offsets"][1]
        content[8 + int.from_bytes(content[:8], "little") + end - 1] ^= 1
        file.write_bytes(content)
    dist.barrier()
    return [failure(lambda: sw.export_hf(path, out)), failure(lambda: sw.load(model, path))]


def export_into(source: str, out: str) -> None:
    """Load sharded as stored, and export unchanged: live, and from a checkpoint."""
    model = sw.load_pretrained(source, _mesh())
    sw.export_hf(model, f"{out}/live")
    sw.save(sw.TrainState(model=model), f"{out}/checkpoint")
    sw.export_hf(f"{out}/checkpoint", f"{out}/stored")


def export_plain_module(out: str) -> dict[str, torch.Tensor]:
    """No transformers model: integers, bools, scalars, fp16 and an empty tensor go out as they are."""
    torch.manual_seed(3)
    model = Odd()
    fully_shard(model, mesh=_mesh(), ignored_params={model.codes})
    sw.export_hf(model, out)
    return whole_values(model)


class Odd(nn.Module):
    """One of each dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(7, 5)
        self.halves = nn.Parameter(torch.randn(3, 2).half(), requires_grad=False)
        self.codes = nn.Parameter(torch.arange(5), requires_grad=False)
        self.register_buffer("steps", torch.tensor(12))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scale", torch.tensor(1.5, dtype=torch.float64))
        self.register_buffer("nothing", torch.zeros(0, 4))
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x)


# ------------------------------------------------------------------------------------- several models


def save_several(root: str, path: str) -> dict[str, dict[str, torch.Tensor]]:
    """Two transformers models of different classes and a plain module in one checkpoint. Their values."""
    models: dict[str, nn.Module] = {}
    for name, kind in (("actor", "llama-tied"), ("critic", "gpt2")):
        models[name] = sw.load_pretrained(f"{root}/{kind}", _mesh())
        with torch.no_grad():
            for parameter in models[name].parameters():
                parameter.mul_(1.5)
    models["value-head"] = small_module()
    fully_shard(models["value-head"], mesh=_mesh())
    sw.save(sw.TrainState(model=models), path)
    return {name: whole_values(model) for name, model in models.items()}


# ------------------------------------------------------------------------------------- beside a run that saves


class HeldUp:
    """Lets the thread that saves behind write only once it is told to."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self._own = FileWriter.write

    def __enter__(self) -> HeldUp:
        own, may_write = self._own, self.may_write

        def write(self: FileWriter, data: memoryview | bytes) -> None:
            if threading.current_thread().name.startswith("shardwise-save"):
                assert may_write.wait(60)
            own(self, data)

        FileWriter.write = write  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self.may_write.set()
        FileWriter.write = self._own  # type: ignore[method-assign]


def export_while_saving(root: str, out: str) -> dict[str, Any]:
    """A live model is exported, twice, while a save of it goes on behind; then trained on before that ends."""
    model = small_module()
    fully_shard(model, mesh=_mesh())
    saved = whole_values(model)
    with sw.Checkpointer(root, mode="async") as checkpointer:
        with HeldUp() as held_up:
            checkpointer.save(sw.TrainState(model=model), 1)
            sw.export_hf(model, f"{out}/first")
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
            changed = whole_values(model)
            sw.export_hf(model, f"{out}/second")
            was_saving = checkpointer.is_saving
            held_up.may_write.set()
        report = checkpointer.wait()
    assert report is not None
    return {"was_saving": was_saving, "saved": saved, "changed": changed, "published": report.is_published}


def numbered_steps(root: str, steps: int) -> None:
    """A run that saves and deletes steps as fast as it can; every value of step k is k."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    state = sw.TrainState(model=model)
    with sw.Checkpointer(root, keep_last=1) as checkpointer:
        for step in range(1, steps + 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(step)
            checkpointer.save(state, step)


# ------------------------------------------------------------------------------------- uneven FSDP and TP


class Packed(nn.Module):
    """Linear layers of 38 rows for TP, a norm that TP leaves alone (so that it lies on ``mesh["dp"]`` only),
    and a gate/up weight whose two halves are cut each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(9, 38)
        self.second = nn.Linear(38, 9)
        self.norm = nn.LayerNorm(9)
        self.gate_up = nn.Parameter(torch.zeros(ROWS, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(torch.relu(self.first(x))))


def packed_model(shape: tuple[int, int]) -> Packed:
    """On a (dp, tp) mesh: TP and FSDP on the same dim, sizes that divide by neither."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    torch.manual_seed(9)
    model = Packed()
    with torch.no_grad():
        model.gate_up.copy_(torch.arange(ROWS * 5).reshape(ROWS, 5))
    placements = [Replicate(), _StridedShard(0, split_factor=2)]
    packed = distribute_tensor(model.gate_up.detach(), mesh, placements, src_data_rank=None)
    model.gate_up = nn.Parameter(packed, requires_grad=False)
    parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"], ignored_params={model.gate_up})
    return model


def save_packed(path: str, shape: tuple[int, int]) -> dict[str, Any]:
    """Save; restore into zeroed models on other meshes; the checkpoint's name → boxes per rank, and values."""
    model = packed_model(shape)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    state = sw.TrainState(model=model, optimizer=optimizer)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    digests = sw.digest(model)
    sw.save(state, path)
    assert sw.verify(path).ok
    before = {n: p._local_tensor.clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    report = sw.restore(sw.TrainState(model=model, optimizer=optimizer), path)
    assert report.exact, report.differences
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter._local_tensor, before[name]), name
    assert sw.digest(model) == digests
    return {"digests": digests, "boxes": _boxes(model)}


def save_with_sliced_mesh(path: str) -> tuple[str, str]:
    """A tensor that lies on other ranks for each rank: one manifest can't describe it."""
    model = packed_model((2, 2))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ranks = mesh["tp"].mesh.tolist()  # a mesh made by hand: nothing in it tells of its siblings
    own = DeviceMesh("cpu", ranks, mesh_dim_names=("by hand",), _init_backend=False)
    sliced = DTensor.from_local(torch.zeros(ROWS // 2, 5), own, [Shard(0)], run_check=False)
    model.gate_up = nn.Parameter(sliced, requires_grad=False)
    error = failure(lambda: sw.save(sw.TrainState(model=model), path))
    assert os.listdir(os.path.dirname(path)) == []
    return error


def restore_packed(path: str, shape: tuple[int, int] | None) -> dict[str, Any]:
    """Restore under another mesh, or with FSDP alone."""
    if shape is None:
        model = Packed()
        fully_shard(model, mesh=_mesh())
    else:
        model = packed_model(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    sw.restore(sw.TrainState(model=model), path)
    return {"digests": sw.digest(model), "boxes": _boxes(model)}


def _boxes(model: nn.Module) -> dict[str, int]:
    from shardwise.tensors.live import describe

    return {w.name: len(w.boxes) for w in describe(model).layout().wanted}


def expected_packed() -> dict[str, torch.Tensor]:
    """The values of :func:`save_packed`, on one process."""
    torch.manual_seed(9)
    model = Packed()
    with torch.no_grad():
        model.gate_up.copy_(torch.arange(ROWS * 5).reshape(ROWS, 5))
    model.gate_up.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(trained).step()
    return {n: p.detach() for n, p in model.named_parameters()}


# --------------------------------------------------------------------------------------------- both sides


def _mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def whole_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer, gathered, under all its names. Every rank must call it."""
    found = {}
    for t in named_tensors(model):
        if t.persistent:
            tensor = t.tensor.detach()
            value = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
            found |= dict.fromkeys(t.names, value)
    return found


def stored_tensors(directory: str | Path) -> dict[str, torch.Tensor]:
    """Everything in the safetensors files of a hub directory, by stored name, each once."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            assert name not in found, name
            found[name] = tensor
    return found


def index_of(directory: str | Path) -> dict[str, Any] | None:
    file = Path(directory, "model.safetensors.index.json")
    return json.loads(file.read_text()) if file.exists() else None


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bitwise, dtype and shape included."""
    if found.dtype is not expected.dtype or found.shape != expected.shape:
        return False
    as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (found, expected)]
    return torch.equal(*as_bytes)
