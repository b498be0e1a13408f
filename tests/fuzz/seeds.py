"""The files that inputs are made from: small, real, written by the programs whose formats are read."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections import Counter, OrderedDict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import shardwise as sw
from shardwise.integrations._trainer_data import DataPlace
from tests.runs._megatron_layout import args_of, megatron_of
from tests.runs._megatron_layout import write as write_megatron
from tests.runs._zero_layout import write

__all__ = ["Net", "data_loader", "make_model", "make_seeds", "state_of"]


class Net(nn.Module):
    """A few small tensors of several kinds, and a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 4, bias=False)
        self.tied = nn.Linear(6, 4, bias=False)
        self.tied.weight = self.second.weight
        self.register_buffer("running", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) + self.tied(self.first(x))


def state_of(seed: int, *, sharded: bool = False, trained: bool = True) -> sw.TrainState:
    """A training state with an optimizer, a scheduler and extras of many types."""
    torch.manual_seed(seed)
    model = Net()
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
    if trained:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    loader = sw.ResumableLoader(data_loader())
    return sw.TrainState(
        model=model, optimizer=optimizer, scheduler=scheduler, dataloader=loader, extra=dict(_values(seed))
    )


def _values(seed: int) -> dict[str, Any]:
    return {
        "plain": [1, 2.5, None, True, "text", {"a": {"b": []}}],
        "typed": (
            1,
            {2, 3},
            frozenset({4}),
            Counter("aab"),
            OrderedDict(x=1),
            deque([1], maxlen=3),
            range(3),
            slice(1),
        ),
        "numbers": {1: float("inf"), 2: 2**70, 3: 1 + 2j, "b": b"bytes", "a": bytearray(b"x")},
        "tensors": {
            "t": torch.arange(4.0) + seed,
            "h": torch.ones(2, 2, dtype=torch.bfloat16),
            "i": torch.tensor(3),
        },
        "arrays": [
            np.arange(3),
            np.float64(2.0),
            np.dtype("int32"),
            np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        ],
        "path": Path("a/b"),
        "dtype": torch.float16,
        "size": torch.Size([1, 2]),
    }


def make_seeds(root: Path) -> dict[str, Path]:
    """Write every seed below ``root``; a directory for each name. In a process without a process group."""
    seeds: dict[str, Path] = {}

    def folder(name: str) -> Path:
        seeds[name] = root / name
        seeds[name].mkdir(parents=True)
        return seeds[name]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _run(folder("run"))
        _spread(folder("spread"))
        _hub(folder("hub"))
        _pickles(folder("torch_file"), folder("torch_index"))
        _rank_files(folder("rank_files"))
        _zero(folder("zero"))
        _megatron(folder("megatron"))
        _dcp(folder("dcp"))
        _full_state(folder("full_state"))
        _trainer(folder("trainer"))
        _trainer_place(folder("trainer_place"))
        make_model(folder("model"))
        _report(folder("report"))
        seeds |= _quantized(root / "quantized")
    return seeds


def _zero(folder: Path) -> None:
    """Two ranks' partitions, of ZeRO 2 and of ZeRO 3."""
    groups = [{"first": torch.ones(3, 4), "second": torch.ones(5)}, {"third": torch.ones(2)}]
    moments = {"exp_avg": {name: t.clone() for group in groups for name, t in group.items()}}
    rest = {
        "frozen": {"fourth": torch.ones(3)},
        "buffers": {"fifth": torch.ones(2)},
        "shared": {"sixth": "first"},
    }
    for stage in (2, 3):
        write(folder / f"zero-{stage}", stage, 2, torch.bfloat16, groups, moments, **rest)


