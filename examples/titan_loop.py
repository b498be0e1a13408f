"""A torchtitan-style loop: your own model, TP and FSDP2 by hand on a mesh with two axes, and weights from the Hub.

    torchrun --nproc-per-node 4 examples/titan_loop.py --out titan-out --tp 2 --steps 4
    torchrun --nproc-per-node 2 examples/titan_loop.py --out titan-out --tp 1 --steps 8   # resumes at step 5
    torchrun --nproc-per-node 4 examples/titan_loop.py --out titan-new --tp 2 --from-scratch

The model has its own parameter names. ``own_name`` translates them from the Hub's names, and the export translates them
back. The script creates a tiny Llama; to use your own, pass ``--base``. It runs on CPUs. On GPUs, use "cuda" for the mesh,
the backend and the batches.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as tp
from torch.utils.data import DataLoader

import shardwise as sw

BATCH, ACCUMULATE, SAVE_EVERY = 12, 2, 2  # sequences per batch on all ranks; batches per step; steps
SAMPLES = [3 + (first + torch.arange(17)) % 90 for first in range(120)]  # tokens that count upwards
OWN_NAMES = {  # by the Hub's names
    **{"model.embed_tokens": "tok_embeddings", "model.": "", "lm_head": "output", "self_attn": "attention"},
    **{"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "mlp.": ""},
    **{"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3", **{f"{x}_proj": f"w{x}" for x in "qkvo"}},
}


def own_name(hub_name: str) -> str:
    for theirs, ours in OWN_NAMES.items():
        hub_name = hub_name.replace(theirs, ours)
    return hub_name


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.wq, self.wo = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(width, kv_heads * self.head_dim, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        split = (*x.shape[:2], -1, self.head_dim)  # with TP, only this rank's heads
        q, k, v = (w(x).view(split).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        cos, sin = rope[:, : x.shape[1]]
        q, k = (t * cos + torch.cat([-t.chunk(2, -1)[1], t.chunk(2, -1)[0]], -1) * sin for t in (q, k))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, hidden = config["hidden_size"], config["intermediate_size"]
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(width, config["rms_norm_eps"]) for _ in range(2))
        self.attention = Attention(width, config["num_attention_heads"], config["num_key_value_heads"])
        self.w1, self.w3 = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rope)
        y = self.ffn_norm(x)
        return x + self.w2(nn.functional.silu(self.w1(y)) * self.w3(y))  # type: ignore[no-any-return]


class Transformer(nn.Module):  # a Llama; config is the content of config.json
    def __init__(self, config: dict[str, Any], length: int = 512) -> None:
        super().__init__()
        width, vocab = config["hidden_size"], config["vocab_size"]
        self.tok_embeddings = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(width, config["rms_norm_eps"])
        self.output = nn.Linear(width, vocab, bias=False)
        head_dim, theta = width // config["num_attention_heads"], config["rope_parameters"]["rope_theta"]
        angles = torch.outer(torch.arange(length), theta ** (-torch.arange(0, head_dim, 2) / head_dim))
        rope = torch.stack([angles.cos(), angles.sin()]).repeat(1, 1, 2)
        self.register_buffer("rope", rope, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for block in self.layers:
            x = block(x, self.rope)
        return self.output(self.norm(x)).clone()  # type: ignore[no-any-return]  # a view would cause an FSDP2 warning


def parallelize(model: Transformer, mesh: DeviceMesh) -> None:
    """TP with sequence parallelism over the mesh axis "tp", then FSDP2 over "dp", in place."""
    rows, whole = Shard(1), Replicate()  # rows of the sequence
    plan: dict[str, Any] = dict.fromkeys(("attention_norm", "ffn_norm"), tp.SequenceParallel())
    plan["attention"] = tp.PrepareModuleInput(input_layouts=(rows, None), desired_input_layouts=(whole, None))
    plan |= {f"attention.w{x}": tp.ColwiseParallel() for x in "qkv"}
    plan |= dict.fromkeys(("w1", "w3"), tp.ColwiseParallel(input_layouts=rows))
    plan |= dict.fromkeys(("attention.wo", "w2"), tp.RowwiseParallel(output_layouts=rows))
    for block in model.layers:
        tp.parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    plan = {"tok_embeddings": tp.RowwiseParallel(input_layouts=whole, output_layouts=rows)}
    plan |= {"output": tp.ColwiseParallel(input_layouts=rows, output_layouts=whole)}
    tp.parallelize_module(model, mesh["tp"], plan | {"norm": tp.SequenceParallel()})
    fully_shard(model, mesh=mesh["dp"])


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def mean(dp: DeviceMesh, value: torch.Tensor) -> float:
    dist.all_reduce(shown := value.detach().clone(), group=dp.get_group())
    return shown.item() / dp.size()


def train(
    base: Path, out: Path, mesh: DeviceMesh, steps: int, from_scratch: bool, checkpoints_at: str | None = None
) -> dict[int, Any]:
    """Train from the newest published step, the base or random weights to ``steps``. Returns each step's loss and gradient norm."""
    with sw.meta_init():  # parameters use no memory yet; buffers are real, because no file has them
        model: Any = Transformer(json.loads((base / "config.json").read_text()))
    parallelize(model, mesh)
    say = print if dist.get_rank() == 0 else lambda _: None
    if from_scratch:
        sw.init_weights(model, seed=0)  # the same values on every mesh
    else:  # also before a resume, because the export uses the names from this load
        say(f"rank 0 read {sw.load(model, base, names=own_name).bytes_read:,} bytes of {base}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
    dp = mesh["dp"]  # ranks of a TP group read the same sequences
    here, of = dp.get_local_rank(), dp.size()
    sampler = sw.ElasticSampler(SAMPLES, global_batch_size=BATCH, rank=here, num_replicas=of)
    loader = sw.ResumableLoader(DataLoader(SAMPLES, batch_sampler=sampler))  # type: ignore[arg-type]
    state = sw.TrainState(model=model, optimizer=optimizer, scheduler=schedule, dataloader=loader)
    found: dict[int, Any] = {}
    with sw.Checkpointer(checkpoints_at or out / "checkpoints", mode="async", keep_last=2) as checkpoints:
        if resumed := checkpoints.resume(state):  # weights, optimizer, schedule, data position; RNG last
            say(f"step {resumed.step} of {resumed.saved_mesh}, now {resumed.mesh}; {resumed.rng}")
        batches = (batch for _ in itertools.count() for batch in loader)
        for step in range(resumed.step + 1 if resumed else 1, steps + 1):
            total = torch.zeros(())
            for part in range(ACCUMULATE):
                model.set_requires_gradient_sync(part == ACCUMULATE - 1)
                loss = loss_of(model, next(batches)) / ACCUMULATE
                loss.backward()
                total += loss.detach()
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            found[step] = [mean(dp, total), norm.full_tensor().item()]
            say(f"step {step}: loss {found[step][0]:.4f}, norm of gradients {found[step][1]:.3f}")
            if step % SAVE_EVERY == 0 or step == steps:
                checkpoints.save(state, step)  # written in the background
                with torch.no_grad():
                    unseen = torch.stack(SAMPLES[:BATCH]).flip(1).chunk(of)[here]
                    say(f"step {step}: validation loss {mean(dp, loss_of(model, unseen)):.4f}")
    if not (export := out / f"export-{steps}").exists():
        sw.export_hf(model, export)
        if dist.get_rank() == 0 and not from_scratch:
            (export / "config.json").write_bytes((base / "config.json").read_bytes())
    return found


def write_base(directory: Path) -> None:
    """Write a tiny random Llama in Hugging Face format. Called on rank 0 only."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 102, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    LlamaForCausalLM(config).save_pretrained(directory)


def main(arguments: list[str] | None = None) -> dict[int, Any]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoints", help="directory or URL of checkpoints; default: OUT/checkpoints")
    parser.add_argument("--base", type=Path, help="directory of a Llama; default: a tiny one, made in OUT")
    parser.add_argument("--tp", type=int, default=1, help="size of the mesh axis tp; the rest is dp")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--from-scratch", action="store_true")
    options = parser.parse_args(arguments)
    shape = dist.get_world_size() // options.tp, options.tp
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    base = options.base or options.out / "base"
    if dist.get_rank() == 0 and not base.exists():
        write_base(base)
    dist.barrier()
    return train(base, options.out, mesh, options.steps, options.from_scratch, options.checkpoints)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
