"""export_hf: what from_pretrained reads back is bitwise what was trained, under the source's own names."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import shardwise as sw
from shardwise.demo.course import default_model
from shardwise.errors import CheckpointError, FormatError, IntegrityError, SourceError
from shardwise.export.write import lay_out
from shardwise.publish.places import discard, published_steps
from shardwise.publish.write import FileFiller
from shardwise.tensors.boxes import TensorSpec
from tests.export import _export_fns as fns
from tests.harness.pool import RankPool
from tests.harness.process import worker_env
from tests.harness.tiers import nightly_rows

AUTO: dict[str, Any] = {
    "llama-tied": transformers.LlamaForCausalLM,
    "llama-bf16": transformers.LlamaForCausalLM,
    "gpt2": transformers.GPT2LMHeadModel,
    "bert": transformers.BertForMaskedLM,
}


def _check_readable(directory: Path, source: Path, kind: str, values: dict[str, torch.Tensor]) -> None:
    stored, original = fns.stored_tensors(directory), fns.stored_tensors(source)
    assert stored.keys() == original.keys(), "hub names, ties left out as in the source"
    for name, tensor in stored.items():
        assert (tensor.dtype, tensor.shape) == (original[name].dtype, original[name].shape), name
    model = AUTO[kind].from_pretrained(directory, dtype="auto")
    found = dict(model.state_dict())
    assert found.keys() == values.keys()
    for name, value in values.items():
        assert fns.same(found[name], value), name
    for name in ("tokenizer_config.json", "vocab.txt"):
        assert (directory / name).read_bytes() == (source / name).read_bytes()
    config, before = (json.loads((d / "config.json").read_text()) for d in (directory, source))
    assert config["architectures"] == before["architectures"]
    assert config["dtype"] == before["dtype"]


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [("llama-tied", 2), ("gpt2", 3), *nightly_rows(("llama-bf16", 3), ("bert", 2))],
)
def test_from_pretrained_reads_exports(ranks: RankPool, tmp_path: Path, kind: str, world_size: int) -> None:
    source = tmp_path / "source"
    fns.save_source(str(source), kind)
    found = ranks.run_ranks(world_size, fns.export_both_ways, str(source), str(tmp_path), {})
    for name in ("live", "stored"):
        _check_readable(tmp_path / name, source, kind, found[0]["values"])
        reports = [f[name] for f in found]
        assert sum(r["bytes_written"] for r in reports) == reports[0]["total_bytes"]
        assert fns.index_of(tmp_path / name) is None
    for one in found:
        assert one["again"][0] == "CheckpointError"
        assert "exists already" in one["again"][1]
    assert not list(tmp_path.glob(".tmp*"))
    # Also by one process without a group.
    sw.export_hf(tmp_path / "checkpoint", tmp_path / "alone")
    _check_readable(tmp_path / "alone", source, kind, found[0]["values"])


def test_several_files_and_dtype(ranks: RankPool, tmp_path: Path) -> None:
    source = tmp_path / "source"
    fns.save_source(str(source), "llama-tied")
    options = {"max_shard_bytes": 2000, "dtype": "bfloat16"}
    found = ranks.run_ranks(2, fns.export_both_ways, str(source), str(tmp_path), options)
    values = found[0]["values"]
    for name in ("live", "stored"):
        directory = tmp_path / name
        files = sorted(p.name for p in directory.glob("*.safetensors"))
        count = len(files)
        assert count > 3
        assert files == [f"model-{k + 1:05d}-of-{count:05d}.safetensors" for k in range(count)]
        index = fns.index_of(directory)
        stored = fns.stored_tensors(directory)
        assert index is not None
        assert index["weight_map"].keys() == stored.keys()
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored.values())
        for tensor_name, file in index["weight_map"].items():
            assert tensor_name in _names_in(directory / file)
        model = transformers.LlamaForCausalLM.from_pretrained(directory, dtype="auto")
        for key, tensor in model.state_dict().items():
            assert fns.same(tensor, values[key].bfloat16()), key
        assert json.loads((directory / "config.json").read_text())["dtype"] == "bfloat16"


def _names_in(file: Path) -> set[str]:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        return set(opened.keys())


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_failed_export_leaves_nothing(ranks: RankPool, tmp_path: Path, failing_rank: int) -> None:
    fns.save_source(str(tmp_path / "source"), "gpt2")
    (tmp_path / "out").mkdir()
    found = ranks.run_ranks(
        2, fns.export_fails, str(tmp_path / "source"), str(tmp_path / "out" / "x"), failing_rank
    )
    assert found[0] == found[1]
    assert f"rank {failing_rank}: OSError" in found[0][1]


def test_no_file_has_more_bytes_than_asked() -> None:
    hub = {
        name: TensorSpec("F32", (size,))
        for name, size in (("a", 10), ("b", 10), ("c", 5), ("d", 100), ("e", 5))
    }
    found = lay_out(hub, None, 100)
    payloads = {file: size - len(found.headers[file]) for file, size in found.sizes.items()}
    assert list(payloads.values()) == [400, 100, 20], (
        "as huggingface_hub: a tensor that is larger is alone, and comes first"
    )
    assert list(lay_out(hub, "F16", 100).sizes) == [f"model-{k:05}-of-00002.safetensors" for k in (1, 2)]


def test_only_new_or_empty_directories(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    taken = tmp_path / "taken"
    taken.mkdir()
    sw.export_hf(model, taken)  # empty: fine
    before = (taken / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="exists already"):
        sw.export_hf(model, taken)
    assert (taken / "model.safetensors").read_bytes() == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="exists already"):
        sw.export_hf(model, tmp_path / "file")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "taken"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="link: is a symbolic link"):
        sw.export_hf(model, tmp_path / "link")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "file", "link", "taken"]
    with pytest.raises(ValueError, match="max_shard_bytes"):
        sw.export_hf(model, tmp_path / "new", max_shard_bytes=0)
    with pytest.raises(ValueError, match="dtype"):
        sw.export_hf(model, tmp_path / "new", dtype="int8")


def test_a_damaged_checkpoint_is_not_exported(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    found = ranks.run_ranks(2, fns.export_damaged, str(tmp_path / "step"), str(tmp_path / "out" / "x"))
    assert found[0] == found[1]
    (export_kind, exported), (load_kind, loaded) = found[0]
    assert (export_kind, load_kind) == ("RankError", "IntegrityError"), (
        "rank 0 compares exports, all ranks loads"
    )
    assert "content of 1 tensors differs from what was saved: 0.bias;" in exported
    assert "0.bias: loaded" in loaded
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(IntegrityError, match=r"0\.bias"):
        sw.export_hf(tmp_path / "step", tmp_path / "out" / "x", dtype="bfloat16")
    with pytest.raises(IntegrityError, match=r"0\.bias"):
        sw.load(fns.small_module(), tmp_path / "step")
    assert sw.load(fns.small_module(), tmp_path / "step", verify="cover").digests_compared == 0
    cast = sw.load(fns.small_module().bfloat16(), tmp_path / "step")
    assert (cast.verified, cast.digests_compared) == ("cover", 0)


def test_a_load_from_a_checkpoint_compares_digests(tmp_path: Path) -> None:
    sw.save(sw.TrainState(model=fns.small_module()), tmp_path / "step")
    report = sw.load(fns.small_module(), tmp_path / "step")
    assert (report.verified, report.digests_compared) == ("digest", 4)
    half = fns.small_module()
    half[1].half()
    report = sw.load(half, tmp_path / "step")
    assert (report.verified, report.digests_compared) == ("cover", 2)
    sw.export_hf(tmp_path / "step", tmp_path / "hub")
    report = sw.load(fns.small_module(), tmp_path / "hub", verify="digest")
    assert (report.verified, report.digests_compared) == ("cover", 0)


def test_the_tokenizer_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fns.save_source(str(tmp_path / "source"), "gpt2")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    model = sw.load_pretrained("source")
    assert model.config.name_or_path == "source"
    monkeypatch.chdir(tmp_path / "elsewhere")
    sw.save(sw.TrainState(model=model), tmp_path / "step")
    monkeypatch.chdir(tmp_path)
    again = sw.load_pretrained("step")
    monkeypatch.chdir(tmp_path / "elsewhere")
    sw.export_hf(again, tmp_path / "out")
    for directory in (tmp_path / "step" / "model", tmp_path / "out"):
        assert (directory / "vocab.txt").read_text() == "a\nb\n"


def test_integers_bools_scalars_and_empty(ranks: RankPool, tmp_path: Path) -> None:
    values = ranks.run_ranks(2, fns.export_plain_module, str(tmp_path / "out"))[0]
    stored = fns.stored_tensors(tmp_path / "out")
    assert stored.keys() == values.keys()
    for name, value in values.items():
        assert fns.same(stored[name], value), name


def test_real_weights_come_out_as_they_went_in(ranks: RankPool, tmp_path: Path) -> None:
    source = default_model()
    ranks.run_ranks(2, fns.export_into, str(source), str(tmp_path))
    original = fns.stored_tensors(source)
    used = {name for name in original if not name.endswith("position_ids")}
    for out in (tmp_path / "live", tmp_path / "stored"):
        stored = fns.stored_tensors(out)
        assert stored.keys() == used
        assert len(stored) > 90
        for name, tensor in stored.items():
            assert fns.same(tensor, original[name]), name
        assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_one_of_several_models(ranks: RankPool, tmp_path: Path) -> None:
    """Of two classes, and a plain module: each with its own config, tokenizer and names."""
    for kind in ("llama-tied", "gpt2"):
        fns.save_source(str(tmp_path / kind), kind)
    path = tmp_path / "checkpoint"
    (values, *_) = ranks.run_ranks(2, fns.save_several, str(tmp_path), str(path))
    for name, kind in (("actor", "llama-tied"), ("critic", "gpt2")):
        sw.export_hf(path, tmp_path / name, model_name=name)
        _check_readable(tmp_path / name, tmp_path / kind, kind, values[name])
    sw.export_hf(path, tmp_path / "head", model_name="value-head", dtype="float16")
    assert sorted(p.name for p in (tmp_path / "head").iterdir()) == ["model.safetensors"]
    for name, tensor in fns.stored_tensors(tmp_path / "head").items():
        assert fns.same(tensor, values["value-head"][name].half()), name
    with pytest.raises(FormatError, match=r"\['actor', 'critic', 'value-head'\]; say which one"):
        sw.export_hf(path, tmp_path / "new")
    with pytest.raises(FormatError, match="not 'judge'"):
        sw.export_hf(path, tmp_path / "new", model_name="judge")
    with pytest.raises(SourceError, match="only checkpoints can contain several models"):
        sw.export_hf(tmp_path / "gpt2", tmp_path / "new", model_name="actor")
    with pytest.raises(ValueError, match="model_name= and config= apply to stored models"):
        sw.export_hf(torch.nn.Linear(2, 2), tmp_path / "new", model_name="actor")
    assert not (tmp_path / "new").exists()


def _at_first_write(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> None:
    """Do something as soon as an export writes its first bytes."""
    own, pending = FileFiller.write_at, [work]

    def write_at(self: FileFiller, name: str, offset_bytes: int, view: memoryview) -> None:
        if pending:
            pending.pop()()
        own(self, name, offset_bytes, view)

    monkeypatch.setattr(FileFiller, "write_at", write_at)


def test_a_step_that_is_deleted_in_the_middle_is_exported(
    ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the run itself, which keeps one step; of more files than are otherwise kept open."""
    state, step = sw.TrainState(model=fns.small_module()), tmp_path / "run" / "step-00000001"
    ranks.run_ranks(2, fns.save_small, str(step))
    monkeypatch.setattr("shardwise.engine.files._MOST_OPEN", 1)
    with sw.Checkpointer(tmp_path / "run", keep_last=1) as checkpointer:
        checkpointer.resume(state)
        _at_first_write(monkeypatch, lambda: checkpointer.save(state, 2))
        sw.export_hf(step, tmp_path / "out")
    assert not step.exists()
    expected = fns.whole_values(fns.small_module())
    stored = fns.stored_tensors(tmp_path / "out")
    assert stored.keys() == expected.keys()
    for name, tensor in stored.items():
        assert fns.same(tensor, expected[name]), name


