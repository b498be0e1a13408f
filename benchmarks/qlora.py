"""QLoRA over two ranks: what each way to it holds of a 4-bit base, and whether its first step is that of one process.

    OMP_NUM_THREADS=1 python benchmarks/qlora.py
    OMP_NUM_THREADS=1 python benchmarks/qlora.py --short

Each way runs in fresh processes: shardwise, which quantizes a bf16 source while it reads it, or keeps stored codes; transformers on every
rank and FSDP2 over it; the same through Accelerate; transformers' own ``DistributedConfig``. ``held``: bytes of codes and scales of the
base on a rank, of all. ``peak``: anonymous memory while the base is loaded and sharded, beside what is held. Then 4 ranks quantize weights
of 600 MiB each. Prints JSON; the exit status is 1 if a contract is broken.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import peft
import torch
import transformers
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import shardwise as sw
from benchmarks.fresh import from_fresh_process, in_fresh_process, on_fresh_ranks
from benchmarks.loading.counters import anonymous_bytes, sampled

MIB = 2**20
WAYS = (
    "shardwise, bf16 source",
    "shardwise, codes kept",
    "fully_shard",
    "Accelerate",
    "transformers DistributedConfig",
)


def main() -> None:
    """Measure and print; exit status 1 if a contract is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="tiny")
    args = parser.parse_args()
    narrow = (128, 384, 2) if args.short else (1024, 4096, 8)
    wide = (128, 512, 1) if args.short else (2560, 122880, 1)
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as root:
        in_fresh_process(_write, f"{root}/narrow", *narrow)
        in_fresh_process(_write_wide, f"{root}/wide", *wide)
        expected = from_fresh_process(_whole, f"{root}/narrow")
        found = {way: _summary(on_fresh_ranks(2, _try, way, f"{root}/narrow"), expected) for way in WAYS}
        ranks = on_fresh_ranks(4, _load_wide, f"{root}/wide/plain")
    beside = max(rank["peak"] - rank["shard"] for rank in ranks)
    print(
        json.dumps(
            {
                "one process": {"codes and scales, MiB": round(expected["all"] / MIB, 2)},
                **found,
                "4 ranks, a bf16 weight of MiB": round(2 * wide[0] * wide[1] / MIB),
                "4 ranks: anonymous memory beside the shard, MiB": round(beside / MIB, 1),
            },
            indent=1,
        )
    )
    ours = [found[way] for way in WAYS[:2]]
    sys.exit(not all(one["is that of one process"] == "bitwise" for one in ours) or beside > 128 * MIB)


def _summary(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> dict[str, Any]:
    if "error" in ranks[0]:
        return {"error": ranks[0]["error"]}
    same = all(rank["step"] == expected["step"] for rank in ranks)
    losses = {rank["loss"] for rank in ranks} == {expected["loss"]}
    return {
        "held, MiB": round(max(rank["held"] for rank in ranks) / MIB, 2),
        "of": round(expected["all"] / MIB, 2),
        "peak beside, MiB": round(max(rank["peak"] - rank["held"] for rank in ranks) / MIB, 1),
        "is that of one process": "bitwise" if same else "loss only" if losses else "no",
    }


def _config(hidden: int, inner: int, layers: int) -> Any:
    return transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
    )


def _four_bits() -> Any:
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )


def _write(directory: str, *sizes: int) -> None:
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(_config(*sizes)).to(torch.bfloat16).save_pretrained(f"{directory}/plain")
    _transformers(directory).save_pretrained(f"{directory}/nf4")


def _write_wide(directory: str, *sizes: int) -> None:
    """Without initial values, which would take minutes."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(_config(*sizes)).to(torch.bfloat16)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.copy_(
            torch.linspace(-1, 1, 4096, dtype=torch.bfloat16)
            .repeat(-(-parameter.numel() // 4096))[: parameter.numel()]
            .view(parameter.shape)
        )
    model.save_pretrained(f"{directory}/plain")


def _transformers(directory: str, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        f"{directory}/plain", quantization_config=_four_bits(), dtype=torch.bfloat16, **options
    )


def _lora() -> Any:
    return peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")


def _try(rank: int, world_size: int, way: str, directory: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (world_size,))
    before = anonymous_bytes()
    try:
        with sampled() as peak:
            model = _made(way, directory, mesh)
        return {"peak": peak.nbytes - before, **_held(model), **_step(model)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _made(way: str, directory: str, mesh: Any) -> Any:
    """The model with adapters, sharded."""
    if way.startswith("shardwise"):
        stored, asked = ("plain", _four_bits()) if "bf16" in way else ("nf4", "keep")
        return sw.load_pretrained(f"{directory}/{stored}", mesh, adapter=_lora(), quantized=asked)
    if way.startswith("transformers"):
        from transformers.distributed import DistributedConfig

        shards = DistributedConfig(fsdp_size=mesh.size())
        return peft.get_peft_model(_transformers(directory, distributed_config=shards), _lora())
    model: Any = peft.get_peft_model(_transformers(directory, device_map="cpu"), _lora())
    if way == "Accelerate":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
        return Accelerator(cpu=True, fsdp_plugin=plugin).prepare(model)
    for block in model.get_base_model().model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _held(model: Any) -> dict[str, int]:
    """Bytes of codes and scales on this rank."""
    codes = [p for n, p in model.named_parameters() if n.endswith("base_layer.weight")]
    held = sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in codes)
    states = (getattr(module, "quant_state", None) for module in model.modules())
    return {"held": held + sum(state.absmax.nbytes for state in states if state is not None)}


def _step(model: Any) -> dict[str, Any]:
    """The loss of one batch, and a hash of the gradients of all adapters."""
    generator = torch.Generator().manual_seed(0)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in trained.values():
            values = torch.randn(parameter.shape, generator=generator) / 32
            if isinstance(parameter, DTensor):
                values = distribute_tensor(values, parameter.device_mesh, parameter.placements)
            parameter.copy_(values)
    batch = (torch.arange(64).view(2, 32) * 7) % 512
    loss = model.train()(input_ids=batch, labels=batch).loss
    loss.backward()
    found = hashlib.sha256()
    for parameter in trained.values():
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        found.update(gradient.contiguous().numpy().tobytes())
    return {"loss": loss.item(), "step": found.hexdigest()}


def _whole(directory: str) -> dict[str, Any]:
    model = peft.get_peft_model(_transformers(directory, device_map="cpu"), _lora())
    return {"all": _held(model)["held"], **_step(model)}


def _load_wide(rank: int, world_size: int, directory: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world_size,))
    before = anonymous_bytes()
    with sampled() as peak:
        _, report = sw.load_pretrained(directory, mesh, quantized=_four_bits(), return_report=True)
    return {"peak": peak.nbytes - before, "shard": report.local_bytes}


if __name__ == "__main__":
    main()
