"""Writes Megatron-core's torch_dist checkpoints without Megatron, from the tensors of a model on the hub.

After Megatron-core 0.16.1 (``dist_checkpointing``, ``sharded_state_dict`` of its modules) and the formulas of Megatron Bridge 0.3.1
(``param_mapping.py``, ``*_bridge.py``). test_megatron.py compares the reader with files of Megatron-core if it's installed.
"""

from __future__ import annotations

import json
import re
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

Tensors = dict[str, torch.Tensor]

_NAMES = {
    "self_attn.o_proj": "self_attention.linear_proj",
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
    "self_attn.q_a_proj": "self_attention.linear_q_down_proj",
    "self_attn.q_b_proj": "self_attention.linear_q_up_proj",
    "self_attn.q_proj": "self_attention.linear_q_proj",  # of latent attention
    "self_attn.kv_a_proj_with_mqa": "self_attention.linear_kv_down_proj",
    "self_attn.kv_b_proj": "self_attention.linear_kv_up_proj",
    "mlp.down_proj": "mlp.linear_fc2",
    "mlp.gate": "mlp.router",
    "block_sparse_moe.gate": "mlp.router",
    "mlp.shared_experts.down_proj": "mlp.shared_experts.linear_fc2",
    "mlp.shared_expert.down_proj": "mlp.shared_experts.linear_fc2",
    "mlp.shared_expert_gate": "mlp.shared_experts.gate_weight",
    "input_layernorm": "self_attention.linear_qkv.layer_norm_weight",
    "post_attention_layernorm": "mlp.linear_fc1.layer_norm_weight",
}
_GEMMA = {
    "post_attention_layernorm": "self_attention.linear_proj.post_layernorm",
    "pre_feedforward_layernorm": "mlp.linear_fc1.layer_norm_weight",
    "post_feedforward_layernorm": "mlp.linear_fc2.post_layernorm",
}
_LATENT = {
    "input_layernorm": "input_layernorm",
    "self_attn.q_a_layernorm": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attn.kv_a_layernorm": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
_WHOLE = ("layer_norm_weight", "gate_weight")  # tensors, not modules


def layer_of(hub: Tensors, config: Any) -> Tensors:
    """A layer's tensors in Megatron, from those of the hub without their prefix."""
    hub, made = dict(hub), {}
    is_latent = "self_attn.kv_b_proj.weight" in hub
    names = (
        _NAMES
        | (_GEMMA if "pre_feedforward_layernorm.weight" in hub else {})
        | (_LATENT if is_latent else {})
    )
    if any("experts" in name for name in hub):
        names = names | {"post_attention_layernorm": "pre_mlp_layernorm"}
    for end in ("weight", "bias"):
        if not is_latent and f"self_attn.k_proj.{end}" in hub:
            groups = config.num_key_value_heads
            parts = [hub.pop(f"self_attn.{x}_proj.{end}") for x in "qkv"]
            by_group = torch.cat([p.unflatten(0, (groups, -1)) for p in parts], 1)
            made[f"self_attention.linear_qkv.{end}"] = by_group.flatten(0, 1)
    for gate in [n for n in hub if n.endswith(("gate_proj.weight", ".w1.weight"))]:
        up = gate.replace("gate_proj", "up_proj").replace(".w1.", ".w3.")
        place = re.sub(r"^block_sparse_moe|(?<=experts)\.", lambda m: {".": "."}.get(m[0], "mlp"), gate)
        stem = (
            place.removesuffix("gate_proj.weight")
            .removesuffix("w1.weight")
            .replace("shared_expert.", "shared_experts.")
        )
        made[f"{stem}linear_fc1.weight"] = torch.cat([hub.pop(gate), hub.pop(up)])
    for name, tensor in hub.items():
        if expert := re.fullmatch(
            r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(?:down_proj|w2)\.weight", name
        ):
            made[f"mlp.experts.{expert[1]}.linear_fc2.weight"] = tensor
        elif name.endswith("e_score_correction_bias"):
            made["mlp.router.expert_bias"] = tensor
        else:
            module, end = name.rsplit(".", 1)
            target = names[module]
            made[target if target.endswith(_WHOLE) else f"{target}.{end}"] = tensor
    count = len({n for n in made if re.fullmatch(r"mlp\.experts\.\d+\.linear_fc1\.weight", n)})
    for k in (1, 2) if count else ():
        found = [made.pop(f"mlp.experts.{e}.linear_fc{k}.weight") for e in range(count)]
        made[f"mlp.experts.experts.linear_fc{k}.weight"] = torch.stack(found)
    return made


def megatron_of(hub: Tensors, config: Any, padded: int, *, stacked: bool = True) -> Tensors:
    """A model's tensors in Megatron, padded to a number of tokens. ``stacked``: layers in one tensor, as where all are alike."""
    made: Tensors = {}
    layers = []
    for k in range(config.num_hidden_layers):
        prefix = f"model.layers.{k}."
        own = {n.removeprefix(prefix): t for n, t in hub.items() if n.startswith(prefix)}
        layers.append(layer_of(own, config))
    for k, layer in enumerate(layers):
        made |= {} if stacked else {f"decoder.layers.{k}.{n}": t for n, t in layer.items()}
    if stacked:
        made |= {f"decoder.layers.{n}": torch.stack([layer[n] for layer in layers]) for n in layers[0]}
    made["decoder.final_layernorm.weight"] = hub["model.norm.weight"]
    ends = {"embedding.word_embeddings": "model.embed_tokens", "output_layer": "lm_head"}
    for target, name in ends.items():
        if f"{name}.weight" in hub:
            tokens = hub[f"{name}.weight"]
            more = torch.full((padded - len(tokens), *tokens.shape[1:]), 7.0, dtype=tokens.dtype)
            made[f"{target}.weight"] = torch.cat([tokens, more])
    return made


def args_of(config: Any, padded: int, **more: Any) -> Namespace:
    """What Megatron-LM's ``args`` say of such a model."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", heads)
    said = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else 1,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "num_experts": getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None),
        "swiglu": True,
        "padded_vocab_size": padded,
        "vocab_size": None,
        "make_vocab_size_divisible_by": 16,
        "tensor_model_parallel_size": 1,
        "world_size": 2,
        "params_dtype": torch.bfloat16,
    }
    return Namespace(**said | more)


def write(
    folder: Path,
    tensors: Tensors,
    args: Namespace | None,
    *,
    dims: dict[str, int] | None = None,
    is_newer: bool = False,
) -> None:
    """The files of ``iter_0000100``. ``dims``: names' ends → the dim that ranks share, if there are several.

    ``is_newer``: as after 0.16.1, where the content of ``common.pt`` is an item of DCP: a list of one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = dict(tensors)
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for name, t in tensors.items():
            dim = next((d for end, d in (dims or {}).items() if name.endswith(end)), None)
            state[name] = distribute_tensor(t, mesh, [Replicate() if dim is None else Shard(dim)])
    groups = [{"lr": 1e-4, "wd_mult": k, "step": 7} for k in (1.0, 0.0)]
    optimizer = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 100, "optimizer": optimizer}
    state |= {"common_state/shard_0_1": [common]} if is_newer else {}
    state["rng_state/shard_0_1"] = [{"numpy": 1}]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, checkpoint_id=folder, planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
    said = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    (folder / "metadata.json").write_text(json.dumps(said | {"common_backend_version": 1}))
    if not is_newer:
        torch.save(common, folder / "common.pt")
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("100")
