"""Single files with the names of a model's authors, against diffusers' ``from_single_file``."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.catalog.records import Chunk, StoredTensor
from shardwise.planning.hub_rules import hub_rules
from shardwise.tensors.boxes import whole
from tests.diffusion.models import ZOO
from tests.harness.on_ranks import on_ranks

#: Of each kind, diffusers' names and those of the authors, in the order in which they are replaced.
NAMES = {
    "wan": (
        ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
        ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
        ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
        ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
        ("condition_embedder.time_proj", "time_projection.1"),
        ("attn1", "self_attn"),
        ("attn2", "cross_attn"),
        (".to_out.0.", ".o."),
        (".to_q.", ".q."),
        (".to_k.", ".k."),
        (".to_v.", ".v."),
        ("ffn.net.0.proj", "ffn.0"),
        ("ffn.net.2", "ffn.2"),
        ("norm3", "norm_"),
        ("norm2", "norm3"),
        ("norm_.", "norm2."),
        ("proj_out", "head.head"),
    ),
    "ltx": (
        ("proj_in", "patchify_proj"),
        ("time_embed", "adaln_single"),
        ("norm_q", "q_norm"),
        ("norm_k", "k_norm"),
    ),
}


def original(kind: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    model = ZOO[kind].cls(**ZOO[kind].config)
    found = {}
    for name, tensor in model.state_dict().items():
        for ours, theirs in NAMES[kind]:
            name = name.replace(ours, theirs)
        if kind == "wan":
            name = re.sub(r"(blocks\.\d+)\.scale_shift_table", r"\1.modulation", name)
            name = "head.modulation" if name == "scale_shift_table" else name
        found[f"model.diffusion_model.{name}"] = tensor.contiguous()
    return found


def sd3() -> dict[str, torch.Tensor]:
    """Three blocks, the last one for images alone: projections are in one tensor, and the last layer's halves swapped."""
    torch.manual_seed(3)
    state = ZOO["sd3"].cls(**ZOO["sd3"].config).state_dict()
    found: dict[str, torch.Tensor] = {}

    def take(theirs: str, ours: str) -> None:
        for end in ("weight", "bias"):
            if f"{ours}.{end}" in state:
                found[f"{theirs}.{end}"] = state.pop(f"{ours}.{end}")

    found["pos_embed"] = state.pop("pos_embed.pos_embed")
    take("x_embedder.proj", "pos_embed.proj")
    for theirs, ours in (("t_embedder", "timestep_embedder"), ("y_embedder", "text_embedder")):
        take(f"{theirs}.mlp.0", f"time_text_embed.{ours}.linear_1")
        take(f"{theirs}.mlp.2", f"time_text_embed.{ours}.linear_2")
    take("context_embedder", "context_embedder")
    for k in range(3):
        to, of = f"joint_blocks.{k}", f"transformer_blocks.{k}"
        for end in ("weight", "bias"):
            for part, names in (
                ("x_block.attn", "attn.to_q attn.to_k attn.to_v"),
                ("context_block.attn", "attn.add_q_proj attn.add_k_proj attn.add_v_proj"),
                ("x_block.attn2", "attn2.to_q attn2.to_k attn2.to_v"),
            ):
                if f"{of}.{names.split()[0]}.{end}" in state:
                    parts = [state.pop(f"{of}.{name}.{end}") for name in names.split()]
                    found[f"{to}.{part}.qkv.{end}"] = torch.cat(parts)
        take(f"{to}.x_block.attn.proj", f"{of}.attn.to_out.0")
        take(f"{to}.x_block.attn2.proj", f"{of}.attn2.to_out.0")
        take(f"{to}.context_block.attn.proj", f"{of}.attn.to_add_out")
        for part, theirs in (("norm_q", "ln_q"), ("norm_k", "ln_k")):
            take(f"{to}.x_block.attn.{theirs}", f"{of}.attn.{part}")
            take(f"{to}.x_block.attn2.{theirs}", f"{of}.attn2.{part}")
            take(f"{to}.context_block.attn.{theirs}", f"{of}.attn.norm_added_{part[-1]}")
        take(f"{to}.x_block.adaLN_modulation.1", f"{of}.norm1.linear")
        if k < 2:
            take(f"{to}.context_block.adaLN_modulation.1", f"{of}.norm1_context.linear")
        else:
            for end in ("weight", "bias"):
                found[f"{to}.context_block.adaLN_modulation.1.{end}"] = swapped(
                    state.pop(f"{of}.norm1_context.linear.{end}")
                )
        for theirs, ours in (("x_block", "ff"), ("context_block", "ff_context")):
            take(f"{to}.{theirs}.mlp.fc1", f"{of}.{ours}.net.0.proj")
            take(f"{to}.{theirs}.mlp.fc2", f"{of}.{ours}.net.2")
    take("final_layer.linear", "proj_out")
    for end in ("weight", "bias"):
        found[f"final_layer.adaLN_modulation.1.{end}"] = swapped(state.pop(f"norm_out.linear.{end}"))
    assert not state
    return {f"model.diffusion_model.{name}": tensor.contiguous() for name, tensor in found.items()}


