"""The matrix products that a plan expects oneDNN to compile, against oneDNN's own log of a real step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import shardwise as sw
from shardwise.fit.groups import Product, workspaces_of
from shardwise.fit.network import step_of
from tests.fit import _products_fns
from tests.harness.launch import Launch

BATCH, LENGTH = 2, 48
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
}
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 2, "vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0}


def compiled(model_class: Any, config: Any, tmp_path: Path) -> int:
    """Products in the log of two steps, without those inside attention: these read heads, with strides of their own."""
    log = tmp_path / "log"
    with Launch(1, _products_fns.log_compiled, model_class, config, BATCH, LENGTH, str(log)) as launch:
        assert launch.wait(60) == [0]
    lines = [
        line for line in log.read_text().splitlines() if "create:cache_miss" in line and ",matmul," in line
    ]
    return sum(re.search(r":blocked:[ab]+:\d", line) is None for line in lines)


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="torch uses oneDNN for bf16 with AVX512 only"
)
@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**SIZES)),
        (transformers.GPT2LMHeadModel, transformers.GPT2Config(**GPT2)),
    ],
    ids=["qwen3", "gpt2"],
)
def test_dense_products_are_those_that_onednn_compiles(model_class: Any, config: Any, tmp_path: Path) -> None:
    with sw.meta_init():
        model = model_class(config).to(torch.bfloat16)
    training = sw.TrainingSpec(batch_size=BATCH, sequence_length=LENGTH, device="cpu")
    products = step_of(model, sw.ShardPolicy(), 1, training).products
    assert products is not None
    assert products.after_one_step() == products.after_many_steps() == products.dense
    assert compiled(model_class, config, tmp_path) == products.dense


def test_mkl_keeps_a_workspace_for_each_product_that_needs_more() -> None:
    def product(rows: int, inner: int, columns: int) -> Product:
        return Product(None, (), rows, inner, columns, 4)

    # Measured with torch 2.13 on an Intel Xeon with AVX512: 1.70, 3.58, 10.14 and 15.20 MiB, each in a process of its own.
    for shape, measured in (
        ((512, 768, 768), 1.70),
        ((512, 768, 2048), 3.58),
        ((512, 512, 16384), 10.14),
        ((512, 1536, 32768), 15.20),
    ):
        assert workspaces_of([product(*shape)]) / 2**20 == pytest.approx(measured, abs=0.03)
    assert workspaces_of([product(256, 768, 16384)]) == 0  # 0.46 MiB, measured
    small, large = product(512, 768, 768), product(512, 768, 2048)
    assert workspaces_of([small, large, small]) == workspaces_of([small]) + workspaces_of([large])
    assert workspaces_of([large, small]) == workspaces_of([large])
