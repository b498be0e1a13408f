"""sentence-transformers: every module of a folder, sharded, and exported whole."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.errors import PlanError
from tests.harness.models import minilm_directory
from tests.harness.on_ranks import on_ranks
from tests.loading._load_fns import assert_same_whole

library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

TEXTS = ["two ranks", "a much longer text, which is padded to the length of nothing else", "cat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real MiniLM with its pooling, then a dense head, with a residual, and a normalization."""
    modules = pytest.importorskip("sentence_transformers.base.modules")
    torch.manual_seed(0)
    model = library.SentenceTransformer(str(minilm_directory()), device="cpu", prompts={"query": "find: "})
    model.append(modules.Dense(384, 40, use_residual=True))
    model.append(modules.Normalize())
    root = tmp_path_factory.mktemp("sentences")
    model.save(str(root / "whole"))
    return root / "whole"


def embedded(model: torch.nn.Module) -> torch.Tensor:
    """As ``encode`` embeds, outside of inference mode, in which FSDP2 can't begin if it is to train later."""
    with torch.no_grad():
        return model(model.preprocess(TEXTS))["sentence_embedding"]


@on_ranks(2)
def test_loaded_trained_and_exported(folder: Path, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    theirs = library.SentenceTransformer(str(folder), device="cpu")
    model, report = sw.load_pretrained(
        folder, mesh, auto_class=library.SentenceTransformer, return_report=True
    )
    assert type(model) is library.SentenceTransformer
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert report.ignored_files == ()
    assert_same_whole(model, theirs)
    assert (model.prompts, model.training) == (theirs.prompts, False)
    assert torch.equal(embedded(model), embedded(theirs))
    assert torch.equal(
        model.encode(TEXTS, convert_to_tensor=True), theirs.encode(TEXTS, convert_to_tensor=True)
    )


@on_ranks(2)
def test_trained_and_exported(folder: Path, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = library.SentenceTransformer(str(folder), device="cpu")
    model = sw.load_pretrained(folder, mesh, auto_class=library.SentenceTransformer)
    for one in (model, whole):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.5)
        loss = one(one.preprocess(TEXTS))["sentence_embedding"].square().sum(0).max()
        loss.backward()
        gradients = {n: p.grad for n, p in one.named_parameters()}
        assert gradients["3.linear.weight"] is not None
        optimizer.step()
        optimizer.zero_grad()
    # both ranks had the same batch: the mean of their gradients is that of one process
    for (name, p), (_, q) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, msg=name)
    out = tmp_path / "out"
    exported = sw.export_hf(model, out)
    assert exported.files == ("model.safetensors", "3_Dense/model.safetensors")
    again = library.SentenceTransformer(str(out), device="cpu")
    expected = model.encode(TEXTS, convert_to_tensor=True)
    assert torch.equal(expected, again.encode(TEXTS, convert_to_tensor=True))
    assert not torch.equal(
        expected, library.SentenceTransformer(str(folder)).encode(TEXTS, convert_to_tensor=True)
    )
    assert (again.prompts, again.max_seq_length) == (whole.prompts, whole.max_seq_length)
    if dist.get_rank() == 0:
        whole.save(str(tmp_path / "theirs"))
        names = [{str(p.relative_to(root)) for p in root.rglob("*")} for root in (out, tmp_path / "theirs")]
        assert names[0] == names[1]
        for name in ("modules.json", "3_Dense/config.json", "sentence_bert_config.json"):
            assert json.loads((out / name).read_text()) == json.loads(
                (tmp_path / "theirs" / name).read_text()
            )


@on_ranks(2)
def test_resumed(folder: Path, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model, other = (
        sw.load_pretrained(folder, mesh, auto_class=library.SentenceTransformer) for _ in range(2)
    )
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    sw.save(sw.TrainState(model), tmp_path / "step")
    sw.restore(sw.TrainState(other), tmp_path / "step")
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local())


def test_building_reads_no_weights(folder: Path) -> None:
    """Only the plan's own ranges are read: of transformers' weights nothing, of the others' at most their file."""
    from shardwise.internals.sentence_transformers import on_meta

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = on_meta(library.SentenceTransformer, str(folder), "auto", trust_remote_code=False)
    assert all(p.is_meta for p in model.parameters())


@on_ranks(2)
def test_a_head_that_is_lost(folder: Path, tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import save_file

    broken = tmp_path / "broken"
    if dist.get_rank() == 0:
        shutil.copytree(folder, broken)
    dist.barrier()
    mesh = init_device_mesh("cpu", (2,))
    file = broken / "3_Dense" / "model.safetensors"
    if dist.get_rank() == 0:
        save_file({"linear.weight": torch.zeros(40, 384)}, file)
    dist.barrier()
    with pytest.raises((PlanError, RuntimeError)):
        sw.load_pretrained(broken, mesh, auto_class=library.SentenceTransformer)
