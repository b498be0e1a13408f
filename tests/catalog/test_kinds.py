"""Other programs' files: every reader of a path refuses them by their name, with the line to write.

Their directories have the public layout of each program; none of these programs is needed to recognize them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import shardwise as sw
from shardwise.catalog.open import open_catalog
from shardwise.catalog.records import KINDS, kind_in
from shardwise.cli import main
from shardwise.doctor.examine import collect, findings_of
from shardwise.errors import FormatError, ShardwiseError, SourceError
from tests.catalog import _dcp_fns
from tests.harness.command import runner
from tests.harness.pool import RankPool

#: Public layouts: words of the name → directories, each with its files. A name that ends in a slash is a folder.
DIRECTORIES: dict[str, list[list[str]]] = {
    "NeMo": [["context/", "weights/"]],
    "Megatron-LM checkpoint (a file for each rank)": [["mp_rank_00/"], ["mp_rank_00_001/"]],
    "a verl run": [["latest_checkpointed_iteration.txt", "global_step_100/", "global_step_200/"]],
    "Accelerate checkpoint of FSDP1's flat parameters": [
        [
            "pytorch_model_fsdp_rank0.bin",
            "pytorch_model_fsdp_rank1.bin",
            "optimizer_0_rank0.bin",
            "scheduler.bin",
        ],
    ],
    "a diffusers pipeline": [
        ["model_index.json", "transformer/", "vae/"],
        ["model_index.json", "flux1-dev.safetensors"],
    ],
    "Orbax": [["_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt"], ["ocdbt.process_0/", "d/"]],
    "GGUF": [["model-Q4_K_M.gguf", "config.json"]],
    "Flax": [["flax_model.msgpack", "config.json"]],
    "TensorFlow": [
        ["tf_model.h5", "config.json"],
        ["model.ckpt.index", "model.ckpt.data-00000-of-00001"],
        ["saved_model.pb"],
    ],
    "ONNX": [["model.onnx"]],
}
FILES: dict[str, list[tuple[str, bytes]]] = {
    "NeMo": [("model.nemo", b"x" * 99)],
    "Megatron-LM checkpoint (a file for each rank)": [("model_optim_rng.pt", b"PK\x03\x04" + b"x" * 99)],
    "what the ranks of a Megatron-LM checkpoint share": [("common.pt", b"PK\x03\x04" + b"x" * 99)],
    "DeepSpeed checkpoint (ZeRO)": [
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", b"PK\x03\x04"),
        ("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", b"PK\x03\x04"),
    ],
    "Accelerate checkpoint of FSDP1's flat parameters": [("pytorch_model_fsdp_rank0.bin", b"PK\x03\x04")],
    "GGUF": [("model.gguf", b"GGUF\x03" + b"\0" * 99), ("renamed.safetensors", b"GGUF\x03" + b"\0" * 99)],
    "Flax": [("flax_model.msgpack", b"\x81" + b"\0" * 99)],
    "TensorFlow": [("tf_model.h5", b"\x89HDF\r\n\x1a\n" + b"\0" * 99)],
    "ONNX": [("model.onnx", b"\x08\x07" + b"\0" * 99)],
    "a single file of a DCP checkpoint (torch.distributed.checkpoint)": [
        ("__0_0.distcp", b"PK\x03\x04"),
        (".metadata", b"\x80\x04"),
    ],
}


#: Content of a file that is named like weights in a folder, and words of the refusal.
CONTENTS = {
    "GGUF": b"GGUF\x03" + b"\0" * 99,
    "TensorFlow": b"\x89HDF\r\n\x1a\n" + b"\0" * 99,
    "is a torch.save file, not safetensors: rename it": b"PK\x03\x04" + b"x" * 99,
    "git lfs pull": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
    "a web page": b"<!DOCTYPE html>\n<html>" + b" " * 99,
}


#: A file of torch.save is read as such, if it's given itself.
NAMED_LIKE = [
    (words, name, folder)
    for words in CONTENTS
    for name in ("model.safetensors", "diffusion_pytorch_model.safetensors", "pytorch_model.bin")
    for folder in (True, False)
    if "torch.save" not in words or (folder and name.endswith(".safetensors"))
]


@pytest.mark.parametrize(("words", "name", "folder"), NAMED_LIKE)
def test_a_file_that_is_not_what_its_name_says(tmp_path: Path, words: str, name: str, folder: bool) -> None:
    file = tmp_path / name
    file.write_bytes(CONTENTS[words])
    for call in (CALLS["catalog"], CALLS["load"], CALLS["diff"], CALLS["convert"]):
        with pytest.raises(SourceError) as raised:
            call(tmp_path if folder else file, tmp_path / "out")
        assert words in str(raised.value)
        assert str(file) in str(raised.value)
        assert "header" not in str(raised.value)


def make(root: Path, names: list[str]) -> Path:
    root.mkdir()
    for name in names:
        if name.endswith("/"):
            (root / name).mkdir()
        elif name.endswith(".safetensors"):
            save_file({"weight": torch.ones(2)}, root / name)
        else:
            (root / name).write_text("{}")
    return root


CALLS: dict[str, Callable[[Any, Any], object]] = {
    "catalog": lambda path, out: open_catalog(path),
    "load": lambda path, out: sw.load(torch.nn.Linear(2, 3), path),
    "load_pretrained": lambda path, out: sw.load_pretrained(path),
    "subfolder": lambda path, out: sw.load_pretrained(Path(path).parent, subfolder=Path(path).name),
    "plan": lambda path, out: sw.plan(path, ranks=2),
    "verify": lambda path, out: sw.verify(path),
    "diff": lambda path, out: sw.diff(path, path),
    "convert": lambda path, out: sw.convert(path, out),
    "export": lambda path, out: sw.export_hf(path, out),
    "restore": lambda path, out: sw.restore(sw.TrainState(model=torch.nn.Linear(2, 3)), path),
}
COMMANDS: dict[str, Callable[[Path, Path], list[object]]] = {
    "inspect": lambda path, out: [path],
    "plan": lambda path, out: [path, "--ranks", 2],
    "verify": lambda path, out: [path],
    "diff": lambda path, out: [path, path],
    "convert": lambda path, out: [path, out, "--to", "checkpoint"],
    "export": lambda path, out: [path, out],
}
GIVEN = [(name, k) for name, kinds in DIRECTORIES.items() for k in range(len(kinds))] + [
    (name, -k - 1) for name, files in FILES.items() for k in range(len(files))
]


@pytest.mark.parametrize(("name", "which"), GIVEN)
def test_every_reader_refuses_it_by_its_name(tmp_path: Path, name: str, which: int) -> None:
    if which >= 0:
        given = make(tmp_path / "given", DIRECTORIES[name][which])
    else:
        file, content = FILES[name][-which - 1]
        given = tmp_path / "given" / file
        given.parent.mkdir()
        given.write_bytes(content)
    out = tmp_path / "out"
    said = set()
    for call in CALLS.values():
        with pytest.raises(SourceError) as raised:
            call(given, out)
        text = str(raised.value).partition("\n")[0]
        assert name in text
        assert str(given) in text
        said.add(text)
    if name != "a diffusers pipeline":  # which load_pipeline is for
        with pytest.raises(SourceError) as raised:
            sw.load_pipeline(given, shard=("transformer",))
        said.add(str(raised.value).partition("\n")[0])
    assert len(said) == 1, "the same sentence everywhere"
    for command, arguments in COMMANDS.items():
        result = runner().invoke(main, [command, *map(str, arguments(given, out))], prog_name="shardwise")
        assert result.exit_code == 1, (command, result.output)
        assert name in result.output.replace("\n", " "), command
    (found,) = [f for f in findings_of(collect([given])) if f.rule == "path.foreign"]
    assert name in found.bites
    assert found.do in said.pop()
    assert not out.exists()


def test_the_layouts_are_those_of_the_table() -> None:
    refused = [kind for kind in KINDS if not kind.works]
    for kinds, given in (
        ([k for k in refused if k.marks], DIRECTORIES),
        ([k for k in refused if k.file], FILES),
    ):
        assert len(kinds) == len(given)
        assert all(sum(f" {name}" in f" {k.name}" for name in given) >= 1 for k in kinds)


def test_weights_that_are_stored_in_several_forms_are_read(tmp_path: Path) -> None:
    """A hub repository may have them for Flax, TensorFlow, ONNX and llama.cpp, too; a Trainer's folder DeepSpeed's optimizer."""
    others = [
        "flax_model.msgpack",
        "tf_model.h5",
        "onnx/",
        "model.onnx",
        "model.gguf",
        "global_step3/",
        "zero_to_fp32.py",
    ]
    root = make(tmp_path / "model", ["model.safetensors", *others])
    assert list(open_catalog(root).tensors) == ["weight"]
    (root / "trainer_state.json").write_text('{"global_step": 3}')
    report = sw.convert(root, tmp_path / "out")
    assert {line.partition(":")[0] for line in report.skipped} >= {n.rstrip("/") for n in others}
    model = torch.nn.ParameterDict({"weight": torch.zeros(2)})
    assert sw.restore(sw.TrainState(model=model), root).step == 3
    with pytest.raises(ShardwiseError, match="global_step3 of DeepSpeed can't be"):
        sw.restore(sw.TrainState(model=model, optimizer=torch.optim.SGD(model.parameters())), root)


@pytest.mark.parametrize(
    "other",
    [
        "latest_checkpointed_iteration.txt",
        "iter_0000100/",
        "mp_rank_00/",
        "global_step_100/",
        "pytorch_model_fsdp_rank0.bin",
        "model_index.json",
        "zero_to_fp32.py",
        "_METADATA",
    ],
)
def test_weights_are_read_whatever_is_next_to_them(tmp_path: Path, other: str) -> None:
    names = [other, "latest_checkpointed_iteration.txt"] if other.startswith("global") else [other]
    root = make(tmp_path / "model", ["model.safetensors", *names])
    assert list(open_catalog(root).tensors) == ["weight"]
    assert sw.convert(root, tmp_path / "out").tensors == 1
    assert runner().invoke(main, ["inspect", str(root)], prog_name="shardwise").exit_code == 0
    for weights in ("pytorch_model.bin", "adapter_model.bin", "adapter_model.safetensors"):
        kind = kind_in([weights, "adapter_config.json", *(name.rstrip("/") for name in names)])
        assert kind is None or kind.works, weights


def test_an_adapter_next_to_the_script_of_deepspeed(tmp_path: Path) -> None:
    root = make(tmp_path / "adapter", ["zero_to_fp32.py", "global_step3/", "adapter_config.json"])
    torch.save({"base_model.model.lora_A.weight": torch.ones(2, 2)}, root / "adapter_model.bin")
    with pytest.raises(SourceError, match="give the path of the one to load"):
        open_catalog(root)
    assert len(open_catalog(root / "adapter_model.bin").tensors) == 1
    assert not [f for f in findings_of(collect([root])) if f.rule == "path.foreign"]


def test_a_folder_above_is_told_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "global_step_3").mkdir()
    make(tmp_path / "global_step_3/actor", ["model_world_size_1_rank_0.pt"])
    for call in CALLS.values():
        with pytest.raises(SourceError, match="its folder actor is a checkpoint from verl"):
            call(tmp_path / "global_step_3", tmp_path / "out")


def test_urls_too() -> None:
    """The store's listing says it, or an object's name."""
    files = fsspec.filesystem("memory")
    for name in ("orbax/_METADATA", "one/model.gguf"):
        files.pipe(f"/kinds/{name}", b"GGUF")
    for url, name in (("memory://kinds/orbax", "Orbax"), ("memory://kinds/one/model.gguf", "GGUF")):
        for call in ("catalog", "load", "verify", "diff", "convert", "export", "restore"):
            with pytest.raises(SourceError, match=f"{url}: is an? .*{name}.*which can't be read"):
                CALLS[call](url, "unwritten")


def test_what_is_recognized_and_not_ours_can_not_be_verified(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    for call in ("verify", "restore"):
        with pytest.raises(SourceError, match=r"is a directory of weights.*shardwise convert"):
            CALLS[call](tmp_path, tmp_path / "out")
    (tmp_path / "trainer_state.json").write_text("{}")
    with pytest.raises(SourceError, match="is an HF Trainer checkpoint, not a shardwise checkpoint"):
        sw.verify(tmp_path)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"architecture": "resnet50", "pretrained_cfg": {}},
            r"timm model \(resnet50\).*timm.create_model\('resnet50'\)",
        ),
    ],
)
def test_a_config_of_another_library(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    """A model of timm: its weights are ordinary, its class is not known here."""
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    for call in ("load_pretrained", "plan"):
        with pytest.raises(SourceError, match=said):
            CALLS[call](tmp_path, tmp_path / "out")
    model = torch.nn.Linear(2, 2, bias=False)
    sw.load(model, tmp_path)
    assert model.weight.eq(1).all()


def test_a_checkpoint_file_of_lightning_or_stable_diffusion(tmp_path: Path) -> None:
    """``.ckpt`` is a file of torch.save; so is one with no known ending."""
    model = torch.nn.Linear(2, 3)
    state = {
        "state_dict": model.state_dict(),
        "optimizer_states": [{}],
        "hyper_parameters": argparse.Namespace(a=1),
    }
    for name in ("last.ckpt", "last.model"):
        torch.save(state, tmp_path / name)
        again = torch.nn.Linear(2, 3)
        sw.load(again, tmp_path / name)
        assert torch.equal(again.weight, model.weight)
    report = sw.convert(tmp_path / "last.ckpt", tmp_path / "out")
    assert any(line.startswith("'optimizer_states': ") for line in report.skipped)
    with pytest.raises(SourceError, match=r"is a torch\.save file, without training state"):
        sw.restore(sw.TrainState(model=model), tmp_path / "last.ckpt")


def test_objects_next_to_plain_weights(tmp_path: Path) -> None:
    """A namespace of arguments, a scalar of numpy, a class, a method: named, and neither built nor run."""
    model = torch.nn.Linear(2, 3)
    beside = {
        "args": argparse.Namespace(rate=0.1, path=Path("x")),
        "best": np.float64(0.5),
        "kind": torch.nn.Linear,
        "made_by": Path.home,
        "epoch": 3,
    }
    for content in ({"model": model.state_dict(), **beside}, {**model.state_dict(), **beside}):
        torch.save(content, tmp_path / "x.pt")
        again = torch.nn.Linear(2, 3)
        sw.load(again, tmp_path / "x.pt")
        assert torch.equal(again.weight, model.weight)
        catalog = open_catalog(tmp_path / "x.pt")
        assert [entry.partition(" ")[0] for entry in catalog.ignored_entries] == [
            repr(name) for name in beside
        ]
        assert "'args' (argparse.Namespace)" in catalog.ignored_entries
        result = runner().invoke(main, ["inspect", str(tmp_path / "x.pt")], prog_name="shardwise")
        assert "argparse.Namespace" in result.output


def test_tensors_of_other_classes_are_named(ranks: RankPool, tmp_path: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    parts = torch.nn.Linear(8, 8, bias=False)
    quantize_(parts, Int8WeightOnlyConfig(version=2))
    torch.save(parts.state_dict(), tmp_path / "x.pt")
    with pytest.raises(FormatError, match=r"'weight' is quantized by torchao \(Int8Tensor\)"):
        open_catalog(tmp_path / "x.pt")
    save_file({"0._weight_qdata": torch.ones(2, 2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(SourceError, match="is quantized by torchao"):
        open_catalog(tmp_path / "model.safetensors")
    torch.save({"weight": torch.ones(2, 2).to_sparse()}, tmp_path / "x.pt")
    with pytest.raises(FormatError, match=r"'weight' is a tensor of torch\._utils\._rebuild_sparse_tensor"):
        open_catalog(tmp_path / "x.pt")
    save_file({"_flat_param": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(SourceError, match="FSDP1's flat parameters"):
        open_catalog(tmp_path / "model.safetensors")
    ranks.run_ranks(2, _dcp_fns.saves_its_own, str(tmp_path))
    for name in ("of_rank_0.pt", "of_rank_1.pt"):
        with pytest.raises(FormatError, match=r"is one rank's part of a sharded model \(DTensor\)"):
            open_catalog(tmp_path / name)


def test_names_of_ours_are_no_mark() -> None:
    for names in (["config.json"], ["model", "state.json"], ["README.md", "data"], []):
        assert kind_in(names) is None
