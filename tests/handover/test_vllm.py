"""vLLM itself as the engine: after each version it says what it says with the exported weights. ``make engines`` runs it.

vLLM has an environment of its own; ``VLLM_PYTHON`` is its interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

import shardwise as sw
from tests.handover import _fns as fns
from tests.harness.on_ranks import on_ranks

PYTHON = os.environ.get("VLLM_PYTHON", "")

_SIZES: dict[str, Any] = {
    "vocab_size": 300,  # vLLM pads it
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "dtype": "bfloat16",
}
MODELS: dict[str, Any] = {
    "llama": LlamaConfig(**_SIZES),
    "qwen2, with biases": Qwen2Config(**_SIZES),
    "qwen3, tied": Qwen3Config(**_SIZES, tie_word_embeddings=True),
    "gemma3": Gemma3TextConfig(**_SIZES),
    "mixtral": MixtralConfig(**_SIZES, num_local_experts=4),
    "qwen3-moe": Qwen3MoeConfig(**_SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64),
}


@pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON isn't set; make engines")
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "engines"),
    [*((kind, 1) for kind in MODELS), ("llama", 2), ("qwen3-moe", 2)],
)
@on_ranks(2, timeout_s=800)
def test_it_says_what_it_says_with_exported_weights(tmp_path: Path, kind: str, engines: int) -> None:
    """FSDP2 on two ranks, tensor parallelism in vLLM; a whole version, and one that is changed in a few elements."""
    rank, path = dist.get_rank(), tmp_path / "model"
    if rank == 0:
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(MODELS[kind], dtype=torch.bfloat16).save_pretrained(path)
    dist.barrier()
    model = sw.load_pretrained(path, fns.mesh(), dtype=torch.bfloat16)
    fns.change(model, 3)
    with sw.handover.WeightSender(model) as sender:
        engine = started(tmp_path, path, engines, sender.url) if rank == 0 else None
        for version in (1, 2):
            sender.publish(version)
            sw.export_hf(model, tmp_path / f"export-{version}")
            (tmp_path / f"published-{version}").touch()
            until(tmp_path / f"version-{version}.json", engine)
            fns.change(model, version, every=37)
    until(tmp_path / "expected-2.json", engine)
    if engine is not None:
        engine.kill()
    before, *found = (read(tmp_path / f"{name}.json") for name in ("before", "version-1", "version-2"))
    assert found == [read(tmp_path / f"expected-{version}.json") for version in (1, 2)]
    assert found[0] not in (before, found[1])


def started(folder: Path, model: Path, ranks: int, url: str) -> subprocess.Popen[bytes]:
    """An engine. What it prints is in ``engine.log``."""
    script = Path(__file__).with_name("_vllm.py")
    others = ("PYTHON", "MASTER_", "RANK", "WORLD", "LOCAL_")
    variables = {n: v for n, v in os.environ.items() if not n.startswith(others)}
    command = [PYTHON, str(script), str(model), str(ranks), str(folder), url]
    with (folder / "engine.log").open("ab") as log:
        return subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT)


def until(path: Path, engine: subprocess.Popen[bytes] | None = None) -> None:
    end = time.monotonic() + 400
    while not path.exists():
        ended = engine is not None and engine.poll() not in (None, 0)
        if ended or time.monotonic() > end:
            log = path.with_name("engine.log").read_text(errors="replace")[-6000:]
            raise AssertionError(f"{path.name} doesn't come; the engine's output ends so:\n{log}")
        time.sleep(0.1)


def read(path: Path) -> Any:
    return json.loads(path.read_text())