def swapped(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat(tensor.chunk(2)[::-1])


@on_ranks(2)
@pytest.mark.parametrize("kind", ["wan", "ltx", "sd3"])
def test_as_from_single_file(kind: str, tmp_path: Path) -> None:
    cls: Any = ZOO[kind].cls
    if dist.get_rank() == 0:
        cls(**ZOO[kind].config).save_config(tmp_path / "config")
        save_file(sd3() if kind == "sd3" else original(kind), tmp_path / "original.safetensors")
    loads_alike(cls, tmp_path, torch.float32)


def loads_alike(cls: Any, folder: Path, dtype: torch.dtype) -> None:
    file, config = folder / "original.safetensors", folder / "config"
    dist.barrier()
    theirs = cls.from_single_file(str(file), config=str(config), torch_dtype=dtype)
    ours = sw.load_pretrained(file, init_device_mesh("cpu", (2,)), config=config, dtype=dtype)
    for (name, found), (other, expected) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert name == other
        assert torch.equal(found.full_tensor(), expected), name


def flux(width: int) -> dict[str, tuple[int, ...]]:
    """Shapes in Black Forest Labs' file of one double and one single block."""
    found: dict[str, tuple[int, ...]] = {}

    def linear(name: str, rows: int, columns: int) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = (rows, columns), (rows,)

    for name, columns in (("time_in", 256), ("vector_in", 768), ("guidance_in", 256)):
        linear(f"{name}.in_layer", width, columns)
        linear(f"{name}.out_layer", width, width)
    linear("txt_in", width, 4096)
    linear("img_in", width, 64)
    for side in ("img", "txt"):
        at = f"double_blocks.0.{side}"
        linear(f"{at}_mod.lin", 6 * width, width)
        linear(f"{at}_attn.qkv", 3 * width, width)
        linear(f"{at}_attn.proj", width, width)
        linear(f"{at}_mlp.0", 4 * width, width)
        linear(f"{at}_mlp.2", width, 4 * width)
        found[f"{at}_attn.norm.query_norm.scale"] = found[f"{at}_attn.norm.key_norm.scale"] = (128,)
    linear("single_blocks.0.linear1", 7 * width, width)
    linear("single_blocks.0.linear2", width, 5 * width)
    linear("single_blocks.0.modulation.lin", 3 * width, width)
    for one in ("query", "key"):
        found[f"single_blocks.0.norm.{one}_norm.scale"] = (128,)
    linear("final_layer.linear", 64, width)
    linear("final_layer.adaLN_modulation.1", 2 * width, width)
    return found


FLUX = {"num_layers": 1, "num_single_layers": 1, "guidance_embeds": True}


@on_ranks(2)
@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:.*torch_dtype:FutureWarning")
def test_flux_in_its_full_width_as_from_single_file(tmp_path: Path) -> None:
    """diffusers converts Flux only in its full width: 1 GiB. ComfyUI's files have a prefix."""
    cls = ZOO["flux"].cls
    if dist.get_rank() == 0:
        with sw.meta_init():
            cls(**FLUX).save_config(tmp_path / "config")
        drawn = torch.Generator().manual_seed(7)
        tensors = {
            f"model.diffusion_model.{name}": torch.empty(shape, dtype=torch.bfloat16).uniform_(
                -1, 1, generator=drawn
            )
            for name, shape in flux(3072).items()
        }
        save_file(tensors, tmp_path / "original.safetensors")
        del tensors
    loads_alike(cls, tmp_path, torch.bfloat16)


def test_every_tensor_of_flux_is_made_from_stored_ones() -> None:
    """diffusers converts Flux only in its full width, so no weights are read here."""
    shapes = flux(3072)
    stored = {n: StoredTensor(n, "BF16", s, (Chunk(whole(s), "file", 0),)) for n, s in shapes.items()}
    with sw.meta_init():
        model = ZOO["flux"].cls(**FLUX)
    made = {one.target: one for one in hub_rules(model).resolve(stored)}
    assert {n: tuple(t.shape) for n, t in model.state_dict().items()} == {n: m.shape for n, m in made.items()}
    assert {source for one in made.values() for source in one.sources} == shapes.keys()
    key = made["transformer_blocks.0.attn.to_k.weight"]
    assert [(tile.source, tile.source_start) for tile in key.tiles] == [
        ("double_blocks.0.img_attn.qkv.weight", (3072, 0))
    ]
    assert sum(tile.numel for one in made.values() for tile in one.tiles) == sum(
        map(math.prod, shapes.values())
    )
