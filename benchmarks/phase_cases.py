"""The configurations of ``benchmarks/phases.py``, and their models: real transformers classes with random weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import peft
import torch
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy

import shardwise as sw

__all__ = ["CASES", "SHORT", "Case", "write", "write_tiny"]


@dataclass(frozen=True)
class Case:
    """One configuration of a run."""

    name: str
    model: str = "dense"
    ranks: int = 2
    replicas: int = 1
    tp: int = 1
    ep: int = 1
    dtype: str = "float32"
    batch: int = 2
    tokens: int = 256
    policy: dict[str, Any] = field(default_factory=dict)
    checkpointing: bool = False
    lora: bool = False
    optimizer: str = "adamw"

    @property
    def is_parallel(self) -> bool:
        return self.tp > 1 or self.ep > 1

    @property
    def compute(self) -> str:
        """The dtype of the forward."""
        precision = self.policy.get("mixed")
        return precision[0] if precision else self.dtype

    @property
    def steps_before_steady(self) -> int:
        """Steps until a step takes no more than the one before it: oneDNN compiles products of experts in bf16 for a while."""
        return 10 if self.model == "moe" and self.compute == "bfloat16" else 0

    def training(self) -> sw.TrainingSpec:
        return sw.TrainingSpec(
            batch_size=self.batch,
            sequence_length=self.tokens,
            checkpointing=self.checkpointing,
            device="cpu",
            optimizer=self.optimizer,  # type: ignore[arg-type]
        )

    def sharding(self) -> sw.ShardPolicy:
        given = dict(self.policy)
        if precision := given.pop("mixed", None):
            given["mixed_precision"] = MixedPrecisionPolicy(
                param_dtype=getattr(torch, precision[0]), reduce_dtype=getattr(torch, precision[1])
            )
        return sw.ShardPolicy(**given)

    def adapter(self) -> Any:
        if not self.lora:
            return None
        return peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")


_MIXED = {"mixed": ("bfloat16", "float32")}
CASES = (
    Case("dense"),
    Case("dense, bf16", dtype="bfloat16"),
    Case("dense, fp32 masters", policy=_MIXED),
    Case("dense, checkpointing", checkpointing=True, batch=4),
    Case("dense, long", batch=4, tokens=512),
    Case("dense, 3 ranks", ranks=3),
    Case("dense, 4 ranks", ranks=4),
    Case("dense, HSDP 2 x 2", ranks=4, replicas=2),
    Case("dense, HSDP 2 x 2, fp32 masters", ranks=4, replicas=2, policy=_MIXED),
    Case("dense, HSDP 2 x 2, bf16 reduced in fp32", dtype="bfloat16", ranks=4, replicas=2, policy=_MIXED),
    Case("dense, HSDP 2 x 2, checkpointing", ranks=4, replicas=2, checkpointing=True),
    Case("dense, offload", policy={"cpu_offload": True}),
    Case("dense, offload, fp32 masters", policy={"cpu_offload": True, **_MIXED}),
    Case("dense, offload, checkpointing", policy={"cpu_offload": True}, checkpointing=True),
    Case("dense, kept gathered", policy={"reshard_after_forward": False}),
    Case("dense, LoRA", lora=True),
    Case("dense, LoRA, bf16", dtype="bfloat16", lora=True),
    Case("dense, LoRA, checkpointing", lora=True, checkpointing=True, batch=4),
    Case("dense, SGD", optimizer="sgd"),
    Case("dense, momentum", optimizer="momentum"),
    Case("tied", model="tied"),
    Case("tied, checkpointing", model="tied", checkpointing=True),
    Case("tied, bf16, 3 ranks", model="tied", dtype="bfloat16", ranks=3),
    Case("tied, fp32 masters", model="tied", policy=_MIXED),
    Case("tied, HSDP 2 x 2", model="tied", ranks=4, replicas=2),
    Case("tied, LoRA", model="tied", lora=True),
    Case("moe", model="moe"),
    Case("moe, bf16", model="moe", dtype="bfloat16"),
    Case("moe, fp32 masters", model="moe", policy=_MIXED),
    Case("moe, checkpointing", model="moe", checkpointing=True),
    Case("moe, HSDP 2 x 2", model="moe", ranks=4, replicas=2),
    Case("moe, 3 ranks", model="moe", ranks=3),
    Case("moe, offload", model="moe", policy={"cpu_offload": True}),
    Case("moe, LoRA", model="moe", lora=True),
    Case("moe, LoRA, checkpointing", model="moe", lora=True, checkpointing=True),
    Case("vlm", model="vlm"),
    Case("vlm, bf16", model="vlm", dtype="bfloat16"),
    Case("vlm, checkpointing", model="vlm", checkpointing=True),
    Case("vlm, fp32 masters", model="vlm", policy=_MIXED),
    Case("vlm, HSDP 2 x 2", model="vlm", ranks=4, replicas=2),
    Case("vlm, 3 ranks", model="vlm", ranks=3),
    Case("vlm, LoRA", model="vlm", lora=True),
    Case("encoder", model="encoder"),
    Case("encoder, 3 ranks", model="encoder", ranks=3),
    Case("gpt2", model="gpt2"),
    Case("gpt2, bf16", model="gpt2", dtype="bfloat16"),
    Case("dense, TP 2", tp=2),
    Case("dense, FSDP 2 x TP 2", ranks=4, tp=2),
    Case("dense, FSDP 2 x TP 2, fp32 masters", ranks=4, tp=2, policy=_MIXED),
    Case("dense, FSDP 2 x TP 2, checkpointing", ranks=4, tp=2, checkpointing=True),
    Case("tied, TP 2", model="tied", tp=2),
    Case("moe, EP 2", model="moe", ep=2),
    Case("moe, FSDP 2 x EP 2", model="moe", ranks=4, ep=2),
)
#: Of the short form.
SHORT = ("dense", "moe, checkpointing")


# ----------------------------------------------------------------------------------------------------
# Models


def write(path: str, model: str, *, is_short: bool) -> None:
    """Make a model of one of the kinds, with random weights: 50 to 240 MiB in fp32, or tiny."""
    torch.manual_seed(0)
    _MODELS[model](1 if is_short else 4).save_pretrained(path)


def write_tiny(path: str, *, with_experts: bool) -> None:
    """Make a model that takes next to nothing."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 1024,
    }
    if with_experts:
        sizes |= {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
        config = transformers.Qwen3MoeConfig(**sizes)
        transformers.Qwen3MoeForCausalLM(config).save_pretrained(path)
    else:
        transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes)).save_pretrained(path)