def _megatron(folder: Path) -> None:
    """A model of two layers, with groups of queries and a padded vocabulary."""
    sizes = {"hidden_size": 4, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = SimpleNamespace(**sizes, head_dim=2)
    layer = {f"self_attn.{x}_proj.weight": torch.ones(rows, 4) for x, rows in (("q", 4), ("k", 2), ("v", 2))}
    layer |= {f"mlp.{x}_proj.weight": torch.ones(6, 4) for x in ("gate", "up")}
    hub = {f"model.layers.{k}.{name}": t for k in range(2) for name, t in layer.items()}
    hub |= {"model.embed_tokens.weight": torch.ones(5, 4), "model.norm.weight": torch.ones(4)}
    write_megatron(folder / "iter_0000100", megatron_of(hub, config, 16), args_of(config, 16, vocab_size=5))


def _rank_files(folder: Path) -> None:
    """Two ranks' files of sharded tensors, made by ranks that never meet."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for rank in (0, 1):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
        placed = ((4, Shard(0)), (2, Shard(1)), (3, Replicate()))
        content: dict[str, object] = {
            f"layer.{k}": DTensor.from_local(torch.ones(n, 4), mesh, (Replicate(), how), run_check=False)
            for k, (n, how) in enumerate(placed)
        }
        torch.save({**content, "step": torch.tensor(1)}, folder / f"model_world_size_2_rank_{rank}.pt")
        dist.destroy_process_group()


def _report(folder: Path) -> None:
    """A run with its ledger, two loss logs, and a plan."""
    state = state_of(1)
    with sw.reports.memory_ledger(folder / "ledger"), sw.Checkpointer(folder / "checkpoints") as checkpoints:
        checkpoints.save(state, 1)
        checkpoints.save(state, 2)
        checkpoints.resume(state)
    for name in ("run-1", "run-2"):
        (folder / name).mkdir()
        lines = [json.dumps({"step": step, "loss": 2.0 / step}) + "\n" for step in range(1, 5)]
        (folder / name / "loss.jsonl").write_text("".join(lines))
    (folder / "plan.json").write_text(json.dumps(sw.plan(folder.parent / "model", ranks=2).to_json()))


def _quantized(root: Path) -> dict[str, Path]:
    """A directory of each format, by the libraries that define them."""
    import transformers

    from tests.quantized import _made as made
    from tests.quantized.compressed_cases import CASES
    from tests.quantized.compressed_models import write

    config = transformers.LlamaConfig(
        vocab_size=8,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    root.mkdir()
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(root / "llama")
    made.fp8_directory(root / "llama", root / "fp8", (4, 8))
    packed = {"bits": 4, "group_size": 32}
    for desc_act in (False, True):
        settings = {**packed, "quant_method": "gptq", "desc_act": desc_act, "sym": False}
        made.packed_directory(root / "llama", root / f"gptq {desc_act}", settings)
    settings = {**packed, "quant_method": "awq", "version": "gemm", "zero_point": True}
    made.packed_directory(root / "llama", root / "awq", settings)
    nested = {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True}
    made.bitsandbytes_directory(root / "llama", root / "nested fp4", load_in_4bit=True, **nested)
    made.bitsandbytes_directory(root / "llama", root / "int8", load_in_8bit=True)
    made.gpt_oss_directory(root / "gpt-oss", experts=2)
    for name in ("fp8-blocks", "int8-channel", "w4-group-zeros", "nvfp4"):
        write(root / name, CASES[name][0], torch.bfloat16)
    plain = ("llama", "gpt-oss before")
    return {f"quantized {one.name}": one for one in sorted(root.iterdir()) if one.name not in plain}


def _run(folder: Path) -> None:
    state = state_of(1)
    with sw.Checkpointer(folder) as checkpoints:
        checkpoints.save(state, 1)
        state.extra["plain"][0] = 2
        checkpoints.save(state, 2)


def _spread(folder: Path) -> None:
    """One step that two ranks saved. They are forks of this process, which has imported torch already."""
    children = [_forked(_save_as, rank, str(folder)) for rank in range(2)]
    for child in children:
        _, status = os.waitpid(child, 0)
        assert status == 0, "a rank that saves a seed failed"


def _forked(work: Any, *args: Any) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work(*args)
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def _save_as(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}.store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    state = state_of(1, sharded=True)
    state.extra["of rank"] = rank
    sw.save(state, os.path.join(folder, "step-00000001"), step=1)
    dist.destroy_process_group()


def _tensors() -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in Net().state_dict().items() if name != "tied.weight"}


def _hub(folder: Path) -> None:
    tensors = _tensors()
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    for file, held in files.items():
        save_file({n: tensors[n] for n in held}, folder / file, metadata={"format": "pt"})
    weight_map = {n: file for file, held in files.items() for n in held}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _pickles(single: Path, several: Path) -> None:
    tensors = _tensors()
    torch.save(tensors, single / "pytorch_model.bin")
    torch.save(tensors, single / "legacy.pt", _use_new_zipfile_serialization=False)
    names = sorted(tensors)
    torch.save({n: tensors[n] for n in names[:2]}, several / "pytorch_model-1.bin")
    torch.save({n: tensors[n] for n in names[2:]}, several / "pytorch_model-2.bin")
    weight_map = {n: f"pytorch_model-{1 if n in names[:2] else 2}.bin" for n in names}
    (several / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def _dcp(folder: Path) -> None:
    state = state_of(1)
    model, optimizer = get_state_dict(state.models["model"], state.optimizers["optimizer"])
    content = {
        "model": model,
        "optimizer": optimizer,
        "lr_scheduler": state.scheduler.state_dict(),
        "step": 7,
    }
    dcp.save(content, checkpoint_id=str(folder), no_dist=True)


def _full_state(folder: Path) -> None:
    """What Accelerate writes with FULL_STATE_DICT: names of parameters in the optimizer's state."""
    state = state_of(1)
    model, optimizer = get_state_dict(state.models["model"], state.optimizers["optimizer"])
    torch.save(model, folder / "pytorch_model_fsdp.bin")
    torch.save(optimizer, folder / "optimizer.bin")
    torch.save(state.scheduler.state_dict(), folder / "scheduler.bin")
    torch.save({"step": 3}, folder / "random_states_0.pkl")


def _trainer(folder: Path) -> None:
    """What the HF Trainer writes on one process."""
    state = state_of(1)
    save_file(_tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    torch.save(state.optimizers["optimizer"].state_dict(), folder / "optimizer.pt")
    torch.save(state.scheduler.state_dict(), folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text(
        json.dumps({"global_step": 4, "epoch": 0.5, "log_history": []})
    )


def data_loader() -> DataLoader[int]:
    """Four batches in an order that a generator of the loader's own gives."""
    generator = torch.Generator().manual_seed(1)
    return DataLoader(list(range(8)), batch_size=2, shuffle=True, generator=generator)  # type: ignore[arg-type]


def _trainer_place(folder: Path) -> None:
    """A checkpoint of our Trainer in the middle of an epoch: what it says of its place in the data."""
    place = DataPlace(lambda _: None, reads_again=True)
    batches = iter(place.open(data_loader(), 0, 0, False, None))
    next(batches), next(batches)
    trainer = {
        "global_batch_size": 4,
        "epoch": 0,
        "batches": 2,
        "accumulation": 1,
        "seeds": {"sampler": 2**63},
    }
    state = dataclasses.replace(state_of(1), dataloader=None, extra={"trainer": trainer, "data": place})
    sw.save(state, folder / "checkpoint-3", step=3)


def make_model(folder: Path) -> None:
    """A transformers model of a few kilobytes, with an adapter of LoRA in ``adapter``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    adapter = folder / "adapter"
    adapter.mkdir()
    document = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
    }
    (adapter / "adapter_config.json").write_text(json.dumps({**document, "base_model_name_or_path": "x"}))
    stem = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    weights = {f"{stem}A.weight": torch.ones(2, 16), f"{stem}B.weight": torch.zeros(16, 2)}
    save_file(weights, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
