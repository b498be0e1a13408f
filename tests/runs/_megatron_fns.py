"""What ranks of test_megatron.py do; and, as a program, a checkpoint by Megatron-core itself."""

from __future__ import annotations

import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from shardwise.errors import ShardwiseError
from tests.runs._megatron_layout import Tensors, args_of, megatron_of, write

_SMALL = {
    "vocab_size": 41,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}
_EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": []}
_LATENT = {
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    **{"n_routed_experts": 4, "num_local_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1},
    **{"num_key_value_heads": 4},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 16},
    "Gemma": {"head_dim": 16},
    "Gemma2": {"head_dim": 16},
    "Gemma3Text": {"head_dim": 16},
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {**_EXPERTS, "shared_expert_intermediate_size": 24},
    "Qwen3Moe": {**_EXPERTS, "head_dim": 16},
    "DeepseekV3": _LATENT,
}


#: The sizes of Megatron-core's own models, below.
ITS_OWN = {
    **{"num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 4, "vocab_size": 60},
    "tie_word_embeddings": False,
}


MOMENTS = ("exp_avg", "exp_avg_sq")


def config_of(family: str, **sizes: Any) -> Any:
    return getattr(transformers, f"{family}Config")(**_SMALL | FAMILIES[family] | sizes)


def model_of(family: str, seed: int, **sizes: Any) -> Any:
    torch.manual_seed(seed)
    name = "Gemma3" if family == "Gemma3Text" else family
    model = getattr(transformers, f"{name}ForCausalLM")(config_of(family, **sizes)).to(torch.bfloat16)
    for p in model.parameters():  # biases and norms, too
        torch.nn.init.normal_(p)
    return model


def save(folder: str, hub: Tensors, family: str, padded: int) -> None:
    """The checkpoint, of which each rank holds a part: of some tensors rows, of others columns, layers or experts."""
    config = config_of(family)
    tensors = megatron_of(hub, config, padded)
    dims = {"qkv.weight": 1, "proj.weight": 2, "mlp.linear_fc1.weight": 1, "mlp.linear_fc2.weight": 2}
    dims |= {"layer_norm_weight": 0, "experts.linear_fc1.weight": 1, "experts.linear_fc2.weight": 3}
    write(Path(folder), tensors, args_of(config, padded), dims=dims | {"word_embeddings.weight": 0})


def takes_over(path: str, family: str, **sizes: Any) -> dict[str, Any]:
    """A rank's model after a load, whole, and the bytes that it read."""
    model = model_of(family, 9, **sizes)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    report = sw.load(model, path)
    whole = {n: p.full_tensor() for n, p in model.named_parameters()}
    return {"model": whole, "read": report.bytes_read}


def errors_of(paths: list[str], family: str) -> list[tuple[str, bool]]:
    """The error of each load, and whether the model is as before."""
    model, found = model_of(family, 9), []
    before = {n: p.clone() for n, p in model.named_parameters()}
    for path in paths:
        text = ""
        try:
            sw.load(model, path)
        except ShardwiseError as error:
            text = str(error)
        found.append((text, all(torch.equal(p, before[n]) for n, p in model.named_parameters())))
    return found


# ----------------------------------------------------------------------------------------------------
# Megatron-core itself


def main(out: str, kind: str, tp: int, pp: int, ep: int) -> None:
    """A model of Megatron-core, saved by its ``dist_checkpointing``; and what each rank has of it, in ``rank_N.pt``."""
    if not torch.cuda.is_available():  # 0.16.1 asks for a device where it copies from one
        torch.cuda.synchronize = lambda *_: None
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    dist.init_process_group("gloo")
    states = import_module("megatron.core.parallel_state")
    states.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
    specs = import_module("megatron.core.models.gpt.gpt_layer_specs")
    config: dict[str, Any] = {
        **{
            "num_layers": 4,
            "hidden_size": 32,
            "ffn_hidden_size": 48,
            "num_attention_heads": 8,
            "kv_channels": 4,
        },
        **{"num_query_groups": 2, "use_cpu_initialization": True, "gated_linear_unit": True, "bf16": True},
        **{"activation_func": torch.nn.functional.silu, "add_bias_linear": False, "normalization": "RMSNorm"},
        **{
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "expert_model_parallel_size": ep,
        },
        **{"pipeline_dtype": torch.bfloat16, "params_dtype": torch.bfloat16, "add_qkv_bias": kind == "Qwen2"},
        "qk_layernorm": kind.startswith("Qwen3"),
    }
    if experts := 4 * (kind in ("Mixtral", "Qwen3Moe")) or None:
        config |= {
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": 48 if kind == "Mixtral" else 24,
            "moe_router_topk": 2,
        }
    made = import_module("megatron.core.transformer.transformer_config").TransformerConfig(**config)
    options = {"num_experts": experts, "moe_grouped_gemm": False, "qk_layernorm": config["qk_layernorm"]}
    torch.manual_seed(0)
    model = (
        import_module("megatron.core.models.gpt")
        .GPTModel(
            made,
            specs.get_gpt_layer_local_spec(**options, normalization="RMSNorm"),
            vocab_size=64,
            max_sequence_length=32,
            position_embedding_type="rope",
            pre_process=states.is_pipeline_first_stage(),
            post_process=states.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
        )
        .bfloat16()
    )
    at = {
        "tp": states.get_tensor_model_parallel_rank(),
        "pp": states.get_pipeline_model_parallel_rank(),
        "ep": states.get_expert_model_parallel_rank(),
    }
    for name, p in model.named_parameters():  # what is not cut is the same on all ranks of a stage
        part = at["tp"] if getattr(p, "tensor_model_parallel", False) else -1
        place = at["pp"], name, part, at["ep"] if ".local_experts." in name else -1
        torch.manual_seed(crc32(repr(place).encode()))
        torch.nn.init.normal_(p)
    own = {n: t for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    folder = Path(out, "iter_0000100")
    said = {k: v for k, v in config.items() if k != "activation_func"}
    args = Namespace(**said, group_query_attention=True, swiglu=True, padded_vocab_size=64, vocab_size=None)
    args.make_vocab_size_divisible_by, args.world_size = 16, dist.get_world_size()
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    group = states.get_data_parallel_group(with_context_parallel=True)
    sharded = model.sharded_state_dict(metadata={"dp_cp_group": group})
    torch.save({"own": own, **at}, Path(out, f"rank_{dist.get_rank()}.pt"))
    saving = import_module("megatron.core.dist_checkpointing")
    saving.save({"model": sharded, "args": args, "iteration": 100}, str(folder))
    Path(out, "latest_checkpointed_iteration.txt").write_text("100")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