def _dense(scale: int, tie: bool = False) -> Any:
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            hidden_size=192 * scale,
            intermediate_size=512 * scale,
            num_hidden_layers=6,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=32 * scale,
            vocab_size=4096 * scale,
            tie_word_embeddings=tie,
        )
    )


def _moe(scale: int) -> Any:
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            hidden_size=128 * scale,
            intermediate_size=256 * scale,
            moe_intermediate_size=64 * scale,
            num_experts=16,
            num_experts_per_tok=4,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32 * scale,
            vocab_size=2048 * scale,
        )
    )


def _vlm(scale: int) -> Any:
    vision = {
        "depth": 4,
        "hidden_size": 64 * scale,
        "intermediate_size": 128 * scale,
        "num_heads": 4,
        "out_hidden_size": 160 * scale,
        "fullatt_block_indexes": [3],
    }
    text = {
        "hidden_size": 160 * scale,
        "intermediate_size": 448 * scale,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 4096 * scale,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [5 * scale] * 4},
    }
    text["rope_parameters"]["mrope_section"] = [4 * scale, 8 * scale, 8 * scale]  # type: ignore[index]
    return transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    )


def _encoder(scale: int) -> Any:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            hidden_size=128 * scale,
            intermediate_size=512 * scale,
            num_hidden_layers=6,
            num_attention_heads=4,
            vocab_size=4096 * scale,
        )
    )


def _gpt2(scale: int) -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=128 * scale, n_layer=6, n_head=4, vocab_size=4096 * scale)
    )


_MODELS: dict[str, Any] = {
    "dense": _dense,
    "tied": lambda scale: _dense(scale, tie=True),
    "moe": _moe,
    "vlm": _vlm,
    "encoder": _encoder,
    "gpt2": _gpt2,
}