def test_more_files_than_may_be_open(
    ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then a step that is deleted in the middle is an error that says so, and nothing appears."""
    step = tmp_path / "step-00000001"
    ranks.run_ranks(2, fns.save_small, str(step))
    monkeypatch.setattr("resource.getrlimit", lambda _: (0, 0))
    monkeypatch.setattr("shardwise.engine.files._MOST_OPEN", 1)
    _at_first_write(monkeypatch, lambda: discard(str(step)))
    with pytest.raises(CheckpointError, match="step-00000001: was deleted while it was being read"):
        sw.export_hf(step, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_exports_beside_a_run_that_saves_and_deletes(tmp_path: Path) -> None:
    """Another process; each export is one step's values, whole, or an error that names the step."""
    root = tmp_path / "run"
    script = (
        "import sys; from tests.export._export_fns import numbered_steps; numbered_steps(sys.argv[1], 60)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(root)], env=worker_env()) as run:
        exported, refused = set(), []
        while run.poll() is None or not exported:
            steps = published_steps(str(root))
            for step, path in list(steps.items())[:1]:
                try:
                    sw.export_hf(path, tmp_path / "out")
                except (CheckpointError, SourceError) as error:
                    refused.append((step, str(error)))
                    continue
                values = torch.cat([t.flatten() for t in fns.stored_tensors(tmp_path / "out").values()])
                assert values.unique().tolist() == [step]
                exported.add(step)
                shutil.rmtree(tmp_path / "out")
    assert run.returncode == 0
    assert exported
    assert all(f"{step:08d}" in error for step, error in refused), refused


def test_a_live_model_while_a_save_goes_on_behind(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run_ranks(2, fns.export_while_saving, str(tmp_path / "run"), str(tmp_path))
    for rank in found:
        assert rank["was_saving"]
        assert rank["published"]
    step = tmp_path / "run" / "step-00000001"
    assert sw.verify(step).ok
    sw.export_hf(step, tmp_path / "stored")
    for name, expected in (("first", "saved"), ("second", "changed"), ("stored", "saved")):
        for key, tensor in fns.stored_tensors(tmp_path / name).items():
            assert fns.same(tensor, found[0][expected][key]), (name, key)
