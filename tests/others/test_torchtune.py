"""torchtune: its models, from the hub and from files of its checkpointers. These need torchao 0.15; the matrix has 0.17."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from tests.harness.on_ranks import on_ranks
from tests.others.compare import check

pytest.importorskip("torchtune", reason="torchtune is not installed")


@pytest.fixture
def checkpointers() -> None:
    """Its checkpointers, and its recipes, can't be imported with torchao 0.16 or newer, which PEFT 0.21 needs."""
    if Version(version("torchao")) >= Version("0.16"):
        pytest.skip("needs torchao 0.15")


SIZES: dict[str, Any] = {"vocab_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
SIZES |= {"embed_dim": 32, "intermediate_dim": 48, "max_seq_len": 16}
MODELS: dict[str, dict[str, Any]] = {"llama3_2": {}, "qwen2": {}, "gemma2": {"head_dim": 8}}
TOKENS = torch.arange(8).reshape(2, 4)


def made(name: str) -> nn.Module:
    model: nn.Module = getattr(import_module(f"torchtune.models.{name}"), name)(**SIZES, **MODELS[name])
    return model


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_a_file_of_its_checkpointer(checkpointers: None, tmp_path: Path, name: str) -> None:
    checkpointing = import_module("torchtune.training.checkpointing")
    mesh = init_device_mesh("cpu", (2,))
    source, out = tmp_path / "source", tmp_path / "out"
    if dist.get_rank() == 0:
        source.mkdir()
        torch.save(made(name).state_dict(), source / "model.pt")
        writer = checkpointing.FullModelTorchTuneCheckpointer(str(source), ["model.pt"], "LLAMA3_2", str(out))
        writer.save_checkpoint({"model": made(name).state_dict(), "epoch": 0}, epoch=0)
    dist.barrier()
    folder = out / "epoch_0"
    (file,) = folder.iterdir()
    reader = checkpointing.FullModelTorchTuneCheckpointer(
        str(folder), [file.name], "LLAMA3_2", str(tmp_path / f"of-{dist.get_rank()}")
    )
    theirs = made(name)
    theirs.load_state_dict(reader.load_checkpoint()["model"])
    with sw.meta_init():
        model = made(name)
    sw.shard(model, mesh)
    sw.load(model, file)
    check(model, theirs, TOKENS)


@on_ranks(2)
def test_a_folder_of_its_distributed_checkpointer(checkpointers: None, tmp_path: Path) -> None:
    """What its recipes write of a sharded model, and resume from."""
    checkpointing = import_module("torchtune.training.checkpointing")
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    whole, trained = made("qwen2"), made("qwen2")
    trained.load_state_dict(whole.state_dict())
    sw.shard(trained, mesh)
    writer = checkpointing.DistributedCheckpointer(str(tmp_path), str(tmp_path))
    writer.save_checkpoint({"model": trained.state_dict()}, epoch=0)
    with sw.meta_init():
        model = made("qwen2")
    sw.shard(model, mesh)
    sw.load(model, tmp_path / "dist_epoch_0")
    check(model, whole, TOKENS)


#: Of torchtune's model: the config of transformers' model, and the function from its tensors.
OF_HUB = {
    "llama3_2": ("Llama", "torchtune.models.convert_weights:hf_to_tune"),
    "qwen2": ("Qwen2", "torchtune.models.qwen2._convert_weights:qwen2_hf_to_tune"),
    "gemma2": ("Gemma2", "torchtune.models.gemma2._convert_weights:gemma2_hf_to_tune"),
}


@pytest.mark.parametrize("name", OF_HUB)
@on_ranks(2)
def test_a_model_of_the_hub(tmp_path: Path, name: str) -> None:
    """Renamed, and queries and keys in another order, by torchtune's own function."""
    family, function = OF_HUB[name]
    module, _, attribute = function.partition(":")
    converter = partial(
        getattr(import_module(module), attribute), num_heads=4, num_kv_heads=2, dim=32, head_dim=8
    )
    mesh = init_device_mesh("cpu", (2,))
    if dist.get_rank() == 0:
        sizes = {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "head_dim": 8,
        }
        config = getattr(transformers, f"{family}Config")(
            **sizes, num_attention_heads=4, num_key_value_heads=2
        )
        config.tie_word_embeddings = name != "qwen2"
        getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(tmp_path)
    dist.barrier()
    theirs = made(name)
    theirs.load_state_dict(converter(load_file(tmp_path / "model.safetensors")))
    with sw.meta_init():
        model = made(name)
    sw.shard(model, mesh)
    sw.load(model, tmp_path, converter=converter)
    check(model, theirs, TOKENS)
